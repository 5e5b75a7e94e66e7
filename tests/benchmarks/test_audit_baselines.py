"""Baselines of `make bench-audit`, each against a plain loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from audit_baselines import Neighbourhood, baseline_scores, best, cca, nearest
from made_pairs import made_pairs, quality
from mispair.auditing.scoring.folds import fold_numbers
from mispair.functional.logistic import FloatArray

N, GROUPS = 24, np.arange(24) // 2


def unit(n: int, width: int, seed: int) -> FloatArray:
    found = np.random.default_rng(seed).standard_normal((n, width))
    return np.asarray(found / np.linalg.norm(found, axis=1, keepdims=True))


X, Y = unit(N, 5, 0), unit(N, 4, 1)
NULL = np.array([0, 1, 5]), np.array([4, 9, 20])
PAIRS = [*((i, i) for i in range(N)), *zip(*(rows.tolist() for rows in NULL), strict=True)]


def neighbours(items: FloatArray, row: int, count: int) -> list[int]:
    others = [other for other in range(N) if GROUPS[other] != GROUPS[row]]
    return sorted(others, key=lambda other: 1 - items[row] @ items[other])[:count]


def test_nearest_items_are_of_other_groups() -> None:
    rows, distances = nearest(torch.from_numpy(X), GROUPS)
    for row in range(N):
        expected = neighbours(X, row, rows.shape[1])
        assert rows[row].tolist() == expected
        assert distances[row] == pytest.approx([1 - X[row] @ X[other] for other in expected])


@pytest.mark.parametrize(("count", "weight", "trust"), [(3, 5.0, 2.0), (10, 1.0, 0.0)])
def test_lemon_and_neighbours(count: int, weight: float, trust: float) -> None:
    near = Neighbourhood.of(torch.from_numpy(X), torch.from_numpy(Y), GROUPS, NULL)
    distance = np.random.default_rng(2).random(N), np.random.default_rng(3).random(len(NULL[0]))
    lemon, agreement = (
        np.concatenate(both) for both in (near.lemon(distance, count, weight, trust), near.agreement(count))
    )
    for place, (i, j) in enumerate(PAIRS):
        s_n = s_m = close = 0.0
        for other in neighbours(X, i, count):
            far = 1 - Y[j] @ Y[other]
            s_n += far * math.exp(-0.1 * (1 - X[i] @ X[other])) * math.exp(-trust * distance[0][other]) / count
            close += Y[j] @ Y[other] / count
        for other in neighbours(Y, j, count):
            far = 1 - X[i] @ X[other]
            s_m += far * math.exp(-0.1 * (1 - Y[j] @ Y[other])) * math.exp(-trust * distance[0][other]) / count
            close += X[i] @ X[other] / count
        own = distance[0][i] if place < N else distance[1][place - N]
        assert lemon[place] == pytest.approx(-(own + weight * s_n + weight * s_m))
        assert agreement[place] == pytest.approx(close)


def test_canonical_directions_of_the_other_folds() -> None:
    """By the generalised eigenvalue problem: no whitening."""
    import scipy.linalg

    rng = np.random.default_rng(0)
    z = rng.standard_normal((300, 3))
    x, y = z @ rng.standard_normal((3, 5)) + 0.3 * rng.standard_normal((300, 5)), z @ rng.standard_normal((3, 4))
    y += 0.3 * rng.standard_normal(y.shape)
    fold = fold_numbers(np.arange(300))
    left, right = cca(torch.from_numpy(x).float(), torch.from_numpy(y).float(), fold, 0.5)
    rest, here = fold != 2, fold == 2
    xx, yy, xy = x[rest].T @ x[rest], y[rest].T @ y[rest], x[rest].T @ y[rest]
    xx, yy = xx + 0.5 * np.trace(xx) / 5 * np.eye(5), yy + 0.5 * np.trace(yy) / 4 * np.eye(4)
    values, directions = scipy.linalg.eigh(xy @ np.linalg.solve(yy, xy.T), xx)
    a = directions[:, ::-1][:, :4]
    strength = np.sqrt(np.maximum(values[::-1][:4], 0))
    b = np.linalg.solve(yy, xy.T @ a) / strength
    found, expected = (
        u / np.linalg.norm(u, axis=1, keepdims=True)
        for u in (x[here] @ (a * np.sqrt(strength)), y[here] @ (b * np.sqrt(strength)))
    )
    cosines = (left[here] * right[here]).sum(1).numpy()
    assert cosines == pytest.approx((found * expected).sum(1), abs=1e-4)


def test_settings_are_chosen_without_the_truth() -> None:
    rng = np.random.default_rng(0)
    null = rng.standard_normal(50)
    weak, strong = (null + 0.2, null), (null + 2, null)
    assert best([weak, strong, weak]) is strong


def test_baselines_find_mismatched_pairs() -> None:
    pairs = made_pairs(300, 0.3)
    found = baseline_scores(pairs.left, pairs.right, pairs.groups)
    assert list(found) == ["cca cosine", "neighbours", "lemon"]
    assert min(quality(scores, pairs.mismatched) for scores in found.values()) > 0.9
    shared = baseline_scores(pairs.left, pairs.left + 0.1, pairs.groups)
    assert list(shared) == ["cosine", "cca cosine", "neighbours", "lemon"]
    plain = (pairs.left * (pairs.left + 0.1)).sum(1)
    plain /= np.linalg.norm(pairs.left, axis=1) * np.linalg.norm(pairs.left + 0.1, axis=1)
    assert shared["cosine"] == pytest.approx(plain, abs=1e-5)
