"""Expected partners, against regressions by scikit-learn's conventions and plain cosines."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mispair.auditing.scoring import joint
from mispair.auditing.scoring.folds import FOLDS
from mispair.auditing.scoring.joint import Expectation


def sides(rows: int = 200, width: int = 12) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    left = rng.standard_normal((rows, width)) + 1
    right = left @ rng.standard_normal((width, width)) / 3 + rng.standard_normal((rows, width))
    return left, right, (np.arange(rows) % FOLDS).astype(np.uint8), rng.random(rows)


def unit(x: np.ndarray) -> np.ndarray:
    return np.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True))


def test_measures_are_those_of_a_regression_on_the_other_folds() -> None:
    left, right, fold, trust = sides()
    tensors = torch.from_numpy(left).float(), torch.from_numpy(right).float()
    rows = torch.arange(len(left))
    found = Expectation.of(*tensors, fold, trust).measure(*tensors, rows, rows, fold)
    x, y = unit(left), unit(right)
    for row in (0, 7, 131):
        others, expected = fold != fold[row], 0.0
        for a, b in ((x, y), (y, x)):
            spread = (trust[others, None] * a[others]).T @ a[others]
            floor = joint.REGULARISATION * np.trace(spread) / len(spread)
            maps = np.linalg.solve(
                spread + floor * np.eye(len(spread)), (trust[others, None] * a[others]).T @ b[others]
            )
            expected += unit(a[row] @ maps) @ b[row]
        assert found[row] == pytest.approx([x[row] @ y[row], expected], abs=1e-4)


def test_a_pair_does_not_depend_on_what_stands_beside_it() -> None:
    left, right, fold, trust = sides()
    tensors = torch.from_numpy(left).float(), torch.from_numpy(right).float()
    learned = Expectation.of(*tensors, fold, trust)
    lefts, rights = torch.tensor([3, 5, 3]), torch.tensor([9, 5, 3])
    several = learned.measure(*tensors, lefts, rights, fold[[3, 5, 3]])
    alone = learned.measure(tensors[0][3:4], tensors[1][9:10], torch.tensor([0]), torch.tensor([0]), fold[[3]])
    assert several[0] == pytest.approx(alone[0], abs=1e-6)


def test_its_own_fold_teaches_a_pair_nothing() -> None:
    left, right, fold, trust = sides()
    changed = right.copy()
    changed[fold == 4] = np.random.default_rng(1).standard_normal(changed[fold == 4].shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint, "DIRECTIONS", left.shape[1])
        learned = [
            Expectation.of(torch.from_numpy(left).float(), torch.from_numpy(side).float(), fold, trust)
            for side in (right, changed)
        ]
    # In the basis of the items themselves, as the main directions see both sides of all pairs.
    first, second = (one.directions @ one.to_right[4] @ one.directions.T for one in learned)
    assert first.numpy() == pytest.approx(second.numpy(), abs=1e-4)
