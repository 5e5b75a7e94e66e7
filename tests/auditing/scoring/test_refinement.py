"""Refined spaces: the loss against a loop, and what they are good for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from made_pairs import fitted_spaces
from mispair.auditing.scoring import refinement
from mispair.auditing.scoring.common_space import CommonSpace
from mispair.auditing.scoring.folds import FOLDS
from mispair.auditing.scoring.refinement import (
    TEMPERATURE,
    adam_step,
    contrastive_loss,
    refined,
)
from mispair.functional.metrics import auroc


def loss_by_a_loop(x: Tensor, y: Tensor, left: Tensor, right: Tensor, weight: Tensor) -> float:
    a, b = x @ left, y @ right
    total, count = 0.0, len(x)
    cosine = [[float(a[p] @ b[q] / a[p].norm() / b[q].norm()) for q in range(count)] for p in range(count)]
    for i in range(count):
        rights = [math.exp(cosine[i][j] / TEMPERATURE) for j in range(count)]
        lefts = [math.exp(cosine[j][i] / TEMPERATURE) for j in range(count)]
        total -= float(weight[i]) * math.log(rights[i] / sum(rights) * lefts[i] / sum(lefts)) / count
    return total


def test_the_loss_is_that_of_a_loop() -> None:
    made = torch.Generator().manual_seed(0)
    x, y = (normalize(torch.randn(5, 4, generator=made, dtype=torch.float64), dim=1) for _ in range(2))
    left, right = (torch.randn(2, 4, 3, generator=made, dtype=torch.float64) for _ in range(2))
    weight = torch.rand(2, 5, generator=made, dtype=torch.float64)
    weight[1, 2] = 0
    there = [0, 1, 3, 4]
    total = loss_by_a_loop(x, y, left[0], right[0], weight[0])
    total += loss_by_a_loop(x[there], y[there], left[1], right[1], weight[1, there]) * 4 / 5
    assert float(contrastive_loss(x, y, left, right, weight)) == pytest.approx(total)


def test_a_step_is_that_of_torch() -> None:
    made = torch.Generator().manual_seed(0)
    ours = torch.randn(4, 3, generator=made)
    theirs = ours.clone().requires_grad_()
    optimizer = torch.optim.Adam([theirs], lr=0.01)
    moments = torch.zeros(4, 3), torch.zeros(4, 3)
    for step in range(1, 5):
        theirs.grad = torch.randn(4, 3, generator=made)
        optimizer.step()
        adam_step(ours, theirs.grad, moments, torch.tensor(0.01), step)
    torch.testing.assert_close(ours, theirs.detach())


def made(n: int = 1200, dimensions: int = 24) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Pairs whose items come in clusters, so that what tells partners apart is not what varies most."""
    rng = np.random.default_rng(1)
    cluster = 2 * rng.standard_normal((8, dimensions))[rng.integers(8, size=n)]
    detail = rng.standard_normal((n, dimensions))
    sides = [
        (cluster + 0.6 * detail + 0.5 * rng.standard_normal((n, dimensions))) @ rng.standard_normal((dimensions,) * 2)
        for _ in range(2)
    ]
    x, y = (torch.from_numpy(side - side.mean(0)).float() for side in sides)
    return normalize(x, dim=1), normalize(y, dim=1), (np.arange(n) % FOLDS).astype(np.uint8)


def separation(spaces: list[CommonSpace], x: torch.Tensor, y: torch.Tensor, fold: np.ndarray) -> float:
    """AUROC of partners against the partners of the next pair of their fold, in the space made without it."""
    right, wrong = [], []
    for number, space in enumerate(spaces):
        rows = np.flatnonzero(fold == number)
        a, b = space.compared_left(x[rows]), space.compared_right(y[rows])
        right += (a * b).sum(1).tolist()
        wrong += (a * b.roll(1, 0)).sum(1).tolist()
    found = auroc(np.array(right + wrong), np.arange(2 * len(right)) < len(right))
    assert found is not None
    return found


def test_refined_spaces_tell_partners_better(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refinement, "ENOUGH", 500)
    monkeypatch.setattr(refinement, "BATCH", 64)
    x, y, fold = made()
    plain = fitted_spaces(x, y, fold, torch.ones(len(x)), 1.0)
    better = refined(plain, x, y, fold, np.ones(len(x)), np.arange(len(x)))
    assert separation(better, x, y, fold) > separation(plain, x, y, fold) + 0.002
    for before, after in zip(plain, better, strict=True):
        assert torch.equal(before.left, after.left)  # evidence stays what it was
        assert after.refined_left is not None
        assert after.refined_left.shape == before.left.shape


def test_a_fold_does_not_refine_its_own_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refinement, "ENOUGH", 100)
    monkeypatch.setattr(refinement, "BATCH", 32)
    x, y, fold = made(400)
    plain = fitted_spaces(x, y, fold, torch.ones(len(x)), 1.0)
    changed = y.clone()
    changed[fold == 3] = y[fold == 3].roll(1, 0)
    first, second = (refined(plain, x, side, fold, np.ones(len(x)), np.arange(len(x)))[3] for side in (y, changed))
    assert first.refined_right is not None
    assert second.refined_right is not None
    assert torch.equal(first.refined_right, second.refined_right)


def test_few_trusted_pairs_leave_the_spaces_as_they_are() -> None:
    x, y, fold = made(300)
    plain = fitted_spaces(x, y, fold, torch.ones(len(x)), 1.0)
    assert refined(plain, x, y, fold, np.ones(len(x)), np.arange(len(x))) is plain
