"""Better partners for flagged pairs: half-replacing, Eq. 7-9 of the REPAIR paper, in the learned space.

One side of a pair is kept. The candidates are the items of the other side with the largest contrast in the common
space. Which of them is the missing partner, and with which probability, is learned from other pairs: their partners are
hidden among the candidates of the same search. An item that has its partner already is rarely the missing one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mispair.auditing.scoring.folds import FOLDS, fold_numbers, random_keys, sample
from mispair.auditing.scoring.judge import Judge, cut
from mispair.auditing.scoring.measures import evidence, largest, rivals, with_contrast
from mispair.auditing.scoring.shared_items import SharedItems
from mispair.compute.threads import parallel_each
from mispair.functional.logistic import FloatArray, logistic, newton, probability
from mispair.pairs.pairs import MATCH_THRESHOLD, IntArray
from mispair.pairs.source import Source
from mispair.support.cores import cores

Mask = npt.NDArray[np.bool_]

POOL = 1 << 14  # items that are tried; of more, those of flagged pairs come first
TRIED = 10  # candidates that are looked at closely, for each pair
KEPT = 3
AT_ONCE = 256  # pairs at a time
WORKERS = 4  # at most: each holds the whole pool in the space of a fold
HIDDEN, LEAST_HIDDEN = 1024, 20  # pairs whose partner is hidden among the candidates: at most, and at least
NETWORK_SHARE = 16  # with the networks of a run, which are slow, one in so many pairs, but not below ...
NETWORK_HIDDEN = 128  # ... so many
STRANGERS = 16  # random candidates that each of these is compared with
LEAST_FREE = 0.01  # probability that an item may be the missing partner although its own pair matches
WORTH = 0.05  # contrast that counts as much as one unit of log odds when candidates are chosen
RIDGE = 1.0  # L2 penalty on what is learned from hidden partners
STEPS = 20  # of Newton's method
FAR = 30.0  # largest log odds


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
    items: SharedItems,
    *,
    keep_left: bool,
    device: torch.device,
    partnered: IntArray | Sequence[int] = (),
    excluded: Mask | None = None,
) -> Partners:
    """Up to three better partners for each of these rows.

    Args:
        source: All pairs.
        judge: What was learned.
        rows: Flagged pairs.
        match: (N,) match score of all pairs; NaN where a row could not be read.
        items: Which rows share items.
        keep_left: Search right items; else left ones.
        device: Where to compute.
        partnered: Rows whose items of the searched side have their partner in another pair.
        excluded: (N,) rows whose items of that side are no better partner of any other.
    """
    has_partner, several = match.copy(), np.zeros(len(match), dtype=np.bool_)
    has_partner[np.asarray(partnered, dtype=np.int64)] = 1
    if excluded is not None:
        has_partner[excluded] = np.nan
    if not keep_left:
        several = _with_several_partners(items, ~np.isnan(match))
        has_partner = _of_whole_items(has_partner, items.left, several)
    search = Search(source, judge, has_partner, items, several, keep_left=keep_left, device=device)
    hidden = sample(np.flatnonzero(match > LEAST_FREE), _most_hidden(source))
    if not len(rows) or len(search.pool) < 2 or len(hidden) < LEAST_HIDDEN:
        return Partners.none(len(rows))
    fold, hidden_fold = search.fold(rows), search.fold(hidden)
    flagged = Candidates.empty(len(rows), min(TRIED, len(search.pool)), search.measures)
    known = Candidates.empty(len(hidden), flagged.rows.shape[1], search.measures)
    own, strange = np.zeros((len(hidden), search.measures)), np.zeros((len(hidden), STRANGERS, search.measures))

    _ = search.taken  # once, before several threads need it

    def in_fold(number: int) -> None:
        items = search.in_space(number)
        for here in cut(np.flatnonzero(fold == number), AT_ONCE):
            flagged.put(here, search.candidates(number, search.compared(rows[here], number, 1 - search.side), items))
        for here in cut(np.flatnonzero(hidden_fold == number), AT_ONCE):
            kept = search.compared(hidden[here], number, 1 - search.side)
            known.put(here, search.candidates(number, kept, items))
            own[here], strange[here] = search.hidden(number, kept, items)

    parallel_each(in_fold, range(FOLDS), min(WORKERS, cores()))
    lesson = Lesson.of(known, own, strange, np.nan_to_num(match[hidden]), hidden, search, flagged)
    found = lesson.best(flagged, np.nan_to_num(match[rows]))
    return given_once(found, np.where(several, 0, has_partner))


def _with_several_partners(items: SharedItems, readable: Mask) -> Mask:
    """(N,) whether the left item of each row is in several different pairs, like an image with five captions."""
    distinct = items.left[readable & items.is_first]
    return np.asarray(np.bincount(distinct, minlength=len(readable))[items.left] > 1)


def _of_whole_items(has_partner: npt.NDArray[np.floating], left: IntArray, several: Mask) -> npt.NDArray[np.floating]:
    """Give rows with one left item and one partner (copies of a pair) the highest value of them all."""
    copies = ~several & ~np.isnan(has_partner)
    highest = np.zeros_like(has_partner)
    np.maximum.at(highest, left[copies], has_partner[copies])
    return np.where(copies, highest[left], has_partner)


def _most_hidden(source: Source) -> int:
    """Largest number of pairs with a hidden partner: each is scored with 27 items."""
    if source.network_score is None:
        return HIDDEN
    return int(np.clip(len(source) // NETWORK_SHARE, NETWORK_HIDDEN, HIDDEN))


@dataclass(frozen=True)
class Candidates:
    """Possible partners of n pairs."""

    rows: IntArray  # (n, t)
    places: IntArray  # (n, t) in the pool
    measures: FloatArray  # (n, t, m) of the new pairs
    free: FloatArray  # (n, t) probability that the item has no partner yet; 0 for the items of the pair itself

    @classmethod
    def empty(cls, count: int, tried: int, measures: int) -> Candidates:
        size = count, tried
        whole = np.zeros(size, dtype=np.int64)
        return cls(whole, whole.copy(), np.zeros((*size, measures)), np.zeros(size))

    def put(self, here: IntArray, part: Candidates) -> None:
        for own, given in zip(vars(self).values(), vars(part).values(), strict=True):
            own[here] = given


@dataclass(frozen=True)
class Compared:
    """Items of one side in the space of a fold."""

    rows: IntArray  # (n,)
    items: Tensor  # (n, D) preprocessed
    units: Tensor  # (n, k) in the space
    rivals: Tensor  # (n,) similarity to their best rivals in the bank


class Search:
    """The candidate items of one side, and how they are chosen."""

    def __init__(
        self,
        source: Source,
        judge: Judge,
        has_partner: npt.NDArray[np.floating],
        shared: SharedItems,
        several: Mask,
        *,
        keep_left: bool,
        device: torch.device,
    ) -> None:
        self.source, self.judge, self.has_partner, self.shared, self.device = source, judge, has_partner, shared, device
        self.several = several  # (N,) which left items may have another partner
        self.keep_left, self.side = keep_left, int(keep_left)  # the side that is replaced: 0 left, 1 right
        self.measures = 3 + int(source.network_score is not None)
        self.pool = self._pool()

    def _pool(self) -> IntArray:
        """Choose the rows of the pool."""
        readable = np.flatnonzero(~np.isnan(self.has_partner))
        if not self.keep_left:  # a left item that several rows share is tried once
            readable = readable[np.unique(self.shared.left[readable], return_index=True)[1]]
        flagged = self.has_partner[readable] < MATCH_THRESHOLD
        chosen = sample(readable[flagged], POOL)
        others = sample(readable[~flagged], POOL - len(chosen))
        return np.sort(np.concatenate([chosen, others]))

    def fold(self, rows: IntArray) -> npt.NDArray[np.uint8]:
        """The fold of each of some rows."""
        return fold_numbers(self.shared.groups[rows])

    def free(self, rows: IntArray) -> FloatArray:
        """Probability of an item without a partner; 1 for items in several pairs."""
        free = np.maximum(1 - np.nan_to_num(self.has_partner[rows]).astype(np.float64), LEAST_FREE)
        return np.where(self.several[rows], 1, free)

    def _vectors(self, rows: IntArray, side: int) -> Tensor:
        vectors = (self.source.left, self.source.right)[side].tensor(rows, self.device)
        return self.judge.transforms[side](vectors)

    def units(self, items: Tensor, number: int, side: int) -> Tensor:
        """Preprocessed items of a side in the space of a fold."""
        space = self.judge.spaces[number]
        return (space.compared_left, space.compared_right)[side](items)

    def rivals(self, units: Tensor, number: int, side: int) -> Tensor:
        """Similarity of items in the space of a fold to their best rivals in its bank."""
        bank = self.judge.banks[number]
        return rivals(units, (bank.space_right, bank.space_left)[side])

    def compared(self, rows: IntArray, number: int, side: int) -> Compared:
        """The items of some rows in the space of a fold."""
        items = self._vectors(rows, side)
        units = self.units(items, number, side)
        return Compared(rows, items, units, self.rivals(units, number, side))

    @cached_property
    def items(self) -> Tensor:
        """(P, D) preprocessed items of the pool."""
        return self._vectors(self.pool, self.side)

    @cached_property
    def pool_rivals(self) -> Tensor:
        """(P,) similarity of each item to its best rivals, in the space of its own fold; others hardly differ."""
        found, fold, items = torch.empty(len(self.pool)).to(self.items), self.fold(self.pool), self.items

        def in_fold(number: int) -> None:
            own = torch.from_numpy(np.flatnonzero(fold == number)).to(self.device)
            if len(own):
                found[own] = self.rivals(self.units(items[own], number, self.side), number, self.side)

        parallel_each(in_fold, range(FOLDS), min(WORKERS, cores()))
        return found

    @cached_property
    def taken(self) -> Tensor:
        """(P,) loss of contrast by the rivals of each item and by its own partner."""
        return torch.from_numpy(WORTH * np.log(self.free(self.pool))).to(self.items) - self.pool_rivals

    def in_space(self, number: int) -> Tensor:
        """The items in the space of a fold, beside `taken`, (P, k + 1)."""
        return torch.column_stack([2 * self.units(self.items, number, self.side), self.taken])

    def candidates(self, number: int, kept: Compared, items: Tensor) -> Candidates:
        """The items with the largest contrast to items of a fold; `items` are `in_space` of it."""
        scores = torch.column_stack([kept.units, torch.ones_like(kept.units[:, :1])]) @ items.T
        places = largest(scores, min(TRIED, len(self.pool)))[1].cpu().numpy()
        tried, left = self.pool[places], self.shared.left
        free = np.where(left[tried] == left[kept.rows][:, None], 0, self.free(tried))
        return Candidates(tried, places, self.measure(number, kept, places, items), free)

    def hidden(self, number: int, kept: Compared, items: Tensor) -> tuple[FloatArray, FloatArray]:
        """(n, m) measures of some pairs of a fold, and (n, STRANGERS, m) of their kept items with random others."""
        rows, each = kept.rows, np.arange(len(kept.rows))
        drawn = random_keys(np.repeat(rows, STRANGERS) * STRANGERS + np.tile(np.arange(STRANGERS), len(rows)), 0)
        places = (drawn % np.uint64(len(self.pool))).astype(np.int64).reshape(len(rows), STRANGERS)
        own = self._measure(number, kept, self.compared(rows, number, self.side), each, each)
        return own, self.measure(number, kept, places, items)

    def measure(self, number: int, kept: Compared, places: IntArray, items: Tensor) -> FloatArray:
        """(n, t, m) contrast, evidence and similarity of kept items with others, and scores of a run's networks.

        `places` (n, t) are those of the other items in the pool, `items` are `in_space` of the same fold.
        """
        needed, partners = np.unique(places, return_inverse=True)
        others = Compared(self.pool[needed], self.items[needed], items[needed, :-1] / 2, self.pool_rivals[needed])
        which = np.repeat(np.arange(len(places)), places.shape[1])
        return self._measure(number, kept, others, which, partners.reshape(-1)).reshape(*places.shape, -1)

    def _measure(
        self, number: int, kept: Compared, others: Compared, which: IntArray, partners: IntArray
    ) -> FloatArray:
        """The same, (k, m), of the kept items `which` (k,) with the other items `partners` (k,)."""
        (left, lefts), (right, rights) = ((kept, which), (others, partners))[:: 1 if self.keep_left else -1]
        a, b = (torch.from_numpy(part).to(left.items.device) for part in (lefts, rights))
        space = self.judge.spaces[number]
        known = evidence(space, left.items @ space.left, right.items @ space.right, a, b)
        measured = with_contrast(left.units, right.units, a, b, known, left.rivals, right.rivals)
        found: FloatArray = measured.double().cpu().numpy()
        if self.source.network_score is None:
            return found
        return np.column_stack([found, self.source.network_score(left.rows[lefts], right.rows[rights])])


@dataclass(frozen=True)
class Lesson:
    """Weights to choose among candidates, learned from pairs with a hidden partner."""

    centre: FloatArray  # (m,) mean of each measure over random pairs
    spread: FloatArray  # (m,) its standard deviation
    weights: FloatArray  # (m,) log odds of being the partner for each standard deviation
    strangers: FloatArray  # sorted exponentials of the weighted sums of random pairs
    others: float  # items of the whole pool that have no partner: their expected number
    fits: FloatArray  # (m + 1,) weights and offset of the log odds that a new pair matches
    slope: float  # of the log odds of the probability against those of the first guess
    offset: float  # the same
    several: Mask  # (P,) whether several pairs may have an item of the pool

    @classmethod
    def of(
        cls,
        known: Candidates,
        own: FloatArray,
        strange: FloatArray,
        worth: FloatArray,
        hidden: IntArray,
        search: Search,
        flagged: Candidates,
    ) -> Lesson:
        """Learn from likely matches.

        Args:
            known: Their candidates, without their own partner.
            own: (n, m) measures of these pairs.
            strange: (n, r, m) measures of their kept items with random ones.
            worth: (n,) probability that each of these pairs matches.
            hidden: (n,) their rows.
            search: The search.
            flagged: Candidates of the flagged pairs, which want the same items.
        """
        centre, spread = strange.mean((0, 1)), strange.std((0, 1)) + 1e-9
        mine, theirs, random = ((part - centre) / spread for part in (own, known.measures, strange))
        # A missing partner is in a pair that is flagged, as a rule.
        free = np.where(search.several[hidden], 1, 1 - LEAST_FREE)
        others = float(search.free(search.pool).sum())
        # All items that were not tried are alternatives as well: random ones that score lower stand for them.
        lower = strange[:, :, 0] < known.measures[:, :, 0].min(axis=1, keepdims=True)
        each = others / np.maximum(lower.sum(axis=1, keepdims=True), 1)
        with np.errstate(divide="ignore"):
            prior = np.log(np.column_stack([free, known.free, lower * each]))
        weights = conditional_logit(np.concatenate([mine[:, None], theirs, random], axis=1), prior, worth)
        flat = random.reshape(-1, random.shape[-1])
        doubt = np.repeat((1 - worth) / random.shape[1], random.shape[1])
        slopes, middle = logistic(
            np.concatenate([mine, flat]),
            np.repeat([1.0, 0.0], [len(mine), len(flat)]),
            np.concatenate([worth, doubt]),
            RIDGE,
        )
        strangers = np.sort(np.exp(np.clip(flat @ weights, -FAR, FAR)))
        guess = cls(
            centre, spread, weights, strangers, others,
            np.append(slopes, middle), 1.0, 0.0, search.several[search.pool],
        )  # fmt: skip
        # Each hidden partner takes the place of the last candidate, if it would have been tried.
        last = known.measures[:, :, 0].argmin(axis=1)
        tried = np.flatnonzero(own[:, 0] >= known.measures[:, :, 0].min(axis=1))
        together = Candidates(*(part.copy() for part in vars(known).values()))
        together.rows[tried, last[tried]], together.places[tried, last[tried]] = -1, -1
        together.measures[tried, last[tried]], together.free[tried, last[tried]] = own[tried], free[tried]
        chance = guess.share(guess.fitting(together), together, guess.wanted(flagged, len(search.pool)))
        best = (-chance).argsort(axis=1, kind="stable")[:, :KEPT]
        first = np.take_along_axis(chance, best, axis=1)
        used = first > 0
        target = (np.take_along_axis(together.rows, best, axis=1) < 0)[used].astype(np.float64)
        slope, offset = logistic(_log_odds(first[used])[:, None], target, np.repeat(worth, used.sum(1)), 1e-3)
        return replace(guess, slope=max(float(slope[0]), 0.0), offset=offset)

    def chances(self, candidates: Candidates) -> FloatArray:
        """(n, t) how probable each candidate is by Bayes' rule over the whole pool.

        Of items that were not tried it is known only that they score lower; they count as random ones that do. So the
        best of many is not believed for being the best.
        """
        sums = np.clip(((candidates.measures - self.centre) / self.spread) @ self.weights, -FAR, FAR)
        weight = np.exp(sums)
        below = np.concatenate([[0.0], np.cumsum(self.strangers)]) / len(self.strangers)
        rest = below[np.searchsorted(self.strangers, weight.min(axis=1))] * self.others
        weight = weight * candidates.free
        return np.asarray(weight / (weight.sum(axis=1) + rest + 1e-300)[:, None])

    def fitting(self, candidates: Candidates) -> FloatArray:
        """The chances, but 0 if the new pair would be flagged."""
        standard = (candidates.measures - self.centre) / self.spread
        return np.where(standard @ self.fits[:-1] + self.fits[-1] >= 0, self.chances(candidates), 0)

    def wanted(self, candidates: Candidates, pool: int) -> FloatArray:
        """(P,) how often each item of the pool is expected to be the partner of one of these pairs."""
        chance = self.chances(candidates).reshape(-1)
        return np.bincount(candidates.places.reshape(-1), chance, minlength=pool).astype(np.float64)

    def share(self, chance: FloatArray, candidates: Candidates, wanted: FloatArray) -> FloatArray:
        """Divide the chances of an item among the pairs with the same candidate, if only one can have it."""
        once = (candidates.places >= 0) & ~self.several[candidates.places]
        times = np.where(once, wanted[candidates.places], 0)
        return chance / np.maximum(times, 1)

    def best(self, flagged: Candidates, match: FloatArray) -> Partners:
        """The best candidates of flagged pairs (n,), as long as the new pair would not be flagged."""
        found = Partners.none(len(match))
        if not len(match):
            return found
        wanted = self.wanted(flagged, int(flagged.places.max()) + 1)
        chance = self.share(self.fitting(flagged), flagged, wanted)
        best = (-chance).argsort(axis=1, kind="stable")[:, :KEPT]
        rows, first = np.take_along_axis(flagged.rows, best, axis=1), np.take_along_axis(chance, best, axis=1)
        score = probability(self.slope * _log_odds(first) + self.offset)
        # Only one of them can be the missing one, and none if the pair matches after all.
        score *= (1 - match)[:, None] / np.maximum(np.where(first > 0, score, 0).sum(1, keepdims=True), 1)
        found.rows[:, : best.shape[1]] = np.where(first > 0, rows, -1)
        found.scores[:, : best.shape[1]] = np.where(first > 0, score, np.nan)
        return found


def conditional_logit(x: FloatArray, prior: FloatArray, worth: FloatArray) -> FloatArray:
    """Fit weights (m,) of a conditional logit: the first of t alternatives is the right one.

    P(first) is its exp(prior + x' weights) over the sum of those of all alternatives: x is (n, t, m), `prior` (n, t)
    the log of their prior probabilities, `worth` (n,) how much each row counts.
    """

    def loss(weights: FloatArray) -> float:
        z = prior + x @ weights
        return float(worth @ (np.logaddexp.reduce(z, axis=1) - z[:, 0]) + RIDGE / 2 * weights @ weights)

    def derivatives(weights: FloatArray) -> tuple[FloatArray, FloatArray]:
        z = prior + x @ weights
        p = np.exp(z - np.logaddexp.reduce(z, axis=1, keepdims=True))
        mean = np.einsum("nt,ntm->nm", p, x)
        around = x - mean[:, None]
        curvature = np.einsum("nt,ntm,ntk->mk", worth[:, None] * p, around, around) + RIDGE * np.eye(len(weights))
        return worth @ (mean - x[:, 0]) + RIDGE * weights, curvature

    return newton(np.zeros(x.shape[2]), loss, derivatives, STEPS)


def _log_odds(chance: FloatArray) -> FloatArray:
    with np.errstate(divide="ignore"):
        return np.asarray(np.clip(np.log(chance) - np.log1p(-np.minimum(chance, 1 - 1e-12)), -FAR, FAR))


def given_once(found: Partners, match: npt.NDArray[np.floating]) -> Partners:
    """Suggest the item of a matched pair to one pair at most.

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
