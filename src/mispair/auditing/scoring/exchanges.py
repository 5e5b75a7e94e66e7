"""Find pairs whose partners were exchanged between similar items.

Photos of one event, or products of one kind, are easily given each other's captions. Such a pair looks right by itself:
it is far above a random one. But if pairs i and j were exchanged, both become more similar by exchanging them again, so
with s the cosine in the learned space

    t = s(i, i) + s(j, j) - s(i, j) - s(j, i)

is negative. Encoders confuse look-alikes, so one negative t proves little. Three facts tell how much it proves:

- An exchange turns t into -t, so any odd function of t is a log likelihood ratio of no exchange against one. The audit
  takes slope * tanh(t / SCALE), which no single t can make certain, and learns the slope by a logistic regression
  without an intercept.
- A pair is exchanged with at most one other. The exchanges are a matching in the graph of similar pairs, and belief
  propagation gives the probability of each edge.
- Near neighbours are exchanged more often than far ones, and lose less by it. Each class of nearness has its own odds
  and slope.

Slopes, odds and probabilities are estimated in turns (expectation maximisation). Pairs may be similar by their left
items, their right items or both: the audit takes the graph that explains the t best.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import normalize

from mispair.auditing.scoring.common_space import CommonSpace, moments
from mispair.auditing.scoring.folds import FOLDS, fold_numbers
from mispair.auditing.scoring.judge import Judge
from mispair.auditing.scoring.matchings import Matchings
from mispair.auditing.scoring.shared_items import SharedItems
from mispair.compute.threads import cores, parallel_each, parallel_map
from mispair.functional.eigenvectors import eigh
from mispair.functional.logistic import FloatArray, newton, probability
from mispair.pairs.pairs import MATCH_THRESHOLD, IntArray
from mispair.pairs.source import Source

LEAST, MOST = 500, 1 << 16  # pairs among which exchanges are searched: at least, and at most
CLOSE_BY = 40  # two items are similar if each is among so many nearest ones of the other
CLASSES = 3, 6, 10, 15, 20, 30  # ranks of nearness at which the next class begins
SCALE = 0.2  # of t; larger ones count hardly more
MOST_ROWS = 8  # pairs with the same item; more may be a placeholder
DIRECTIONS = 256  # main directions of the items in which the nearest ones are searched
AT_ONCE = 512  # items at a time
COUPLES = 1 << 14  # couples measured at a time
WORKERS = 4  # at most: each holds all pairs in the space of a fold
LEAST_RATE = 0.02  # share of exchanged pairs; below, it may be encoders that confuse look-alikes
# The log likelihood ratio must be larger than by chance: half the 99 % quantile of chi squared with 14 degrees of
# freedom, for the slopes and odds of all classes. And larger by this for each pair, as a logistic has lighter tails
# than t: of COCO without noise it is -.002 among pairs of similar left or right items, .017 where both are similar.
CHANCE, LEAST_GAINS = 15.0, np.array([0.004, 0.004, 0.03])
ROUNDS, PASSES = 10, 8  # of expectation maximisation, and of belief propagation in each
RIDGE = 1e-3  # L2 penalty on the slope
FIRST_ODDS = 0.03  # of an exchange, before any is estimated
FAR = 25.0  # largest log odds of a couple


@dataclass(frozen=True)
class Exchanges:
    """Which pairs seem to be exchanged with a similar one.

    Attributes:
        chance: (N,) probability that the partner of each pair was exchanged with that of a similar one.
    """

    chance: npt.NDArray[np.float32]

    def lowered(self, score: FloatArray) -> FloatArray:
        """(N,) log odds that each pair matches and is not exchanged, from log odds that it matches by itself.

        Of P = p (1 - q), with p / (1 - p) = e^score.
        """
        q = np.clip(self.chance.astype(np.float64), 0, 1 - 1e-9)
        with np.errstate(divide="ignore"):
            return np.asarray(score + np.log1p(-q) - np.logaddexp(0, np.log(q) + score))


@dataclass(frozen=True)
class Couples:
    """Pairs that may have exchanged their partners: the edges of a graph of n pairs.

    Attributes:
        first: (c,) places of pairs.
        second: (c,) places of pairs that are similar to them.
        nearness: (c,) class of nearness, 0 for the nearest.
    """

    first: IntArray
    second: IntArray
    nearness: IntArray


def find_exchanges(
    source: Source, items: SharedItems, judge: Judge, match: npt.NDArray[np.floating], device: torch.device
) -> Exchanges | None:
    """Search exchanges among pairs that match by themselves.

    Args:
        source: The pairs.
        items: Which rows share items; copies of a pair get what its first row gets.
        judge: What was learned.
        match: (N,) match score of each pair by itself; NaN for rows that cannot be read.
        device: Where to compute.

    Returns:
        None if there are too few or too many pairs, or not clearly more exchanges than encoders confuse.
    """
    rows = np.flatnonzero((np.nan_to_num(match) >= MATCH_THRESHOLD) & items.is_first & (items.partners == 0))
    # A copy of a caption at another photo was not exchanged: that photo has one as well.
    shared = [np.bincount(own[rows], minlength=len(match))[own[rows]] > 1 for own in (items.left, items.right)]
    rows = rows[~(shared[0] & shared[1])]
    if not LEAST <= len(rows) <= MOST:
        return None
    x, y = (transform(side) for transform, side in zip(judge.transforms, source.tensors(rows, device), strict=True))
    groups, fold = items.groups[rows], fold_numbers(items.groups[rows])
    chances, gains = [], []
    for vectors, owners in ((x, items.left[rows]), (y, items.right[rows]), (torch.cat([x, y], dim=1), rows)):
        couples = similar_pairs(vectors, owners, groups)
        if couples is None:
            return None
        chance, gain = exchange_probability(lost_by_exchange(judge.spaces, x, y, fold, couples), couples, len(rows))
        chances.append(chance)
        gains.append(gain if chance.mean() >= LEAST_RATE else -np.inf)
    above = np.array(gains) - CHANCE - LEAST_GAINS * len(rows)
    best = int(above.argmax())
    if above[best] <= 0:
        return None
    found = np.zeros(len(match), dtype=np.float32)
    # Some may be exchanged between similar left items and others between similar right ones.
    found[rows] = chances[2] if best == 2 else 1 - np.prod(1 - np.array(chances)[:2][above[:2] > 0], axis=0)
    return Exchanges(np.where(items.partners == 0, found[items.first], 0))


def similar_pairs(vectors: Tensor, owners: IntArray, groups: IntArray) -> Couples | None:
    """Couples of pairs of which each has one of the nearest items of the other; None if there are too few items.

    Args:
        vectors: (n, D) the item of each pair.
        owners: (n,) pairs with the same number have the same item.
        groups: (n,) pairs of one group are never a couple.
    """
    _, first, item = np.unique(owners, return_index=True, return_inverse=True)
    near = nearest(vectors[torch.from_numpy(first).to(vectors.device)], groups[first])
    if near is None:
        return None
    one, other, rank = mutual(near)
    sizes = np.bincount(item)
    few = (sizes[one] <= MOST_ROWS) & (sizes[other] <= MOST_ROWS)
    one, other, rank = one[few], other[few], rank[few]
    # All pairs with one item and all with the other.
    starts, by_item = np.cumsum(sizes) - sizes, np.argsort(item, kind="stable")
    each = sizes[one] * sizes[other]
    edge = np.repeat(np.arange(len(one)), each)
    place = np.arange(len(edge)) - np.repeat(np.cumsum(each) - each, each)
    a = by_item[starts[one[edge]] + place // sizes[other[edge]]]
    b = by_item[starts[other[edge]] + place % sizes[other[edge]]]
    return Couples(a, b, np.searchsorted(CLASSES, rank[edge], side="right"))


def nearest(x: Tensor, groups: IntArray) -> IntArray | None:
    """(n, CLOSE_BY) places of the nearest items of other groups, of n items (n, D); None if there are too few."""
    if len(np.unique(groups)) <= CLOSE_BY or np.bincount(groups - groups.min()).max() > len(groups) - CLOSE_BY:
        return None
    directions = eigh(moments(x))[1][:, -DIRECTIONS:].to(x)
    items, own = normalize(x @ directions, dim=1), torch.from_numpy(groups).to(x.device)

    def search(start: int) -> IntArray:
        here = slice(start, start + AT_ONCE)
        alike = (items[here] @ items.T).masked_fill_(own[here, None] == own, -torch.inf)
        return np.asarray(alike.topk(CLOSE_BY, dim=1).indices.cpu().numpy())

    return np.concatenate(list(parallel_map(search, range(0, len(x), AT_ONCE), cores(WORKERS))))


def mutual(near: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Items that are among each other's nearest ones, once each: both places, and the higher of both ranks.

    Args:
        near: (n, c) places of the nearest items of each, the nearest first.
    """
    n, count = near.shape
    own, other, rank = np.repeat(np.arange(n), count), near.reshape(-1), np.tile(np.arange(count), n)
    couple, number, times = np.unique(
        np.minimum(own, other) * n + np.maximum(own, other), return_inverse=True, return_counts=True
    )
    highest = np.zeros(len(couple), dtype=np.int64)
    np.maximum.at(highest, number, rank)
    both = times == 2
    return couple[both] // n, couple[both] % n, highest[both]


