"""Exchanges among similar pairs, against a loop and on pairs that are known."""

from __future__ import annotations

from copy import copy
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from torch.nn.functional import normalize

import mispair
from made_pairs import MadePairs, made_pairs, quality
from mispair.auditing.findings import EXCHANGED
from mispair.auditing.scoring import exchanges
from mispair.auditing.scoring.common_space import CommonSpace
from mispair.auditing.scoring.exchanges import (
    Couples,
    along_main_directions,
    cells,
    learn_exchanges,
    lost_by_exchange,
    lowered,
    nearest,
    nearest_are_lowest,
    similar_pairs,
    symmetric_slopes,
)
from mispair.auditing.scoring.folds import FOLDS
from mispair.functional.logistic import probability


def unit(rows: int, width: int, seed: int) -> torch.Tensor:
    return normalize(torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, width)).astype("f4")), dim=1)


def swapped(pairs: MadePairs, share: float, side: str = "left") -> MadePairs:
    """Pairs that exchange right items with one of the ten most similar ones by their left, or by their right items."""
    rng = np.random.default_rng(0)
    x = normalize(torch.from_numpy(getattr(pairs, side)), dim=1)
    near = (x @ x.T).fill_diagonal_(-2).topk(10, dim=1).indices.numpy()
    right, moved = pairs.right.copy(), np.zeros(len(pairs), dtype=bool)
    for row in rng.permutation(len(pairs)).tolist():
        free = [other for other in near[row].tolist() if not moved[other]]
        if not moved[row] and free and moved.mean() < share:
            both = [row, int(rng.choice(free))]
            moved[both] = True
            right[both] = right[both[::-1]]
    return MadePairs(pairs.left, right, moved, pairs.groups)


@pytest.mark.parametrize("decay", [1.0, 0.98])
def test_the_main_directions_hold_most_of_the_variance(decay: float) -> None:
    rows = np.random.default_rng(0).standard_normal((900, 500)) * decay ** np.arange(500)
    variance = np.linalg.svd(rows, compute_uv=False) ** 2
    needed = int(np.searchsorted(np.cumsum(variance), 0.95 * variance.sum())) + 1
    found = along_main_directions(torch.from_numpy(rows.astype("f4")))
    assert (needed > 256) == (decay == 1)
    assert found.shape == (900, max(256, needed))
    assert torch.allclose(found.norm(dim=1), torch.ones(900))


def space(seed: int) -> CommonSpace:
    rng = np.random.default_rng(seed)
    left, right = (torch.from_numpy(rng.standard_normal((6, 4)).astype("f4")) for _ in range(2))
    return CommonSpace(left, right, torch.ones(4))


def test_what_couples_lose_is_that_of_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "COUPLES", 3)
    x, y, spaces = unit(30, 6, 0), unit(30, 6, 1), [space(seed) for seed in range(FOLDS)]
    rng = np.random.default_rng(2)
    first, second, fold = rng.integers(0, 15, 40), rng.integers(15, 30, 40), rng.integers(0, FOLDS, 30)
    couples = np.stack([first, second])
    found = lost_by_exchange(spaces, x, y, couples, fold[couples])
    for place, (i, j) in enumerate(zip(first, second, strict=True)):
        expected = []
        for own in (spaces[fold[i]], spaces[fold[j]]):
            s = (own.compared_left(x) @ own.compared_right(y).T).double().numpy()
            expected.append(s[i, i] + s[j, j] - s[i, j] - s[j, i])
        assert found[place] == pytest.approx(np.mean(expected), abs=1e-5)


def test_many_items_are_compared_with_those_of_near_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    centres = unit(20, 32, 0)
    x = normalize(centres[np.arange(2000) % 20] + unit(2000, 32, 1), dim=1)
    groups = np.arange(2000) // 2
    every = nearest(x, groups)
    monkeypatch.setattr(exchanges, "PER_CELL", 50)
    monkeypatch.setattr(exchanges, "CELLS_SEARCHED", 12)
    parts = [own for own, _ in cells(x)]
    assert sorted(torch.cat(parts).tolist()) == list(range(2000))
    assert all(set(own.tolist()) <= set(among.tolist()) for own, among in cells(x))
    found = nearest(x, groups)
    assert every is not None
    assert found is not None
    assert not (groups[found] == groups[:, None]).any()
    shared = [len(set(a) & set(b)) for a, b in zip(every.tolist(), found.tolist(), strict=True)]
    assert 0.9 < np.mean(shared) / every.shape[1] < 1


