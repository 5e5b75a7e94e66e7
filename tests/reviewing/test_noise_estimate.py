"""The noise rate from few decisions: against plain loops, unbiased for any scores, exact when all are decided."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import cycle, pairwise

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit
from scipy.stats import binomtest

from mispair.functional.logistic import FloatArray
from mispair.reviewing import noise_estimate
from mispair.reviewing.noise_estimate import EVEN, FOLDS, PRIOR, SURE, TEMPER, Draw, most_instructive

SLOPE = noise_estimate.SLOPE, noise_estimate.SLOPE_SPREAD
OFFSET = 0.0, noise_estimate.OFFSET_SPREAD
WITH_ANSWERS = SLOPE, (noise_estimate.WEIGHT, noise_estimate.WEIGHT_SPREAD), (0.0, noise_estimate.LEAN_SPREAD)


def fitted(
    rows: list[tuple[float, ...]], decisions: list[float], priors: tuple[tuple[float, float], ...]
) -> list[float]:
    """Weights with the greatest posterior density, the last one for 1, by a general minimiser."""

    def loss(beta: list[float]) -> float:
        value = sum(((b - middle) / spread) ** 2 / 2 for b, (middle, spread) in zip(beta, priors, strict=True))
        for row, y in zip(rows, decisions, strict=True):
            value += np.logaddexp(0, sum(b * x for b, x in zip(beta, (*row, 1.0), strict=True)) * (1 - 2 * y))
        return float(value)

    start = [middle for middle, _ in priors]
    return list(map(float, scipy.optimize.minimize(loss, start, method="BFGS", options={"gtol": 1e-7}).x))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def by_hand(
    q: list[float], seed: int, decisions: list[float], answers: list[float]
) -> tuple[float, Callable[[float], float], float, float]:
    """The rate; how far off it is, in standard deviations, if the shift of the log odds is given; slope; factor."""
    x = [round(math.log(p / (1 - p)), 2) for p in (min(max(v, SURE), 1 - SURE) for v in q)]
    q = [sigmoid(value / TEMPER) for value in x]
    total = sum(math.sqrt(value * (1 - value)) for value in q)
    rates = [(1 - EVEN) * math.sqrt(value * (1 - value)) / total + EVEN / len(q) for value in q]
    uniform = np.random.default_rng(seed).random(len(q)).tolist()
    fold = np.random.default_rng([seed, 1]).integers(0, FOLDS, len(q), dtype=np.int32).tolist()
    sizes = [draw / rate for draw, rate in zip(uniform, rates, strict=True)]
    order = sorted(range(len(q)), key=lambda pair: sizes[pair])

    def inclusion(count: int) -> list[float]:
        size = sizes[order[count]] if count < len(q) else math.inf
        return [min(1.0, size * rate) for rate in rates]

    count = len(decisions)
    drawn = order[: max(count, len(answers))]
    decided, asked = inclusion(count), inclusion(len(drawn))
    says = {pair: 2 * a - 1 for pair, a in zip(order, answers, strict=False) if not math.isnan(a)}
    told = {pair: y for pair, y in zip(order, decisions, strict=False) if not math.isnan(y)}

    def fits(pairs: list[int]) -> tuple[list[float], list[float]]:
        both = [pair for pair in pairs if pair in says]
        by_score = fitted([(x[pair],) for pair in pairs], [told[pair] for pair in pairs], (SLOPE, OFFSET))
        rows: list[tuple[float, ...]] = [(x[pair], says[pair]) for pair in both]
        return by_score, fitted(rows, [told[pair] for pair in both], WITH_ANSWERS)

    of_fold = [fits([pair for pair in told if fold[pair] != own]) for own in range(FOLDS)]
    by_score = [sigmoid(of_fold[fold[i]][0][0] * x[i] + of_fold[fold[i]][0][1]) for i in range(len(q))]
    by_both = dict(enumerate(by_score))
    for pair, sign in says.items():
        slope, weight, offset = of_fold[fold[pair]][1]
        by_both[pair] = sigmoid(slope * x[pair] + weight * sign + offset)
    rate = sum(by_score) + sum((by_both[pair] - by_score[pair]) / asked[pair] for pair in drawn)
    rate += sum((y - by_both[pair]) / decided[pair] for pair, y in told.items())
    (slope, offset), (slope_both, weight, offset_both) = fits(list(told))

    def variance(shift: float) -> float:
        value = 0.0
        for pair in range(len(q)):
            p = sigmoid(slope * x[pair] + shift)
            value += (1 - asked[pair]) / asked[pair] * (p * (1 - p) + (p - by_score[pair]) ** 2)
        for pair in drawn:
            p = sigmoid(slope * x[pair] + shift)
            if pair in says:
                p = sigmoid(slope_both * x[pair] + weight * says[pair] + offset_both + shift - offset)
            missed = (1 / decided[pair] - 1 / asked[pair]) / asked[pair]
            value += missed * (p * (1 - p) + (p - by_both[pair]) ** 2)
        return value

    observed = sum(
        ((1 / asked[i] - 1) * (y - by_score[i]) ** 2 + (1 / decided[i] - 1 / asked[i]) * (y - by_both[i]) ** 2)
        / decided[i]
        for i, y in told.items()
    )
    modelled = variance(offset)
    factor = max(1.0, (count * observed / modelled + PRIOR) / (count + PRIOR)) if modelled else 0.0

    def surprise(shift: float) -> float:
        possible = sum(sigmoid(slope * value + shift) for value in x) / len(q)
        return abs(rate / len(q) - possible) - 1.96 * math.sqrt(factor * variance(shift)) / len(q)

    return rate / len(q), surprise, slope, factor


@settings(max_examples=8)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(61, 90), annotated=st.booleans(), data=st.data())
def test_the_estimate_is_that_of_plain_loops(seed: int, size: int, annotated: bool, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    q = rng.random(size)
    count = data.draw(st.integers(60, size))
    y = np.where(rng.random(size) < q, 1.0, 0.0)[Draw(q, seed).order]
    asked = data.draw(st.integers(0, size)) if annotated else 0
    answers = np.where(rng.random(asked) < 0.2, 1 - y[:asked], y[:asked])
    answers[rng.random(asked) < 0.1] = np.nan
    decisions = y[:count].copy()
    decisions[rng.random(count) < 0.2] = np.nan
    rate, surprise, slope, factor = by_hand(q.tolist(), seed, decisions.tolist(), answers.tolist())
    found = Draw(q, seed).estimate(decisions, answers)
    assert found is not None
    assert found.decisions == count
    assert found.rate == pytest.approx(min(max(rate, 0), 1), abs=1e-4)
    odds = np.round(np.log(np.clip(q, SURE, 1 - SURE) / np.clip(1 - q, SURE, 1 - SURE)), 2)
    for end in (found.low, found.high):
        if factor and 1e-6 < end < 1 - 1e-6:  # where the estimate just is a surprise
            shift = scipy.optimize.brentq(lambda at: expit(slope * odds + at).mean() - end, -40, 40)  # noqa: B023
            assert surprise(shift) == pytest.approx(0, abs=1e-3)
    assert found.low <= found.rate <= found.high


@given(seed=st.integers(0, 2**32 - 1), size=st.integers(0, 60), factor=st.floats(-2, 4), shift=st.floats(-3, 3))
@settings(max_examples=15)
def test_the_correction_is_the_most_probable_one(seed: int, size: int, factor: float, shift: float) -> None:
    rng = np.random.default_rng(seed)
    odds = rng.normal(0, 2, size)
    answers = (rng.random(size) < expit(factor * odds + shift)).astype(float)
    expected = fitted([(x,) for x in odds.tolist()], answers.tolist(), (SLOPE, OFFSET))
    assert noise_estimate.recalibrate(odds, answers) == pytest.approx(expected, abs=3e-3)


@pytest.mark.parametrize("scores", ["right", "useless", "opposite", "sure"])
def test_it_is_unbiased_however_bad_the_scores_are(scores: str) -> None:
    rng = np.random.default_rng(0)
    truth = rng.random(400)
    y = (rng.random(400) < truth).astype(float)
    q = {"right": truth, "useless": rng.random(400), "opposite": 1 - truth, "sure": (truth > 0.9).astype(float)}[scores]
    rates = []
    for seed in range(25):
        draw = Draw(q, seed)
        found = draw.estimate(y[draw.order[:80]])
        assert found is not None
        rates.append(found.rate)
    error = np.mean(rates) - y.mean()
    assert abs(error) < 4 * np.std(rates) / math.sqrt(len(rates))


ERRORS = {
    "5 %": (0.05, 0.05), "15 %": (0.15, 0.15), "30 %": (0.3, 0.3), "misses": (0.02, 0.3), "false alarms": (0.3, 0.02),
    "guesses": (0.5, 0.5), "says the opposite": (0.9, 0.9),
}  # shares of the matched and of the mismatched pairs on which an annotator errs  # fmt: skip


def annotated(y: FloatArray, errors: tuple[float, float], rng: np.random.Generator) -> FloatArray:
    """Answers of an annotator who errs so often."""
    return np.where(rng.random(len(y)) < np.where(y == 1, errors[1], errors[0]), 1 - y, y)


@pytest.mark.parametrize(("kind", "scores"), list(zip(ERRORS, cycle(["right", "useless"]), strict=False)))
def test_it_is_unbiased_however_often_an_annotator_errs(kind: str, scores: str) -> None:
    rng = np.random.default_rng(3)
    truth = rng.random(400)
    y = (rng.random(400) < truth).astype(float)
    q = truth if scores == "right" else rng.random(400)
    rates = []
    for seed in range(25):
        draw = Draw(q, seed)
        found = draw.estimate(y[draw.order[:80]], annotated(y, ERRORS[kind], rng)[draw.order[:200]])
        assert found is not None
        rates.append(found.rate)
    error = np.mean(rates) - y.mean()
    assert abs(error) < 4 * np.std(rates) / math.sqrt(len(rates))


@pytest.mark.parametrize(("draws", "least"), [(25, 22), pytest.param(400, 372, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["5 %", "15 %", "30 %", "misses", "false alarms"])
def test_the_interval_with_an_annotator_covers_the_truth(kind: str, draws: int, least: int) -> None:
    """In an independent simulation: another data set, annotator and draw each time."""
    covered, widths = 0, []
    for seed in range(draws):
        rng = np.random.default_rng([4, seed])
        truth = rng.beta(0.15, 0.6, 2000)
        y = (rng.random(2000) < truth).astype(float)
        draw = Draw(truth, seed)
        decisions = y[draw.order[:100]]
        found = draw.estimate(decisions, annotated(y, ERRORS[kind], rng)[draw.order[:800]])
        alone = draw.estimate(decisions)
        assert found is not None
        assert alone is not None
        covered += found.low <= y.mean() <= found.high
        widths.append(found.half_width / alone.half_width)
    assert covered >= least
    assert np.mean(widths) < {"5 %": 0.75, "30 %": 0.98}.get(kind, 0.9)


def test_an_annotator_without_an_answer_changes_nothing() -> None:
    rng = np.random.default_rng(5)
    truth = rng.random(300)
    draw = Draw(truth, 0)
    decisions = (rng.random(100) < truth[draw.order[:100]]).astype(float)
    assert draw.estimate(decisions, np.full(100, np.nan)) == draw.estimate(decisions)


def test_a_plan_is_as_wide_as_it_says() -> None:
    rng = np.random.default_rng(6)
    truth = rng.beta(0.15, 0.6, 6000)
    y = (rng.random(6000) < truth).astype(float)
    draw = Draw(truth, 0)
    answers = annotated(y, (0.1, 0.1), rng)
    plan = draw.plan(0.015, y[draw.order[:60]], answers[draw.order[:60]])
    assert plan.decisions < 0.6 * plan.alone
    assert plan.decisions <= plan.calls
    found = draw.estimate(y[draw.order[: plan.decisions]], answers[draw.order[: plan.calls]])
    alone = draw.estimate(y[draw.order[: plan.alone]])
    assert found is not None
    assert alone is not None
    assert found.half_width == pytest.approx(0.015, rel=0.2)
    assert alone.half_width == pytest.approx(0.015, rel=0.2)
    few = draw.plan(0.015, y[draw.order[:60]], answers[draw.order[:60]], most_calls=500)
    assert few.calls <= 500
    assert plan.decisions < few.decisions <= few.alone == plan.alone


def test_no_calls_are_planned_that_would_not_help() -> None:
    rng = np.random.default_rng(7)
    truth = rng.random(2000)
    draw = Draw(truth, 0)
    y = (rng.random(2000) < truth).astype(float)[draw.order[:400]]
    assert draw.plan(0.05, y, annotated(y, (0.5, 0.5), rng)).calls == 0
    assert draw.plan(1.0).decisions == noise_estimate.LEAST
    assert draw.plan(0.0).alone == 2000
    assert Draw(np.full(5, 0.5), 0).plan(0.1) == noise_estimate.Plan(0, 5, 5)
    assert Draw(np.empty(0), 0).plan(0.1) == noise_estimate.Plan(0, 0, 0)


@given(st.lists(st.sampled_from([(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0), (math.nan, 1.0), (0.0, math.nan)])))
def test_errors_of_an_annotator(both: list[tuple[float, float]]) -> None:
    people, answers = np.array(both).reshape(-1, 2).T
    found = noise_estimate.annotator_errors(people, np.append(answers, 1.0))
    assert found.false_alarms == both.count((0.0, 1.0))
    assert found.misses == both.count((1.0, 0.0))
    assert found.both == sum(not math.isnan(y + a) for y, a in both)
    if found.both:
        exact = binomtest(found.wrong, found.both).proportion_ci()
        assert found.interval == pytest.approx((exact.low, exact.high), abs=1e-6)
        assert found.rate == found.wrong / found.both


def test_with_all_pairs_decided_it_is_exact() -> None:
    rng = np.random.default_rng(1)
    y = (rng.random(100) < 0.3).astype(float)
    draw = Draw(rng.random(100), 5)
    found = draw.estimate(y[draw.order])
    assert found is not None
    assert (found.rate, found.low, found.high) == pytest.approx((y.mean(),) * 3)


def test_no_estimate_from_too_few_decisions() -> None:
    draw = Draw(np.random.default_rng(0).random(200), 0)
    assert draw.estimate(np.zeros(noise_estimate.LEAST - 1)) is None
    assert draw.estimate(np.zeros(noise_estimate.LEAST)) is not None
    few = Draw(np.full(5, 0.5), 0)
    assert few.estimate(np.zeros(4)) is None
    assert few.estimate(np.zeros(5)) is not None


@pytest.mark.parametrize("draws", [50, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["right", "overconfident"])
def test_the_interval_covers_the_truth(kind: str, draws: int) -> None:
    rng = np.random.default_rng(2)
    truth = rng.beta(0.15, 0.6, 3000)
    y = (rng.random(3000) < truth).astype(float)
    odds = np.log(np.clip(truth, 1e-4, 1 - 1e-4) / np.clip(1 - truth, 1e-4, 1))
    q = truth if kind == "right" else 1 / (1 + np.exp(-1.5 * odds))
    covered = 0
    for seed in range(draws):
        draw = Draw(q, seed)
        found = draw.estimate(y[draw.order[:300]])
        assert found is not None
        covered += found.low <= y.mean() <= found.high
    assert covered >= 0.9 * draws


def test_drawn_in_the_same_order_for_every_size() -> None:
    draw = Draw(np.random.default_rng(0).random(50), 3)
    assert sorted(draw.order.tolist()) == list(range(50))
    inclusion = [draw.inclusion(count) for count in range(51)]
    assert all((later >= earlier).all() for earlier, later in pairwise(inclusion))
    assert (inclusion[-1] == 1).all()


def test_the_least_certain_pairs_teach_most() -> None:
    q = np.array([0.01, 0.5, 0.99, 0.45, 0.2, 0.9])
    order = most_instructive(q, seed=0).tolist()
    assert set(order[:2]) == {1, 3}
    assert set(order[-2:]) == {0, 2}


def test_sure_pairs_are_told_apart() -> None:
    rates = Draw(np.array([0.0002, 0.001, 0.01, 0.1]), 0).rates
    assert (np.diff(rates) > 0).all()
