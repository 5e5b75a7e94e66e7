"""The noise rate from few decisions: against plain loops, unbiased for any scores, exact when all are decided."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit

from mispair.reviewing import noise_estimate
from mispair.reviewing.noise_estimate import EVEN, FOLDS, PRIOR, SURE, TEMPER, Draw, most_instructive


def fitted(log_odds: list[float], answers: list[float]) -> tuple[float, float]:
    """Slope and offset with the greatest posterior density, by a general minimiser."""
    priors = (noise_estimate.SLOPE, noise_estimate.SLOPE_SPREAD), (0.0, noise_estimate.OFFSET_SPREAD)

    def loss(beta: list[float]) -> float:
        value = sum(((b - middle) / spread) ** 2 / 2 for b, (middle, spread) in zip(beta, priors, strict=True))
        for x, y in zip(log_odds, answers, strict=True):
            value += np.logaddexp(0, (beta[0] * x + beta[1]) * (1 - 2 * y))
        return float(value)

    slope, offset = scipy.optimize.minimize(loss, [1.0, 0.0], method="BFGS", options={"gtol": 1e-7}).x
    return slope, offset


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def by_hand(q: list[float], seed: int, answers: list[float]) -> tuple[float, Callable[[float], float], float, float]:
    """The rate; how far off it is, in standard deviations, if the shift of the log odds is given; slope; total."""
    x = [round(math.log(p / (1 - p)), 2) for p in (min(max(v, SURE), 1 - SURE) for v in q)]
    q = [sigmoid(value / TEMPER) for value in x]
    total = sum(math.sqrt(value * (1 - value)) for value in q)
    rates = [(1 - EVEN) * math.sqrt(value * (1 - value)) / total + EVEN / len(q) for value in q]
    uniform = np.random.default_rng(seed).random(len(q)).tolist()
    fold = np.random.default_rng([seed, 1]).integers(0, FOLDS, len(q), dtype=np.int32).tolist()
    sizes = [draw / rate for draw, rate in zip(uniform, rates, strict=True)]
    order = sorted(range(len(q)), key=lambda pair: sizes[pair])
    count = len(answers)
    size = sizes[order[count]] if count < len(q) else math.inf
    inclusion = [min(1.0, size * rate) for rate in rates]
    told = [(pair, y) for pair, y in zip(order, answers, strict=False) if not math.isnan(y)]
    fits = []
    for own in range(FOLDS):
        other = [(x[pair], y) for pair, y in told if fold[pair] != own]
        fits.append(fitted([one for one, _ in other], [y for _, y in other]))
    expected = [sigmoid(fits[fold[pair]][0] * x[pair] + fits[fold[pair]][1]) for pair in range(len(q))]
    rate, observed = sum(expected), 0.0
    for pair, y in told:
        rate += (y - expected[pair]) / inclusion[pair]
        observed += (1 - inclusion[pair]) * ((y - expected[pair]) / inclusion[pair]) ** 2
    slope, offset = fitted([x[pair] for pair, _ in told], [y for _, y in told])

    def variance(shift: float) -> float:
        value = 0.0
        for pair in range(len(q)):
            p = sigmoid(slope * x[pair] + shift)
            value += (1 - inclusion[pair]) / inclusion[pair] * (p * (1 - p) + (p - expected[pair]) ** 2)
        return value

    modelled = variance(offset)
    factor = max(1.0, (count * observed / modelled + PRIOR) / (count + PRIOR)) if modelled else 0.0

    def surprise(shift: float) -> float:
        possible = sum(sigmoid(slope * value + shift) for value in x) / len(q)
        return abs(rate / len(q) - possible) - 1.96 * math.sqrt(factor * variance(shift)) / len(q)

    return rate / len(q), surprise, slope, factor


@settings(max_examples=8)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(61, 90), data=st.data())
def test_the_estimate_is_that_of_plain_loops(seed: int, size: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    q = rng.random(size)
    count = data.draw(st.integers(60, size))
    answers = np.where(rng.random(count) < q[Draw(q, seed).order[:count]], 1.0, 0.0)
    answers[rng.random(count) < 0.2] = np.nan
    rate, surprise, slope, factor = by_hand(q.tolist(), seed, answers.tolist())
    found = Draw(q, seed).estimate(answers)
    assert found is not None
    assert found.decided == count
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
    assert noise_estimate.recalibrate(odds, answers) == pytest.approx(fitted(odds.tolist(), answers.tolist()), abs=3e-3)


@pytest.mark.parametrize("scores", ["right", "useless", "opposite", "sure"])
def test_it_is_unbiased_however_bad_the_scores_are(scores: str) -> None:
    rng = np.random.default_rng(0)
    truth = rng.random(400)
    y = (rng.random(400) < truth).astype(float)
    q = {"right": truth, "useless": rng.random(400), "opposite": 1 - truth, "sure": (truth > 0.9).astype(float)}[scores]
    rates = []
    for seed in range(100):
        draw = Draw(q, seed)
        found = draw.estimate(y[draw.order[:80]])
        assert found is not None
        rates.append(found.rate)
    error = np.mean(rates) - y.mean()
    assert abs(error) < 4 * np.std(rates) / math.sqrt(len(rates))


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


@pytest.mark.parametrize("kind", ["right", "overconfident"])
def test_the_interval_covers_the_truth(kind: str) -> None:
    rng = np.random.default_rng(2)
    truth = rng.beta(0.15, 0.6, 3000)
    y = (rng.random(3000) < truth).astype(float)
    odds = np.log(np.clip(truth, 1e-4, 1 - 1e-4) / np.clip(1 - truth, 1e-4, 1))
    q = truth if kind == "right" else 1 / (1 + np.exp(-1.5 * odds))
    covered = 0
    for seed in range(200):
        draw = Draw(q, seed)
        found = draw.estimate(y[draw.order[:300]])
        assert found is not None
        covered += found.low <= y.mean() <= found.high
    assert covered >= 180


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