@given(st.integers(0, 10_000))
def test_similar_pairs_are_those_of_a_loop(seed: int) -> None:
    rng = np.random.default_rng(seed)
    owners = rng.integers(0, 25, 60)
    owners[:25] = np.arange(25)
    vectors, groups = unit(25, 8, seed)[owners], owners // 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchanges, "CLOSE_BY", 4)
        patch.setattr(exchanges, "CLASSES", (1, 3))
        patch.setattr(exchanges, "MOST_ROWS", 4)
        found = similar_pairs(vectors, owners, groups)
    assert found is not None
    alike = (vectors @ vectors.T).double().numpy()
    places = [int(np.flatnonzero(owners == item)[0]) for item in range(25)]
    near = [
        sorted((b for b in range(25) if b // 2 != a // 2), key=lambda b: -alike[places[a], places[b]])[:4]
        for a in range(25)
    ]
    expected = set()
    for i in range(60):
        for j in range(60):
            a, b = int(owners[i]), int(owners[j])
            if a < b and b in near[a] and a in near[b] and max((owners == a).sum(), (owners == b).sum()) <= 4:
                rank = max(near[a].index(b), near[b].index(a))
                expected.add((i, j, 0 if rank < 1 else 1 if rank < 3 else 2))
    assert set(zip(*found.ends.tolist(), found.nearness.tolist(), strict=True)) == expected


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


@pytest.mark.parametrize("share", [0.0, 0.05, 0.2])
def test_about_as_many_exchanges_are_believed_as_were_made(share: float) -> None:
    rng, n = np.random.default_rng(0), 6000
    order = rng.permutation(n)
    first, second = np.tile(order, 3), np.concatenate([np.roll(order, k) for k in (1, 2, 3)])
    couples = Couples(np.stack([first, second]), np.repeat([0, 0, 1], n))
    made, free = np.zeros(3 * n, dtype=bool), np.ones(n, dtype=bool)
    for edge in rng.permutation(n):  # of the nearest class
        both = couples.ends[:, edge]
        if free[both].all() and 1 - free.mean() < share:
            made[edge], free[both] = True, False
    t = 0.25 + 0.13 * rng.standard_normal(3 * n)
    kept = free[couples.ends].all(axis=0)
    t = np.where(made, -t, np.where(kept, t, 0.13 * rng.standard_normal(3 * n)))
    evidence, matchings, gain = learn_exchanges(t, couples, n)
    chance = 1 - matchings.single
    assert 0.65 * share <= chance.mean() <= share + 0.02
    assert (gain > exchanges.CHANCE + exchanges.LEAST_GAIN * n) == (share > 0)
    # The same messages with the same weights stay as they are.
    again = copy(matchings).update(evidence.weights(t, couples.nearness), 1)
    assert again.single == pytest.approx(matchings.single, abs=0.02)
    if share:
        assert chance[~free].mean() > chance[free].mean() + 0.3


@pytest.mark.parametrize(("exchanged", "stand_out"), [(0.0, False), (0.01, True), (0.1, True)])
def test_exchanges_are_told_from_look_alikes_that_encoders_confuse(exchanged: float, stand_out: bool) -> None:
    rng, n, last = np.random.default_rng(0), 40_000, len(exchanges.CLASSES)
    nearness = np.repeat([0, last], n)
    t = np.where(nearness == 0, 0.6, 1.0) * (0.2 + 0.1 * rng.standard_normal(2 * n))
    made = np.flatnonzero((nearness == 0) & (rng.random(2 * n) < exchanged))
    t[made] *= -1
    assert nearest_are_lowest(t, nearness) == stand_out
    assert not nearest_are_lowest(t[:n], nearness[:n])  # there are no far ones


@given(st.integers(0, 10_000))
def test_the_slope_is_that_of_a_regression_on_both_signs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    t, kept, exchanged = rng.standard_normal(50) + 0.5, rng.random(50), 0.3 * rng.random(50)
    model = LogisticRegression(C=1 / exchanges.RIDGE, fit_intercept=False, tol=1e-10)
    model.fit(np.concatenate([t, t])[:, None], np.repeat([1, 0], 50), np.concatenate([kept, exchanged]))
    found = symmetric_slopes(t[None], kept[None], exchanged[None])
    assert float(found[0]) == pytest.approx(max(float(model.coef_[0, 0]), 0), abs=1e-3)


@given(st.floats(-20, 20), st.floats(0, 1))
def test_the_score_is_that_of_the_product(score: float, chance: float) -> None:
    found = probability(lowered(np.array([score]), np.array([chance], dtype="f4")))
    assert found == pytest.approx(probability(np.array([score])) * (1 - np.float32(chance)), abs=1e-6)


@cache
def with_exchanges(side: str) -> tuple[MadePairs, mispair.Audit]:
    pairs = swapped(made_pairs(1200, 0.0, noise=0.7, hidden=24, widths=(48, 40)), 0.3, side)
    return pairs, mispair.audit(pairs.left, pairs.right)


@pytest.mark.parametrize("side", ["left", "right"])
def test_exchanged_pairs_are_found_that_look_right_alone(side: str) -> None:
    pairs, found = with_exchanges(side)
    alone = found.judge.combination.score(found.scan.measures)
    assert found.scores.proved is not None
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
    assert found.scores.proved is None
    assert found.summary.close_rate is None
    assert "exchanged" not in found.table.column_names
    assert found.match_score == pytest.approx(found.scores.alone(), abs=exchanges.UNPROVED)
    if share:
        assert quality(found.score, pairs.mismatched) > quality(found.scores.alone(), pairs.mismatched) - 0.002


def test_a_few_exchanges_prove_nothing_but_come_last() -> None:
    pairs = swapped(made_pairs(1200, 0.0, noise=1.0, hidden=24, widths=(48, 40)), 0.03, "left")
    found = mispair.audit(pairs.left, pairs.right)
    assert found.scores.proved is None
    assert found.summary.close_rate is None
    assert quality(found.score, pairs.mismatched) > quality(found.scores.alone(), pairs.mismatched) + 0.02


def test_about_as_many_trials_are_found_as_exchanges_that_were_made() -> None:
    claimed, true = [], []
    for side in ("left", "right"):
        pairs, found = with_exchanges(side)
        tried = {(trial.kind, trial.by): trial for trial in found.scores.trials}
        assert set(tried) == {(kind, by) for kind in exchanges.ALIKE for by in exchanges.BY}
        for trial in tried.values():
            assert (trial.couples[:, 0] != trial.couples[:, 1]).all()
            assert trial.sums.shape == trial.chance.shape == trial.couples.shape
        detections = {(one.kind, one.by): one for one in found.summary.detections}
        claimed.append(detections["similar", side].found)
        true.append(found.is_mismatch[pairs.mismatched].mean())
        assert found.summary.at_most > pairs.mismatched.mean()
    assert np.mean(claimed) == pytest.approx(np.mean(true), abs=0.1)
