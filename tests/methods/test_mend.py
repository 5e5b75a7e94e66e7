"""Mend: its losses against plain loops, its phases, and whole runs."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import mispair
from mispair.config import Config
from mispair.errors import ConflictError, DataError, TooFewError
from mispair.methods import mend
from mispair.methods.base import StepPlan, similarity
from mispair.methods.mend import STUDENT, TEACHERS, Mend, MendInputs, MendOracle, MendUnaudited
from mispair.methods.repair import Repair
from mispair.models import Network, SideSpec, build
from mispair.models.inference import similarities
from mispair.pairs.audited import AuditColumns
from mispair.pairs.batches import PairLoader
from mispair.pairs.noise import add_noise
from mispair.pairs.pairs import Pairs
from mispair.training.run_folder import read_examples, read_result
from mispair.training.settings import override
from refusals import refused
from small_data import gradients, shake
from tiny import tiny_pairs
from training import check_resume
from two_networks import COUNT, LITTLE, SMALL, image_text, training, vector_pairs

SCORE = np.random.default_rng(5).random(COUNT).astype(np.float32)
CHOSEN = np.flatnonzero(SCORE >= 0.5)[:9]
TEMPERATURE = 0.05


@pytest.fixture
def uncorrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mend, "CORRUPTED", 0.0)


def scored(pairs: Pairs, score: Any = SCORE) -> Pairs:
    return replace(pairs, match_score=np.asarray(score, dtype=np.float32))


def untrained(pairs: Pairs | None = None, **settings: Any) -> Mend:
    """With networks that have not learned anything, in which nothing is random."""
    chosen = {**SMALL, "method": "mend", "dropout": 0.0, "epochs": 7, "flagged_size": 5, **settings}
    config = override(Config(data="test"), chosen)
    if pairs is None:
        pairs = scored(vector_pairs() if config.model == "two-tower" else image_text())
    specs = SideSpec.of(pairs.left), SideSpec.of(pairs.right)
    nets = [build(own, *specs, seed=seed).train() for seed, own in enumerate(Mend.network_configs(config))]
    for seed, net in enumerate(nets):
        shake(net, seed)
        for module in net.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.momentum = 0.0  # so that nothing changes from one step to the next
    return Mend(config, nets, PairLoader(pairs, torch.device("cpu")))


def bounded(net: Network, S: Tensor) -> list[list[float]]:
    """tanh of the score before the sigmoid, in float64."""
    rows = S.double().tolist()
    return [[math.tanh(math.log(s / (1 - s)) if net.squashed else s) for s in row] for row in rows]


def softmax(values: list[float]) -> list[float]:
    powers = [math.exp(value / TEMPERATURE) for value in values]
    return [power / sum(powers) for power in powers]


def transposed(matrix: list[list[float]]) -> list[list[float]]:
    return [list(column) for column in zip(*matrix, strict=True)]


def loop_info_nce(t: list[list[float]], images: list[int]) -> list[float]:
    losses = []
    for i in range(len(t)):
        there = [j for j in range(len(t)) if j == i or images[i] != images[j]]
        both = [softmax([side[i][j] for j in there])[there.index(i)] for side in (t, transposed(t))]
        losses.append(-math.log(both[0]) - math.log(both[1]))
    return losses


def loop_distillation(t: list[list[float]], teachers: list[list[list[float]]]) -> float:
    total = 0.0
    for turn in (lambda matrix: matrix, transposed):
        for i in range(len(t)):
            wanted = [softmax(turn(one)[i]) for one in teachers]
            for place, mine in enumerate(softmax(turn(t)[i])):
                p = sum(one[place] for one in wanted) / len(wanted)
                total += p * (math.log(p) - math.log(mine))
    return total


def in_evaluation(net: Network, inputs: MendInputs) -> Tensor:
    assert inputs.uncorrupted is not None
    net.eval()
    with torch.no_grad():
        S = similarity(net, inputs.uncorrupted)
    net.train()
    return S


# ---------------------------------------------------------------------- a step


@pytest.mark.usefixtures("uncorrupted")
@pytest.mark.parametrize("model", ["two-tower", "vse", "sgr"])
@pytest.mark.parametrize("net", TEACHERS)
def test_the_loss_of_a_teacher_equals_a_loop(model: str, net: int) -> None:
    method = untrained(model=model)
    method.begin_epoch(0)
    plan = StepPlan(3, 0, CHOSEN)
    inputs = method.inputs(net, plan, None)
    result = method.loss(net, inputs)
    images = inputs.batch.left_rows.tolist()
    losses = loop_info_nce(bounded(method.nets[net], similarity(method.nets[net], inputs.batch)), images)
    weights = [1.0] * len(CHOSEN) + [0.3] * 5
    expected = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)
    assert result.loss.item() == pytest.approx(expected, rel=2e-4)
    assert inputs.uncorrupted is None


@pytest.mark.usefixtures("uncorrupted")
@pytest.mark.parametrize("model", ["two-tower", "vse", "sgr"])
def test_the_loss_of_the_student_equals_a_loop(model: str) -> None:
    method = untrained(model=model)
    method.begin_epoch(4)
    inputs = method.inputs(STUDENT, StepPlan(3, 0, CHOSEN), None)
    result = method.loss(STUDENT, inputs)
    t = bounded(method.nets[STUDENT], similarity(method.nets[STUDENT], inputs.batch))
    teachers = [bounded(method.nets[net], in_evaluation(method.nets[net], inputs)) for net in TEACHERS]
    assert result.loss.item() == pytest.approx(loop_distillation(t, teachers), rel=2e-4)
    assert inputs.weights is None
    assert len(t) == len(CHOSEN) + 5


@pytest.mark.parametrize("model", ["two-tower", "vse", "sgr"])
@pytest.mark.parametrize(("epoch", "net"), [(0, 0), (0, 1), (4, STUDENT)])
def test_the_trained_network_alone_gets_gradients(model: str, epoch: int, net: int) -> None:
    method = untrained(model=model)
    method.begin_epoch(epoch)
    method.loss(net, method.inputs(net, StepPlan(0, 0, CHOSEN), None)).loss.backward()  # type: ignore[no-untyped-call]
    for number, network in enumerate(method.nets):
        assert any(grad is not None for grad in gradients(network).values()) == (number == net)
        assert network.training


def test_teachers_see_pairs_without_augmentation() -> None:
    method = untrained(model="vse", augment=True)
    method.begin_epoch(4)
    inputs = method.inputs(STUDENT, StepPlan(0, 0, CHOSEN), np.random.default_rng(0))
    plain = method.inputs(STUDENT, StepPlan(0, 0, CHOSEN), None)
    assert inputs.uncorrupted is not None
    assert torch.equal(inputs.uncorrupted.left.values, plain.batch.left.values)
    assert not torch.equal(inputs.batch.left.lengths, torch.full((len(CHOSEN) + 5,), 5))  # type: ignore[arg-type]


def test_words_and_regions_are_corrupted_in_training() -> None:
    method = untrained(model="sgr")
    method.begin_epoch(0)
    inputs = method.inputs(0, StepPlan(0, 0, CHOSEN), None)
    assert method.loss(0, inputs).loss != method.loss(0, inputs).loss


def test_other_items_go_with_each_step() -> None:
    """Items of flagged pairs, with a partner of a trusted pair for a teacher and with any other for the student."""
    method = untrained()
    trusted = method.trusted
    for epoch, net in ((0, 0), (0, 1), (4, STUDENT)):
        method.begin_epoch(epoch)
        drawn = []
        for position in range(3):
            lefts, rights = method._items(net, StepPlan(position, 0, CHOSEN))
            assert np.array_equal(lefts[: len(CHOSEN)], CHOSEN)
            assert np.array_equal(rights[: len(CHOSEN)], CHOSEN)
            lefts, rights = lefts[len(CHOSEN) :], rights[len(CHOSEN) :]
            assert len(lefts) == 5
            assert ((trusted[lefts] ^ trusted[rights]) if net != STUDENT else ~(trusted[lefts] | trusted[rights])).all()
            drawn.append((lefts.tolist(), rights.tolist()))
        assert drawn[0] != drawn[1] != drawn[2]


# ---------------------------------------------------------------------- before an epoch


def test_first_the_teachers_then_the_student() -> None:
    method = untrained(warmup_epochs=2, epochs=6)
    training = [method.begin_warmup(), method.begin_warmup(), *(method.begin_epoch(epoch) for epoch in range(6))]
    for epoch, parts in enumerate(training):
        training_now = [number for number, pairs in enumerate(parts) if len(pairs.clean)]
        assert training_now == list(method.trained_networks(epoch)) == ([0, 1] if epoch < 4 else [STUDENT])
        for number in training_now:
            assert np.array_equal(parts[number].clean, np.flatnonzero(SCORE >= 0.5))


@pytest.mark.parametrize(("networks", "kept"), [(None, [2, 1, 0]), (3, [2, 1, 0]), (2, [2, 1]), (1, [2])])
def test_the_model_is_the_student_with_its_teachers(networks: int | None, kept: list[int]) -> None:
    method = untrained(warmup_epochs=0, epochs=4, networks=networks)
    assert [method.kept_networks(epoch) for epoch in range(4)] == [[0, 1], [0, 1], kept, kept]


def test_the_student_trains_in_its_share_of_the_epochs() -> None:
    def teacher_epochs(share: float, epochs: int) -> int:
        return untrained(warmup_epochs=0, epochs=epochs, student_share=share).teacher_epochs

    assert [teacher_epochs(share, 10) for share in (0.01, 0.25, 0.5, 0.99)] == [9, 8, 5, 1]
    assert teacher_epochs(0.5, 2) == 1
    with refused(ConflictError, where="epochs", names="mend"):
        teacher_epochs(0.5, 1)


def test_the_learning_rate_rises_and_falls_in_both_phases() -> None:
    method = untrained(warmup_epochs=2, epochs=8, lr=1.0)  # five epochs for the teachers, five for the student
    for net, start in ((0, 0), (1, 0), (STUDENT, 5)):
        rates = [method.learning_rate(net, start + 5 * done) for done in (0, 0.025, 0.05, 0.525, 1 - 1e-9)]
        assert rates == pytest.approx([0.01, 0.5, 1.0, 0.5, 0.0], abs=1e-9)


def test_models_of_the_networks() -> None:
    def models(**settings: Any) -> list[str]:
        return [own.model for own in Mend.network_configs(override(Config(), settings))]

    assert models(model="sgr") == ["sgr", "vse", "sgr"]
    assert models(model="vse") == ["vse", "vse", "vse"]
    assert models(model="two-tower") == ["two-tower", "two-tower", "two-tower"]
    assert models(model="sgr", second_model="saf") == ["sgr", "saf", "sgr"]


def test_methods_of_two_networks_take_no_third() -> None:
    with refused(ConflictError, where="networks", names="repair"):
        Repair.network_configs(override(Config(), {"method": "repair", "networks": 3}))


# ---------------------------------------------------------------------- report


def test_the_report_and_what_became_of_each_pair() -> None:
    pairs = scored(add_noise(vector_pairs(), noise_ratio=0.4, seed=0))
    method = untrained(pairs)
    method.begin_epoch(0)
    report, examples = method.report(), method.examples(np.arange(COUNT))
    right = ~pairs.mismatched  # type: ignore[operator]
    assert report.clean_share is not None
    assert report.clean_precision is not None
    assert report.replaced is not None
    assert report.clean_share[0] == pytest.approx((SCORE >= 0.5).mean())
    assert report.clean_precision[0] == pytest.approx(right[SCORE >= 0.5].mean())
    assert method.partners is not None
    fits = []
    for row in np.flatnonzero(method.partners.keeps_right):
        true = pairs.truth[method.partners.own[row]]  # type: ignore[index]
        lenders = zip(method.partners.lenders[row], method.partners.odds[row], strict=True)
        fits.append(sum(float(odds) for pair, odds in lenders if pairs.link[pair] == true))
    assert report.replaced[0].new_left_fits == pytest.approx(np.mean(fits))
    assert examples.labels is not None
    assert examples.new_left is not None
    assert np.array_equal(examples.labels, SCORE >= 0.5)
    assert np.array_equal(examples.new_left >= 0, SCORE < 0.5)
    assert (SCORE[examples.new_left[examples.new_left >= 0]] >= 0.5).all()


# ---------------------------------------------------------------------- whole runs


STOPS = [(0, 1, 1), (1, 0, 2), (2, 2, 1), (3, 2, 2)]  # teachers, then twice the student


@pytest.mark.parametrize("settings", [{"augment": True}, {"model": "sgr", "dropout": 0.3}], ids=["vse", "sgr"])
def test_resume_is_exact_also_into_and_out_of_the_student(tmp_path: Path, settings: dict[str, Any]) -> None:
    pairs = add_noise(tiny_pairs(7), noise_ratio=0.4, seed=0)
    pairs = scored(pairs, np.random.default_rng(2).random(35))
    steps, states = check_resume(training("mend", epochs=3, flagged_size=4, **settings), pairs, tmp_path, STOPS)
    numbers = [number for number, _ in steps]
    first = numbers.index(STUDENT)
    assert {*numbers[:first]} == {*TEACHERS}
    assert {*numbers[first:]} == {STUDENT}
    for whole, broken in zip(states[0]["partners"], states[1]["partners"], strict=True):
        assert torch.equal(whole, broken)


SCORES: list[tuple[str, Callable[[int], Any]]] = [
    ("all trusted", np.ones),
    ("none trusted", np.zeros),
    ("one flagged", lambda count: np.arange(count) > 0),
    ("two trusted", lambda count: np.arange(count) < 2),
    ("half", lambda count: np.arange(count) % 2),
]


def few_pairs() -> Iterator[Any]:
    """Every verdict with one set of pairs, every set with two verdicts; all of both are a slow test."""
    for (what, *case), (verdict, score) in itertools.product(LITTLE, SCORES):
        slow = what != "two images" and verdict not in ("half", "two trusted")
        yield pytest.param(*case, score, id=f"{what}, {verdict}", marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(("pairs", "settings", "score"), [*few_pairs()])
def test_few_pairs_and_any_verdict_of_the_audit(
    pairs: Pairs, settings: dict[str, Any], score: Callable[[int], Any]
) -> None:
    given = scored(pairs, score(len(pairs)))
    matcher = mispair.fit(given, **{**SMALL, "method": "mend", "epochs": 2, **settings})
    assert np.isfinite(matcher.score(pairs.left, pairs.right)).all()
    assert len(matcher.networks) == 3


def test_unlike_networks_are_saved_and_averaged_on_one_scale(tmp_path: Path) -> None:
    pairs = scored(image_text(24), np.arange(24) % 2)
    settings = {**SMALL, "method": "mend", "model": "sgr", "epochs": 2}
    matcher = mispair.fit(pairs, image_text(12), out=tmp_path / "run", **settings)
    assert matcher.models == ["sgr", "vse", "sgr"]
    matcher.save(tmp_path / "model.safetensors")
    again = mispair.Matcher.load(tmp_path / "model.safetensors", "cpu")
    assert again.models == matcher.models
    scores = matcher.score(pairs.left, pairs.right)
    assert np.array_equal(again.score(pairs.left, pairs.right), scores)
    from mispair.pairs.batches import SideLoader

    sides = [SideLoader(side, torch.device("cpu")) for side in (pairs.left, pairs.right)]
    matrices = similarities(matcher.networks, *sides)
    expected = np.mean([bounded(net, S) for net, S in zip(matcher.networks, matrices, strict=True)], axis=0)
    assert scores == pytest.approx(expected, abs=1e-5)
    result, examples = read_result(tmp_path / "run"), read_examples(tmp_path / "run")
    assert result is not None
    assert result.best.networks == (2, 1, 0)
    assert examples is not None
    assert examples.labels is not None


def test_one_network_is_the_student_alone(tmp_path: Path) -> None:
    pairs = scored(image_text(24), np.arange(24) % 2)
    settings = {**SMALL, "method": "mend", "model": "sgr", "epochs": 2, "networks": 1}
    shown = StringIO()
    matcher = mispair.fit(pairs, image_text(12), out=tmp_path, console=Console(file=shown, width=200), **settings)
    assert matcher.models == ["sgr"]
    result = read_result(tmp_path)
    assert result is not None
    assert result.best.networks == (2,)
    # The student alone replaces its teachers, whose model may have been better.
    assert re.findall(r"(epoch \d/2).*(\(best.*\))", shown.getvalue()) == [
        ("epoch 1/2", "(best)"),
        ("epoch 2/2", "(best of the new model)"),
    ]


def test_it_audits_first_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs, found = vector_pairs(), []

    def score_pairs(given: Pairs, *_: Any) -> Any:
        found.append(given)
        return SCORE

    monkeypatch.setattr("mispair.auditing.audit.score_pairs", score_pairs)
    mispair.fit(pairs, out=tmp_path / "mend", method="mend", **SMALL)
    assert len(found) == 1
    assert np.array_equal(AuditColumns.read(tmp_path / "mend/audited.parquet").match_score, SCORE)
    mispair.fit(scored(pairs), method="mend", **SMALL)
    mispair.fit(pairs, method="plain", **SMALL)
    assert len(found) == 1


def test_pairs_that_cannot_be_audited_are_refused_with_a_way_out() -> None:
    with refused(TooFewError, names="`method`"):
        mispair.fit(vector_pairs(12), method="mend", **SMALL)


def test_it_learns_from_noisy_pairs() -> None:
    """40 % wrong pairs and a rough audit; chance is an rSum of 126."""
    noisy, test = add_noise(tiny_pairs(100), noise_ratio=0.4, seed=0), tiny_pairs(24, seed=5)
    assert noisy.mismatched is not None
    luck = np.random.default_rng(0).random(500) * 0.55
    pairs = scored(noisy, np.where(noisy.mismatched, luck, 1 - luck))
    settings: dict[str, Any] = {
        "model": "vse", "embed_size": 32, "word_size": 16, "batch_size": 24, "flagged_size": 8, "lr": 1e-2,
        "warmup_epochs": 0, "epochs": 8, "augment": False, "device": "cpu",
    }  # fmt: skip
    matcher = mispair.fit(pairs, method="mend", **settings)
    assert matcher.evaluate(test).averaged.rsum > 300


def test_all_pairs_may_be_trusted() -> None:
    method = untrained(scored(add_noise(vector_pairs(), noise_ratio=0.4, seed=1)), model="two-tower", trust="all")
    assert not method.trusted.all()
    assert mispair.methods.select(method.config) is MendUnaudited
    unaudited = MendUnaudited(method.config, method.nets, method.loader)
    unaudited.begin_epoch(0)
    assert unaudited.trusted.all()
    assert unaudited.partners is None


def test_the_truth_may_take_the_place_of_the_audit() -> None:
    pairs = add_noise(vector_pairs(), noise_ratio=0.4, seed=1)
    method = untrained(scored(pairs), model="two-tower", trust="truth", flagged_size=0)
    assert type(method) is Mend  # `select` chooses the variant
    oracle = MendOracle(method.config, method.nets, method.loader)
    assert mispair.methods.select(method.config) is MendOracle
    assert pairs.mismatched is not None
    assert (oracle.trusted == ~pairs.mismatched).all()
    with refused(DataError, names="`noise_ratio`"):
        mispair.fit(vector_pairs(), **{**SMALL, "method": "mend", "model": "two-tower", "trust": "truth"})
