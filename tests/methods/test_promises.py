"""What every method promises; and what both do whose noisy pairs have steps of their own, NCR and BiCro."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mispair
from mispair.config import Config
from mispair.errors import ChangedError
from mispair.methods import METHODS, find
from mispair.methods.base import StepInputs, StepPlan, similarity
from mispair.methods.bicro import BiCro
from mispair.methods.coteaching import CoTeaching
from mispair.methods.ncr import NCR
from mispair.pairs.batches import Items, SideLoader
from mispair.pairs.noise import add_noise
from mispair.pairs.pairs import Pairs, Vectors
from mispair.support.arrays import IntArray
from mispair.training.run_folder import Run
from mispair.training.trainer import Trainer
from refusals import refused
from small_data import gradients
from tiny import tiny_pairs, weights
from training import check_resume, trained, with_other_truth
from two_networks import (
    CLEAN,
    COUNT,
    LITTLE,
    NOISY,
    ends_well,
    random_w,
    small,
    step_on,
    training,
    vector_pairs,
    with_w,
)

MODELS = ["two-tower", "vse", "sgr"]
BOTH: dict[str, type[NCR] | type[BiCro]] = {"ncr": NCR, "bicro": BiCro}
both = pytest.mark.parametrize("name", BOTH)

# ---------------------------------------------------------------------- every method


@pytest.mark.parametrize("name", METHODS)
def test_it_is_registered(name: str) -> None:
    assert find(name) is METHODS[name]
    assert METHODS[name].__name__.lower() == name


@pytest.mark.parametrize("name", METHODS)
def test_all_pairs_that_a_step_looks_at_are_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a loss is not finite: also noisy pairs, pairs whose item is taken from a bank, and known pairs."""
    pairs = add_noise(tiny_pairs(5), noise_ratio=0.4, seed=0)
    if name == "mend":
        pairs = replace(pairs, match_score=np.random.default_rng(1).random(len(pairs)))
    model = "sgr" if name == "mscn" else "vse"
    settings = training(name, model=model, epochs=1, noisy_start=0.0, eta=1.0, meta_share=0.1)
    run = Run(tmp_path, settings)
    trainer = Trainer(settings, pairs, None, run)
    items, inputs = SideLoader.items, trainer.method.inputs
    seen: list[tuple[SideLoader, IntArray]] = []
    more = set[bool]()

    def noting(self: SideLoader, rows: IntArray, *args: Any) -> Items:
        seen.append((self, rows))
        return items(self, rows, *args)

    def checked(net: int, plan: StepPlan, augment: np.random.Generator | None) -> StepInputs:
        seen.clear()
        given = inputs(net, plan, augment)
        left, right = (
            {row for side, rows in seen if side is own for row in rows.tolist()}
            for own in (trainer.loader.left, trainer.loader.right)
        )
        named = trainer.method.pairs_used(net, plan)
        assert right <= {*named.tolist()}
        assert left <= {*pairs.link[named].tolist()}
        assert all(pair in right or pairs.link[pair] in left for pair in named.tolist())
        more.add(not {*named.tolist()} <= {*plan.pairs.tolist()})
        return given

    monkeypatch.setattr(SideLoader, "items", noting)
    monkeypatch.setattr(trainer.method, "inputs", checked)
    trainer.fit()
    run.close()
    expected = {"repair": {False, True}, "bicro": {False, True}, "mscn": {False, True}, "mend": {True}}
    assert more == expected.get(name, {False})


