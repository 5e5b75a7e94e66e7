"""Exchanges among similar pairs, against a loop and on pairs that are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import normalize

import mispair
from made_pairs import MadePairs, made_pairs, quality
from mispair.auditing.findings import EXCHANGED
from mispair.auditing.scoring import exchanges
from mispair.auditing.scoring.exchanges import Exchanges, exchange_probability, losses, nearest
from mispair.functional.logistic import probability


def unit(rows: int, width: int, seed: int) -> torch.Tensor:
    return normalize(torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, width)).astype("f4")), dim=1)


def swapped(pairs: MadePairs, share: float) -> MadePairs:
    """Pairs that exchange right items with one of the ten most similar left items."""
    rng = np.random.default_rng(0)
    x = normalize(torch.from_numpy(pairs.left), dim=1)
    near = (x @ x.T).fill_diagonal_(-2).topk(10, dim=1).indices.numpy()
    right, moved = pairs.right.copy(), np.zeros(len(pairs), dtype=bool)
    for row in rng.permutation(len(pairs)).tolist():
        free = [other for other in near[row].tolist() if not moved[other]]
        if not moved[row] and free and moved.mean() < share:
            both = [row, int(rng.choice(free))]
            moved[both] = True
            right[both] = right[both[::-1]]
    return MadePairs(pairs.left, right, moved, pairs.groups)


@given(st.integers(0, 10_000), st.integers(1, 4))
def test_losses_are_those_of_a_loop(seed: int, count: int) -> None:
    a, b = unit(8, 5, seed), unit(8, 5, seed + 1)
    s = (a @ b.T).double().numpy()
    rng = np.random.default_rng(seed)
    own = rng.permutation(8)[:3]
    near = np.stack([rng.permutation([j for j in range(8) if j != i])[:count] for i in own])
    picks = rng.integers(count, size=3)
    found = losses(a, b, own, near, picks)
    for place, i in enumerate(own):
        expected = min(s[i, i] + s[j, j] - s[i, j] - s[j, i] for j in near[place])
        assert found[0, place] == pytest.approx(expected, abs=1e-5)
        link = np.arange(8)
        other = near[place, picks[place]]
        link[[i, other]] = other, i  # the right item of each pair after the exchange
        after = min(s[i, link[i]] + s[j, link[j]] - s[i, link[j]] - s[j, link[i]] for j in near[place])
        assert found[1, place] == pytest.approx(after, abs=1e-5)


def test_the_nearest_are_of_other_groups_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "CLOSE_BY", 3)
    monkeypatch.setattr(exchanges, "AT_ONCE", 7)
    x, groups = unit(30, 6, 0), np.arange(30) // 2
    found, alike = nearest(x, groups), (x @ x.T).numpy()
    assert found is not None
    for row in range(30):
        others = [j for j in range(30) if groups[j] != groups[row]]
        assert found[row].tolist() == sorted(others, key=lambda j: -alike[row, j])[:3]
    assert nearest(x, np.zeros(30, dtype=np.int64)) is None


def test_the_probability_is_that_of_the_mixture() -> None:
    rng = np.random.default_rng(0)
    moved = np.arange(8000) < 2000
    observed, exchanged = rng.standard_normal(8000) + 2 - 4 * moved, rng.standard_normal(8000) - 2
    found = exchange_probability(observed, exchanged, 0.25)
    assert found == pytest.approx(probability(-4 * observed + np.log(1 / 3)), abs=0.05)


@given(st.floats(-20, 20), st.floats(0, 1))
def test_the_score_is_that_of_the_product(score: float, chance: float) -> None:
    found = probability(Exchanges(np.array([chance], dtype="f4")).lowered(np.array([score])))
    assert found == pytest.approx(probability(np.array([score])) * (1 - np.float32(chance)), abs=1e-6)


def test_exchanged_pairs_are_found_that_look_right_alone() -> None:
    pairs = swapped(made_pairs(1200, 0.0, noise=0.7, hidden=24, widths=(48, 40)), 0.3)
    found = mispair.audit(pairs.left, pairs.right)
    alone = found.judge.combination.score(found.scan.measures)
    assert found.similar.exchanges is not None
    assert quality(found.score, pairs.mismatched) > quality(alone, pairs.mismatched) + 0.02
    assert "exchanged" in found.table.column_names
    assert EXCHANGED in found.table.column("reason").to_pylist()
    assert pairs.mismatched[found.is_mismatch].mean() > 0.9
    assert found.summary.close_rate is not None
    assert 0.2 < found.summary.close_rate < 0.4


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_pairs_without_exchanges_are_left_alone(share: float) -> None:
    pairs = made_pairs(1200, share, seed=1)
    found = mispair.audit(pairs.left, pairs.right)
    assert found.similar.exchanges is None
    assert found.summary.close_rate is None
    assert "exchanged" not in found.table.column_names
