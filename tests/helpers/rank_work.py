"""What the processes of tests/training/test_distributed.py do."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch._dynamo  # optimizers import it, so that each process would
from torch import Tensor, distributed

import mispair.auditing.audit  # noqa: F401 - so that the processes need not import it one by one
from mispair.compute.distributed import ALONE, Ranks
from mispair.config import Config
from mispair.errors import StoppedError
from mispair.methods.base import StepPlan
from mispair.models.layers import BatchNorm, Dropout
from mispair.pairs.noise import add_noise
from mispair.pairs.pairs import Pairs
from mispair.robust.pytorch import RobustLoss
from mispair.robust.robust import Robust
from mispair.training import checkpoint
from mispair.training.fit import fit
from mispair.training.run_folder import Run
from mispair.training.trainer import AUGMENTATION, Trainer
from small_data import one_to_one, shake, small_config, vectors
from tiny import tiny_pairs

SMALL: dict[str, Any] = {"embed_size": 16, "word_size": 6, "sim_size": 8, "device": "cpu", "checkpoint_seconds": 1e6}


@contextmanager
def float64() -> Iterator[None]:
    """Networks ask for float32 by name in many places; inside they get float64."""
    torch.set_default_dtype(torch.float64)
    try:
        with patch.object(torch.Tensor, "float", torch.Tensor.double):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def noisy_pairs(model: str) -> Pairs:
    """Pairs of which some are known to be mismatched and some are flagged."""
    pairs = one_to_one(vectors(20), vectors(20, seed=1)) if model == "two-tower" else tiny_pairs(9)
    pairs = add_noise(pairs, noise_ratio=0.4, seed=1)
    score = np.random.default_rng(5).uniform(0.3, 1, len(pairs)).astype(np.float32)
    return replace(pairs, match_score=score)


def gradients(ranks: Ranks, cases: list[dict[str, Any]]) -> list[dict[str, float]]:
    """By case: how far gradients and epoch states of all ranks together are from one process."""
    return [_differences(ranks, small_config(device="cpu", batch_size=11, **case)) for case in cases]


def _differences(ranks: Ranks, config: Config) -> dict[str, float]:
    with float64():
        return _compared(_gradients(config, Ranks()), _gradients(config, ranks))


def _gradients(config: Config, ranks: Ranks) -> dict[str, Tensor]:
    """Of a step in the warm-up and of one in the main epochs, by each network; and what the method knows by then."""
    team = ranks.world
    trainer = Trainer(config, noisy_pairs(config.model), None, Run(Path("none"), config, writes=False), ranks=ranks)
    for net in trainer.nets:
        net.double()
        shake(net, seed=3)
    found: dict[str, Tensor] = {}
    for epoch in (0, config.total_epochs - 1):
        trainer.begin(epoch)
        for number, net in enumerate(trainer.nets):
            for plan in trainer.plans(number)[:2]:
                loss = trainer.method.warmup_loss if plan.main_step is None else trainer.method.loss
                rng = trainer._rng(AUGMENTATION, plan.position) if net.augments else None
                torch.manual_seed(7)
                result = loss(number, trainer.method.inputs(number, plan, rng))
                result.loss.backward()  # type: ignore[no-untyped-call]
                team.add_gradients(net.parameters())
                place = f"{epoch}.{number}.{plan.position}"
                found |= {f"{place}.{name}": p.grad for name, p in net.named_parameters() if p.grad is not None}
                found[f"{place}.loss"] = result.loss.detach()
                net.zero_grad(set_to_none=True)
                found |= {f"{place}.{name}": b.clone() for name, b in net.named_buffers() if b.is_floating_point()}
                if plan.main_step is not None:
                    trainer.cursor.main_steps[number] += not plan.on_noisy
                    trainer.method.after_step(number, plan)
        found |= {f"state.{epoch}.{name}": value for name, value in _flat(trainer.method.state_dict())}
    return found


def _flat(state: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """All numbers of a nested state."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from _flat(value, f"{name}.{key}")
    elif isinstance(state, list | tuple):
        for place, value in enumerate(state):
            yield from _flat(value, f"{name}.{place}")
    elif isinstance(state, Tensor | float | int):
        yield name, torch.as_tensor(state)


def _compared(expected: dict[str, Tensor], found: dict[str, Tensor]) -> dict[str, float]:
    """The largest differences of gradients and of states, beside the size of the tensor."""
    assert expected.keys() == found.keys()
    apart = {
        key: float((found[key].double() - value.double()).abs().max() / (1e-3 + value.double().abs().max()))
        for key, value in expected.items()
        if value.numel()
    }
    states = {key for key in apart if key.startswith("state")}
    return {
        "gradients": max(value for key, value in apart.items() if key not in states),
        "states": max((apart[key] for key in states), default=0.0),
    }


