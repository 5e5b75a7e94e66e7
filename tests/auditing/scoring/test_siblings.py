"""Agreement of the right items of one left item, against a loop and on pairs that are known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mispair
from made_pairs import made_pairs, quality
from mispair.auditing.scoring.siblings import LEAST_TRUST, Siblings, compared


@given(st.integers(0, 10_000), st.integers(1, 6))
def test_agreement_is_that_of_a_loop(seed: int, groups: int) -> None:
    rng = np.random.default_rng(seed)
    number = np.sort(np.concatenate([np.arange(groups), rng.integers(groups, size=8)]))
    y = rng.standard_normal((len(number), 4))
    y /= np.linalg.norm(y, axis=1, keepdims=True)
    weight = rng.random(len(number)) * (rng.random(len(number)) < 0.8)
    found, others = compared(y, number, weight, weight)
    for row in range(len(number)):
        siblings = [k for k in range(len(number)) if number[k] == number[row] and k != row]
        mean = sum((weight[k] * y[k] for k in siblings), np.zeros(4))
        assert others[row] == pytest.approx(mean, abs=1e-9)
        trust = sum(weight[k] for k in siblings)
        if trust < LEAST_TRUST - 1e-9:
            assert np.isnan(found[row])
        elif trust > LEAST_TRUST + 1e-9:
            assert found[row] == pytest.approx(mean @ y[row] / np.linalg.norm(mean), abs=1e-5)


def test_copies_do_not_vouch_for_each_other() -> None:
    """A copy has no weight and is compared with the siblings of its first row."""
    y = np.eye(3)[[0, 0, 1]]
    found, _ = compared(y, np.zeros(3, dtype=np.int64), np.array([1.0, 0.0, 1.0]), np.array([1.0, 1.0, 1.0]))
    assert found == pytest.approx([0, 0, 0], abs=1e-7)


def test_agreement_never_raises_a_score() -> None:
    penalty = Siblings(np.array([0.9, 0.5, 0.1, np.nan], dtype=np.float32), 0.5, 2.0).penalty
    assert penalty == pytest.approx([0, 0, -0.8, 0], abs=1e-6)


def test_siblings_find_mismatched_pairs_that_look_right_alone() -> None:
    made = made_pairs(900, 0.2, per_left=5, noise=1.0)
    found = mispair.audit(made.left, made.right, groups=made.groups)
    assert found.scores.siblings is not None
    alone = found.judge.combination.score(found.scan.measures)
    assert quality(found.score, made.mismatched) > quality(alone, made.mismatched) + 0.005
    assert "siblings" in found.table.column_names
    summary = found.summary
    assert summary.close_rate is not None
    assert summary.close_rate_low is not None
    assert summary.close_rate_high is not None
    assert 0 <= summary.close_rate_low <= summary.close_rate <= summary.close_rate_high <= 1


def test_left_items_with_all_partners_of_another_one_are_still_found() -> None:
    """Their siblings agree: that must not excuse them."""
    made = made_pairs(900, 0.0, per_left=5, noise=0.5)
    right, moved = made.right.reshape(180, 5, -1).copy(), np.arange(0, 60)
    right[moved] = right[np.roll(moved, 1)]
    found = mispair.audit(made.left, right.reshape(900, -1), groups=made.groups)
    mismatched = np.repeat(np.isin(np.arange(180), moved), 5)
    alone = found.judge.combination.score(found.scan.measures)
    assert quality(found.score, mismatched) > quality(alone, mismatched) - 0.005
    assert found.summary.noise_rate == pytest.approx(1 / 3, abs=0.08)


def test_without_siblings_nothing_changes() -> None:
    made = made_pairs(300, 0.3)
    found = mispair.audit(made.left, made.right)
    assert found.scores.siblings is None
    assert found.summary.close_rate is None
    assert "siblings" not in found.table.column_names
