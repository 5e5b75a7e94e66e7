"""Pairs with structure for the tests of the audit: one hidden vector a pair, seen through two random linear maps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from mispair.auditing.scoring.common_space import CommonSpace, CommonSpaceFitter
from mispair.auditing.scoring.folds import fold_numbers
from mispair.auditing.scoring.judge import Judge, learn
from mispair.functional.logistic import FloatArray
from mispair.functional.metrics import auroc
from mispair.support.arrays import IntArray


def fitted_spaces(
    left: torch.Tensor, right: torch.Tensor, fold: IntArray, trust: torch.Tensor, regularisation: float
) -> list[CommonSpace]:
    """A space for each fold, in the coordinates of the vectors."""
    fitter = CommonSpaceFitter(left, right, fold)
    return [fitter.turned_back(space) for space in fitter.fit_several(trust, [regularisation])[0]]


@dataclass(frozen=True)
class MadePairs:
    """Pairs of which it is known which are wrong."""

    left: npt.NDArray[np.float32]  # (n, D)
    right: npt.NDArray[np.float32]  # (n, E)
    mismatched: npt.NDArray[np.bool_]  # (n,)
    groups: IntArray  # (n,)

    def __len__(self) -> int:
        return len(self.left)

    @property
    def fold(self) -> npt.NDArray[np.uint8]:
        return fold_numbers(self.groups)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(self.left), torch.from_numpy(self.right)

    def take(self, rows: IntArray, *, grouped: bool) -> MadePairs:
        """These rows, some perhaps several times: copies of a row are of its group, or each is its own."""
        groups = self.groups[rows] if grouped else np.arange(len(rows))
        return MadePairs(self.left[rows], self.right[rows], self.mismatched[rows], groups)

    def scaled(self, left: float, right: float) -> MadePairs:
        return replace(self, left=self.left * np.float32(left), right=self.right * np.float32(right))

    def with_constant_columns(self, value: float = 3.0) -> MadePairs:
        """One more column on the left and two more on the right, which say nothing."""
        sides = ((self.left, 1), (self.right, 2))
        left, right = (np.insert(side, [0] * count, np.float32(value), axis=1) for side, count in sides)
        return replace(self, left=left, right=right)


def made_pairs(
    n: int = 400,
    share: float = 0.3,
    *,
    widths: tuple[int, int] = (24, 16),
    hidden: int = 12,
    noise: float = 0.3,
    per_left: int = 1,
    seed: int = 0,
) -> MadePairs:
    """Pairs of which this share is wrong.

    Args:
        n: Number of pairs.
        share: Of the pairs that get another one's right item.
        widths: Of the left and the right vectors.
        hidden: Width of what both sides see.
        noise: Standard deviation of what only one side sees; what both see has 1.
        per_left: Pairs that share a left item, and are one group.
        seed: Of everything.
    """
    rng = np.random.default_rng(seed)
    items = -(-n // per_left)
    z = rng.standard_normal((items, hidden)) * np.linspace(1.5, 0.5, hidden)
    maps = [rng.standard_normal((hidden, width)) / np.sqrt(hidden) for width in widths]
    groups = np.repeat(np.arange(items), per_left)[:n]
    left = (z @ maps[0] + noise * rng.standard_normal((items, widths[0])))[groups]
    right = z[groups] @ maps[1] + noise * rng.standard_normal((n, widths[1]))
    wrong = np.zeros(n, dtype=bool)
    moved = rng.permutation(n)[: round(share * n)]
    right[moved] = right[np.roll(moved, 1)]
    wrong[moved] = groups[moved] != groups[np.roll(moved, 1)]  # a few go back to their own group by chance
    return MadePairs(left.astype(np.float32), right.astype(np.float32), wrong, groups)


def learned(pairs: MadePairs, *, joint: bool = False, checked: FloatArray | None = None) -> Judge:
    return learn(*pairs.tensors, pairs.fold, pairs.groups, joint=joint, checked=checked)


def scores(judge: Judge, pairs: MadePairs) -> FloatArray:
    return judge.combination.score(judge.measure(*pairs.tensors, pairs.fold))


def quality(score: npt.NDArray[np.floating], wrong: npt.NDArray[np.bool_]) -> float:
    """AUROC of right against wrong pairs."""
    found = auroc(score, ~wrong)
    assert found is not None
    return found
