"""Better partners for flagged pairs: half-replacing, Eq. 7-9 of the REPAIR paper, in the learned space.

One side of a pair is kept. The candidates are the items of the other side with the largest contrast in the common
space; the judge chooses among them. An item whose own pair matches is rarely the missing partner.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mispair.auditing.scoring.folds import FOLDS, fold_numbers, sample
from mispair.auditing.scoring.judge import Judge
from mispair.auditing.scoring.measures import rivals
from mispair.auditing.sources.source import Source
from mispair.data.pairs import MATCH_THRESHOLD, IntArray
from mispair.functional.logistic import FloatArray, probability

POOL = 1 << 15  # items that are tried; of more, those of flagged pairs come first
TRIED = 10  # candidates that the judge scores, for each pair
KEPT = 3
AT_ONCE = 1024  # pairs at a time
ATTACHED = -3.0  # added to the log odds of an item whose own pair certainly matches
WORTH = 0.05  # contrast that counts as much as one unit of log odds when candidates are chosen


@dataclass(frozen=True)
class Partners:
    """New partners on one side, best first."""

    rows: IntArray  # (n, KEPT) rows of the suggested items, -1 for none
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
    folds: IntArray | None = None,
) -> Partners:
    """Up to three better partners for each of these rows.

    Args:
        source: All pairs.
        judge: What was learned.
        rows: Flagged pairs.
        match: (N,) match score of all pairs; NaN where a row could not be read.
        groups: (N,) rows of one group share their left item; None if all differ.
        keep_left: Search right items; else left ones.
        device: Where to compute.
        folds: (N,) rows of one of these groups are in one fold; by default the groups above.
    """
    found = Partners.none(len(rows))
    search = Search(source, judge, match, groups, keep_left=keep_left, device=device)
    fold = fold_numbers(search.owners(rows) if folds is None else folds[rows])
    for number in range(FOLDS if len(search.pool) else 0):
        places = np.flatnonzero(fold == number)
        candidates = search.in_space(number) if len(places) else torch.empty(0)
        for start in range(0, len(places), AT_ONCE):
            here = places[start : start + AT_ONCE]
            found.rows[here], found.scores[here] = search.best(rows[here], number, candidates)
    return found


class Search:
    """The candidate items of one side, and how they are chosen."""

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
        self.items = judge.transforms[self.side](self._vectors(self.pool, self.side))

    def owners(self, rows: IntArray) -> IntArray:
        """Which left item each of some rows has: rows that share one are of one group."""
        return rows if self.groups is None else self.groups[rows]

    def attached(self, rows: IntArray) -> npt.NDArray[np.float32]:
        """Penalty for the items of some rows because they have a partner already.

        None for left items that several pairs may share, such as images with several captions.
        """
        penalty = ATTACHED if self.keep_left or self.groups is None else 0
        return np.asarray(np.float32(penalty) * np.nan_to_num(self.match[rows]))

    def _pool(self) -> IntArray:
        """Rows whose items are tried."""
        readable = np.flatnonzero(~np.isnan(self.match))
        if not self.keep_left and self.groups is not None:  # a left item that several rows share is tried once
            readable = readable[np.unique(self.groups[readable], return_index=True)[1]]
        flagged = self.match[readable] < MATCH_THRESHOLD
        chosen = sample(readable[flagged], POOL)
        others = sample(readable[~flagged], POOL - len(chosen))
        return np.sort(np.concatenate([chosen, others]))

    def _vectors(self, rows: IntArray, side: int) -> Tensor:
        vectors = (self.source.left, self.source.right)[side].gather(rows)
        return torch.from_numpy(np.ascontiguousarray(vectors)).to(self.device)

    def in_space(self, number: int) -> Tensor:
        """The items in the space of a fold, with their penalty for rivals and for their own partner, (P, k + 1)."""
        space, bank = self.judge.spaces[number], self.judge.banks[number]
        items = (space.compared_left, space.compared_right)[self.side](self.items)
        loss = rivals(items, (bank.space_right, bank.space_left)[self.side])
        attached = torch.from_numpy(WORTH * self.attached(self.pool)).to(items)
        return torch.column_stack([2 * items, attached - loss])

    def best(self, rows: IntArray, number: int, candidates: Tensor) -> tuple[IntArray, npt.NDArray[np.float32]]:
        """Of the candidates in the space of a fold, the best ones for some rows of that fold."""
        space = self.judge.spaces[number]
        kept = self.judge.transforms[1 - self.side](self._vectors(rows, 1 - self.side))
        kept = (space.compared_left, space.compared_right)[1 - self.side](kept)
        scores = torch.column_stack([kept, torch.ones_like(kept[:, :1])]) @ candidates.T
        tried = self.pool[scores.topk(min(TRIED, len(self.pool)), dim=1).indices.cpu().numpy()]
        again, flat = np.repeat(rows, tried.shape[1]), tried.reshape(-1)
        left, right = (again, flat) if self.keep_left else (flat, again)
        network_score = self.source.network_score
        networks = None if network_score is None else network_score(left, right)
        (own, lefts), (others, rights) = (np.unique(side, return_inverse=True) for side in (left, right))
        items = self._vectors(own, 0), self._vectors(others, 1)
        measures = self.judge.measure_items(*items, lefts, rights, number, networks)
        score = self.judge.combination.score(measures)
        order = np.where(self.owners(flat) == self.owners(again), -np.inf, score + self.attached(flat))
        return _best(tried, order.reshape(tried.shape), score.reshape(tried.shape))


def _best(tried: IntArray, order: FloatArray, score: FloatArray) -> tuple[IntArray, npt.NDArray[np.float32]]:
    """The best of the candidates (n, TRIED) by `order`, as long as the new pair would not be flagged."""
    fits = probability(score)
    order = np.where(fits >= MATCH_THRESHOLD, order, -np.inf)
    best = (-order).argsort(axis=1, kind="stable")[:, :KEPT]
    rows, fits = np.take_along_axis(tried, best, axis=1), np.take_along_axis(fits, best, axis=1)
    good = np.isfinite(np.take_along_axis(order, best, axis=1))
    found = Partners.none(len(tried))  # there may be fewer candidates than that
    found.rows[:, : best.shape[1]] = np.where(good, rows, -1)
    found.scores[:, : best.shape[1]] = np.where(good, fits, np.nan)
    return found.rows, found.scores
