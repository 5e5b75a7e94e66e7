"""Find exchanges of partners between similar items.

Photos of one event, or products of one kind, are easily given each other's captions. Such a pair looks right by itself,
because it scores far above a random pair. But if pairs i and j were exchanged, both become more similar by exchanging
them again, so with s the cosine in the learned space

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
items, their right items or both: the audit takes the graph that explains the t best. If it explains them hardly better
than chance, its exchanges get a small probability: enough to put these pairs behind others, too little to flag them.

To know which exchanges it would find, the audit makes some itself, among pairs that seem to match, and scores them like
all others (trials).
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from itertools import chain
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import normalize

from mispair.auditing.scoring.common_space import CommonSpace, moments
from mispair.auditing.scoring.folds import FOLDS, fold_numbers
from mispair.auditing.scoring.judge import Judge
from mispair.auditing.scoring.measures import largest
from mispair.auditing.scoring.shared_items import SharedItems
from mispair.compute.threads import parallel_each, parallel_map
from mispair.functional.eigenvectors import eigh
from mispair.functional.logistic import FloatArray, probability
from mispair.pairs.pairs import MATCH_THRESHOLD
from mispair.pairs.source import Source
from mispair.support.arrays import IntArray
from mispair.support.cores import cores
from mispair.support.progress import tracked

BY = ["left", "right", "both"]  # by which items pairs are similar
LEAST, MOST = 500, 1 << 16  # pairs among which exchanges are searched: at least, and at most
CLOSE_BY = 40  # two items are similar if each is among so many nearest ones of the other
CLASSES = 3, 6, 10, 15, 20, 30  # ranks of nearness at which the next class begins
SCALE = 0.2  # of t; larger ones count hardly more
MOST_ROWS = 8  # pairs with the same item; more may be a placeholder
# Of what a space that has seen both pairs of a couple adds to t, beyond one that has seen one of them: what the latter
# adds beyond one that has seen neither. Measured: .94 to .89 in Flickr8k, .90 to .89 in MS-COCO.
REMEMBERED = 0.9
# Main directions of the items in which the nearest ones are searched: so many, or more for this share of the variance.
# Of word counts 256 hold .69, and a quarter of the exchanges between similar captions was not among the candidates.
DIRECTIONS, HELD = 256, 0.95
AT_ONCE = 256  # items at a time
# Of many items on a CPU, each is compared with those of the nearest cells alone.
PER_CELL, CELLS_SEARCHED, SEEN_PER_CELL, MOVES = 256, 64, 32, 6
COUPLES = 512  # couples measured at a time, so that their items stay in the processor's cache
WORKERS = 4  # at most: each holds all pairs in the space of a fold
LEAST_RATE = 0.02  # share of exchanged pairs; below, it may be encoders that confuse look-alikes
# The log likelihood ratio must be larger than by chance: half the 99 % quantile of chi squared with 14 degrees of
# freedom, for the slopes and odds of all classes. It must also grow by this for each pair, because a logistic has
# lighter tails than t. On COCO with random mismatches alone it grows by up to .007 among pairs of similar left or right
# items. Where both are similar it grows by up to .017, so it must be larger still there, unless many pairs prove that
# the nearest couples have the lowest t. Exchanges of a tenth of 7,000 pairs give .011 to .05.
CHANCE, LEAST_GAIN, LEAST_DOUBTFUL = 15.0, 0.008, 0.03
UNPROVED = 0.01  # probability that there are exchanges which are not proved: it changes hardly more than the order
MANY = 5000  # fewer prove nothing: of 2,000 matched pairs beside 30 % random ones, both held and the gain was .018
# More of the t of the two nearest classes are below the lowest 1 % of the t of the farthest class, so many times and so
# many standard errors. In COCO, 7,000 pairs and more: .7 to 1.1 without exchanges, 1.4 with 20 %, 1.9 with 40 %.
LOWEST, NEAREST, TIMES, SURE = 0.01, 1, 1.25, 5.0
TRIALS = 800  # pairs that are exchanged on purpose, of each kind; at most 1 / RARE of all pairs ...
RARE, REPEATED = 20, 4  # ... at a time, and so many times
ALIKE = {"similar": 10, "most_similar": 3}  # items are among so many nearest ones of each other, by kind of trial
SETTLED = 16  # passes of belief propagation after which a trial is settled
ROUNDS, PASSES = 10, 8  # of expectation maximisation, and of belief propagation in each
RIDGE, STEPS = 1e-3, 50  # L2 penalty on the slopes, and steps of Newton's method
FIRST_ODDS = 0.03  # of an exchange, before any is estimated
FAR = 25.0  # largest log odds of a couple
DAMPING = 0.5  # share of the last messages that is kept, so that they settle in graphs with circles
UNCHANGED = 1e-9  # change of messages and slopes below which they stay as they are
LEVELS = 1024  # of t, each with one mean, when slopes are learned


def lowered(score: FloatArray, chance: npt.NDArray[np.floating]) -> FloatArray:
    """Log odds of P = p (1 - q), with p / (1 - p) = e^score and q the chance of an exchange."""
    q = np.clip(chance.astype(np.float64), 0, 1 - 1e-9)
    with np.errstate(divide="ignore"):
        return np.asarray(score + np.log1p(-q) - np.logaddexp(0, np.log(q) + score))


@dataclass(frozen=True)
class Trial:
    """Pairs with partners exchanged on purpose."""

    by: str  # what was similar: "left", "right" or "both"
    kind: str  # how similar, as in `ALIKE`
    couples: IntArray  # (k, 2) rows a and b
    # (k, 2) weighted sums of the measures of a's left item with b's right item, and of b's left with a's right
    sums: FloatArray
    chance: FloatArray  # (k, 2) probability that these are exchanged, as the audit sees it


@dataclass(frozen=True)
class Couples:
    """Possible exchanges between pairs: the edges of a graph of n pairs."""

    ends: IntArray  # (2, c) places of both pairs
    nearness: IntArray  # (c,) class of nearness, 0 for the nearest


class Matchings:
    """Belief propagation over the matchings of a graph; exact if the graph is a tree.

    A node has at most one edge, and an edge multiplies the probability of a matching by its weight. A message to an
    edge is the probability that its node has no other edge.

    Attributes:
        single: (n,) probability that each node has no edge.
        chosen: (e,) probability of each edge.
        log_partition: Bethe's approximation of the logarithm of the sum over all matchings.
    """

    def __init__(self, ends: IntArray, nodes: int) -> None:
        self._ends, self._nodes, self._free = ends, nodes, np.ones(ends.shape)
        self.single, self.chosen, self.log_partition = np.ones(nodes), np.zeros(ends.shape[1]), 0.0

    def update(self, weight: FloatArray, passes: int) -> Self:
        """Pass messages with these weights (e,), starting from the last ones."""
        for _ in range(passes):
            parts, total = self._sums(weight)
            last = self._free
            self._free = DAMPING * last + (1 - DAMPING) / (1 + np.maximum(total[self._ends] - parts, 0))
            if np.abs(self._free - last).max(initial=0) < UNCHANGED:
                break
        total, both = self._sums(weight)[1], weight * self._free.prod(axis=0)
        self.single, self.chosen = 1 / (1 + total), both / (1 + both)
        self.log_partition = float(np.log1p(total).sum() - np.log1p(both).sum())
        return self

    def _sums(self, weight: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Contribution of each edge to the odds of either end (2, e), and their sum for each node (n,)."""
        parts = weight * self._free[::-1]
        total = np.bincount(self._ends.reshape(-1), parts.reshape(-1), self._nodes)
        return parts, np.asarray(total, dtype=np.float64)


