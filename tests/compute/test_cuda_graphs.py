"""Recorded steps: what counts as the same shape, and that repeating gives what running gives."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

import mispair
import replay
from kernel_marks import needs_gpu
from mispair.compute import cuda_graphs
from mispair.compute.cuda_graphs import SEEN, CudaGraphStep, _mapped, _shape, _stream, _tensors
from mispair.methods import METHODS
from mispair.pairs.batches import Items
from mispair.pairs.noise import add_noise
from tiny import tiny_pairs, weights
from training import check_resume, trained
from two_networks import training, vector_pairs


@dataclass(frozen=True)
class Nested:
    items: Items
    parts: tuple[Items, ...]
    extra: Tensor | None
    flag: str


def nested(seed: int, rows: int = 2, extra: bool = True, flag: str = "a", capacity: int = 7) -> Nested:
    generator = torch.Generator().manual_seed(seed)
    first, second, third = (torch.rand(rows, 3, generator=generator) for _ in range(3))
    return Nested(Items(first, capacity=capacity), (Items(second), Items(third)), first.sum() if extra else None, flag)


def test_the_shape_is_all_but_the_numbers() -> None:
    shape = _shape(nested(0))
    assert shape == _shape(nested(1))
    assert hash(shape) == hash(_shape(nested(1)))
    others = [nested(0, rows=3), nested(0, extra=False), nested(0, flag="b"), nested(0, capacity=8)]
    assert len({shape, *map(_shape, others)}) == 5
    assert _shape(torch.zeros(2)) != _shape(torch.zeros(2, dtype=torch.long))


def test_inputs_are_built_again_around_other_tensors() -> None:
    first, second = nested(0), nested(1)
    others = iter(_tensors(second))
    built = _mapped(first, lambda _: next(others))
    assert isinstance(built, Nested)
    assert all(a is b for a, b in zip(_tensors(built), _tensors(second), strict=True))
    assert len(_tensors(built)) == 4
    assert built.flag == "a"
    assert built.items.capacity == 7


def test_without_recording_the_step_is_just_called() -> None:
    seen: list[Any] = []
    recorded = CudaGraphStep(seen.append, on=False)
    for number in range(3):
        recorded((torch.tensor(number),))
    assert [int(inputs[0]) for inputs in seen] == [0, 1, 2]


class Recorder:
    """Stands for CUDA, which a CPU does not have: notes on which streams is recorded, and records nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.streams: list[Any] = []  # of each recording
        self.current = "default"
        self.replays = 0
        self.ended: list[Any] = []  # states from which random numbers go on
        self.error: RuntimeError | None = None
        _stream.cache_clear()
        fakes = {"CUDAGraph": lambda: self, "Stream": lambda device: f"stream of {device}", "graph": self.graph}
        nothing = dict.fromkeys(("synchronize", "empty_cache", "graph_pool_handle"), lambda *_: ())
        monkeypatch.setattr(torch.cuda, "get_rng_state", lambda _: "random state")
        monkeypatch.setattr(cuda_graphs, "_end_recording", lambda *given: self.ended.append(given[-1]))
        for name, fake in {**fakes, **nothing, "stream": self.stream}.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def replay(self) -> None:
        self.replays += 1

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, _: Any, pool: Any, stream: Any = None, capture_error_mode: str = "global") -> Iterator[None]:  # noqa: ARG002
        self.streams.append(stream)
        before, self.current = self.current, stream
        if self.error is not None:
            raise self.error  # and torch stays on the stream
        yield
        self.current = before


def test_a_step_is_recorded_on_the_gpu_of_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is the current one: else the recording is empty, and repeating it does nothing."""
    cuda = Recorder(monkeypatch)
    with CudaGraphStep(lambda inputs: inputs[0] + 1, on=True) as recorded:
        for _ in range(4):
            recorded((torch.zeros(2),))
    assert cuda.streams == ["stream of cpu"]
    assert cuda.replays == 3
    assert not recorded._places


def test_a_step_that_cannot_be_recorded_runs_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the stream of before, and without the memory of what was recorded until then."""
    cuda, seen = Recorder(monkeypatch), []
    recorded = CudaGraphStep(lambda x: seen.append((len(x), cuda.current)), on=True)
    for rows in (2, 2, 3):
        recorded(torch.zeros(rows))
    assert recorded._recorded
    cuda.error = RuntimeError("CUDA out of memory")
    with pytest.warns(UserWarning, match="does not record steps, so training takes longer: CUDA out of memory"):
        recorded(torch.zeros(3))
    recorded(torch.zeros(2))
    assert seen[-2:] == [(3, "default"), (2, "default")]
    assert cuda.ended == ["random state"]
    assert not recorded._recorded
    assert not recorded._places