def lost_by_exchange(
    spaces: list[CommonSpace], x: Tensor, y: Tensor, fold: npt.NDArray[np.uint8], couples: Couples
) -> FloatArray:
    """(c,) t of each couple: the mean by the two spaces that were fitted without either pair.

    Args:
        spaces: The space of each fold.
        x: (n, D) left items.
        y: (n, E) right items.
        fold: (n,) fold of each pair.
        couples: The couples.
    """
    found = np.zeros((2, len(couples.first)))

    def measure(number: int) -> None:
        a, b = spaces[number].compared_left(x), spaces[number].compared_right(y)
        own = (a * b).sum(1)
        for end, side in enumerate((couples.first, couples.second)):
            here = np.flatnonzero(fold[side] == number)
            for start in range(0, len(here), COUPLES):
                part = here[start : start + COUPLES]
                i, j = (torch.from_numpy(places[part]).to(x.device) for places in (couples.first, couples.second))
                t = own[i] + own[j] - (a[i] * b[j]).sum(1) - (a[j] * b[i]).sum(1)
                found[end, part] = t.double().cpu().numpy()

    parallel_each(measure, range(FOLDS), cores(WORKERS))
    return np.asarray(found.mean(0))


def exchange_probability(t: FloatArray, couples: Couples, pairs: int) -> tuple[FloatArray, float]:
    """(n,) probability that each pair is exchanged, and the log likelihood ratio of these exchanges against none.

    Args:
        t: (c,) what each couple loses by an exchange.
        couples: The couples.
        pairs: n.
    """
    t = np.tanh(t / SCALE)
    classes, kind = len(CLASSES) + 1, couples.nearness
    own = [kind == number for number in range(classes)]

    def ratio(kept: FloatArray, exchanged: FloatArray) -> FloatArray:
        """How much more likely each t is after an exchange than without: nearer pairs have smaller t."""
        slopes = np.array([symmetric_slope(t[here], kept[here], exchanged[here]) for here in own])
        return np.exp(np.clip(-slopes[kind] * t, -FAR, FAR))

    odds, likely = np.full(classes, FIRST_ODDS), ratio(np.ones_like(t), np.zeros_like(t))
    exchanges = Matchings(couples.first, couples.second, pairs)
    for _ in range(ROUNDS):
        exchanges.update(odds[kind] * likely, PASSES)
        neither = exchanges.single[couples.first] * exchanges.single[couples.second]
        chosen, free = (np.bincount(kind, part, minlength=classes) for part in (exchanges.chosen, neither))
        odds = np.clip((chosen + 0.01) / (free + 1), 1e-5, 1)
        likely = ratio(neither, exchanges.chosen)
    exchanges.update(odds[kind] * likely, PASSES)
    expected = Matchings(couples.first, couples.second, pairs)
    expected.update(odds[kind], ROUNDS * PASSES)
    return 1 - exchanges.single, exchanges.log_partition - expected.log_partition


def symmetric_slope(t: FloatArray, kept: FloatArray, exchanged: FloatArray) -> float:
    """Slope of the log odds that a couple is not exchanged, without an intercept.

    Args:
        t: (c,) what each couple loses by an exchange.
        kept: (c,) probability that neither pair is exchanged.
        exchanged: (c,) probability that both are, with each other; these have -t, before the exchange.
    """
    worth = kept + exchanged

    def loss(slope: FloatArray) -> float:
        z = slope * t
        return float(worth @ np.logaddexp(0, z) - kept @ z + 0.5 * slope @ slope * RIDGE)

    def derivatives(slope: FloatArray) -> tuple[FloatArray, FloatArray]:
        p = probability(slope * t)
        gradient = (worth * p - kept) @ t + RIDGE * slope[0]
        return np.array([gradient]), np.array([[(worth * p * (1 - p)) @ np.square(t) + RIDGE]])

    return max(float(newton(np.zeros(1), loss, derivatives)[0]), 0.0)
