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
LEARNED = 512  # matched pairs by which the probabilities of partners are calibrated
SHARPNESS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
WORTH = 0.05  # contrast that counts as much as one unit of log odds when candidates are chosen


@dataclass(frozen=True)
class Partners:
    """New partners on one side, best first."""

    rows: IntArray  # (n, KEPT) rows of the suggested items, -1 for none
    scores: npt.NDArray[np.float32]  # (n, KEPT) probability that it is the missing partner, NaN for none

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
    known = sample(np.flatnonzero(match >= MATCH_THRESHOLD), LEARNED)
    if len(rows) and len(search.pool) and len(known):
        search.learn_sharpness(fold_numbers(search.owners(known) if folds is None else folds[known]), known)
    for number in range(FOLDS if len(search.pool) else 0):
        places = np.flatnonzero(fold == number)
        candidates = search.in_space(number) if len(places) else torch.empty(0)
        for start in range(0, len(places), AT_ONCE):
            here = places[start : start + AT_ONCE]
            found.rows[here], found.scores[here] = search.best(rows[here], number, candidates)
    return found if search.shared else given_once(found, match)


def given_once(found: Partners, match: npt.NDArray[np.floating]) -> Partners:
    """Suggestions in which the item of a matched pair, which has its partner, is given to one pair at most.

    It goes to the pair for which it is the most probable; the others keep their next ones.
    """
    places, ranks = np.nonzero(found.rows >= 0)
    given = found.rows[places, ranks]
    order = np.lexsort((places, ranks, -found.scores[places, ranks], given))
    again = np.zeros(len(given), dtype=bool)
    again[order[1:]] = given[order[1:]] == given[order[:-1]]
    drop = again & (match[given] >= MATCH_THRESHOLD)
    rows, scores = found.rows.copy(), found.scores.copy()
    rows[places[drop], ranks[drop]], scores[places[drop], ranks[drop]] = -1, np.nan
    left = np.argsort(rows < 0, axis=1, kind="stable")
    return Partners(np.take_along_axis(rows, left, axis=1), np.take_along_axis(scores, left, axis=1))


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
        self.shared = not keep_left and groups is not None  # left items that several pairs may have
        self.sharpness = 1.0
        self.pool = self._pool()
        self.items = judge.transforms[self.side](self._vectors(self.pool, self.side))

    def owners(self, rows: IntArray) -> IntArray:
        """Which left item each of some rows has: rows that share one are of one group."""
        return rows if self.groups is None else self.groups[rows]

    def attached(self, rows: IntArray) -> npt.NDArray[np.float32]:
        """Penalty for the items of some rows because they have a partner already.

        None for left items that several pairs may share, such as images with several captions.
        """
        penalty = 0 if self.shared else ATTACHED
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

    def candidates(self, rows: IntArray, number: int, items: Tensor) -> tuple[IntArray, FloatArray, FloatArray]:
        """The items with the largest contrast for some rows of a fold.

        Returns:
            (n, TRIED) their rows, log odds of the new pairs, and how much rarer each is the missing partner than an
            item that has none: 0 for the items of the row itself.
        """
        space = self.judge.spaces[number]
        kept = self.judge.transforms[1 - self.side](self._vectors(rows, 1 - self.side))
        kept = (space.compared_left, space.compared_right)[1 - self.side](kept)
        scores = torch.column_stack([kept, torch.ones_like(kept[:, :1])]) @ items.T
        tried = self.pool[scores.topk(min(TRIED, len(self.pool)), dim=1).indices.cpu().numpy()]
        again, flat = np.repeat(rows, tried.shape[1]), tried.reshape(-1)
        score = self.log_odds(again, flat, number)
        prior = np.where(self.owners(flat) == self.owners(again), 0, np.exp(self.attached(flat), dtype=np.float64))
        return tried, score.reshape(tried.shape), prior.reshape(tried.shape)

    def log_odds(self, kept: IntArray, others: IntArray, number: int) -> FloatArray:
        """Log odds of pairs of the kept items of some rows and the other items of others, by the judge of a fold."""
        left, right = (kept, others) if self.keep_left else (others, kept)
        network_score = self.source.network_score
        networks = None if network_score is None else network_score(left, right)
        (own, lefts), (partners, rights) = (np.unique(side, return_inverse=True) for side in (left, right))
        items = self._vectors(own, 0), self._vectors(partners, 1)
        measures = self.judge.measure_items(*items, lefts, rights, number, networks)
        return self.judge.combination.score(measures)

    def best(self, rows: IntArray, number: int, items: Tensor) -> tuple[IntArray, npt.NDArray[np.float32]]:
        """The best candidates for some rows of a fold, and their probabilities."""
        tried, score, prior = self.candidates(rows, number, items)
        with np.errstate(divide="ignore"):
            order = score + np.log(prior)
        weight, rest = self.weights(score, prior, self.sharpness)
        return _best(tried, order, score, weight / (weight.sum(axis=1) + rest)[:, None])

    def weights(self, score: FloatArray, prior: FloatArray, sharpness: float) -> tuple[FloatArray, FloatArray]:
        """What candidates (n, TRIED) weigh in Bayes' rule over the whole pool, and what all others weigh (n,).

        Prior times likelihood ratio of a partner against a stranger, to the power of `sharpness`. Of items that were
        not tried it is known only that they score lower; they count as random ones that do, as shuffled pairs show it.
        So the best of many is not believed for being the best.
        """
        combination = self.judge.combination
        rate = float(np.clip(combination.rate, 1e-3, 1 - 1e-3))
        odds = score, np.sort(combination.log_odds(self.judge.null))
        ratio, null = ((np.exp(np.clip(part, -60, 60)) * rate / (1 - rate)) ** sharpness for part in odds)
        below = np.concatenate([[0.0], np.cumsum(null)]) / len(null)
        others = float(np.exp(sharpness * self.attached(self.pool)).sum())
        rest = below[np.searchsorted(null, ratio.min(axis=1))] * others
        return ratio * prior**sharpness, rest

    def learn_sharpness(self, fold: npt.NDArray[np.uint8], rows: IntArray) -> None:
        """How sharp the weights are: so that the partners of matched pairs, taken for missing, are most probable.

        Args:
            fold: (n,) fold of each of these rows.
            rows: Matched pairs.
        """
        known = np.zeros(len(SHARPNESS))
        for number in np.unique(fold).tolist():
            here = rows[fold == number]
            _, score, prior = self.candidates(here, number, self.in_space(number))
            own = self.log_odds(here, here, number)[:, None]
            for place, sharpness in enumerate(SHARPNESS):
                weight, rest = self.weights(score, prior, sharpness)
                mine, _ = self.weights(own, np.ones_like(own), sharpness)
                known[place] += np.log(mine[:, 0] / (mine[:, 0] + weight.sum(axis=1) + rest)).sum()
        self.sharpness = SHARPNESS[int(known.argmax())]


def _best(
    tried: IntArray, order: FloatArray, score: FloatArray, chance: FloatArray
) -> tuple[IntArray, npt.NDArray[np.float32]]:
    """The best of the candidates (n, TRIED) by `order`, as long as the new pair would not be flagged."""
    order = np.where(probability(score) >= MATCH_THRESHOLD, order, -np.inf)
    best = (-order).argsort(axis=1, kind="stable")[:, :KEPT]
    rows, fits = np.take_along_axis(tried, best, axis=1), np.take_along_axis(chance, best, axis=1)
    good = np.isfinite(np.take_along_axis(order, best, axis=1))
    found = Partners.none(len(tried))  # there may be fewer candidates than that
    found.rows[:, : best.shape[1]] = np.where(good, rows, -1)
    found.scores[:, : best.shape[1]] = np.where(good, fits, np.nan)
    return found.rows, found.scores
