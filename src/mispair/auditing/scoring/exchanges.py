"""Pairs of similar left items whose partners seem to be exchanged.

Photos of one event, or products of one kind, are easily given each other's captions. Such a pair looks right by itself:
it is far above a random one. But if pairs i and j were exchanged, both become more similar by exchanging them again, so
with s the cosine in the learned space

    t = min over j of s(i, i) + s(j, j) - s(i, j) - s(j, i)

is low, where j are the pairs whose left items are the nearest to that of i. Encoders confuse look-alikes as well, so a
low t alone proves nothing. How low it is after an exchange is known from exchanges on purpose. As the noise rate is the
share of pairs that are like shuffled ones, the exchange rate is the share of pairs that are like exchanged ones, and it
gives the probability of an exchange for each pair.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import normalize

from mispair.auditing.scoring.calibration import noise_interval, noise_rate
from mispair.auditing.scoring.common_space import moments
from mispair.auditing.scoring.folds import FOLDS, NEAR, fold_numbers, random_keys
from mispair.auditing.scoring.judge import Judge
from mispair.auditing.scoring.shared_items import SharedItems
from mispair.compute.threads import cores, parallel_each, parallel_map
from mispair.functional.eigenvectors import eigh
from mispair.functional.logistic import FloatArray, logistic
from mispair.pairs.pairs import MATCH_THRESHOLD, IntArray
from mispair.pairs.source import Source

LEAST, MOST = 500, 1 << 15  # pairs among which exchanges are searched: at least, and at most
CLOSE_BY = 20  # nearest left items with which partners may be exchanged, ...
NEAREST = 5  # ... and with which they are on purpose: a careful choice, as farther ones are easier to notice
DIRECTIONS = 64  # main directions of the left items in which the nearest ones are searched
AT_ONCE = 512  # pairs at a time
WORKERS = 4  # at most: each holds all pairs in the space of a fold
LEAST_RATE = 0.05  # share of exchanged pairs; below, it may be encoders that confuse look-alikes
ROUNDS = 20  # of fitting the curve and estimating again which pairs are exchanged
FAR = 30.0  # largest log odds


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


def find_exchanges(
    source: Source, items: SharedItems, judge: Judge, match: npt.NDArray[np.floating], device: torch.device
) -> Exchanges | None:
    """Searches exchanges among pairs that match by themselves.

    Args:
        source: The pairs.
        items: Which rows share items; copies of a pair get what its first row gets.
        judge: What was learned.
        match: (N,) match score of each pair by itself; NaN for rows that cannot be read.
        device: Where to compute.

    Returns:
        None if there are too few or too many pairs, or not clearly more that look exchanged than encoders confuse.
    """
    rows = np.flatnonzero((np.nan_to_num(match) >= MATCH_THRESHOLD) & items.is_first & (items.partners == 0))
    if not LEAST <= len(rows) <= MOST:
        return None
    x, y = (transform(side) for transform, side in zip(judge.transforms, source.tensors(rows, device), strict=True))
    near = nearest(x, items.groups[rows])
    if near is None:
        return None
    fold = fold_numbers(items.groups[rows])
    found = np.zeros((2, len(rows)))

    def compare(number: int) -> None:
        space, own = judge.spaces[number], np.flatnonzero(fold == number)
        a, b = space.compared_left(x), space.compared_right(y)
        for start in range(0, len(own), AT_ONCE):
            here = own[start : start + AT_ONCE]
            found[:, here] = losses(a, b, here, near[here], _picks(rows[here]))

    parallel_each(compare, range(FOLDS), cores(WORKERS))
    observed, exchanged = found
    low, _ = noise_interval(observed, exchanged)
    if low < LEAST_RATE:
        return None
    rate = noise_rate(observed, exchanged)
    chance = np.zeros(len(match), dtype=np.float32)
    chance[rows] = exchange_probability(observed, exchanged, rate)
    return Exchanges(np.where(items.partners == 0, chance[items.first], 0))


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


def _picks(rows: IntArray) -> IntArray:
    return (random_keys(rows, NEAR) % np.uint64(NEAREST)).astype(np.int64)


def losses(a: Tensor, b: Tensor, own: IntArray, near: IntArray, picks: IntArray) -> FloatArray:
    """(2, n) t of some pairs as they are, and after an exchange with one of their neighbours.

    Args:
        a: (m, k) left items of all pairs, of unit length.
        b: (m, k) right items.
        own: (n,) places of the pairs.
        near: (n, c) places of their neighbours.
        picks: (n,) which neighbour each exchanges its partner with.
    """
    every, places, others = (torch.from_numpy(part).to(a.device) for part in (np.arange(len(own)), own, near))
    pick = torch.from_numpy(picks).to(a.device)
    lefts, rights = a[others], b[others]
    fits, paired = (lefts * rights).sum(2), (a[places] * b[places]).sum(1, keepdim=True)
    to_left = (lefts @ b[places][:, :, None])[:, :, 0]  # s(j, i)
    to_right = (rights @ a[places][:, :, None])[:, :, 0]  # s(i, j)
    observed = paired + fits - to_left - to_right
    partner = rights[every, pick]  # the right item that each pair gets
    exchanged = to_right[every, pick][:, None] + fits - (lefts @ partner[:, :, None])[:, :, 0] - to_right
    exchanged[every, pick] = -observed[every, pick]  # exchanged again
    return torch.stack([observed.amin(1), exchanged.amin(1)]).double().cpu().numpy()


def exchange_probability(observed: FloatArray, exchanged: FloatArray, rate: float) -> FloatArray:
    """(n,) probability that each of the observed pairs is exchanged.

    The ratio of both densities is a logistic curve, fitted to pairs that are likely not exchanged.

    Args:
        observed: (n,) t of the pairs as they are.
        exchanged: (n,) the same after exchanges on purpose.
        rate: Share of the observed pairs that are exchanged.
    """
    chance = np.full(len(observed), rate)
    label = np.repeat([0.0, 1.0], [len(observed), len(exchanged)])
    prior = np.log(rate / max(1 - rate, 1e-9))
    for _ in range(ROUNDS):
        worth = np.concatenate([1 - chance, np.full(len(exchanged), (1 - chance).sum() / len(exchanged))])
        slope, offset = logistic(np.concatenate([observed, exchanged])[:, None], label, worth, 1e-3)
        log_odds = np.clip(slope[0] * observed + offset + prior, -FAR, FAR)
        chance = 1 / (1 + np.exp(-log_odds))
    return np.asarray(chance)
