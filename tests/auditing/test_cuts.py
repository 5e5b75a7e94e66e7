"""Cuts of one's own, noise rates of parts, and what is said where nothing matches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import mispair
from made_pairs import made_pairs
from mispair.auditing.report.page import make_page, render
from mispair.auditing.scoring.calibration import noise_interval, noise_rate
from mispair.auditing.summary import USUAL_CUTS, CutSummary, below_cuts, count_parts, cuts, parts, share_of, threshold
from mispair.errors import ConflictError, InvalidValueError
from refusals import refused


def test_keep_best_keeps_that_share() -> None:
    match = np.array([0.9, np.nan, 0.1, 0.5, 0.3, 0.7])
    assert threshold(match, None, None) == 0.5
    assert threshold(match, 0.2, None) == 0.2
    for share in (0.2, 0.4, 0.8, 1.0):
        below = threshold(match, None, share)
        assert (match >= below).sum() == round(5 * share)


@pytest.mark.parametrize("wrong", ["", "eighty", "0", "120%", -1.0, 1.5, float("nan")])
def test_what_is_no_share_is_a_mistake_in_words(wrong: str | float) -> None:
    with refused(InvalidValueError, where="keep_best", names=repr(wrong)):
        share_of(wrong)


def test_a_cut_that_is_none_is_refused() -> None:
    made = made_pairs(100)
    with refused(InvalidValueError, where="flag_below", names="2.0"):
        mispair.audit(made.left, made.right, flag_below=2.0)
    with refused(ConflictError, names="`keep_best`"):
        mispair.audit(made.left, made.right, flag_below=0.2, keep_best=0.8)


def cuts_of(
    match: np.ndarray, rate: tuple[float, float, float], values: Sequence[float] = USUAL_CUTS
) -> list[CutSummary]:
    """By two parts of the pairs."""
    parts = (match[: len(match) // 3], match[len(match) // 3 :])
    first, second = (below_cuts(part, rate, len(match), values) for part in parts)
    return cuts(values, first + second)


def test_cuts_know_how_many_of_the_flagged_are_mismatched() -> None:
    """Scores that are true probabilities: the estimates are their means, and the intervals hold the truth."""
    rng = np.random.default_rng(0)
    held = total = 0
    for _ in range(20):
        match = rng.beta(0.5, 0.3, 3000)
        matched = rng.random(3000) < match
        rate = float((1 - match).mean())
        for cut in cuts_of(match, (rate, rate - 0.01, rate + 0.01)):
            flagged = match < cut.flag_below
            assert cut.flagged == flagged.sum()
            assert cut.mismatched == pytest.approx((1 - match[flagged]).mean())
            assert cut.mismatched_low <= cut.mismatched <= cut.mismatched_high
            held += cut.mismatched_low <= (~matched[flagged]).mean() <= cut.mismatched_high
            total += 1
    assert held >= 0.95 * total


def test_a_higher_noise_rate_shifts_the_odds() -> None:
    """Against the definition: odds times the ratio of the prior odds."""
    match = np.full(100_000, 0.75)
    (cut,) = cuts_of(match, (0.25, 0.25, 0.4), [0.9])
    odds = (0.25 / 0.75) * (0.4 / 0.6) / (0.25 / 0.75)
    assert cut.mismatched_high == pytest.approx(odds / (1 + odds), abs=0.001)
    assert cut.mismatched_low == pytest.approx(0.25, abs=0.005)


def test_no_pair_below_a_cut() -> None:
    assert [cut.flagged for cut in cuts_of(np.ones(10), (0.0, 0.0, 0.1))] == [0] * 7


def test_an_audit_with_a_cut_of_ones_own() -> None:
    made = made_pairs(300, 0.3)
    plain = mispair.audit(made.left, made.right)
    strict = mispair.audit(made.left, made.right, flag_below=0.05)
    best = mispair.audit(made.left, made.right, keep_best="60%")
    assert strict.summary.flagged == (plain.match_score < 0.05).sum() < plain.summary.flagged
    assert best.kept.sum() == 180
    assert best.summary.flag_below == best.threshold == pytest.approx(np.sort(plain.match_score)[120])
    assert [cut.flagged for cut in best.summary.cuts if cut.flag_below == best.threshold] == [120]
    assert best.table.column("is_mismatch").to_pylist() == best.is_mismatch.tolist()
    assert "Flagged pairs by threshold" in render(make_page(best.reported))


# ---------------------------------------------------------------------- parts


def test_parts_have_the_rate_of_their_own_pairs() -> None:
    rng = np.random.default_rng(0)
    values = ["a"] * 300 + ["b"] * 200 + ["c"]
    wrong = np.concatenate([np.arange(300) < 30, np.arange(200) < 120, [False]])
    sums, shuffled = rng.standard_normal(501) + 4 * ~wrong, rng.standard_normal(500)
    sums[0] = np.nan
    half = [count_parts(values[here], sums[here], shuffled, wrong[here]) for here in (slice(250), slice(250, None))]
    counts = {name: half[0].get(name, 0) + half[1][name] for name in "abc"}
    first, second, third = parts(counts, shuffled)
    assert (first.value, first.pairs, first.flagged) == ("a", 299, 29)
    assert (second.value, second.pairs, second.flagged) == ("b", 200, 120)
    assert third.pairs == 1
    assert first.noise_rate == noise_rate(sums[1:300], shuffled)
    assert (second.noise_rate_low, second.noise_rate_high) == noise_interval(sums[300:500], shuffled)
    assert second.noise_rate == pytest.approx(0.6, abs=0.1)


def test_a_summary_by_a_column(tmp_path: Path) -> None:
    made = made_pairs(300, 0.3)
    for name, vectors in (("left", made.left), ("right", made.right)):
        np.save(tmp_path / f"{name}.npy", vectors)
    lines = "".join(f"p{row},{'ab'[row % 3 == 0]}\n" for row in range(300))
    (tmp_path / "ids.csv").write_text("id,origin\n" + lines)
    from mispair.auditing.audit import Settings, audit_source
    from mispair.pairs.layouts.arrays import open_arrays

    source = open_arrays(tmp_path / "left.npy", tmp_path / "right.npy", tmp_path / "ids.csv")
    found = audit_source(source, Settings(by="origin"))
    assert [(part.value, part.pairs) for part in found.summary.parts] == [("a", 200), ("b", 100)]
    assert sum(part.flagged for part in found.summary.parts) == found.summary.flagged
    assert found.table["source"].to_pylist() == ["ab"[row % 3 == 0] for row in range(300)]
    assert "source" not in audit_source(source, Settings()).table.column_names
    assert "By origin" in render(make_page(found.reported))
    with refused(InvalidValueError, where="by", names="origin"):
        audit_source(source, Settings(by="where"))


# ---------------------------------------------------------------------- nothing matches


def test_two_sides_that_have_nothing_to_do_with_each_other() -> None:
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((600, 20)), rng.standard_normal((600, 24))
    found = mispair.audit(left.astype(np.float32), right.astype(np.float32)).summary
    assert found.nothing_in_common
    assert found.noise_rate > 0.85
    assert found.noise_rate_high == 1


def test_half_mismatched_is_not_nothing() -> None:
    made = made_pairs(600, 0.5)
    assert not mispair.audit(made.left, made.right).summary.nothing_in_common