@dataclass(frozen=True)
class Evidence:
    """Odds of an exchange, and how they depend on t."""

    odds: FloatArray  # (classes,) of an exchange of two pairs, by their nearness, before t is known
    slopes: FloatArray  # (classes,) of the log odds that a couple is not exchanged

    def weights(self, t: FloatArray, nearness: IntArray) -> FloatArray:
        """(c,) odds of an exchange for each couple, ignoring other couples."""
        log_ratio = -self.slopes[nearness] * np.tanh(t / SCALE)
        return np.asarray(self.odds[nearness] * np.exp(np.clip(log_ratio, -FAR, FAR)))


@dataclass(frozen=True)
class Graph:
    """Pairs with similar left items, similar right items or both."""

    by: str  # which
    couples: Couples  # mutually similar pairs
    t: FloatArray  # (c,) what each couple loses by an exchange, in the spaces of its two folds
    evidence: Evidence  # what t says here
    matchings: Matchings  # which pairs are exchanged
    ratio: float  # log likelihood ratio of these exchanges against none
    above: float  # the same, above what can be chance; minus infinity if they are too few
    possible: bool  # whether there may be exchanges that are not proved


def search_exchanges(
    source: Source, items: SharedItems, judge: Judge, match: npt.NDArray[np.floating], device: torch.device
) -> tuple[npt.NDArray[np.float32] | None, list[Trial]]:
    """Search exchanges among pairs with a high match score, and make some on purpose to test the search.

    Copies of a pair get the value of its first row. Too few or too many pairs are not searched.

    Args:
        source: The pairs.
        items: Which rows share items.
        judge: What was learned.
        match: (N,) match score of each pair by itself; NaN for rows that cannot be read.
        device: Where to compute.

    Returns:
        (N,) probability that the partner of each pair was exchanged, or None if nothing speaks for it; and the trials.
        If there are not clearly more exchanges than encoders confuse, no probability is above `UNPROVED`.
    """
    rows = np.flatnonzero((np.nan_to_num(match) >= MATCH_THRESHOLD) & items.is_first & (items.partners == 0))
    # A copy of a caption at another photo was not exchanged: that photo has one as well.
    shared = [np.bincount(own[rows], minlength=len(match))[own[rows]] > 1 for own in (items.left, items.right)]
    rows = rows[~(shared[0] & shared[1])]
    if not LEAST <= len(rows) <= MOST:
        return None, []
    raw = source.tensors(rows, device)
    x, y = (transform(side) for transform, side in zip(judge.transforms, raw, strict=True))
    groups, fold = items.groups[rows], fold_numbers(items.groups[rows])
    main = along_main_directions(x), along_main_directions(y)
    sides = (main[0], items.left[rows]), (main[1], items.right[rows]), (along_main_directions(torch.cat(main, 1)), rows)
    alike = [similar_pairs(vectors, owners, groups) for vectors, owners in sides]
    similar = [couples for couples in alike if couples is not None]
    if len(similar) < len(alike):
        return None, []
    t = lost_in_graphs(judge.spaces, x, y, fold, similar)
    found = parallel_map(lambda of: _graph(*of, len(rows)), zip(BY, similar, t, strict=True))
    graphs = [next(found) for _ in tracked(BY)]
    used, belief = _believed(graphs)
    memory = [remembered(judge.spaces, x, y, fold, graph) for graph in used]
    trials = Trials(judge, raw, (x, y), rows, fold, used, memory, belief)
    # The networks of a run cannot be asked about new pairs.
    made = [] if judge.networks else list(chain.from_iterable(parallel_map(trials.of, graphs)))
    if not used:
        return None, made
    chance = np.zeros(len(match), dtype=np.float32)
    chance[rows] = belief * (1 - np.prod([graph.matchings.single for graph in used], axis=0))
    return np.where(items.partners == 0, chance[items.first], 0), made


