"""Cuts against a plain loop over all of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mispair.calibrating.cuts import Cut, Ranked, at_rate
from mispair.errors import ConflictError, InvalidValueError
from mispair.functional.logistic import FloatArray
from refusals import refused

LEVELS = st.lists(st.integers(1, 6), min_size=2, max_size=40)


def ranked(levels: list[int]) -> Ranked:
    order = np.array(levels, dtype=np.float64)
    return Ranked(order, order / 7, 0.3, 0.2, 0.4)


def all_cuts(order: FloatArray, match: FloatArray) -> dict[int, tuple[float, float, float]]:
    """Kept pairs of every cut: its least score, its purity and the share of the matched pairs that it loses."""
    found = {}
    for least in sorted(set(order.tolist())):
        kept = order >= least
        found[int(kept.sum())] = least, match[kept].mean(), 1 - match[kept].sum() / match.sum()
    return found


def check(cut: Cut, expected: tuple[float, float, float]) -> None:
    assert (cut.least, cut.purity, cut.lost) == pytest.approx(expected, abs=1e-9)
    assert 0 <= cut.purity_low <= cut.purity + 1e-9 <= cut.purity_high + 2e-9 <= 1 + 2e-9


@given(LEVELS, st.floats(0.1, 1))
def test_the_purest_cut_keeps_the_most_pairs(levels: list[int], purity: float) -> None:
    one = ranked(levels)
    cuts = all_cuts(one.order, one.match)
    good = [kept for kept, (_, share, _) in cuts.items() if share >= purity - 1e-12]
    if not good:
        with refused(ConflictError, "purity"):
            one.cut(purity=purity)
        return
    cut = one.cut(purity=purity)
    assert cut.kept == max(good)
    check(cut, cuts[cut.kept])


@given(LEVELS, st.integers(1, 50))
def test_the_best_pairs_are_at_most_so_many(levels: list[int], keep: int) -> None:
    one = ranked(levels)
    cuts = all_cuts(one.order, one.match)
    few = [kept for kept in cuts if kept <= keep]
    if not few:
        with refused(ConflictError, "keep"):
            one.cut(keep=keep)
        return
    cut = one.cut(keep=keep)
    assert cut.kept == max(few)
    check(cut, cuts[cut.kept])


def test_cuts_by_score_and_by_probability() -> None:
    one = ranked([1, 2, 3, 3, 5])
    assert (one.cut(least=2.5).kept, one.cut(least=2.5).least) == (3, 3)
    assert one.cut(probability=5 / 7).kept == 1
    with refused(ConflictError):
        one.cut()
    with refused(ConflictError):
        one.cut(least=2.5, keep=1)
    with refused(ConflictError):
        one.cut(least=6)
    with refused(ConflictError):
        one.cut(probability=0.9)


@pytest.mark.parametrize("purity", [0, 1.5, -1, float("nan")])
def test_a_purity_is_a_share(purity: float) -> None:
    with refused(InvalidValueError, "purity"):
        ranked([1, 2]).cut(purity=purity)


@settings(max_examples=6)
@given(st.floats(0.05, 0.9), st.floats(0.05, 0.9))
def test_probabilities_of_another_noise_rate(rate: float, other: float) -> None:
    """By Bayes' rule with the known densities of two normal distributions."""
    rng = np.random.default_rng(0)
    matched = rng.random(20_000) >= other
    score = rng.normal(size=20_000) + 3 * matched

    def posterior(noise: float) -> FloatArray:
        return np.asarray(1 / (1 + noise / (1 - noise) * np.exp(-(3 * score - 4.5))))

    found = at_rate(posterior(rate), rate)
    assert found.mean() == pytest.approx(matched.mean(), abs=0.01)
    assert found == pytest.approx(posterior(1 - matched.mean()), abs=0.02)
