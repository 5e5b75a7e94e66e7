"""Retrieval metrics: grouped R@K and rSum. Ties and NaN count against the model, so a collapsed model scores 0.

Everything runs where the similarity matrix is, in chunks of rows, without sorting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mispair.errors import ConflictError

KS = (1, 5, 10)
CHUNK_ELEMENTS = 1 << 26  # elements of S compared at a time
Blocks = Callable[[], Iterable[tuple[slice, Sequence[Tensor]]]]


@dataclass(frozen=True)
class Recalls:
    """One direction: share of the queries, in per cent, with a right answer among the first K; ranks start at 1."""

    r1: float
    r5: float
    r10: float
    median_rank: float
    mean_rank: float


@dataclass(frozen=True)
class Retrieval:
    """Both directions."""

    left_to_right: Recalls  # image to text
    right_to_left: Recalls  # text to image

    @property
    def rsum(self) -> float:
        """Sum of the six recalls: 600 is perfect."""
        both = (self.left_to_right, self.right_to_left)
        return sum(recall for side in both for recall in (side.r1, side.r5, side.r10))

    def metrics(self) -> dict[str, float]:
        """The metrics by name, for logs and tables: `i2t_r1`, ..., `t2i_mean_rank`, `rsum`."""
        sides = (("i2t", self.left_to_right), ("t2i", self.right_to_left))
        flat = {f"{name}_{key}": value for name, side in sides for key, value in asdict(side).items()}
        return {**flat, "rsum": self.rsum}


Part = Callable[[Tensor, Tensor], Retrieval]  # of these rows and columns only


def retrieval(S: Tensor, left_groups: Tensor, right_groups: Tensor) -> Retrieval:
    """Metrics of a similarity matrix; items of one group match.

    Args:
        S: (l, r) similarities.
        left_groups: (l,) group of each left item.
        right_groups: (r,) group of each right item.

    >>> retrieval(torch.eye(20), torch.arange(20), torch.arange(20)).rsum
    600.0
    >>> retrieval(torch.ones(20, 20), torch.arange(20), torch.arange(20)).rsum
    0.0
    """
    return of_ranks(ranks(S, left_groups, right_groups))


def of_ranks(both: tuple[Tensor, Tensor]) -> Retrieval:
    """Metrics of the ranks of both sides, from 0."""
    return Retrieval(*map(recalls, both))


def fold_retrieval(part: Part, left_groups: Tensor, right_groups: Tensor, folds: int = 5) -> Retrieval:
    """Mean over `folds` equal slices of the left items, each with its own right items (COCO 1K: 5 folds of testall)."""
    if not 1 <= folds <= len(left_groups):
        raise ConflictError(str(folds), where="folds", expected=f"1 to {len(left_groups):,}, the number of images")
    results = []
    for rows in torch.arange(len(left_groups), device=left_groups.device).tensor_split(folds):
        columns = torch.isin(right_groups, left_groups[rows]).nonzero().squeeze(1)
        if not len(columns):
            first, last = int(rows[0]) + 1, int(rows[-1]) + 1
            found = f"{folds}, of which one has the images {first:,} to {last:,} without any captions"
            raise ConflictError(found, where="folds", advice="Give fewer.")
        results.append(part(rows, columns))
    return Retrieval(
        _mean([result.left_to_right for result in results]), _mean([result.right_to_left for result in results])
    )


def ranks(S: Tensor, left_groups: Tensor, right_groups: Tensor) -> tuple[Tensor, Tensor]:
    """Rank of the best right answer of each query, from 0: how many wrong items score at least as high.

    An item without any match gets a rank behind all others.
    """
    groups = left_groups.to(S.device), right_groups.to(S.device)
    return next(block_ranks(lambda: ((block, [S[block]]) for block in row_blocks(*S.shape)), 1, *groups))


def row_blocks(left: int, right: int) -> Iterator[slice]:
    """Cut the rows of a (left, right) matrix into blocks of bounded size."""
    step = max(1, CHUNK_ELEMENTS // max(1, right))
    return (slice(start, min(start + step, left)) for start in range(0, left, step))


def block_ranks(
    blocks: Blocks, count: int, left_groups: Tensor, right_groups: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """The `ranks` of `count` matrices at a time, from blocks of their rows; `blocks` is called twice for them."""
    rows, columns, device = len(left_groups), len(right_groups), left_groups.device
    left_ranks = torch.empty(count, rows, dtype=torch.long, device=device)
    right_best = [torch.full((columns,), -torch.inf, device=device)] * count  # becomes as precise as its matrix
    right_found = torch.zeros(columns, dtype=torch.bool, device=device)
    nowhere = max(rows, columns, *KS)  # also in a set of fewer than 10 no answer is not a right one
    for block, matrices in blocks():
        match = left_groups[block, None] == right_groups
        for number, S in enumerate(matrices):
            positives = S.masked_fill(~match, -torch.inf)
            wrong = _count(S, positives.amax(dim=1, keepdim=True), match).sum(dim=1)
            left_ranks[number, block] = wrong.masked_fill(~match.any(dim=1), nowhere)
            right_best[number] = torch.maximum(right_best[number], positives.amax(dim=0))
        right_found |= match.any(dim=0)
    right_ranks = torch.zeros(count, columns, dtype=torch.long, device=device)
    for block, matrices in blocks():
        match = left_groups[block, None] == right_groups
        for number, S in enumerate(matrices):
            right_ranks[number] += _count(S, right_best[number], match).sum(dim=0)
    return zip(left_ranks, right_ranks.masked_fill(~right_found, nowhere), strict=True)


def _count(S: Tensor, best: Tensor, match: Tensor) -> Tensor:
    """Count wrong items that are not below the best right one, so a NaN on either side counts against the model."""
    return ~(best > S) & ~match


def recalls(rank: Tensor) -> Recalls:
    """Recalls of ranks, from 0."""
    rank = rank.cpu().double()  # not every device knows double precision
    r1, r5, r10 = (100.0 * (rank < k).double().mean().item() for k in KS)
    return Recalls(r1, r5, r10, rank.quantile(0.5).floor().item() + 1, rank.mean().item() + 1)


def _mean(sides: Sequence[Recalls]) -> Recalls:
    columns = zip(*(asdict(side).values() for side in sides), strict=True)
    return Recalls(*(sum(column) / len(sides) for column in columns))


def auroc(scores: npt.NDArray[Any], positive: npt.NDArray[np.bool_]) -> float | None:
    """Probability of a positive scoring higher than a negative, ties counted half; None if one kind is missing.

    >>> auroc(np.array([0.9, 0.4, 0.4, 0.1]), np.array([True, True, False, False]))
    0.875
    """
    count = int(positive.sum())
    others = len(positive) - count
    if not count or not others:
        return None
    _, inverse, repeats = np.unique(scores, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(repeats) - (repeats - 1) / 2
    return float((mean_rank[inverse][positive].sum() - count * (count + 1) / 2) / (count * others))