@pytest.mark.parametrize("name", METHODS)
def test_methods_that_use_the_truth_say_so(name: str, tmp_path: Path) -> None:
    """The same link with another truth: other weights and a refusal to go on, or the same weights and none."""
    pairs = add_noise(tiny_pairs(5), noise_ratio=0.4, seed=0)
    other = with_other_truth(pairs)
    model = "sgr" if name == "mscn" else "vse"
    settings = training(
        name, model=model, epochs=2 if name == "mend" else 1, warmup_epochs=0, noisy_start=0.0, meta_share=0.08
    )
    for given, folder in ((pairs, "one"), (other, "two")):
        trained(settings, given, tmp_path / folder, None)
    uses = METHODS[name].uses_truth
    assert (weights(tmp_path / "one") != weights(tmp_path / "two")) == uses
    with refused(ChangedError, where=tmp_path / "one") if uses else nullcontext():
        trained(settings, other, tmp_path / "one", None)


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].noisy_from(Config())])
@pytest.mark.parametrize("settings", [{}, {"noisy": "drop"}, {"noisy_start": 1.0}], ids=str)
def test_noisy_pairs_come_in_when_the_method_says(name: str, settings: dict[str, Any]) -> None:
    kind = METHODS[name]
    assert issubclass(kind, CoTeaching)
    method = with_w(small(kind, epochs=4, eta=1.0, **settings), random_w())
    start = kind.noisy_from(method.config)
    taking_part = [epoch for epoch in range(4) if any(len(split.noisy) for split in method.begin_epoch(epoch))]
    assert taking_part == ([] if start is None else list(range(start, 4)))


# ---------------------------------------------------------------------- a step


def untrained(name: str, **settings: Any) -> NCR | BiCro:
    """With labels of many values: BiCro's of untrained networks are all near 1."""
    method = small(BOTH[name], **{"label_floor": 0.2, **settings})
    method.w = random_w(7)
    if isinstance(method, BiCro):
        method.clean = [CLEAN[:20], CLEAN[3:]]
    return method


def named(grads: dict[str, Tensor | None]) -> set[str]:
    return {name for name, grad in grads.items() if grad is not None}


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("on_noisy", [False, True])
@pytest.mark.parametrize("model", MODELS)
@both
def test_the_trained_network_alone_gets_gradients_and_all_of_them(
    name: str, model: str, on_noisy: bool, half: bool
) -> None:
    """In half precision, weights converted for a prediction must not come back without gradients (older torch)."""
    method = untrained(name, model=model)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        result = step_on(method, 1, CLEAN, on_noisy=on_noisy)
    assert not result.metrics["label"].requires_grad
    result.loss.backward()  # type: ignore[no-untyped-call]
    found = named(gradients(method.nets[1]))
    similarity(method.nets[1], method.loader.batch(CLEAN)).sum().backward()  # type: ignore[no-untyped-call]
    assert found == named(gradients(method.nets[1]))
    assert not named(gradients(method.nets[0]))
    assert all(net.training for net in method.nets)


@pytest.mark.parametrize("on_noisy", [False, True])
@both
def test_a_step_is_a_function_of_its_inputs_and_networks(name: str, on_noisy: bool) -> None:
    method = untrained(name, dropout=0.0)
    inputs: Any = method.inputs(0, StepPlan(0, 3, CLEAN, None, on_noisy), None)
    before = method.loss(0, inputs).loss
    method.w, method.mean_losses = random_w(9), random_w(9)
    if isinstance(method, BiCro):
        method.clean = [NOISY, NOISY]
    assert torch.equal(method.loss(0, inputs).loss, before)
    assert method.repeatable


@pytest.mark.parametrize("on_noisy", [False, True])
@both
def test_labels_see_pairs_without_augmentation(name: str, on_noisy: bool) -> None:
    method = untrained(name, model="vse", augment=True)
    augmented: Any = method.inputs(0, StepPlan(0, 0, CLEAN, None, on_noisy), np.random.default_rng(0))
    plain = method.loader.batch(CLEAN)
    assert torch.equal(augmented.unaugmented.left.values, plain.left.values)
    assert torch.equal(augmented.unaugmented.right.values, plain.right.values)
    assert not torch.equal(augmented.batch.left.lengths, torch.full((len(CLEAN),), 5))
    labels = [step_on(method, 0, CLEAN, on_noisy=on_noisy).metrics["label"], method.loss(0, augmented).metrics["label"]]
    assert labels[0] == labels[1]


# ---------------------------------------------------------------------- which pairs


