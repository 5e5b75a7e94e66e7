"""Whether the right items of one left item agree: five captions of one image should say much the same.

A caption that its siblings contradict is close to the image at best, although the pair alone looks right. The opposite
proves nothing: all captions of an image may belong to another one. So agreement never raises a score, and a lack of it
lowers it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mispair.auditing.scoring.folds import sample
from mispair.auditing.scoring.judge import SideTransform
from mispair.auditing.scoring.shared_items import SharedItems
from mispair.functional.logistic import FloatArray, logistic
from mispair.pairs.pairs import MATCH_THRESHOLD
from mispair.pairs.source import Source
from mispair.support.arrays import IntArray

AT_ONCE = 1 << 14  # rows whose vectors are read at a time, and more to the end of their group
LEAST_TRUST = 0.5  # sum of the match scores of the siblings, below which they say nothing
LEARNED, LEAST = 4096, 50  # rows that the slope is learned from: at most, and at least
CLOSE_BY = 10  # nearest left items of which one lends its partner


@dataclass(frozen=True)
class Siblings:
    """Agreement of each right item with the others of its left item."""

    # (N,) cosine with the mean of the siblings, weighted by their match scores; NaN without siblings
    agreement: npt.NDArray[np.float32]
    typical: float  # its lowest decile over matched pairs
    slope: float  # log odds for each unit below that

    @property
    def penalty(self) -> FloatArray:
        """(N,) log odds for a lack of agreement: never positive, 0 without siblings."""
        below = np.minimum(self.agreement.astype(np.float64) - self.typical, 0)
        return np.asarray(self.slope * np.nan_to_num(below))


def find_siblings(
    source: Source, items: SharedItems, transforms: Sequence[SideTransform], match: npt.NDArray[np.floating]
) -> Siblings | None:
    """Compare the right items of each left item; None if hardly any left item has several.

    One pass over the rows with siblings. Rows with the same two items are one sibling.

    Args:
        source: The pairs.
        items: Which rows share items.
        transforms: Preprocessing of both sides.
        match: (N,) match score of each pair by itself; NaN for rows that cannot be read.
    """
    rows = _with_siblings(items, match)
    if len(rows) < LEAST:
        return None
    weight = np.where(items.is_first, np.nan_to_num(match), 0)
    owners, learned = items.left[rows], sample(np.sort(rows), LEARNED)
    ends = np.flatnonzero(np.diff(owners, append=-1)) + 1
    x, y = (_unit(transform, side) for transform, side in zip(transforms, source.gather(learned), strict=True))
    agreement, means = np.full(len(match), np.nan, dtype=np.float32), np.zeros(y.shape, dtype=np.float64)
    start = 0
    while start < len(rows):
        stop = int(ends[np.searchsorted(ends, min(start + AT_ONCE, len(rows)))])
        here, own = rows[start:stop], owners[start:stop]
        right = _unit(transforms[1], source.right.gather(here)).double().numpy()
        number = np.cumsum(np.diff(own, prepend=own[0]) != 0)
        agreement[here], others = compared(right, number, weight[here], weight[items.first[here]])
        _, places, chosen = np.intersect1d(learned, here, assume_unique=True, return_indices=True)
        means[places] = others[chosen]
        start = stop
    strange = torch.from_numpy(items.left[learned])
    alike = (x @ x.T).masked_fill(strange[:, None] == strange[None, :], -torch.inf)
    nearest = alike.topk(min(CLOSE_BY, len(learned)), dim=1).indices.numpy()
    each = np.arange(len(learned))
    near = nearest[each, each % nearest.shape[1]]
    typical_and_slope = _learned(agreement[learned], means, y.double().numpy(), near, match[learned])
    return None if typical_and_slope is None else Siblings(agreement, *typical_and_slope)


def _unit(transform: SideTransform, vectors: npt.NDArray[np.float32]) -> Tensor:
    """Preprocessed vectors of one side, on the host."""
    return transform(torch.from_numpy(np.ascontiguousarray(vectors)).to(transform.mean.device)).cpu()


def _with_siblings(items: SharedItems, match: npt.NDArray[np.floating]) -> IntArray:
    """Readable rows with siblings, ordered by their left item."""
    readable = np.flatnonzero(~np.isnan(match) & (items.partners == 0))
    distinct = np.bincount(items.left[readable[items.is_first[readable]]], minlength=len(match))
    rows = readable[distinct[items.left[readable]] > 1]
    return rows[items.left[rows].argsort(kind="stable")]


def compared(
    y: FloatArray, number: IntArray, weight: FloatArray, own: FloatArray
) -> tuple[npt.NDArray[np.float32], FloatArray]:
    """Agreement of each right item (n, E) with the others of its group (n,), and the weighted sum of these (n, E).

    `weight` (n,) is 0 for copies of other rows; `own` (n,) is the weight of the row that each row is a copy of, or its
    own.
    """
    total, trust = np.zeros((int(number[-1]) + 1, y.shape[1])), np.bincount(number, weight)
    np.add.at(total, number, weight[:, None] * y)
    others = total[number] - own[:, None] * y
    length = np.linalg.norm(others, axis=1)
    agree = np.einsum("nd,nd->n", others, y) / np.maximum(length, 1e-12)
    agree[(trust[number] - own < LEAST_TRUST) | (length < 1e-9)] = np.nan
    return agree.astype(np.float32), others


def _learned(
    agreement: npt.NDArray[np.float32],
    means: FloatArray,
    y: FloatArray,
    near: IntArray,
    match: npt.NDArray[np.floating],
) -> tuple[float, float] | None:
    """The lowest decile of agreement over matched pairs, and its slope; None if there are too few matched pairs.

    Learned as the combination is, from observed, random and look-alike pairs: n rows with weighted sums of their
    siblings (n, E), right items (n, E), rows with similar left items (n,), and match scores (n,).
    """
    told = np.flatnonzero(~np.isnan(agreement))
    seen, match = agreement[told].astype(np.float64), match[told].astype(np.float64)
    matched = seen[match >= MATCH_THRESHOLD]
    if len(matched) < LEAST:
        return None
    unit = means[told] / np.linalg.norm(means[told], axis=1, keepdims=True)
    strangers, alike = y[(told + len(y) // 2) % len(y)], y[near[told]]
    scores = np.concatenate([seen, *(np.einsum("nd,nd->n", unit, other) for other in (strangers, alike))])
    likeness = np.clip(np.einsum("nd,nd->n", y[told], alike), 0, 1)
    target = np.concatenate([match, np.zeros(len(told)), likeness])
    slope, _ = logistic(scores[:, None], target, np.ones(len(target)), 1e-3)
    return float(np.quantile(matched, 0.1)), max(float(slope[0]), 0.0)
