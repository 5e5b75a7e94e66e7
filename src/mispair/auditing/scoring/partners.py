"""Better partners for flagged pairs: half-replacing, Eq. 7-9 of the REPAIR paper, in the learned space.

One side of a pair is kept. The candidates are the items of the other side with the largest contrast in the common
space. Which of them is the missing partner, and with which probability, is learned from other pairs: their partners are
hidden among the candidates of the same search. An item that has its partner already is rarely the missing one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
from mispair.pairs.pairs import MATCH_THRESHOLD
from mispair.pairs.source import Source
from mispair.support.arrays import IntArray, Mask
from mispair.support.cores import cores

Scores = npt.NDArray[np.floating]

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

    def take(self, places: slice | IntArray) -> Partners:
        """Return the partners of some of the rows."""
        return Partners(self.rows[places], self.scores[places])


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
        partnered: Rows with an item of the searched side that has its partner in another pair.
        excluded: (N,) rows with an item that is not a better partner of any other.
    """
    has_partner, several = match.copy(), np.zeros(len(match), dtype=np.bool_)
    has_partner[np.asarray(partnered, dtype=np.int64)] = 1
    if excluded is not None:
        has_partner[excluded] = np.nan
    if not keep_left:
        several = _with_several_partners(items, ~np.isnan(match))
        has_partner = _of_whole_items(has_partner, items.left, several)
    pool = pool_of(has_partner, None if keep_left else items.left)
    hidden = sample(np.flatnonzero(match > LEAST_FREE), _most_hidden(source))
    if not len(rows) or len(pool) < 2 or len(hidden) < LEAST_HIDDEN:
        return Partners.none(len(rows))
    free = np.where(several, 1, np.maximum(1 - has_partner.astype(np.float64), LEAST_FREE))
    search = Search(source, judge, items, pool, free, keep_left=keep_left, device=device)
    fold, hidden_fold = (fold_numbers(items.groups[part]) for part in (rows, hidden))
    measures = 3 + int(source.network_score is not None)
    flagged, known = (Candidates.empty(len(part), min(TRIED, len(pool)), measures) for part in (rows, hidden))
    own, strange = np.zeros((len(hidden), measures)), np.zeros((len(hidden), STRANGERS, measures))

    def in_fold(number: int) -> None:
        others = search.pool_in(number)
        for here in cut(np.flatnonzero(fold == number), AT_ONCE):
            flagged.put(here, search.candidates(number, search.items(rows[here], number, 1 - search.side), others))
        for here in cut(np.flatnonzero(hidden_fold == number), AT_ONCE):
            kept, partners = (search.items(hidden[here], number, side) for side in (1 - search.side, search.side))
            known.put(here, search.candidates(number, kept, others))
            own[here] = search.measure(number, kept, partners, np.arange(len(here))[:, None])[:, 0]
            strange[here] = search.measure(number, kept, others, _random_places(hidden[here], len(pool)))

    parallel_each(in_fold, range(FOLDS), min(WORKERS, cores()))
    # A missing partner is in a pair that is flagged, as a rule.
    own_free = np.where(several[hidden], 1, 1 - LEAST_FREE)
    odds = Odds.learned(known, own, strange, own_free, match[hidden], float(free[pool].sum()))
    wanted = odds.wanted(flagged, several[pool])
    places, chance = odds.best(flagged, wanted)
    slope, offset = calibration(*odds.best(revealed(known, own, own_free), wanted), match[hidden])
    score = probability(slope * _log_odds(chance) + offset)
    # Only one of them can be the missing one, and none if the pair matches after all.
    score *= (1 - match[rows])[:, None] / np.maximum(np.where(chance > 0, score, 0).sum(1, keepdims=True), 1)
    found = Partners.none(len(rows))
    found.rows[:, : places.shape[1]] = np.where(chance > 0, pool[places], -1)
    found.scores[:, : places.shape[1]] = np.where(chance > 0, score, np.nan)
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


def pool_of(has_partner: npt.NDArray[np.floating], left: IntArray | None) -> IntArray:
    """Choose the rows with candidates: one for each of the `left` items, if these are searched."""
    readable = np.flatnonzero(~np.isnan(has_partner))
    if left is not None:
        readable = readable[np.unique(left[readable], return_index=True)[1]]
    flagged = has_partner[readable] < MATCH_THRESHOLD
    chosen = sample(readable[flagged], POOL)
    others = sample(readable[~flagged], POOL - len(chosen))
    return np.sort(np.concatenate([chosen, others]))


