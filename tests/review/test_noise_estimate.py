"""The noise rate from few decisions: against plain loops, unbiased for any scores, exact when all are decided."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mispair.review import noise_estimate
from mispair.review.noise_estimate import Draw, most_instructive


def by_hand(q: list[float], seed: int, answers: list[float]) -> tuple[float, float]:
    """Rate and half width, pair by pair."""
    q = [min(max(value, noise_estimate.SURE), 1 - noise_estimate.SURE) for value in q]
    total = sum(math.sqrt(value * (1 - value)) for value in q)
    even = noise_estimate.EVEN
    rates = [(1 - even) * math.sqrt(value * (1 - value)) / total + even / len(q) for value in q]
    uniform = np.random.default_rng(seed).random(len(q)).tolist()
    sizes = [draw / rate for draw, rate in zip(uniform, rates, strict=True)]
    order = sorted(range(len(q)), key=lambda pair: sizes[pair])
    count = len(answers)
    size = sizes[order[count]] if count < len(q) else math.inf
    inclusion = [min(1.0, size * rate) for rate in rates]
    rate, observed = sum(q), 0.0
    for pair, answer in zip(order, answers, strict=False):
        if not math.isnan(answer):
            rate += (answer - q[pair]) / inclusion[pair]
            observed += (1 - inclusion[pair]) * (answer - q[pair]) ** 2 / inclusion[pair] ** 2
    log_odds = [math.log(value / (1 - value)) for value in q]
    told = [(log_odds[pair], answer) for pair, answer in zip(order, answers, strict=False) if not math.isnan(answer)]
    slope, offset, doubt = noise_estimate.recalibrate(*(np.array(column) for column in zip(*told, strict=True)))
    expected = 0.0
    for value, odds, chance in zip(q, log_odds, inclusion, strict=True):
        corrected = 1 / (1 + math.exp(-min(max(slope - noise_estimate.DOUBT * doubt, 0), 1) * odds - offset))
        expected += (1 - chance) / chance * (corrected * (1 - corrected) + (corrected - value) ** 2)
    mixed = (count * observed + noise_estimate.PRIOR * expected) / (count + noise_estimate.PRIOR)
    variance = max(observed, mixed)
    return rate / len(q), 1.96 * math.sqrt(variance) / len(q)


@given(seed=st.integers(0, 2**32 - 1), size=st.integers(61, 90), data=st.data())
def test_the_estimate_is_that_of_plain_loops(seed: int, size: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    q = rng.random(size)
    count = data.draw(st.integers(60, size))
    answers = rng.choice([0.0, 1.0, np.nan], size=count)
    rate, half = by_hand(q.tolist(), seed, answers.tolist())
    found = Draw(q, seed).estimate(answers)
    assert found is not None
    assert found.decided == count
    assert found.rate == pytest.approx(min(max(rate, 0), 1), abs=1e-9)
    assert found.low == pytest.approx(min(max(rate - half, 0), 1), abs=1e-9)
    assert found.high == pytest.approx(min(max(rate + half, 0), 1), abs=1e-9)


@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 90), factor=st.floats(-2, 4), shift=st.floats(-3, 3))
def test_the_correction_is_the_most_probable_one(seed: int, size: int, factor: float, shift: float) -> None:
    rng = np.random.default_rng(seed)
    odds = rng.normal(0, 2, size)
    answers = (rng.random(size) < 1 / (1 + np.exp(-factor * odds - shift))).astype(float)
    slope, offset, doubt = noise_estimate.recalibrate(odds, answers)

    def loss(slope: float, offset: float) -> float:
        likelihood = [
            math.log1p(math.exp((slope * x + offset) * (1 - 2 * y))) for x, y in zip(odds, answers, strict=True)
        ]
        priors = ((slope - noise_estimate.SLOPE) / noise_estimate.SLOPE_SPREAD, offset / noise_estimate.OFFSET_SPREAD)
        return sum(likelihood) + sum(prior**2 for prior in priors) / 2

    least = loss(slope, offset)
    for step in (1e-3, 0.1):
        around = [
            loss(slope + step * a, offset + step * b) for a, b in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1))
        ]
        assert least < min(around) + 1e-9
    h = 1e-3
    down = (loss(slope + h, offset) + loss(slope - h, offset) - 2 * least) / h**2
    across = (loss(slope, offset + h) + loss(slope, offset - h) - 2 * least) / h**2
    mixed = sum(a * b * loss(slope + h * a, offset + h * b) for a in (1, -1) for b in (1, -1)) / (4 * h**2)
    assert doubt == pytest.approx(math.sqrt(across / (down * across - mixed**2)), rel=1e-3)


@pytest.mark.parametrize("scores", ["right", "useless", "opposite", "sure"])
def test_it_is_unbiased_however_bad_the_scores_are(scores: str) -> None:
    rng = np.random.default_rng(0)
    truth = rng.random(400)
    y = (rng.random(400) < truth).astype(float)
    q = {"right": truth, "useless": rng.random(400), "opposite": 1 - truth, "sure": (truth > 0.9).astype(float)}[scores]
    rates = []
    for seed in range(200):
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