def layers(ranks: Ranks) -> list[float]:
    """How far normalisation and dropout of parts are from those of the whole."""
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(13, 5, 3))).requires_grad_()
    parts = x.detach()[ranks.world.part(13)].clone().requires_grad_()
    results = []
    for given, team in ((x, ALONE), (parts, ranks.world)):
        norm, dropout = BatchNorm(5).double(), Dropout(0.4)
        norm.team = dropout.team = team
        torch.manual_seed(0)
        with team.on_part(13) if team is not ALONE else _nothing():
            y = dropout(norm(given))
        (y.pow(3)).sum().backward()
        if team is not ALONE:
            y = team.gather_alike(y, 13)
        assert given.grad is not None
        gradient = given.grad if team is ALONE else team._gathered(given.grad, 13)
        results.append([y.detach(), gradient, norm.running_mean, norm.running_var])
    return [float((a - b).abs().max()) for a, b in zip(*results, strict=True)]


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def train(ranks: Ranks, folder: Path, settings: dict[str, Any], stop: int | None = None) -> dict[str, Any]:
    """Trains tiny pairs in a run folder, stopped after so many steps of a rank; gives the weights of the checkpoint."""
    config = {**SMALL, **settings}
    pairs, dev = add_noise(tiny_pairs(12), noise_ratio=0.4, seed=1), tiny_pairs(5, seed=2)
    steps = Trainer._step
    made = []

    def counted(trainer: Trainer, plan: StepPlan, inputs: Any) -> None:
        steps(trainer, plan, inputs)
        made.append(plan)
        if len(made) == stop and ranks.rank == ranks.size - 1:  # a signal to one of them stops all
            trainer.stop(signal.SIGTERM)

    with float64(), patch.object(Trainer, "_step", counted):
        try:
            matcher = fit(pairs, dev, out=folder, **config)
        except StoppedError as error:
            return {"stopped": str(error), "code": error.code}
        return {"rsum": matcher.evaluate(dev).averaged.rsum, "steps": len(made)}


def first_losses(ranks: Ranks) -> list[float]:
    """Losses of the first steps in float32."""
    config = small_config(device="cpu", batch_size=10, model="sgr", warmup_epochs=0)
    trainer = Trainer(config, tiny_pairs(12), None, Run(Path("none"), config, writes=False), ranks=ranks)
    trainer.begin(0)
    torch.manual_seed(3)
    events: list[Any] = []
    with patch.object(Run, "log", lambda _, event: events.append(event)):
        for _ in islice(trainer.steps(), 3):
            pass
        trainer._flush_metrics()
    return [event.loss for event in events]


def traffic(ranks: Ranks) -> tuple[int, int]:
    """Bytes that a rank hands in for a step, counted and by the arithmetic of docs/scaling.md."""
    pairs, size, width = tiny_pairs(12), 10, 16
    config = small_config(device="cpu", batch_size=size, model="vse", embed_size=width, warmup_epochs=0)
    trainer = Trainer(config, pairs, None, Run(Path("none"), config, writes=False), ranks=ranks)
    trainer.begin(0)
    sent = []
    all_reduce, all_gather = distributed.all_reduce, distributed.all_gather

    def summed(tensor: Tensor, **options: Any) -> None:
        sent.append(tensor.nbytes)
        all_reduce(tensor, **options)

    def gathered(whole: list[Tensor], part: Tensor, **options: Any) -> None:
        sent.append(part.nbytes)
        all_gather(whole, part, **options)

    with patch.object(distributed, "all_reduce", summed), patch.object(distributed, "all_gather", gathered):
        for _ in islice(trainer.steps(), 1):
            pass
    share = size // ranks.size
    channels = [layer.num_features for layer in trainer.nets[0].modules() if isinstance(layer, BatchNorm)]
    parameters = sum(p.numel() for p in trainer.nets[0].parameters())
    expected = 4 * width * (share + size) + 4 * size * share + sum(16 * c + 4 for c in channels) + 4 * parameters
    return sum(sent), expected


def newest(folder: Path) -> dict[str, Tensor]:
    """Weights and the method's state in the newest checkpoint of a run folder."""
    state = checkpoint.resume(folder / "checkpoints")
    assert state is not None
    weights = {f"{number}.{name}": part for number, net in enumerate(state.networks) for name, part in net.items()}
    adam = {f"adam.{name}": part for name, part in _flat(state.optimizers)}
    return {**weights, **adam, **{f"method{name}": part for name, part in _flat(state.method)}}


def fail(ranks: Ranks, folder: Path, how: str) -> None:
    """The last rank fails in its third step, in one of several ways."""
    steps = Trainer._step
    made = []

    def failing(trainer: Trainer, plan: StepPlan, inputs: Any) -> None:
        made.append(plan)
        if len(made) == 3 and ranks.rank == ranks.size - 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(5, "the disk is gone")
        steps(trainer, plan, inputs)

    with patch.object(Trainer, "_step", failing):
        fit(tiny_pairs(12), out=folder, **SMALL, batch_size=10, epochs=2)


def robust_gradients(ranks: Ranks) -> tuple[float, np.ndarray]:
    """The loss of `RobustLoss` and the gradients of two towers, as the mean over the ranks that DDP makes of them."""
    scores = np.linspace(0.4, 1, 12)
    left, right = torch.randn(2, 12, 5, generator=torch.Generator().manual_seed(0))
    towers = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(1)).requires_grad_()
    own = torch.arange(12).chunk(ranks.size)[ranks.rank]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = RobustLoss(Robust(scores, left_items=np.arange(12) // 2))(
            left[own] @ towers[0], right[own] @ towers[1], own
        )
        loss.backward()
    assert towers.grad is not None
    ranks.world.add_up([towers.grad])
    return loss.item(), (towers.grad / ranks.size).numpy()