@pytest.mark.parametrize(("name", "order"), [("ncr", "after"), ("bicro", "before")])
def test_each_network_trains_on_what_the_other_calls_clean(name: str, order: str) -> None:
    w = random_w()
    method = with_w(untrained(name, clean_threshold=0.6, epochs=4), w)
    for epoch in range(4):
        for net, split in enumerate(method.begin_epoch(epoch)):
            assert split.clean.tolist() == [i for i in range(COUNT) if w[1 - net, i] > 0.6]
            noisy = [i for i in range(COUNT) if w[1 - net, i] <= 0.6]
            assert split.noisy.tolist() == (noisy if epoch >= 2 else [])
            assert split.order == order
            if isinstance(method, BiCro):
                assert method.clean[net].tolist() == split.clean.tolist()


def check_order(plans: list[StepPlan], noisy_first: bool) -> None:
    """Steps of one network in main epochs: at first on clean pairs alone, then on noisy ones before or after each."""
    first = [plan.on_noisy for plan in plans].index(True) - (not noisy_first)
    late = plans[first:]
    assert first > 0
    assert [plan.on_noisy for plan in late] == [noisy_first, not noisy_first] * (len(late) // 2)
    assert [plan.main_step for plan in late[::2]] == [plan.main_step for plan in late[1::2]]
    one, other = (set(np.concatenate([plan.pairs for plan in part])) for part in (late[::2], late[1::2]))
    assert not one & other


STOPS = [(0, 0, 1), (1, 1, 1), (2, 0, 1), (2, 0, 2), (2, 1, 3)]  # warm-up, clean steps alone, after clean, after noisy


@pytest.mark.parametrize(
    ("clean", "settings"),
    [
        (tiny_pairs(7), {"augment": True}),
        (vector_pairs(36, shared=1), {"model": "two-tower", "split_losses": "single"}),
    ],
    ids=["vse", "two-tower"],
)
@both
def test_resume_is_exact_wherever_it_stopped(name: str, tmp_path: Path, clean: Pairs, settings: dict[str, Any]) -> None:
    steps, _ = check_resume(training(name, **settings), add_noise(clean, noise_ratio=0.4, seed=0), tmp_path, STOPS)
    for net in range(2):
        plans = [plan for number, plan in steps if number == net and plan.main_step is not None]
        check_order(plans, noisy_first=name == "bicro")


# ---------------------------------------------------------------------- whole runs


@pytest.mark.parametrize(("pairs", "settings"), [case[1:] for case in LITTLE], ids=[case[0] for case in LITTLE])
@both
def test_little_or_much_noise_few_pairs(name: str, pairs: Pairs, settings: dict[str, Any]) -> None:
    assert ends_well(name, pairs, **settings)


@pytest.mark.parametrize(("name", "rsum", "spread"), [("ncr", 450, 0.1), ("bicro", 280, 0.07)])
def test_it_learns_from_noisy_pairs(name: str, rsum: float, spread: float) -> None:
    """40 % wrong pairs; chance is an rSum of 32. Seeds 0-2: 546, 558, 566 (NCR) and 365, 399, 414 (BiCro)."""
    rng = np.random.default_rng(0)
    x, m = rng.normal(size=(500, 8)), rng.normal(size=(8, 12)) / 3
    y = x @ m + 0.3 * rng.normal(size=(500, 12))
    train, test = (
        Pairs(Vectors(x[part].astype(np.float32)), Vectors(y[part].astype(np.float32)), np.arange(len(x[part])))
        for part in (slice(400), slice(400, 500))
    )
    noisy = add_noise(train, noise_ratio=0.4, seed=0)
    matcher = mispair.fit(
        noisy, method=name, model="two-tower", embed_size=16, batch_size=64, lr=1e-2, warmup_epochs=4, epochs=4,
        negatives_start=16, negatives_end=4, hardening_steps=40, split_losses="single", device="cpu",
    )  # fmt: skip
    assert matcher.evaluate(test).averaged.rsum > rsum
    assert matcher.score(test.left, test.right).std() > spread