@pytest.mark.parametrize("method", [name for name, kind in METHODS.items() if kind.repeatable])
def test_nothing_that_changes_in_a_training_is_recorded(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a method and the trainer change from step to step and from epoch to epoch, repeated steps follow."""
    settings = training(method, model="two-tower", epochs=3, lr_decay_epochs=2, bank_size=32, flagged_size=4)
    pairs = add_noise(vector_pairs(40, shared=1), noise_ratio=0.2, seed=0)
    pairs = replace(pairs, match_score=np.arange(len(pairs)) % 5 / 4)
    monkeypatch.setattr("mispair.training.trainer.make_optimizer", replay.optimizer)
    trained(settings, pairs, tmp_path / "run", None)
    for module in ("training.trainer", "methods.epoch_view", "methods.decl"):
        monkeypatch.setattr(f"mispair.{module}.CudaGraphStep", replay.ReplayedStep)
    monkeypatch.setattr(replay.ReplayedStep, "replays", 0)
    trained(settings, pairs, tmp_path / "repeated", None)
    assert replay.ReplayedStep.replays > 5
    assert weights(tmp_path / "repeated") == weights(tmp_path / "run")


@pytest.mark.gpu
@needs_gpu
def test_a_repeated_step_is_the_step() -> None:
    """Dropout included: a repeated step draws the random numbers that the step would draw."""
    results = []
    for on in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(5, 3).cuda()
        optimizer = torch.optim.Adam(layer.parameters(), torch.tensor(0.01, device="cuda"), fused=True, capturable=True)

        def step(inputs: tuple[Tensor, Tensor], layer: nn.Linear = layer, optimizer: Any = optimizer) -> Tensor:
            x, y = inputs
            optimizer.zero_grad(set_to_none=True)
            loss = (layer(dropout(x, 0.3)) - y).square().mean()
            loss.backward()
            optimizer.step()
            return torch.as_tensor(loss.detach())

        recorded, generator = CudaGraphStep(step, on=on), torch.Generator().manual_seed(1)
        losses = []
        for number in range(12):
            rows = 4 + number % 3  # three shapes that take turns
            parts = torch.rand(rows, 5, generator=generator), torch.rand(rows, 3, generator=generator)
            losses.append(float(recorded((parts[0].cuda(), parts[1].cuda()))))
        assert len(recorded._recorded) == (3 if on else 0)
        results.append([*losses, *layer.weight.flatten().tolist()])
    assert results[0] == pytest.approx(results[1], rel=1e-5, abs=1e-6)
    assert SEEN == 2


@pytest.mark.gpu
@needs_gpu
def test_after_a_step_that_cannot_be_recorded_random_numbers_go_on() -> None:
    results = []
    for on in (False, True):
        torch.manual_seed(0)
        recorded = CudaGraphStep(lambda x: dropout(x * float(x.mean()), 0.5), on=on)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            results.append([recorded(torch.ones(999, device="cuda")).tolist() for _ in range(4)])
        assert [str(warning.message)[:34] for warning in found] == ["This GPU does not record steps, so"] * on
    assert results[1] == results[0]
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


@pytest.mark.gpu
@needs_gpu
def test_after_an_error_in_a_step_random_numbers_go_on() -> None:
    """Recording itself ends well here, as it does where memory runs out."""
    results: list[Any] = []

    def step(x: Tensor, recording: bool) -> Tensor:
        if recording and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("out of memory")
        return dropout(x, 0.5)

    for on in (False, True):
        torch.manual_seed(0)
        recorded = CudaGraphStep(functools.partial(step, recording=on), on=on)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results.append([recorded(torch.ones(999, device="cuda")).tolist() for _ in range(4)])
    assert results[1] == results[0]


@pytest.mark.gpu
@needs_gpu
def test_memory_is_given_back_when_the_last_step_has_ended() -> None:
    """Steps take long and much memory, and nobody waits for them before the end."""
    before, total = torch.cuda.memory_reserved(), torch.zeros((), device="cuda")

    def step(x: Tensor) -> None:
        product = x
        for _ in range(20):
            product = (product @ x).tanh()
        total.add_(product.sum())

    results = []
    for on in (False, True):
        total.zero_()
        with CudaGraphStep(step, on=on) as recorded:
            for _ in range(6):
                recorded(torch.full((4096, 4096), 1e-3, device="cuda"))
        results.append(float(total))
    assert results[1] == pytest.approx(results[0])
    assert torch.cuda.memory_reserved() - before < 2**28


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("method", "model"),
    [
        ("plain", "vse"), ("plain", "saf"), ("plain", "scan"), ("repair", "vse"), ("repair", "sgr"), ("decl", "sgr"),
        ("ncr", "sgr"), ("bicro", "sgr"), ("mend", "sgr"),
    ],
)  # fmt: skip
def test_recorded_training_is_training(method: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {
        "method": method, "model": model, "embed_size": 128, "sim_size": 32, "batch_size": 20, "epochs": 2,
        "warmup_epochs": 2, "dropout": 0.0, "precision": "float32", "lr": 1e-3, "negatives_end": 4, "bank_size": 64,
        "device": "cuda",
    }  # fmt: skip
    dev = tiny_pairs(10, seed=1)  # the best networks are saved while the training goes on
    recorded = mispair.fit(tiny_pairs(40), dev, **settings)
    monkeypatch.setattr(CudaGraphStep, "_record", lambda *_: False)
    eager = mispair.fit(tiny_pairs(40), dev, **settings)
    for ours, theirs in zip(recorded.networks, eager.networks, strict=True):
        for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3, msg=name)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("method", "model"), [("plain", "vse"), ("repair", "sgr"), ("mscn", "sgr"), ("mend", "sgr")])
def test_a_continued_training_is_training(method: str, model: str, tmp_path: Path) -> None:
    """Bit for bit. Its learning rate goes on falling, which a step recorded after a restart must follow."""
    settings = training(
        method, model=model, embed_size=128, sim_size=32, batch_size=20, epochs=6, lr_decay_epochs=3, dropout=0.2,
        bank_size=64, flagged_size=4, device="cuda",
    )  # fmt: skip
    pairs = add_noise(tiny_pairs(40), noise_ratio=0.2, seed=0)
    pairs = replace(pairs, match_score=np.random.default_rng(2).random(len(pairs)))
    check_resume(settings, pairs, tmp_path, [(1, 0, 2)])