def lost_in_graphs(
    spaces: list[CommonSpace], x: Tensor, y: Tensor, fold: npt.NDArray[np.uint8], several: list[Couples]
) -> list[FloatArray]:
    """t of the couples of several graphs, (c,) each; a couple that is in several is measured once."""
    n, stops = len(fold), np.cumsum([len(one.nearness) for one in several])[:-1]
    keys, place = np.unique(np.concatenate([one.ends[0] * n + one.ends[1] for one in several]), return_inverse=True)
    couples = np.stack([keys // n, keys % n])
    return np.split(lost_by_exchange(spaces, x, y, couples, fold[couples])[place], stops)


def remembered(
    spaces: list[CommonSpace], x: Tensor, y: Tensor, fold: npt.NDArray[np.uint8], graph: Graph
) -> FloatArray:
    """(c,) how much of t is due to the pair of each couple that a space has seen, by a space that has seen both."""
    ends = graph.couples.ends
    third = np.argmin([(fold[ends] == number).any(axis=0) for number in range(3)], axis=0)
    return REMEMBERED * (lost_by_exchange(spaces, x, y, ends, third[None]) - graph.t)


def _graph(by: str, couples: Couples, t: FloatArray, pairs: int) -> Graph:
    evidence, matchings, ratio = learn_exchanges(t, couples, pairs)
    doubtful = by == "both" and not (pairs >= MANY and nearest_are_lowest(t, couples.nearness))
    least = CHANCE + (LEAST_DOUBTFUL if doubtful else LEAST_GAIN) * pairs
    enough = 1 - matchings.single.mean() >= LEAST_RATE
    possible = by != "both" or nearest_are_lowest(t, couples.nearness, times=1, errors=0)
    return Graph(by, couples, t, evidence, matchings, ratio, ratio - least if enough else -np.inf, possible)


def _believed(graphs: list[Graph]) -> tuple[list[Graph], float]:
    """Graphs by which pairs seem exchanged, and the probability that any are."""
    best = max(graphs, key=lambda graph: graph.above)
    # Some may be exchanged between similar left items and others between similar right ones.
    used = [graph for graph in (graphs[:2] if best is not graphs[2] else graphs[2:]) if graph.above > 0]
    if used:
        return used, 1.0
    likely = max((graph for graph in graphs if graph.possible), key=lambda graph: graph.ratio)
    return ([likely], UNPROVED) if likely.ratio > 0 else ([], 0.0)


def nearest_are_lowest(t: FloatArray, nearness: IntArray, times: float = TIMES, errors: float = SURE) -> bool:
    """Whether the lowest t (c,) are clearly more often of the nearest couples than of far ones.

    So many times as often, and more often by so many standard errors.

    Encoders confuse look-alikes of any nearness, and t is smaller between nearer ones: in large data without exchanges
    the lowest t are of far couples. Exchanges are made among the nearest.
    """
    near, far = t[nearness <= NEAREST], t[nearness == len(CLASSES)]
    if not len(near) or not len(far):
        return False
    share = float((near < np.quantile(far, LOWEST)).mean())
    error = float(np.sqrt((1 / len(near) + 1 / len(far)) / LOWEST))
    return share > LOWEST * max(times, 1 + errors * error)


@dataclass(frozen=True)
class Trials:
    """Exchanges pairs on purpose, and scores them like all others."""

    judge: Judge
    raw: tuple[Tensor, Tensor]  # the vectors of all pairs, (n, D) and (n, E), ...
    sides: tuple[Tensor, Tensor]  # ... and preprocessed
    rows: IntArray  # (n,)
    fold: npt.NDArray[np.uint8]  # (n,)
    used: list[Graph]  # in which exchanges are believed
    memory: list[FloatArray]  # (c,) for each of these, see `remembered`
    belief: float  # how much

    def of(self, graph: Graph) -> list[Trial]:
        """Exchange partners in a graph, once for each kind of nearness."""
        rng, found = np.random.default_rng(0), []
        for kind, most in ALIKE.items():
            alike = graph.couples.ends[:, graph.couples.nearness <= CLASSES.index(most)]
            likely = self.likely(alike)
            drawn = [self.drawn(alike, likely, rng) for _ in range(REPEATED)]
            couples, chance = np.concatenate(drawn), np.concatenate([self.chance(part) for part in drawn])
            found.append(Trial(graph.by, kind, self.rows[couples], self.sums(couples), chance))
        return found

    def likely(self, alike: IntArray) -> FloatArray:
        """(c,) how likely each couple (2, c) is drawn: a random pair, and a random one of those like it.

        Pairs that are likely exchanged already are drawn rarely.
        """
        friends = np.bincount(alike.reshape(-1), minlength=len(self.fold))
        likely = (1 / friends[alike]).sum(axis=0)
        for graph in self.used:
            likely *= graph.matchings.single[alike].prod(axis=0)
        return np.asarray(np.maximum(likely, 1e-12))

    def drawn(self, alike: IntArray, likely: FloatArray, rng: np.random.Generator) -> IntArray:
        """(k, 2) disjoint couples."""
        most = max(min(TRIALS // REPEATED, len(self.fold) // RARE) // 2, 1)
        order = (rng.exponential(size=len(likely)) / likely).argsort()
        taken: set[int] = set()
        found: list[tuple[int, int]] = []
        for couple in zip(*alike[:, order], strict=True):
            if taken.isdisjoint(couple):
                taken.update(couple)
                found.append(couple)
            if len(found) == most:
                break
        return np.array(found, dtype=np.int64).reshape(-1, 2)

    def sums(self, couples: IntArray) -> FloatArray:
        """(k, 2) weighted sums of the measures of the new pairs, each by itself, by the fold of its left item."""
        found = np.empty(couples.shape)
        for end, other in ((0, 1), (1, 0)):
            lefts, rights = couples[:, end], couples[:, other]
            measured = self.judge.measure(self.raw[0][lefts], self.raw[1][rights], self.fold[lefts])
            found[:, end] = self.judge.combination.sums(measured)
        return found

    def chance(self, couples: IntArray) -> FloatArray:
        """(k, 2) probability of an exchange of the new pairs, as the audit sees it."""
        kept = np.ones(couples.shape)
        exchanged, changed = np.arange(len(self.fold)), np.zeros(len(self.fold), dtype=bool)
        exchanged[couples], changed[couples] = couples[:, ::-1], True
        x, y = self.sides
        there = torch.from_numpy(exchanged).to(x.device)
        for graph, memory in zip(self.used, self.memory, strict=True):
            # A pair of the graph keeps the item by which it is similar to others.
            by_right = graph.by == "right"
            sides = (x[there], y) if by_right else (x, y[there])
            touched = np.flatnonzero(changed[graph.couples.ends].any(axis=0))
            t, near = graph.t.copy(), graph.couples.ends[:, touched]
            # Either space of a couple has seen one pair, as it was; that of an audit remembers the new one.
            forgotten = changed[near].sum(axis=0) / 2 * (1 + (exchanged[near[0]] == near[1]))
            t[touched] = lost_by_exchange(self.judge.spaces, *sides, near, self.fold[near])
            t[touched] += forgotten * memory[touched]
            matchings = copy(graph.matchings).update(graph.evidence.weights(t, graph.couples.nearness), SETTLED)
            kept *= matchings.single[couples[:, ::-1] if by_right else couples]
        return self.belief * (1 - kept)


def similar_pairs(vectors: Tensor, owners: IntArray, groups: IntArray) -> Couples | None:
    """Couples of pairs, each with one of the nearest items of the other; None if there are too few items.

    Args:
        vectors: (n, D) the item of each pair.
        owners: (n,) number of this item.
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
    return Couples(np.stack([a, b]), np.searchsorted(CLASSES, rank[edge], side="right"))


def along_main_directions(x: Tensor) -> Tensor:
    """(n, d) items (n, D) along their main directions, of unit length."""
    if x.shape[1] > DIRECTIONS:
        variance, directions = eigh(moments(x))
        held = variance.flip(0).cumsum(0) / variance.sum()
        most = max(DIRECTIONS, int((held < HELD).sum()) + 1)
        x = x @ directions[:, -most:].to(x)
    return normalize(x, dim=1)


def nearest(items: Tensor, groups: IntArray) -> IntArray | None:
    """(n, CLOSE_BY) places of the nearest items of other groups, of n items (n, D); None if there are too few."""
    n, (_, number) = len(items), np.unique(groups, return_inverse=True)
    most_alike = np.bincount(number).max()
    if number.max() < CLOSE_BY or most_alike > n - CLOSE_BY:
        return None
    own = torch.from_numpy(number.astype(np.int32)).to(items.device)
    everything, near = torch.arange(n, device=items.device), np.empty((n, CLOSE_BY), dtype=np.int64)

    def search(rows: Tensor, among: Tensor) -> None:
        others, of_others = (items, own) if among is everything else (items[among], own[among])
        for part in torch.split(rows, AT_ONCE):
            alike = (items[part] @ others.T).masked_fill_(own[part, None] == of_others, -torch.inf)
            near[part.cpu()] = among[largest(alike, CLOSE_BY)[1]].cpu()

    few = n <= CELLS_SEARCHED * PER_CELL or most_alike > PER_CELL
    if few or items.device.type != "cpu":
        parallel_each(lambda rows: search(rows, everything), torch.split(everything, AT_ONCE))
    else:
        parallel_each(lambda cell: search(*cell), cells(items))
    return near


def cells(items: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the places of the items (n, D) of each cell, and those of the nearest cells, itself among them.

    Cells are found by k-means among unit vectors.
    """
    count, generator = len(items) // PER_CELL, torch.Generator().manual_seed(0)
    seen = items[torch.randperm(len(items), generator=generator)[: SEEN_PER_CELL * count]]
    centres = seen[:count]
    for _ in range(MOVES):
        cell = (seen @ centres.T).argmax(dim=1)
        centres = normalize(torch.zeros_like(centres).index_add_(0, cell, seen), dim=1)
    cell = torch.cat([(part @ centres.T).argmax(dim=1) for part in torch.split(items, 1 << 14)])
    members = torch.split(cell.argsort(stable=True), cell.bincount(minlength=count).tolist())
    for own, near in zip(members, (centres @ centres.T).topk(CELLS_SEARCHED).indices.tolist(), strict=True):
        if len(own):
            yield own, torch.cat([members[number] for number in near])


def mutual(near: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Items among each other's nearest (n, c), once each: both places, and the higher of both ranks."""
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
    spaces: list[CommonSpace], x: Tensor, y: Tensor, couples: IntArray, chosen: npt.NDArray[np.integer]
) -> FloatArray:
    """(c,) t of couples (2, c) of items (n, D) and (n, E): the mean over the spaces with numbers `chosen` (m, c)."""
    found = np.zeros(chosen.shape)

    def measure(number: int) -> None:
        own, places = np.nonzero(chosen == number)
        needed, where = np.unique(couples[:, places], return_inverse=True)
        rows, (i, j) = torch.from_numpy(needed).to(x.device), torch.from_numpy(where.reshape(2, -1)).to(x.device)
        a, b = spaces[number].compared_left(x[rows]), spaces[number].compared_right(y[rows])
        for start in range(0, len(places), COUPLES):
            here = slice(start, start + COUPLES)
            apart = [side.index_select(0, i[here]).sub_(side.index_select(0, j[here])) for side in (a, b)]
            t = apart[0].mul_(apart[1]).sum(1)  # (a_i - a_j)' (b_i - b_j)
            found[own[here], places[here]] = t.double().cpu().numpy()

    parallel_each(measure, range(FOLDS), min(WORKERS, cores()))
    return np.asarray(found.mean(axis=0))


def learn_exchanges(t: FloatArray, couples: Couples, pairs: int) -> tuple[Evidence, Matchings, float]:
    """Learn from t (c,) the evidence, the exchanges, and their log likelihood ratio against none.

    By expectation maximisation.
    """
    classes, kind, bounded = len(CLASSES) + 1, couples.nearness, np.tanh(t / SCALE)
    level = kind * LEVELS + np.minimum((bounded + 1) / 2 * LEVELS, LEVELS - 1).astype(np.int64)

    def by_level(values: FloatArray) -> FloatArray:
        return np.asarray(np.bincount(level, values, classes * LEVELS).reshape(classes, LEVELS), dtype=np.float64)

    mean_t = by_level(bounded) / np.maximum(by_level(np.ones_like(t)), 1)

    none = np.zeros_like(mean_t)
    evidence = Evidence(np.full(classes, FIRST_ODDS), symmetric_slopes(mean_t, by_level(np.ones_like(t)), none))
    exchanges = Matchings(couples.ends, pairs)
    for _ in range(ROUNDS):
        exchanges.update(evidence.weights(t, kind), PASSES)
        neither = exchanges.single[couples.ends].prod(axis=0)
        chosen, free = (np.bincount(kind, part, minlength=classes) for part in (exchanges.chosen, neither))
        odds = np.clip((chosen + 0.01) / (free + 1), 1e-5, 1)
        # nearer pairs have smaller t
        evidence = Evidence(odds, symmetric_slopes(mean_t, by_level(neither), by_level(exchanges.chosen)))
    exchanges.update(evidence.weights(t, kind), PASSES)
    expected = Matchings(couples.ends, pairs).update(evidence.odds[kind], ROUNDS * PASSES)
    return evidence, exchanges, exchanges.log_partition - expected.log_partition


def symmetric_slopes(t: FloatArray, kept: FloatArray, exchanged: FloatArray) -> FloatArray:
    """Slopes (k,) of the log odds against an exchange, without an intercept, of k classes of couples.

    By Newton's method, which rises from 0 to the maximum: the likelihood curves the less, the farther from 0.

    Args:
        t: (k, c) loss of each couple by an exchange.
        kept: (k, c) probability that neither pair is exchanged.
        exchanged: (k, c) probability that both are, with each other; these have -t, before the exchange.
    """
    worth, slopes = kept + exchanged, np.zeros(len(t))
    for _ in range(STEPS):
        p = probability(slopes[:, None] * t)
        gradient = ((kept - worth * p) * t).sum(1) - RIDGE * slopes
        step = gradient / ((worth * p * (1 - p) * t * t).sum(1) + RIDGE)
        slopes = np.maximum(slopes + step, 0)
        if np.abs(step).max() < UNCHANGED:
            break
    return slopes
