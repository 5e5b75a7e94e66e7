"""Each kind of evidence against data whose truth is known, and each formula against an independent reference."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from mispair.calibrating.evidence import (
    View,
    _equal_rows,
    _look_alikes,
    _mismatched,
    by_audit,
    by_checked,
    by_shuffled,
    by_vectors,
    disagreement,
    normal_scores,
)
from mispair.errors import ConflictError, TooFewError
from mispair.functional.logistic import FloatArray, probability
from mispair.reviewing.noise_estimate import Population
from refusals import refused
from scored import Bools, N, five_levels, joint_space, made

SCALES: list[Callable[[FloatArray], FloatArray]] = [np.exp, lambda x: x**3, lambda x: 1 / (1 + np.exp(-x))]


def calibration_error(match: FloatArray, wrong: Bools) -> float:
    """Mean distance between probability and truth over tenths of the pairs."""
    return float(
        np.mean([abs(match[part].mean() - (~wrong[part]).mean()) for part in np.array_split(match.argsort(), 10)])
    )


def test_normal_scores_are_quantiles_of_the_mean_rank() -> None:
    a, b = np.array([[3.0], [1.0], [3.0]]), np.array([[2.0]])
    found = np.concatenate(normal_scores(a, b)).ravel()
    ranks = np.array([3.5, 1, 3.5, 2])
    assert found == pytest.approx(norm.ppf((ranks - 0.5) / 4))


@pytest.mark.parametrize("change", [lambda x: x, five_levels], ids=["real", "five levels"])
def test_shuffled_pairs_give_rate_and_probabilities(change: Callable[[FloatArray], FloatArray]) -> None:
    score, wrong, null = made()
    view = by_shuffled(change(score)[:, None], change(null)[:, None], ["clip"])
    assert view.low <= wrong.mean() <= view.high
    assert abs(view.rate - wrong.mean()) < 0.03
    assert calibration_error(view.match, wrong) < 0.04
    order = np.argsort(view.order, kind="stable")
    assert (np.diff(view.match[order]) >= -1e-9).all()


@given(st.sampled_from(SCALES), st.integers(0, 5))
def test_only_the_order_of_the_scores_counts(change: Callable[[FloatArray], FloatArray], seed: int) -> None:
    score, wrong, null = made(seed)
    score, wrong, null = score[:300], wrong[:300], null[:300]
    rows = np.arange(0, 300, 4)
    new, new_null = change(score)[:, None], change(null)[:, None]
    for one, other in (
        (by_shuffled(score[:, None], null[:, None], ["s"]), by_shuffled(new, new_null, ["s"])),
        (by_checked(score[:, None], rows, ~wrong[rows], ["s"]), by_checked(new, rows, ~wrong[rows], ["s"])),
    ):
        assert other.match == pytest.approx(one.match)
        assert (other.rate, other.low, other.high) == pytest.approx((one.rate, one.low, one.high))


def test_two_columns_are_better_than_each() -> None:
    rng = np.random.default_rng(0)
    wrong = rng.random(N) < 0.3
    scores, null = rng.normal(size=(N, 2)) + 1.8 * ~wrong[:, None], rng.normal(size=(N, 2))
    both = by_shuffled(scores, null, ["a", "b"])
    alone = by_shuffled(scores[:, :1], null[:, :1], ["a"])
    truth = (~wrong).astype(float)
    assert np.square(both.match - truth).mean() < 0.8 * np.square(alone.match - truth).mean()
    assert both.low <= wrong.mean() <= both.high


def test_the_vectors_of_a_score_give_shuffled_pairs_and_look_alikes() -> None:
    cosine, left, right, wrong = joint_space()
    view = by_vectors(2.5 * np.maximum(cosine, -0.3), left, right, "clip")  # as CLIPScore, clipped
    assert view.low <= wrong.mean() <= view.high
    assert abs(view.rate - wrong.mean()) < 0.02
    assert view.look_alikes_found is not None
    assert view.at_most is not None
    assert 0 < view.look_alikes_found < 0.97  # a random pair is found more often
    assert view.at_most >= view.high


def test_vectors_of_something_else_are_refused() -> None:
    cosine, left, right, _ = joint_space()
    with refused(ConflictError, "left"):
        by_vectors(np.random.default_rng(0).permutation(cosine), left, right, "clip")
    with refused(ConflictError, "left"):
        by_vectors(cosine, left, right[:, :20], "clip")


def test_pairs_that_share_an_item_are_not_wrong() -> None:
    rng = np.random.default_rng(0)
    left = np.repeat(rng.normal(size=(40, 6)), 5, axis=0)  # five captions a photo
    right = rng.normal(size=(200, 6))
    groups = [_equal_rows(side) for side in (left, right)]
    assert (groups[0].reshape(40, 5) == groups[0].reshape(40, 5)[:, :1]).all()
    assert len(np.unique(groups[0])) == 40
    rows, partners = _mismatched(np.arange(200), np.roll(np.arange(200), -1), groups)
    assert len(rows) == 40
    assert (rows // 5 != partners // 5).all()
    rows, partners = _mismatched(*_look_alikes(left, right, rng), groups)
    assert (rows // 5 != partners // 5).all()


def test_a_reversed_or_blind_score_is_refused() -> None:
    score, wrong, null = made()
    rows = np.arange(0, N, 10)
    with refused(ConflictError, "score", "'distance'"):
        by_shuffled(-score[:, None], -null[:, None], ["distance"])
    with refused(ConflictError, "score", "'noise'"):
        by_shuffled(null[:, None], made(1)[2][:, None], ["noise"])
    with refused(ConflictError, "score", "'distance'"):
        by_checked(-score[:, None], rows, ~wrong[rows], ["distance"])
    with refused(ConflictError, "score", "'distance'"):
        by_audit(-score[:, None], (~wrong).astype(float), (0.3, 0.2, 0.4), ["distance"])


def test_too_few_pairs_are_refused() -> None:
    score, wrong, null = made()
    with refused(TooFewError, names="40"):
        by_shuffled(score[:40, None], null[:, None], ["s"])
    with refused(TooFewError, names="50"):
        by_shuffled(score[:, None], null[:50, None], ["s"])
    with refused(TooFewError, names="20"):
        by_checked(score[:, None], np.arange(20), ~wrong[:20], ["s"])
    with refused(TooFewError, names="90"):
        by_checked(score[:, None], np.arange(90), np.ones(90, dtype=bool), ["s"])


@pytest.mark.parametrize("change", [lambda x: x, five_levels], ids=["real", "five levels"])
def test_checked_pairs_give_rate_and_probabilities(change: Callable[[FloatArray], FloatArray]) -> None:
    score, wrong, _ = made()
    rows = np.random.default_rng(1).choice(N, 400, replace=False)
    view = by_checked(change(score)[:, None], rows, ~wrong[rows], ["clip"])
    assert view.low <= wrong.mean() <= view.high
    assert calibration_error(view.match, wrong) < 0.06


def test_checked_pairs_correct_what_shuffled_ones_cannot_know() -> None:
    """Wrong pairs about the same subject: far above shuffled ones, and below the right ones."""
    rng = np.random.default_rng(0)
    wrong = rng.random(N) < 0.5
    score, null = rng.normal(size=N) + np.where(wrong, 2.5, 4.5), rng.normal(size=N)
    blind = by_shuffled(score[:, None], null[:, None], ["clip"])
    assert blind.high < 0.2
    rows = rng.choice(N, 200, replace=False)
    view = by_checked(score[:, None], rows, ~wrong[rows], ["clip"], base=blind)
    assert view.low <= wrong.mean() <= view.high
    assert disagreement([blind, view])
    assert not disagreement([view, view])


def test_the_rate_of_a_random_sample_covers_and_is_unbiased() -> None:
    """The interval against simulated samples, and its width against that of the plain proportion."""
    score, wrong, _ = made(3)
    odds = -(2.6 * score - 2.6**2 / 2)
    found = []
    for seed in range(100):
        rows = np.random.default_rng(seed).choice(N, 150, replace=False)
        found.append(Population(probability(odds), 0).by_sample(rows, wrong[rows].astype(float)))
    assert np.mean([one.low <= wrong.mean() <= one.high for one in found]) >= 0.93
    assert np.mean([one.rate for one in found]) == pytest.approx(wrong.mean(), abs=0.006)
    plain = 1.96 * np.sqrt(wrong.mean() * (1 - wrong.mean()) / 150)
    assert np.mean([one.half_width for one in found]) < 0.9 * plain


def test_weights_undo_an_uneven_draw() -> None:
    """Low scores are drawn five times as often: the plain share is wrong, the weighted estimate is not."""
    score, wrong, _ = made(4)
    chance = np.where(score < 1.3, 0.15, 0.03)
    found, plain = [], []
    for seed in range(100):
        rows = np.flatnonzero(np.random.default_rng(seed).random(N) < chance)
        plain.append(wrong[rows].mean())
        found.append(Population(np.full(N, 0.5), 0).by_sample(rows, wrong[rows].astype(float), 1 / chance[rows]))
    assert np.mean(plain) > wrong.mean() + 0.1
    assert np.mean([one.rate for one in found]) == pytest.approx(wrong.mean(), abs=0.015)
    assert np.mean([one.low <= wrong.mean() <= one.high for one in found]) >= 0.93


def test_an_audit_is_handed_on_by_score() -> None:
    score, wrong, _ = made()
    match = np.where(wrong, 0.1, 0.9)  # sure enough, so that the means by score are stretched to 0 and 1
    view = by_audit(five_levels(score)[:, None], match, (0.3, 0.28, 0.33), ["vlm"])
    assert (view.rate, view.low, view.high) == (0.3, 0.28, 0.33)
    levels = five_levels(score)
    for level in np.unique(levels):
        assert view.match[levels == level] == pytest.approx((~wrong[levels == level]).mean(), abs=0.03)


@pytest.mark.parametrize("spread", [0.6, 1.2, 2.5])
def test_an_unsure_audit_is_an_independent_view(spread: float) -> None:
    """However blurred its probabilities are, those by score are calibrated."""
    score, wrong, _ = made()
    rng = np.random.default_rng(7)
    seen = rng.normal(size=N) + spread * ~wrong
    odds = spread * seen - spread**2 / 2 + np.log((1 - wrong.mean()) / wrong.mean())
    view = by_audit(score[:, None], 1 / (1 + np.exp(-odds)), (0.3, 0.28, 0.33), ["clip"])
    assert calibration_error(view.match, wrong) < 0.05
    best = np.argsort(-view.order)[:1000]
    assert view.match[best].mean() == pytest.approx((~wrong[best]).mean(), abs=0.05)


def test_a_score_of_the_same_vectors_is_not_stretched() -> None:
    """The audit has seen all that the score has."""
    score, wrong, _ = made()
    odds = 2.6 * score - 2.6**2 / 2 + np.log((1 - wrong.mean()) / wrong.mean())
    view = by_audit(score[:, None], 1 / (1 + np.exp(-odds)), (0.3, 0.28, 0.33), ["clip"])
    assert calibration_error(view.match, wrong) < 0.03


def test_a_view_has_one_probability_for_equal_scores() -> None:
    score, wrong, null = made()
    levels = five_levels(score)
    rows = np.arange(0, N, 10)
    views: list[View] = [
        by_shuffled(levels[:, None], five_levels(null)[:, None], ["vlm"]),
        by_checked(levels[:, None], rows, ~wrong[rows], ["vlm"]),
        by_audit(levels[:, None], (~wrong).astype(float), (0.3, 0.2, 0.4), ["vlm"]),
    ]
    for view in views:
        assert all(np.ptp(view.match[levels == level]) < 1e-12 for level in np.unique(levels))


@pytest.mark.parametrize("drawn", ["evenly", "low scores more often"])
def test_the_interval_of_a_cut_by_checked_pairs_covers(drawn: str) -> None:
    """Of given cuts, and of those that the same checked pairs have chosen."""
    score, wrong, _ = made(6)
    chance = np.full(N, 0.1) if drawn == "evenly" else np.where(score < 1.3, 0.2, 0.08)
    held = []
    for seed in range(30):
        rows = np.flatnonzero(np.random.default_rng([seed, 1]).random(N) < chance)
        view = by_checked(score[:, None], rows, ~wrong[rows], ["clip"], 1 / chance[rows])
        chosen = [view.cut(purity=purity) for purity in (0.9, 0.95, 0.98)]
        for cut in [view.cut(least=1.0), view.cut(least=2.0), *chosen]:
            held.append(cut.purity_low <= (~wrong[score >= cut.least]).mean() <= cut.purity_high)
    assert np.mean(held) >= 0.93


@pytest.mark.parametrize("change", [lambda x: x, five_levels], ids=["real", "five levels"])
@pytest.mark.parametrize("evidence", ["shuffled", "audit"])
def test_the_interval_of_a_cut_covers(evidence: str, change: Callable[[FloatArray], FloatArray]) -> None:
    """Another sample of pairs, of shuffled pairs and another audit each time."""
    held = []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        wrong = rng.random(1500) < 0.4
        score, null, seen = rng.normal(size=(3, 1500)) + np.outer([2.5, 0, 2], ~wrong)
        odds = 2 * seen - 2 + np.log(0.6 / 0.4)
        if evidence == "shuffled":
            view = by_shuffled(change(score)[:, None], change(null[:500])[:, None], ["clip"])
        else:
            view = by_audit(change(score)[:, None], 1 / (1 + np.exp(-odds)), (0.4, 0.37, 0.43), ["clip"])
        assert view.interval is not None
        for least in (0.8, 1.7, 2.5):
            kept = np.flatnonzero(change(score) >= least)
            low, high = view.interval(kept)
            held.append(low <= wrong[kept].mean() <= high)
    assert np.mean(held) >= 0.93