def _most_hidden(source: Source) -> int:
    """Largest number of pairs with a hidden partner: each is scored with 27 items."""
    if source.network_score is None:
        return HIDDEN
    return int(np.clip(len(source) // NETWORK_SHARE, NETWORK_HIDDEN, HIDDEN))


def _random_places(rows: IntArray, pool: int) -> IntArray:
    """(n, STRANGERS) places in a pool of this size."""
    drawn = random_keys(rows[:, None] * STRANGERS + np.arange(STRANGERS), 0)
    return (drawn % np.uint64(pool)).astype(np.int64)


@dataclass(frozen=True)
class Candidates:
    """Possible partners of n pairs."""

    places: IntArray  # (n, t) in the pool
    measures: FloatArray  # (n, t, m) of the new pairs
    free: FloatArray  # (n, t) probability that the item has no partner yet; 0 for the items of the pair itself

    @classmethod
    def empty(cls, count: int, tried: int, measures: int) -> Candidates:
        size = count, tried
        return cls(np.zeros(size, dtype=np.int64), np.zeros((*size, measures)), np.zeros(size))

    def put(self, here: IntArray, part: Candidates) -> None:
        for own, given in zip(vars(self).values(), vars(part).values(), strict=True):
            own[here] = given


@dataclass(frozen=True)
class Items:
    """Items of one side in the space of a fold."""

    rows: IntArray  # (n,)
    vectors: Tensor  # (n, D) preprocessed
    units: Tensor  # (n, k) in the space
    rivals: Tensor  # (n,) similarity to their best rivals in the bank


class Search:
    """Search the items of one side for partners of the items of the other side."""

    def __init__(
        self,
        source: Source,
        judge: Judge,
        shared: SharedItems,
        pool: IntArray,
        free: FloatArray,
        *,
        keep_left: bool,
        device: torch.device,
    ) -> None:
        """Take the rows of the candidates, and the probability of an item without a partner, (N,)."""
        self.source, self.judge, self.left, self.pool, self.free = source, judge, shared.left, pool, free
        self.keep_left, self.side, self.device = keep_left, int(keep_left), device  # the replaced side: 0 left, 1 right
        self.vectors = self._vectors(pool, self.side)
        self.rivals = torch.empty(len(pool)).to(self.vectors)  # in the space of their own fold; others hardly differ
        fold = fold_numbers(shared.groups[pool])

        def in_fold(number: int) -> None:
            own = torch.from_numpy(np.flatnonzero(fold == number)).to(device)
            if len(own):
                self.rivals[own] = self._rivals(self._units(self.vectors[own], number, self.side), number, self.side)

        parallel_each(in_fold, range(FOLDS), min(WORKERS, cores()))
        # (P,) loss of contrast by the rivals of each item and by its own partner
        self.taken = torch.from_numpy(WORTH * np.log(free[pool])).to(self.vectors) - self.rivals

    def _vectors(self, rows: IntArray, side: int) -> Tensor:
        vectors = (self.source.left, self.source.right)[side].tensor(rows, self.device)
        return self.judge.transforms[side](vectors)

    def _units(self, vectors: Tensor, number: int, side: int) -> Tensor:
        space = self.judge.spaces[number]
        return (space.compared_left, space.compared_right)[side](vectors)

    def _rivals(self, units: Tensor, number: int, side: int) -> Tensor:
        bank = self.judge.banks[number]
        return rivals(units, (bank.space_right, bank.space_left)[side])

    def items(self, rows: IntArray, number: int, side: int) -> Items:
        """The items of some rows in the space of a fold."""
        vectors = self._vectors(rows, side)
        units = self._units(vectors, number, side)
        return Items(rows, vectors, units, self._rivals(units, number, side))

    def pool_in(self, number: int) -> Items:
        """The items of the pool in the space of a fold."""
        return Items(self.pool, self.vectors, self._units(self.vectors, number, self.side), self.rivals)

    def candidates(self, number: int, kept: Items, pool: Items) -> Candidates:
        """The items of the pool with the largest contrast to items of a fold."""
        scores = torch.addmm(self.taken, kept.units, pool.units.T, alpha=2)
        places = largest(scores, min(TRIED, len(self.pool)))[1].cpu().numpy()
        tried = self.pool[places]
        free = np.where(self.left[tried] == self.left[kept.rows][:, None], 0, self.free[tried])
        return Candidates(places, self.measure(number, kept, pool, places), free)

    def measure(self, number: int, kept: Items, others: Items, places: IntArray) -> FloatArray:
        """(n, t, m) measures of each kept item with the other items at some places (n, t).

        These are contrast, evidence, similarity, and the score of a run's networks.
        """
        needed, partners = np.unique(places, return_inverse=True)
        some = Items(others.rows[needed], others.vectors[needed], others.units[needed], others.rivals[needed])
        which = np.repeat(np.arange(len(places)), places.shape[1])
        (left, lefts), (right, rights) = ((kept, which), (some, partners.reshape(-1)))[:: 1 if self.keep_left else -1]
        a, b = (torch.from_numpy(part).to(left.vectors.device) for part in (lefts, rights))
        space = self.judge.spaces[number]
        known = evidence(space, left.vectors @ space.left, right.vectors @ space.right, a, b)
        measured = with_contrast(left.units, right.units, a, b, known, left.rivals, right.rivals)
        found: FloatArray = measured.double().cpu().numpy()
        if self.source.network_score is not None:
            found = np.column_stack([found, self.source.network_score(left.rows[lefts], right.rows[rights])])
        return found.reshape(*places.shape, -1)


@dataclass(frozen=True)
class Odds:
    """Odds of a candidate to be the missing partner, learned from pairs with a hidden partner."""

    centre: FloatArray  # (m,) mean of each measure over random pairs
    spread: FloatArray  # (m,) its standard deviation
    weights: FloatArray  # (m,) log odds of being the partner for each standard deviation
    fits: FloatArray  # (m + 1,) weights and offset of the log odds that a new pair matches
    strangers: FloatArray  # sorted exponentials of the weighted sums of random pairs
    others: float  # items of the whole pool that have no partner: their expected number

    @classmethod
    def learned(
        cls, known: Candidates, own: FloatArray, strange: FloatArray, free: FloatArray, worth: Scores, others: float
    ) -> Odds:
        """Learn from likely matches.

        Args:
            known: Their candidates, without their own partner.
            own: (n, m) measures of these pairs.
            strange: (n, r, m) measures of their kept items with random ones.
            free: (n,) probability that the hidden partner has no other partner.
            worth: (n,) probability that each of these pairs matches.
            others: As the attribute.
        """
        centre, spread = strange.mean((0, 1)), strange.std((0, 1)) + 1e-9
        mine, theirs, random = ((part - centre) / spread for part in (own, known.measures, strange))
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
        return cls(centre, spread, weights, np.append(slopes, middle), strangers, others)

    def chances(self, candidates: Candidates) -> FloatArray:
        """(n, t) how probable each candidate is by Bayes' rule over the whole pool.

        Items that were not tried are only known to score lower; they count like random items with lower scores. So the
        best of many candidates gets no credit for being the best.
        """
        sums = np.clip(((candidates.measures - self.centre) / self.spread) @ self.weights, -FAR, FAR)
        weight = np.exp(sums)
        below = np.concatenate([[0.0], np.cumsum(self.strangers)]) / len(self.strangers)
        rest = below[np.searchsorted(self.strangers, weight.min(axis=1))] * self.others
        weight = weight * candidates.free
        return np.asarray(weight / (weight.sum(axis=1) + rest + 1e-300)[:, None])

    def wanted(self, candidates: Candidates, several: Mask) -> FloatArray:
        """(P,) expected number of these pairs to get each item; 0 for items with `several` pairs."""
        chance = self.chances(candidates).reshape(-1)
        return np.where(several, 0, np.bincount(candidates.places.reshape(-1), chance, minlength=len(several)))

    def best(self, candidates: Candidates, wanted: FloatArray) -> tuple[IntArray, FloatArray]:
        """(n, KEPT) places of the best candidates, and their chances: 0 if the new pair would be flagged.

        Pairs that want the same item share its chance.
        """
        standard = (candidates.measures - self.centre) / self.spread
        chance = np.where(standard @ self.fits[:-1] + self.fits[-1] >= 0, self.chances(candidates), 0)
        chance = chance / np.maximum(np.where(candidates.places >= 0, wanted[candidates.places], 0), 1)
        best = (-chance).argsort(axis=1, kind="stable")[:, :KEPT]
        return np.take_along_axis(candidates.places, best, axis=1), np.take_along_axis(chance, best, axis=1)


def revealed(known: Candidates, own: FloatArray, free: FloatArray) -> Candidates:
    """Put each hidden partner, at place -1, in the place of the last candidate, if it would have been tried."""
    last = known.measures[:, :, 0].argmin(axis=1)
    tried = np.flatnonzero(own[:, 0] >= known.measures[:, :, 0].min(axis=1))
    together = Candidates(*(part.copy() for part in vars(known).values()))
    for values, given in zip(vars(together).values(), (-1, own[tried], free[tried]), strict=True):
        values[tried, last[tried]] = given
    return together


def calibration(places: IntArray, chance: FloatArray, worth: Scores) -> tuple[float, float]:
    """Slope and offset of the log odds of being the hidden partner, against those of the chance."""
    used = chance > 0
    target = (places < 0)[used].astype(np.float64)
    slope, offset = logistic(_log_odds(chance[used])[:, None], target, np.repeat(worth, used.sum(1)), 1e-3)
    return max(float(slope[0]), 0.0), offset


def conditional_logit(x: FloatArray, prior: FloatArray, worth: Scores) -> FloatArray:
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
