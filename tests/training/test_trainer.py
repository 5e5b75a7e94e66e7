"""The loop: what it trains, what it survives and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from rich.console import Console

import mispair
from mispair import methods
from mispair.config import Config
from mispair.errors import (
    ChangedError,
    CollapseError,
    ConflictError,
    DamagedError,
    DataError,
    InvalidValueError,
    NonFiniteError,
    NotFoundError,
    ShapeError,
    StoppedError,
    TooFewError,
    UnknownNameError,
)
from mispair.functional.losses import hard_loss
from mispair.methods.base import EpochPairs, Method, StepInputs, StepPlan, StepResult, similarity
from mispair.methods.mend import Mend
from mispair.pairs.batches import Batch, PairLoader
from mispair.pairs.pairs import Pairs, Regions, Tokens, Vectors
from mispair.pairs.vocabulary import Vocabulary
from mispair.training import checkpoint
from mispair.training.run_folder import Run
from mispair.training.settings import override
from mispair.training.trainer import Trainer
from refusals import refused
from small_data import chosen
from tiny import tiny_pairs, weights
from training import trained

SMALL: dict[str, Any] = {
    "embed_size": 16, "word_size": 8, "sim_size": 8, "batch_size": 16, "epochs": 2, "warmup_epochs": 1, "lr": 1e-3,
    "hardening_steps": 10, "negatives_start": 8, "negatives_end": 2, "checkpoint_seconds": 0.0, "device": "cpu",
}  # fmt: skip


def config(**settings: Any) -> Config:
    return override(Config(data="tiny"), {**SMALL, **settings})


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


@dataclass(frozen=True)
class DuoInputs(StepInputs):
    noisy: Batch = field(kw_only=True)


class Duo(Method):
    """A toy with two networks, a noisy set, a state of its own and random numbers in the step."""

    networks = 2
    seen = 0

    def begin_epoch(self, epoch: int) -> list[EpochPairs]:
        pairs = np.arange(len(self.loader.pairs))
        cut = 20 + 7 * epoch
        return [EpochPairs(pairs[cut:], pairs[:cut]), EpochPairs(pairs[:-cut], pairs[-cut:])]

    def inputs(self, net: int, plan: StepPlan, augment: np.random.Generator | None) -> StepInputs:
        given = super().inputs(net, plan, augment)
        if plan.noisy is None:
            return given
        return DuoInputs(given.batch, given.negatives, noisy=self.loader.batch(plan.noisy, augment))

    def loss(self, net: int, inputs: DuoInputs) -> StepResult:
        S = similarity(self.nets[net], inputs.batch)
        extra = hard_loss(similarity(self.nets[net], inputs.noisy), 0.2)
        weight = torch.rand(()) + 1 / (1 + self.seen)
        loss = hard_loss(S, 0.2, inputs.negatives) + weight * extra
        return StepResult(loss, S, {"extra": extra})

    def after_step(self, net: int, plan: StepPlan) -> None:  # noqa: ARG002
        self.seen += len(plan.pairs)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


@pytest.fixture(autouse=True)
def _duo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(methods.METHODS, "duo", Duo)


def run_until(settings: Config, pairs: Pairs, folder: Path, stop_after: int | None) -> None:
    """Trains; with `stop_after` the process "dies" without any clean-up after so many steps."""
    with Run(folder, settings) as run:
        trainer = Trainer(settings, pairs, tiny_pairs(8, seed=1), run)
        if stop_after is None:
            trainer.fit()
            return
        steps, done = trainer.steps, [0]

        def dying_steps() -> Iterator[StepPlan]:
            for plan in steps():
                done[0] += 1
                if done[0] >= stop_after:
                    raise RuntimeError("killed")
                yield plan

        trainer.steps = dying_steps  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="killed"):
            trainer.fit()


@pytest.mark.parametrize(("method", "model"), [("plain", "sgr"), ("duo", "vse")], ids=str)
def test_resume_is_exact_from_any_step(tmp_path: Path, method: str, model: str) -> None:
    settings, pairs = config(method=method, model=model, dropout=0.3), tiny_pairs(10)
    run_until(settings, pairs, tmp_path / "whole", None)
    for stop_after in (3, 1, 5):
        run_until(settings, pairs, tmp_path / "broken", stop_after)
    run_until(settings, pairs, tmp_path / "broken", None)
    assert weights(tmp_path / "broken") == weights(tmp_path / "whole")

    def timeless(folder: Path) -> list[dict[str, Any]]:
        return [{**event, "seconds": 0, "selection_seconds": 0} for event in events(folder, "validation")]

    assert timeless(tmp_path / "broken") == timeless(tmp_path / "whole")


def test_prefetched_batches_train_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(method="duo", epochs=1)
    run_until(settings, tiny_pairs(16), tmp_path / "plain", None)
    monkeypatch.setattr(PairLoader, "on_host", True)
    run_until(settings, tiny_pairs(16), tmp_path / "prefetched", None)
    assert weights(tmp_path / "plain") == weights(tmp_path / "prefetched")


def test_seeds_matter_and_repeat(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run_until(config(seed=seed, epochs=1), tiny_pairs(16), tmp_path / name, None)
    assert weights(tmp_path / "a") == weights(tmp_path / "b") != weights(tmp_path / "c")


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("vse", {"warmup_epochs": 3, "epochs": 3, "lr": 1e-2, "batch_size": 25}),
        pytest.param("sgr", {"warmup_epochs": 4, "epochs": 6, "lr": 3e-3}, marks=pytest.mark.slow),
    ],
)
def test_training_learns(model: str, settings: dict[str, Any]) -> None:
    """VSE-inf, seeds 0-2: 426, 457, 470."""
    pairs = tiny_pairs(40)
    gentle = {"negatives_end": 8, "dropout": 0.1, "embed_size": 32, "checkpoint_seconds": 60.0}
    matcher = mispair.fit(pairs, **{**SMALL, **gentle, **settings, "model": model})
    by_luck = 100 * (1 + 5 + 10) * (1 / 40 + 1 / 40)
    assert matcher.evaluate(pairs).averaged.rsum > 3 * by_luck


def test_two_tower_learns_across_two_vector_spaces() -> None:
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(200, 6))
    left, right = (np.asarray(hidden @ rng.normal(size=(6, d)), dtype=np.float32) for d in (12, 20))
    train = Pairs(Vectors(left[:150]), Vectors(right[:150]), np.arange(150))
    test = Pairs(Vectors(left[150:]), Vectors(right[150:]), np.arange(50))
    settings = {**SMALL, "model": "two-tower", "epochs": 20, "lr": 3e-3, "dropout": 0.0, "checkpoint_seconds": 60.0}
    matcher = mispair.fit(train, **settings)
    assert matcher.evaluate(test).averaged.rsum > 450
    assert matcher.encode(left[:3], "left").shape == (3, 16)


def test_regions_on_both_sides() -> None:
    rng = np.random.default_rng(0)
    left, right = (rng.normal(size=(20, n, 5)).astype(np.float32) for n in (4, 6))
    pairs = Pairs(Regions(left), Regions(right), np.arange(20))
    for model in ("vse", "sgr"):
        assert mispair.fit(pairs, **SMALL, model=model).score(left[:2], right).shape == (2, 20)


def test_the_last_state_is_kept_without_validation(tmp_path: Path) -> None:
    matcher = mispair.fit(tiny_pairs(16), out=tmp_path / "run", **SMALL)
    state = checkpoint.resume(tmp_path / "run/checkpoints")
    assert state is not None
    for name, value in matcher.networks[0].state_dict().items():
        assert torch.equal(value, state.networks[0][name]), name


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    first = mispair.fit(tiny_pairs(16), out=tmp_path / "run", **SMALL)
    logged = (tmp_path / "run/metrics.jsonl").read_bytes()
    again = mispair.fit(tiny_pairs(16), out=tmp_path / "run", **SMALL)
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == logged
    assert np.array_equal(first.score(tiny_pairs(4).left, ["a b"]), again.score(tiny_pairs(4).left, ["a b"]))


def test_an_ended_run_says_so_and_refuses_other_pairs(tmp_path: Path) -> None:
    mispair.fit(tiny_pairs(16), out=tmp_path / "run", **SMALL)
    console = Console(file=StringIO(), width=200)
    mispair.fit(tiny_pairs(16), out=tmp_path / "run", console=console, **SMALL)
    assert "This run has ended already; nothing was trained." in console.file.getvalue()  # type: ignore[attr-defined]
    with refused(ChangedError, where=tmp_path / "run"):
        mispair.fit(tiny_pairs(16, seed=5), out=tmp_path / "run", **SMALL)


def test_other_pairs_are_refused_on_resume(tmp_path: Path) -> None:
    settings = config()
    run_until(settings, tiny_pairs(16), tmp_path / "run", 3)
    with Run(tmp_path / "run", settings) as run, refused(ChangedError, where=tmp_path / "run"):
        Trainer(settings, tiny_pairs(16, seed=5), None, run).fit()


def test_many_dev_pairs_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mispair.training.validation.HELD_OUT", 6)
    with Run(tmp_path / "run", config()) as run:
        dev = Trainer(config(), tiny_pairs(16), tiny_pairs(8), run).validation.dev
    assert dev is not None
    assert len(dev.left) == 6
    assert dev.link.tolist() == [image for image in range(6) for _ in range(5)]


@pytest.mark.parametrize("ended", [True, False])
def test_other_dev_pairs_are_refused_as_they_choose_the_best_epoch(ended: bool, tmp_path: Path) -> None:
    def fit(dev: Pairs) -> None:
        mispair.fit(tiny_pairs(16), dev, out=tmp_path / "run", **SMALL)

    fit(tiny_pairs(6, seed=1))
    if not ended:
        (tmp_path / "run/result.json").unlink()
    fit(tiny_pairs(6, seed=1))
    if not ended:
        (tmp_path / "run/result.json").unlink()
    with refused(ChangedError, where=tmp_path / "run"):
        fit(tiny_pairs(6, seed=2))


def test_a_stop_signal_saves_and_names_the_way_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Trainer.steps

    def signalled_steps(trainer: Trainer) -> Iterator[StepPlan]:
        for plan in steps(trainer):
            trainer.stop(15)
            yield plan

    monkeypatch.setattr(Trainer, "steps", signalled_steps)
    with pytest.raises(StoppedError, match=r"step 1 .*out=") as stop:
        mispair.fit(tiny_pairs(16), out=tmp_path / "run", **SMALL)
    assert stop.value.code == 143
    assert len(checkpoint.find(tmp_path / "run/checkpoints")) == 1
    with refused(StoppedError, names="`out`"):
        mispair.fit(tiny_pairs(16), **SMALL)


def test_validation_pairs_must_be_of_the_same_kind() -> None:
    train, dev = tiny_pairs(16), tiny_pairs(8)
    assert isinstance(dev.right, Tokens)
    other = Vocabulary((*dev.right.vocabulary.words[:4], *reversed(dev.right.vocabulary.words[4:])))
    with refused(DataError, where="tiny", names="right side"):
        mispair.fit(train, replace(dev, right=replace(dev.right, vocabulary=other)), **SMALL)
    wide = Regions(np.zeros((8, 5, 13), dtype=np.float32))
    with refused(ShapeError, where="tiny", names="5 regions of width 13"):
        mispair.fit(train, replace(dev, left=wide), **SMALL)


def test_validation_needs_pairs() -> None:
    with refused(TooFewError, where="tiny"):
        mispair.fit(tiny_pairs(16), chosen(tiny_pairs(16), np.empty(0, np.int64)), **SMALL)


def test_texts_of_two_vocabularies_are_refused() -> None:
    texts = tiny_pairs(4).right
    assert isinstance(texts, Tokens)
    other = Vocabulary((*texts.vocabulary.words[:4], *reversed(texts.vocabulary.words[4:])))
    foreign = Tokens(*other.encode(texts.texts), other, texts.texts)
    with refused(DataError, where="mine", names="(30 and 30 words)"):
        mispair.fit(Pairs(texts, foreign, np.arange(20), name="mine"), **SMALL)
    mispair.fit(Pairs(texts, texts, np.arange(20)), **{**SMALL, "epochs": 1})


class Picky(Duo):
    """Finds nothing to train on in its first main epoch."""

    def begin_epoch(self, epoch: int) -> list[EpochPairs]:
        none = np.empty(0, dtype=np.int64)
        return super().begin_epoch(epoch) if epoch else [EpochPairs(none), EpochPairs(np.array([3]))]


def test_an_epoch_without_any_step_is_refused_or_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(methods.METHODS, "picky", Picky)
    with refused(TooFewError, where="tiny", names="picky"):
        mispair.fit(tiny_pairs(16), out=tmp_path / "run", **{**SMALL, "warmup_epochs": 0}, method="picky")
    assert not (tmp_path / "run/result.json").exists()
    console = Console(file=StringIO(), width=200)
    mispair.fit(tiny_pairs(16), console=console, **SMALL, method="picky")
    assert "epoch 1/2  the method picky" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_callers_random_numbers_are_left_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    mispair.fit(tiny_pairs(16), tiny_pairs(8), **SMALL)
    assert torch.equal(torch.rand(3), expected)


class Poisoned(Method):
    """Gives a loss that is not finite in its second main step."""

    steps = 0

    def loss(self, net: int, inputs: StepInputs) -> StepResult:
        S = similarity(self.nets[net], inputs.batch)
        loss = hard_loss(S, 0.2)
        return StepResult(loss * float("nan") if self.steps == 1 else loss, S)

    def after_step(self, net: int, plan: StepPlan) -> None:  # noqa: ARG002
        self.steps += 1


def test_a_non_finite_loss_stops_before_the_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(methods.METHODS, "poisoned", Poisoned)
    settings = config(method="poisoned", warmup_epochs=0, checkpoint_seconds=1000.0)
    with Run(tmp_path / "run", settings) as run:
        trainer = Trainer(settings, tiny_pairs(16), None, run)
        with pytest.raises(NonFiniteError) as stop:
            trainer.fit()
        expected = trainer.plans(0)[1].pairs
        assert "step 1;" in str(stop.value)
        assert ", ".join(map(str, sorted(expected.tolist()))) in str(stop.value)
    # The weights are those of one finite step, although more steps were computed before the metrics were read.
    trained(settings, tiny_pairs(16), tmp_path / "one", (0, 0, 1))
    one = checkpoint.resume(tmp_path / "one/checkpoints")
    assert one is not None
    for name, value in trainer.nets[0].named_parameters():
        assert torch.equal(value, one.networks[0][name]), name


def test_noisy_pairs_of_a_step_that_is_not_finite_are_named_too(tmp_path: Path) -> None:
    pairs, settings = tiny_pairs(16), config(method="duo", warmup_epochs=0)
    features = np.array(pairs.left.features)  # type: ignore[union-attr]
    features[0] = np.nan  # of pairs 0 to 4, which are noisy ones of network 0
    with Run(tmp_path / "run", settings) as run:
        trainer = Trainer(settings, replace(pairs, left=Regions(features)), None, run)
        with pytest.raises(NonFiniteError) as stop:
            trainer.fit()
    step, named = re.findall(r"at step (\d+);.* Pairs of that batch: ([\d, ]+)\.", str(stop.value))[0]
    plan = trainer.plans(0)[int(step)]
    assert plan.noisy is not None
    assert [int(pair) for pair in named.split(", ")] == sorted({*plan.pairs.tolist(), *plan.noisy.tolist()})
    assert {*range(5)} & {*plan.noisy.tolist()}


class Flat(Method):
    """Lets the last layer fade, so that all similarities become equal."""

    def loss(self, net: int, inputs: StepInputs) -> StepResult:
        with torch.no_grad():
            self.nets[net].get_parameter("score.weight").mul_(0.8)
        S = similarity(self.nets[net], inputs.batch)
        return StepResult(0 * S.sum(), S)


def test_a_collapse_is_named_and_the_last_good_state_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(methods.METHODS, "flat", Flat)
    settings = config(method="flat", model="sgr", epochs=20)
    with Run(tmp_path / "run", settings) as run:
        trainer = Trainer(settings, tiny_pairs(16), None, run)
        with pytest.raises(CollapseError, match=r"`negatives_end`.* `lr`") as stop:
            trainer.fit()
        monkeypatch.setattr(Flat, "ignores", Mend.ignores)
        with pytest.raises(CollapseError, match="`lr`") as other:
            trainer._refuse_collapse()
    assert "negatives_end" not in str(other.value)  # no advice that has no effect
    kept = checkpoint.find(tmp_path / "run/checkpoints")
    assert str(kept[0]) in str(stop.value)
    healthy = [event["spread"] for event in events(tmp_path / "run", "steps")]
    state = checkpoint.resume(tmp_path / "run/checkpoints")
    assert state is not None
    assert state.cursor.step < trainer.cursor.step
    assert healthy[-1] < 0.002 * max(healthy)


@pytest.mark.slow
def test_health_does_not_depend_on_how_often_checkpoints_are_written(tmp_path: Path) -> None:
    found = []
    for seconds in (0.0, 1e6):
        settings = config(epochs=8, checkpoint_seconds=seconds)
        with Run(tmp_path / str(seconds), settings) as run:
            trainer = Trainer(settings, tiny_pairs(16), None, run)
            trainer.fit()
        found.append([learner.monitor.health for learner in trainer.learners])
    assert found[0] == found[1]
    assert found[0][0].peak > 0


def test_files_of_a_run_that_are_gone_or_damaged_are_named(tmp_path: Path) -> None:
    settings, pairs, out = config(epochs=1, warmup_epochs=0), tiny_pairs(16), tmp_path / "run"

    def train() -> None:
        with Run(out, settings) as run:
            Trainer(settings, pairs, pairs, run).fit()

    train()
    best = (out / "best.safetensors").read_bytes()
    damaged = bytearray(best)
    damaged[-5] ^= 1
    (out / "best.safetensors").write_bytes(damaged)
    with refused(DamagedError, where=out / "best.safetensors"):
        train()
    (out / "best.safetensors").unlink()
    with refused(NotFoundError, where=out / "best.safetensors"):
        train()
    (out / "best.safetensors").write_bytes(best)
    train()
    (out / "result.json").unlink()
    state = checkpoint.resume(out / "checkpoints")
    assert state is not None
    changes: list[dict[str, Any]] = [
        {"networks": [{}]},
        {"random_state": torch.zeros(3)},
        {"optimizers": [{"a": 1}]},
        {"health": []},
    ]
    for change in changes:
        checkpoint.save(out / "checkpoints", replace(state, **change))
        with refused(DamagedError, where=out / "checkpoints"):
            train()
    checkpoint.save(out / "checkpoints", state)
    faults = (
        ("mispair.training.trainer.restore", torch.OutOfMemoryError("CUDA out of memory.")),
        ("mispair.training.trainer.restore", RuntimeError("CUDA error: uncorrectable ECC memory error encountered")),
        ("torch.load", RuntimeError("DefaultCPUAllocator: can't allocate memory")),
    )
    for function, error in faults:  # nothing is wrong with the checkpoint
        with patch(function, side_effect=error), pytest.raises(type(error), match="memory"):
            train()
    train()
    assert (out / "best.safetensors").read_bytes() == best


def test_tiny_and_wrong_inputs() -> None:
    with refused(TooFewError, where="tiny", names="1 training pairs"):
        mispair.fit(chosen(tiny_pairs(16), np.array([3])), **SMALL)
    with refused(ConflictError, where="model", names="two-tower"):
        mispair.fit(tiny_pairs(16), **SMALL, model="two-tower")
    with refused(UnknownNameError, where="method", names='"plain"'):
        mispair.fit(tiny_pairs(16), **SMALL, method="plian")
    with refused(InvalidValueError, where="device", names="gpu"):
        mispair.fit(tiny_pairs(16), **{**SMALL, "device": "gpu"})
    with refused(ShapeError, "fit: pairs", "str"):
        mispair.fit("folder", **SMALL)  # type: ignore[arg-type]
    two = mispair.fit(chosen(tiny_pairs(16), np.array([3, 9])), **SMALL)  # two pairs are the least that works
    assert two.score(tiny_pairs(3).left, ["a"]).shape == (3, 1)


def test_weights_stay_where_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a GPU the recorded steps would go on changing the memory where a GRU was before."""
    settings = config(model="sgr")
    with Run(tmp_path / "run", settings) as run:
        trainer = Trainer(settings, tiny_pairs(16), tiny_pairs(6, seed=1), run)
        monkeypatch.setattr(torch.nn.GRU, "_apply", lambda *_: pytest.fail("a GRU was moved"))
        trainer.epoch()
        assert run.best.exists()
        assert all(net.training for net in trainer.nets)
