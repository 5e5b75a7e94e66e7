"""Noise rates and probabilities on mixtures that are known."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.stats import beta, norm
from sklearn.isotonic import IsotonicRegression

from made_pairs import quality
from mispair.auditing.scoring import calibration
from mispair.auditing.scoring.calibration import (
    FAR,
    HIGH_CUT,
    LOW_CUTS,
    Combination,
    _checked_weight,
    combine,
    match_probability,
    noise_interval,
    noise_rate,
    positive_weights,
    standardised,
)
from mispair.functional.logistic import FloatArray, logistic, probability

N = 4000
SCORES = hnp.arrays(np.float64, st.integers(1, 80), elements=st.floats(-5, 5, width=16))
RATES = [0.0, 0.2, 0.6, 1.0]


@dataclass(frozen=True)
class Mixture:
    """Scores of which it is known whose they are; right pairs score higher by `apart` standard deviations."""

    observed: FloatArray
    shuffled: FloatArray
    mismatched: npt.NDArray[np.bool_]


def mixture(rate: float, apart: float = 3.0, n: int = N, shuffled: int = N, seed: int = 0) -> Mixture:
    rng = np.random.default_rng(seed)
    wrong = np.arange(n) < round(rate * n)
    return Mixture(rng.standard_normal(n) + apart * ~wrong, rng.standard_normal(shuffled), wrong)


# ---------------------------------------------------------------------- noise rate


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rate", RATES)
def test_the_noise_rate_is_within_sampling_error(rate: float, seed: int) -> None:
    made = mixture(rate, apart=4.0, seed=seed)
    # The share of the observed, and of the shuffled, below a quantile q has a variance of q (1 - q) / N.
    error = math.sqrt((rate + rate**2) * 0.7 / 0.3 / N)
    assert noise_rate(made.observed, made.shuffled) == pytest.approx(rate, abs=4 * error + 1e-3)


@pytest.mark.parametrize("rate", RATES)
def test_the_interval_holds_the_rate(rate: float) -> None:
    made = mixture(rate, apart=4.0, n=500, shuffled=480)
    low, high = noise_interval(made.observed, made.shuffled)
    assert 0 <= low <= noise_rate(made.observed, made.shuffled) <= high <= 1
    assert low - 0.005 <= rate <= high + 0.005
    assert noise_interval(made.observed, made.shuffled) == (low, high)


def test_intervals_of_many_samples_hold_the_rate_as_often_as_they_claim() -> None:
    held = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        wrong = rng.random(300) < 0.4
        low, high = noise_interval(rng.standard_normal(300) + 5 * ~wrong, rng.standard_normal(300))
        held += low <= 0.4 <= high
    assert held >= 33  # of 40; 38 on average


@pytest.mark.parametrize(("n", "rate"), [(200, 0.0), (200, 0.02), (200, 0.5), (1000, 0.05), (1000, 0.97), (200, 1.0)])
def test_intervals_hold_few_and_nearly_all(n: int, rate: float) -> None:
    held = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        wrong = np.arange(n) < round(rate * n)
        low, high = noise_interval(rng.standard_normal(n) + 4 * ~wrong, rng.standard_normal(n))
        held += low <= wrong.mean() <= high
    assert held >= 37  # of 40


def test_matched_pairs_with_low_scores_do_not_raise_the_lower_end() -> None:
    """Nothing is mismatched, but a few matched pairs score as shuffled ones do, though not as the lowest of them."""
    rng = np.random.default_rng(0)
    shuffled, observed = rng.standard_normal(1000), rng.standard_normal(1000) + 4
    observed[:30] = rng.uniform(-1.5, -0.9, 30)
    assert noise_interval(observed, shuffled)[0] == 0


def test_both_ends_are_clopper_and_pearsons() -> None:
    rng = np.random.default_rng(0)
    observed, shuffled = (
        rng.standard_normal(300) + np.repeat([0.0, 5.0], 150),
        norm.ppf(np.linspace(0.00001, 0.99999, 99_999)),
    )
    low, high = noise_interval(observed, shuffled)
    below = {cut: int((observed <= np.quantile(shuffled, cut)).sum()) for cut in (*LOW_CUTS, HIGH_CUT)}
    lows = [beta.ppf(0.025, below[cut], 301 - below[cut]) / cut for cut in LOW_CUTS]
    assert low == pytest.approx(min(lows), rel=0.02)
    assert high == pytest.approx(beta.ppf(0.975, below[HIGH_CUT] + 1, 300 - below[HIGH_CUT]) / HIGH_CUT, rel=0.01)


def test_unbiased_scores_keep_the_upper_end_up() -> None:
    """Where hardly anything matches, learning raised the scores of all observed pairs; the others did not change."""
    rng = np.random.default_rng(0)
    raised, shuffled = rng.standard_normal(500) + 0.5, rng.standard_normal(500)
    unbiased = rng.standard_normal(500), rng.standard_normal(500)
    assert noise_interval(raised, shuffled)[1] < 0.9
    assert noise_interval(raised, shuffled, unbiased)[1] == 1
    a, b = raised[:, None], shuffled[:, None]
    found = combine(a, b, b[:0], b[:0, 0], np.full(500, 0.3), None, unbiased)
    assert found.high == 1
    assert found.rate > 0.85


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.6, 1.0])
def test_equal_scores_do_not_raise_the_rate(rate: float) -> None:
    """Two values only, as vectors of a single number have it."""
    made = mixture(rate, apart=0.0)
    shuffled = np.sign(made.shuffled)
    observed = np.where(made.mismatched, np.sign(made.observed), 1.0)
    assert noise_rate(observed, shuffled) == pytest.approx(rate, abs=0.05)


@given(SCORES, SCORES)
def test_the_rate_is_a_share_and_goes_by_the_order_alone(observed: FloatArray, shuffled: FloatArray) -> None:
    rate = noise_rate(observed, shuffled)
    assert 0 <= rate <= 1
    assert noise_rate(np.ldexp(observed, 3), np.ldexp(shuffled, 3)) == rate
    assert noise_rate(shuffled, shuffled) == 1


# ---------------------------------------------------------------------- probability


@given(SCORES, SCORES, st.floats(0, 1))
def test_the_probability_never_falls_with_the_score(observed: FloatArray, shuffled: FloatArray, rate: float) -> None:
    found = match_probability(observed, shuffled, rate)
    assert ((found >= 0) & (found <= 1)).all()
    order = observed.argsort(kind="stable")
    assert (np.diff(found[order]) >= -1e-12).all()
    for score in np.unique(observed):  # equal scores, equal probabilities
        assert np.ptp(found[observed == score]) <= 1e-12


@pytest.mark.parametrize("shuffled", [N, N // 3])
@pytest.mark.parametrize("rate", [0.2, 0.6])
def test_the_probability_is_that_of_the_mixture(rate: float, shuffled: int) -> None:
    made = mixture(rate, apart=2.0, shuffled=shuffled)
    found = match_probability(made.observed, made.shuffled, rate)
    right = (1 - rate) * norm.pdf(made.observed, 2)
    expected = right / (right + rate * norm.pdf(made.observed))
    assert np.abs(found - expected).mean() < 0.03
    for low in np.arange(0, 1, 0.2):  # and of the pairs said to be right with about p, about p are
        inside = (found >= low) & (found < low + 0.2)
        if inside.sum() > 100:
            assert found[inside].mean() == pytest.approx((~made.mismatched)[inside].mean(), abs=0.08)
    assert found.mean() == pytest.approx(1 - rate, abs=0.05)


def test_a_rate_of_nothing_still_tells_better_from_worse() -> None:
    observed, shuffled = np.linspace(1, 5, 100), np.linspace(-3, 2, 100)
    found = match_probability(observed, shuffled, 0.0)
    assert found[0] < found[-1]
    assert found.min() > 0.9


def test_log_odds_become_probabilities() -> None:
    score = np.linspace(-30, 30, 601)
    found = probability(score)
    assert (np.diff(found) > 0).all()
    assert found[300] == 0.5
    assert np.log(found / (1 - found))[150:450] == pytest.approx(score[150:450], rel=1e-6, abs=1e-9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert probability(np.array([-1e300, -np.inf, np.inf])).tolist() == pytest.approx([0, 0, 1])


def test_standard_scores_are_bounded() -> None:
    found = standardised(np.array([[1.0, 1e9], [3.0, -1e9]]), np.array([1.0, 0.0]), np.array([2.0, 1.0]))
    assert found.tolist() == [[0.0, FAR[1]], [1.0, FAR[0]]]


# ---------------------------------------------------------------------- combination


@dataclass(frozen=True)
class Measured:
    """Measures of pairs of which it is known which are wrong: one tells much, one little, one nothing."""

    observed: FloatArray
    shuffled: FloatArray
    close: FloatArray
    mismatched: npt.NDArray[np.bool_]
    alike: float = 0.5  # how right the close pairs are

    def combine(self, checked: FloatArray | None = None) -> Combination:
        trust = match_probability(self.observed[:, 0], self.shuffled[:, 0], 0.5)
        return combine(self.observed, self.shuffled, self.close, np.full(len(self.close), self.alike), trust, checked)

    def changed(self, change: Callable[[FloatArray], FloatArray]) -> Measured:
        return Measured(change(self.observed), change(self.shuffled), change(self.close), self.mismatched)


def measured(rate: float = 0.3, n: int = 1500, seed: int = 0) -> Measured:
    rng = np.random.default_rng(seed)
    wrong = rng.random(n) < rate
    apart, scale, middle = np.array([3.0, 1.0, 0.0]), np.array([0.1, 10.0, 1.0]), np.array([5.0, -200.0, 0.0])

    def scattered(count: int) -> FloatArray:
        return np.asarray(rng.standard_normal((count, 3)) * scale + middle)

    observed = scattered(n) + apart * scale * ~wrong[:, None]
    return Measured(observed, scattered(n), scattered(n // 2) + 0.5 * apart * scale, wrong)


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.6])
def test_a_combination_knows_rate_order_and_odds(rate: float) -> None:
    made = measured(rate)
    found = made.combine()
    assert found.rate == pytest.approx(made.mismatched.mean(), abs=0.06)
    assert found.low <= found.rate <= found.high
    score = found.score(made.observed)
    assert quality(score, made.mismatched) > quality(made.observed[:, 0], made.mismatched) - 0.002
    match = probability(score)
    edges = np.linspace(0, 1, 11)
    bins = np.digitize(match, edges[1:-1])
    error = sum(abs(match[bins == b].sum() - (~made.mismatched)[bins == b].sum()) for b in range(10)) / len(match)
    assert error < 0.05
    assert np.mean((match < 0.5) == made.mismatched) > 0.9


def test_shares_show_which_measure_counts() -> None:
    shares = measured().combine().shares()
    assert shares.sum() == pytest.approx(1)
    assert shares[0] > shares[1] > shares[2] >= 0
    nothing = np.zeros(3)
    none = Combination(
        nothing, nothing + 1, nothing, nothing, np.array([1.0, 0.0]), nothing, nothing, 1.0, 0.0, 0.0, 0.0, 0.0
    )
    assert none.shares().tolist() == [0, 0, 0]


def test_no_measure_counts_against_a_pair() -> None:
    """The second measure is the first one with noise: a fit with any weights subtracts it."""
    rng = np.random.default_rng(0)
    target = (np.arange(2000) < 1000).astype(np.float64)
    truth = rng.standard_normal(2000) + 2 * target
    error = rng.standard_normal(2000)
    x = np.column_stack([truth + error, error, rng.standard_normal(2000) - target])
    weights = positive_weights(x, target, np.ones(2000), calibration.RIDGE)
    assert weights[0] > 0
    assert weights[1:].tolist() == [0, 0]
    alone, _ = logistic(x[:, :1], target, np.ones(2000), calibration.RIDGE)
    assert weights[0] == pytest.approx(alone[0])
    assert positive_weights(-x[:, :1], target, np.ones(2000), calibration.RIDGE).tolist() == [0]


def test_units_of_a_measure_do_not_matter() -> None:
    made = measured()
    factor, shift = np.array([1e4, 1e-3, 7.0]), np.array([0.0, 5.0, -3.0])
    other = made.changed(lambda part: part * factor + shift)
    first, second = made.combine().score(made.observed), other.combine().score(other.observed)
    assert second == pytest.approx(first, abs=1e-2)


def test_the_order_of_the_score_is_that_of_the_weighted_sum() -> None:
    """A slope is never negative, whatever the targets say."""
    rng = np.random.default_rng(0)
    observed, shuffled, close = rng.standard_normal((3, 200, 2))
    found = combine(observed, shuffled, close, rng.random(200), rng.random(200))
    assert found.slope > 0
    assert np.isfinite(found.score(observed)).all()


def test_measures_without_spread_weigh_nothing() -> None:
    made = measured()
    flat = made.changed(lambda part: np.column_stack([part, np.full(len(part), 0.3)]))
    found = flat.combine()
    assert found.score(flat.observed) == pytest.approx(made.combine().score(made.observed), abs=1e-2)


@pytest.mark.parametrize("close", [0, 10])
def test_few_or_no_near_pairs_do_no_harm(close: int) -> None:
    made = measured()
    found = Measured(made.observed, made.shuffled, made.close[:close], made.mismatched).combine()
    assert quality(found.score(made.observed), made.mismatched) > 0.97


# ---------------------------------------------------------------------- checked pairs


def checked_rows(made: Measured, rows: npt.NDArray[np.int64]) -> FloatArray:
    checked = np.full(len(made.mismatched), np.nan)
    checked[rows] = ~made.mismatched[rows]
    return checked


def test_what_is_checked_moves_the_score_its_way() -> None:
    made = measured()
    middle = np.argsort(np.abs(made.combine().score(made.observed)))[:100]  # the doubtful ones
    plain = made.combine().score(made.observed)[middle].mean()
    for value, sign in ((1.0, 1), (0.0, -1)):
        checked = np.full(len(made.mismatched), np.nan)
        checked[middle] = value
        assert sign * (made.combine(checked).score(made.observed)[middle].mean() - plain) > 0.3


def test_checked_pairs_show_which_measure_is_worth_more() -> None:
    """Two measures that tell observed from shuffled pairs equally well, of which only one knows the truth."""
    rng = np.random.default_rng(0)
    n = 1500
    wrong = rng.random(n) < 0.4
    deceived = rng.permutation(wrong)
    observed = rng.standard_normal((n, 2)) + 2.0 * np.column_stack([~wrong, ~deceived])
    made = Measured(observed, rng.standard_normal((n, 2)), rng.standard_normal((n, 2)), wrong, alike=0.0)
    told = made.combine(checked_rows(made, np.arange(150)))
    rest = np.arange(n) >= 150
    plain = quality(made.combine().score(observed)[rest], wrong[rest])
    assert quality(told.score(observed)[rest], wrong[rest]) > plain + 0.005
    assert told.shares()[0] > made.combine().shares()[0] + 0.01


def test_nothing_checked_changes_nothing() -> None:
    made = measured()
    plain, told = made.combine(), made.combine(np.full(len(made.mismatched), np.nan))
    assert told.score(made.observed).tolist() == plain.score(made.observed).tolist()


def test_few_checked_pairs_count_for_a_tenth_and_many_for_themselves() -> None:
    known = np.arange(1000) < 10
    assert _checked_weight(known) * known.sum() == pytest.approx(100)
    assert _checked_weight(np.arange(1000) < 500) == 1
    assert _checked_weight(np.zeros(1000, dtype=bool)) >= 1


def test_the_curve_is_the_mean_of_neighbours_and_never_falls() -> None:
    rng = np.random.default_rng(3)
    score, target = rng.standard_normal(400), rng.random(400)
    knots, chances = calibration._curve(score, target)
    order = score.argsort()
    assert len(knots) == 400 // calibration.GROUP
    expected = [score[order[start : start + 20]].mean() for start in range(0, 400, 20)]
    np.testing.assert_allclose(knots, expected)
    means = [target[order[start : start + 20]].mean() for start in range(0, 400, 20)]
    np.testing.assert_allclose(chances, IsotonicRegression().fit_transform(np.arange(20), means))


def test_wrong_pairs_that_stand_apart_are_flagged() -> None:
    """Probabilities follow the data, not the shape of a logistic curve."""
    rng = np.random.default_rng(0)
    wrong = np.arange(1000) < 300
    observed = np.where(wrong, rng.normal(0, 1, 1000), rng.normal(6, 0.5, 1000))[:, None]
    shuffled = rng.normal(0, 1, (1000, 1))
    found = calibration.combine(
        observed, shuffled, shuffled[:0], shuffled[:0, 0], (observed[:, 0] > 4).astype(np.float64)
    )
    chance = probability(found.score(observed))
    assert (chance[wrong] < 0.5).mean() > 0.95
    assert (chance[~wrong] < 0.5).mean() < 0.01
    assert np.unique(chance).size == 1000
