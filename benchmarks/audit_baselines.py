"""Other ways to find mismatched pairs, which `bench_audit.py` compares with the match score.

| name | what it is |
|---|---|
| `cosine` | the CLIP score: only for vectors of a common space |
| `cca cosine` | cosine after a regularised canonical correlation analysis, fitted without the fold of a pair |
| `neighbours` | cosine of an item with the partners of its partner's nearest neighbours, both ways added |
| `lemon` | LEMoN (Zhang et al., ICML 2025): distance of a pair, and distances to the partners of its neighbours |

They get what the audit gets: the vectors, centred and of unit length, and which pairs share a left item. Each has a
small grid of settings. The setting is taken that separates the pairs best from shuffled ones, which needs no truth.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import normalize

from mispair.auditing.scoring.calibration import separation
from mispair.auditing.scoring.folds import fold_numbers, shuffled
from mispair.auditing.scoring.joint import share_a_space
from mispair.functional.eigenvectors import eigh
from mispair.functional.logistic import FloatArray
from mispair.support.arrays import IntArray

REGULARISATIONS = (0.3, 1.0, 3.0, 10.0)  # times the mean variance
DIRECTIONS = 128
COUNTS = (10, 30)  # nearest neighbours
WEIGHTS = (1.0, 5.0, 20.0)  # LEMoN's beta = gamma
TRUSTS = (0.0, 5.0)  # LEMoN's tau_2: how much less neighbours count that are mismatched themselves
NEARNESS = 0.1  # LEMoN's tau_1: how much less far neighbours count
AT_ONCE = 1024
Scored = tuple[FloatArray, FloatArray]  # scores of observed and of shuffled pairs: higher is better


def baseline_scores(
    left: npt.NDArray[np.floating], right: npt.NDArray[np.floating], groups: IntArray
) -> dict[str, FloatArray]:
    """Scores (n,) of all baselines, by name: higher is better.

    Args:
        left: (n, D) left item of each pair.
        right: (n, E) right item.
        groups: (n,) pairs of one group share an item.
    """
    raw = [torch.from_numpy(np.ascontiguousarray(side, dtype=np.float32)) for side in (left, right)]
    x, y = (normalize(side - side.mean(0), dim=1) for side in raw)
    fold = fold_numbers(groups)
    partner = shuffled(fold, groups)
    strange = np.flatnonzero(partner >= 0)
    null = strange, partner[strange]
    found: dict[str, Scored] = {}
    if share_a_space(raw[0], raw[1], fold, groups):
        found["cosine"] = _cosines((normalize(raw[0], dim=1), normalize(raw[1], dim=1)), null)
    found["cca cosine"] = best(_cosines(cca(x, y, fold, value), null) for value in REGULARISATIONS)
    near = Neighbourhood.of(x, y, groups, null)
    found["neighbours"] = best(near.agreement(count) for count in COUNTS)
    distances = tuple(1 - scores for scores in found.get("cosine", found["cca cosine"]))
    found["lemon"] = best(
        near.lemon((distances[0], distances[1]), *setting) for setting in product(COUNTS, WEIGHTS, TRUSTS)
    )
    return {name: observed for name, (observed, _) in found.items()}


def best(tried: Iterable[Scored]) -> Scored:
    """The scores that separate observed from shuffled pairs best."""
    return max(tried, key=lambda scores: separation(*scores))


def _cosines(sides: tuple[Tensor, Tensor], null: tuple[IntArray, IntArray]) -> Scored:
    x, y = sides
    pairs = (x, y), (x[null[0]], y[null[1]])
    observed, strange = ((a * b).sum(1).double().numpy() for a, b in pairs)
    return observed, strange


def cca(x: Tensor, y: Tensor, fold: npt.NDArray[np.uint8], regularisation: float) -> tuple[Tensor, Tensor]:
    """Both sides (n, k) in the main canonical directions, of unit length; each fold by those of all others.

    Args:
        x: (n, D) centred.
        y: (n, E) centred.
        fold: (n,) fold of each pair.
        regularisation: Added to the variances, in units of their mean.
    """
    k = min(DIRECTIONS, x.shape[1], y.shape[1])
    left, right = torch.empty(len(x), k), torch.empty(len(y), k)
    numbers = np.unique(fold).tolist()
    moments = [_moments(x[fold == n], y[fold == n]) for n in numbers]
    total = [sum((one[part] for one in moments), torch.zeros_like(moments[0][part])) for part in range(3)]
    for number, own in zip(numbers, moments, strict=True):
        xx, yy, xy = (whole - part for whole, part in zip(total, own, strict=True))
        white_x, white_y = (_whitening(one, regularisation) for one in (xx, yy))
        u, strength, v = torch.linalg.svd(white_x.T @ xy @ white_y, full_matrices=False)
        scale = strength[:k].sqrt()
        rows = torch.from_numpy(np.flatnonzero(fold == number))
        left[rows] = normalize(x[rows].double() @ (white_x @ u[:, :k] * scale), dim=1).float()
        right[rows] = normalize(y[rows].double() @ (white_y @ v[:k].T * scale), dim=1).float()
    return left, right


def _moments(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (x.T @ x).double(), (y.T @ y).double(), (x.T @ y).double()


def _whitening(moment: Tensor, regularisation: float) -> Tensor:
    values, vectors = eigh(moment)
    return torch.as_tensor(vectors / (values.clamp(min=0) + regularisation * values.mean()).sqrt())


@dataclass(frozen=True)
class Neighbourhood:
    """The nearest neighbours of both items of pairs, in pairs of other groups; observed pairs, then shuffled ones."""

    count: int  # n: the first pairs are observed
    near_left: IntArray  # (n + s, K) pairs with the nearest left items, nearest first
    near_right: IntArray  # (n + s, K) pairs with the nearest right items
    left_distance: FloatArray  # (n + s, K) of left items to those of `near_left`
    right_distance: FloatArray  # (n + s, K) of right items to those of `near_right`
    partner_right: FloatArray  # (n + s, K) of right items to the partners of `near_left`
    partner_left: FloatArray  # (n + s, K) of left items to the partners of `near_right`

    @classmethod
    def of(cls, x: Tensor, y: Tensor, groups: IntArray, null: tuple[IntArray, IntArray]) -> Neighbourhood:
        """Of n pairs of items (n, D) and (n, E) of unit length; `null` are the rows of shuffled pairs' items."""
        (near_left, left_distance), (near_right, right_distance) = (nearest(side, groups) for side in (x, y))
        lefts, rights = (np.concatenate([np.arange(len(x)), rows]) for rows in null)
        near_left, near_right = near_left[lefts], near_right[rights]
        return cls(
            len(x),
            near_left,
            near_right,
            left_distance[lefts],
            right_distance[rights],
            _distances(y, rights, near_left),
            _distances(x, lefts, near_right),
        )

    def agreement(self, count: int) -> Scored:
        """Mean cosine of either item with the partners of its partner's nearest neighbours, added."""
        return self._split(2 - self.partner_right[:, :count].mean(1) - self.partner_left[:, :count].mean(1))

    def lemon(self, distance: Scored, count: int, weight: float, trust: float) -> Scored:
        """The negative score of LEMoN, d + beta s_n + gamma s_m.

        Here s_n is the mean, over the nearest neighbours of the left item, of the distance from the right item to their
        partner, times exp(-tau_1 distance of the neighbour) exp(-tau_2 distance of the neighbour to its partner); s_m
        is the same with the sides exchanged.

        Args:
            distance: Multimodal distance d of observed and of shuffled pairs.
            count: k nearest neighbours.
            weight: beta = gamma.
            trust: tau_2.
        """
        total = np.concatenate(distance)
        for near, far, partner in (
            (self.near_left, self.left_distance, self.partner_right),
            (self.near_right, self.right_distance, self.partner_left),
        ):
            doubt = NEARNESS * far[:, :count] + trust * distance[0][near[:, :count]]
            total = total + weight * (partner[:, :count] * np.exp(-doubt)).mean(1)
        return self._split(-total)

    def _split(self, scores: FloatArray) -> Scored:
        return scores[: self.count], scores[self.count :]


def nearest(items: Tensor, groups: IntArray) -> tuple[IntArray, FloatArray]:
    """The nearest items of other groups (n, K) by cosine, nearest first, and their distances (n, K)."""
    group = torch.from_numpy(groups)
    count = min(max(COUNTS), len(np.unique(groups)) - 1)
    rows, distances = [], []
    for start in range(0, len(items), AT_ONCE):
        here = slice(start, start + AT_ONCE)
        near = (items[here] @ items.T).masked_fill(group[here, None] == group, -torch.inf)
        found = near.topk(count, dim=1)
        rows.append(found.indices.numpy())
        distances.append(1 - found.values.double().numpy())
    return np.concatenate(rows), np.concatenate(distances)


def _distances(items: Tensor, own: IntArray, others: IntArray) -> FloatArray:
    """(n, K) cosine distances of some items to others."""
    parts = []
    for start in range(0, len(own), AT_ONCE):
        mine = items[own[start : start + AT_ONCE]]
        theirs = items[others[start : start + AT_ONCE]]
        parts.append(1 - torch.einsum("nd,nkd->nk", mine, theirs).double().numpy())
    return np.concatenate(parts)
