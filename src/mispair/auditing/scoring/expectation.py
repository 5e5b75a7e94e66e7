"""Compare items with the partners that are expected for them, in the space that their encoders share.

Contrast and evidence ask whether an item is closer to its partner than to others. That is what tells matched pairs from
shuffled ones, but it ignores what both have in common with all pairs of the data: code that looks like no answer at all
fits no question, and shuffling does not show that. So two measures keep the mean of each side, which all others take
out: the plain cosine, and the cosine of an item with the partner that a regression on the other folds expects.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from mispair.auditing.scoring.common_space import moments, product
from mispair.auditing.scoring.folds import FOLDS
from mispair.compute.threads import parallel_map
from mispair.functional.eigenvectors import eigh
from mispair.functional.logistic import FloatArray

DIRECTIONS = 256  # main directions of both sides in which partners are expected
REGULARISATION = 3.0  # times the mean spread along them


@dataclass(frozen=True)
class Expectation:
    """Expected partners, for each fold by the pairs of the others."""

    directions: Tensor  # (D, k) of both sides
    to_right: Tensor  # (FOLDS, k, k)
    to_left: Tensor  # (FOLDS, k, k)

    @classmethod
    def of(cls, left: Tensor, right: Tensor, fold: npt.NDArray[np.uint8], trust: FloatArray) -> Expectation:
        """Learn from n pairs of raw vectors (n, D), each with a fold and the probability that it matches."""
        x, y = normalize(left, dim=1), normalize(right, dim=1)
        directions = eigh(moments(x) + moments(y))[1][:, -DIRECTIONS:].to(x).contiguous()
        x, y = x @ directions, y @ directions
        weight = torch.from_numpy(trust).to(x)[:, None]

        def sums(number: int) -> Tensor:
            """(3, k, k) second moments of left and of right items, and their products."""
            here = torch.from_numpy(np.flatnonzero(fold == number)).to(x.device)
            a, b, w = x[here], y[here], weight[here]
            return torch.stack([product(w * a, a), product(w * b, b), product(w * a, b)])

        each = torch.stack(list(parallel_map(sums, range(FOLDS))))
        lefts, rights, ties = (each.sum(0) - each).unbind(1)
        return cls(directions, _solved(lefts, ties).to(x), _solved(rights, ties.mT).to(x))

    def measure(
        self, left: Tensor, right: Tensor, lefts: Tensor, rights: Tensor, fold: npt.NDArray[np.uint8]
    ) -> npt.NDArray[np.float32]:
        """(n, 2) cosines of pairs, and of their items with the expected ones, both ways added.

        Pair i has the left item `lefts[i]` of (u, D) and the right item `rights[i]` of (v, D), both raw vectors.
        """
        x, y = normalize(left, dim=1), normalize(right, dim=1)
        found = np.empty((len(fold), 2), dtype=np.float32)
        a, b = x @ self.directions, y @ self.directions
        for number in np.unique(fold):
            here = np.flatnonzero(fold == number)
            places = torch.from_numpy(here).to(x.device)
            i, j = lefts[places], rights[places]
            expected = cosine_similarity(a[i] @ self.to_right[number], b[j])
            expected += cosine_similarity(b[j] @ self.to_left[number], a[i])
            found[here] = torch.column_stack([(x[i] * y[j]).sum(1), expected]).cpu().numpy()
        return found


def _solved(spread: Tensor, ties: Tensor) -> Tensor:
    """(FOLDS, k, k) regressions from second moments (FOLDS, k, k) and products with the other side."""
    floor = REGULARISATION * torch.diagonal(spread, dim1=1, dim2=2).mean(1).clamp(min=1e-12)
    ridge = floor[:, None, None] * torch.eye(spread.shape[-1], dtype=spread.dtype)
    # One at a time: LU of a batch fails in MKL with several threads.
    return torch.stack([torch.linalg.solve(a, b) for a, b in zip(spread + ridge, ties, strict=True)])
