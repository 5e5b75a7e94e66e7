"""Better partners for pairs that look wrong: half-replacing, Eq. 7-9 of the REPAIR paper, in the learned space.

One side of a pair is kept. Of the items of the other side those come into question that stand out among its rivals in
the common space; the judge chooses among them. An item whose own pair looks right is rarely the missing partner.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import normalize

from mispair.auditing.scoring.folds import FOLDS, fold_numbers, sample
from mispair.auditing.scoring.judge import Judge
from mispair.auditing.scoring.measures import rivals
from mispair.auditing.sources.source import Source
from mispair.data.pairs import IntArray
from mispair.functional.logistic import FloatArray, probability

POOL = 1 << 15  # items that are tried; of more, those of the pairs that look wrong come first
TRIED = 10  # candidates that the judge looks at, for each pair
KEPT = 3
AT_ONCE = 1024  # pairs mended at a time
ATTACHED = -3.0  # added to the log odds of an item whose own pair is certainly right
WORTH = 0.05  # of a unit of log odds in units of contrast, while candidates are chosen


@dataclass(frozen=True)
class Partners:
    """New partners on one side, best first."""

    rows: IntArray  # (n, KEPT) rows that lend their item, -1 for none
    scores: npt.NDArray[np.float32]  # (n, KEPT) match score of the new pair, NaN for none

    @classmethod
    def none(cls, count: int) -> Partners:
        return cls(np.full((count, KEPT), -1), np.full((count, KEPT), np.nan, dtype=np.float32))


def find_partners(
    source: Source,
    judge: Judge,
    rows: IntArray,
    match: npt.NDArray[np.floating],
    groups: IntArray | None,
    *,
    keep_left: bool,
    device: torch.device,
) -> Partners:
    """Up to three better partners for each of these rows.

    Args:
        source: All pairs.
        judge: What was learned.
        rows: Pairs to mend.
        match: (N,) match score of all pairs; NaN where a row could not be read.
        groups: (N,) rows of one group share their left item; None if all differ.
        keep_left: Look for right items; else for left ones.
        device: Where to compute.
    """
    found = Partners.none(len(rows))
    search = Search(source, judge, match, groups, keep_left=keep_left, device=device)
    fold = fold_numbers(search.owners(rows))
    for number in range(FOLDS if len(search.pool) else 0):
        places = np.flatnonzero(fold == number)
        candidates = search.in_space(number) if len(places) else torch.empty(0)
        for start in range(0, len(places), AT_ONCE):
            here = places[start : start + AT_ONCE]
            found.rows[here], found.scores[here] = search.best(rows[here], number, candidates)
    return found


class Search:
    """The items of one side that may take a place, and how they are chosen."""

    def __init__(
        self,
        source: Source,
        judge: Judge,
        match: npt.NDArray[np.floating],
        groups: IntArray | None,
        *,
        keep_left: bool,
        device: torch.device,
    ) -> None:
        self.source, self.judge, self.match, self.groups, self.device = source, judge, match, groups, device
        self.keep_left, self.side = keep_left, int(keep_left)  # the side that is replaced: 0 left, 1 right
        self.pool = self._pool()
        self.items = judge.frames[self.side](self._vectors(self.pool, self.side))

    def owners(self, rows: IntArray) -> IntArray:
        """Which left item each of some rows has: rows that share one are of one group."""
        return rows if self.groups is None else self.groups[rows]

    def attached(self, rows: IntArray) -> npt.NDArray[np.float32]:
        """What the items of some rows lose because they have a partner already.

        An image with several captions may get one more; what belongs to one pair alone is taken if that is right.
        """
        loss = ATTACHED if self.keep_left or self.groups is None else 0
        return np.asarray(np.float32(loss) * np.nan_to_num(self.match[rows]))

    def _pool(self) -> IntArray:
        """Rows whose items are tried."""
        readable = np.flatnonzero(~np.isnan(self.match))
        if not self.keep_left and self.groups is not None:  # a left item that several rows share is tried once
            readable = readable[np.unique(self.groups[readable], return_index=True)[1]]
        is_wrong = self.match[readable] < 0.5
        chosen = sample(readable[is_wrong], POOL)
        others = sample(readable[~is_wrong], POOL - len(chosen))
        return np.sort(np.concatenate([chosen, others]))

    def _vectors(self, rows: IntArray, side: int) -> Tensor:
        vectors = (self.source.left, self.source.right)[side].gather(rows)
        return torch.from_numpy(np.ascontiguousarray(vectors)).to(self.device)

    def in_space(self, number: int) -> Tensor:
        """The items in the space of a fold, with what they lose for their rivals and for being attached, (P, k + 1)."""
        space, bank = self.judge.spaces[number], self.judge.banks[number]
        items = normalize(self.items @ (space.left, space.right)[self.side], dim=1)
        loss = rivals(items, (bank.space_right, bank.space_left)[self.side])
        attached = torch.from_numpy(WORTH * self.attached(self.pool)).to(items)
        return torch.column_stack([2 * items, attached - loss])

    def best(self, rows: IntArray, number: int, candidates: Tensor) -> tuple[IntArray, npt.NDArray[np.float32]]:
        """Of the candidates in the space of a fold, the best ones for some rows of that fold."""
        space = self.judge.spaces[number]
        kept = self.judge.frames[1 - self.side](self._vectors(rows, 1 - self.side))
        kept = normalize(kept @ (space.left, space.right)[1 - self.side], dim=1)
        scores = torch.column_stack([kept, torch.ones_like(kept[:, :1])]) @ candidates.T
        tried = self.pool[scores.topk(min(TRIED, len(self.pool)), dim=1).indices.cpu().numpy()]
        again, flat = np.repeat(rows, tried.shape[1]), tried.reshape(-1)
        left, right = (again, flat) if self.keep_left else (flat, again)
        fold = np.full(len(flat), number, dtype=np.uint8)
        opinion = self.source.network_opinion(left, right)
        measures = self.judge.measure(self._vectors(left, 0), self._vectors(right, 1), fold, opinion)
        score = self.judge.combination.score(measures)
        order = np.where(self.owners(flat) == self.owners(again), -np.inf, score + self.attached(flat))
        return _best(tried, order.reshape(tried.shape), score.reshape(tried.shape))


def _best(tried: IntArray, order: FloatArray, score: FloatArray) -> tuple[IntArray, npt.NDArray[np.float32]]:
    """The best of the candidates (n, TRIED) by `order`, as long as the new pair is rather right than wrong."""
    fits = probability(score)
    order = np.where(fits >= 0.5, order, -np.inf)  # before the best are taken: what does not fit takes no place
    best = (-order).argsort(axis=1, kind="stable")[:, :KEPT]
    rows, fits = np.take_along_axis(tried, best, axis=1), np.take_along_axis(fits, best, axis=1)
    good = np.isfinite(np.take_along_axis(order, best, axis=1))
    found = Partners.none(len(tried))  # there may be fewer candidates than that
    found.rows[:, : best.shape[1]] = np.where(good, rows, -1)
    found.scores[:, : best.shape[1]] = np.where(good, fits, np.nan)
    return found.rows, found.scores
