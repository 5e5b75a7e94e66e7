"""Measures of vectors by encoders with a common space, such as those of CLIP.

The normalised cosine is negCLIPLoss of Wang et al., "CLIPLoss and Norm-Based Data Selection Methods for Multimodal
Contrastive Learning" (NeurIPS 2024): the cosine s_ii of a pair, less what either item has with any other one,

    s_ii - t/2 * (log mean_j exp(s_ij / t) + log mean_j exp(s_ji / t)).

Items that are similar to everything lose by it, and special ones win. The paper takes the temperature t of the encoder,
0.01, and random batches of the data. Here the others are trusted pairs, both sides are centred, and t is proportional
to the spread of the cosines, because the temperature of the encoder is unknown.

This cosine ignores what both items share with all pairs of the data. For example, shuffled pairs cannot show that a
piece of code answers no question at all. So two more measures keep the mean of each side: the plain cosine,
and the cosine of an item with its expected partner, by a regression on the other folds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from mispair.auditing.scoring.calibration import separated, separation
from mispair.auditing.scoring.common_space import moments, product
from mispair.auditing.scoring.folds import FOLDS, in_random_order, shuffled
from mispair.compute.threads import parallel_map
from mispair.functional.eigenvectors import eigh
from mispair.functional.logistic import FloatArray
from mispair.support.arrays import IntArray

DIRECTIONS = 256  # main directions of both sides in which partners are expected
REGULARISATION = 3.0  # times the mean spread along them
TEMPERATURE = 0.25  # times the standard deviation of the cosines of shuffled pairs
LEAST_SPREAD = 1e-6
PIECE = 4096  # pairs at a time
OTHERS = 1024  # pairs that all are compared with before any is trusted
CLEAR, SURE = 0.55, 5.0  # AUROC of pairs against shuffled ones, and standard errors above chance, to see a common space


def temperature(left: Tensor, right: Tensor) -> Tensor:
    """The temperature for items like these: M pairs (M, D) of unit length, in random order."""
    spread = (left * right.roll(1, dims=0)).sum(1).std(correction=0)
    return TEMPERATURE * spread.clamp(min=LEAST_SPREAD)


def normalised_cosine(
    left: Tensor, right: Tensor, other_left: Tensor, other_right: Tensor, lefts: Tensor, rights: Tensor
) -> Tensor:
    """(n,) cosines of pairs, less the cosines of their items with others.

    Pair i has the items `lefts[i]` of (u, D) and `rights[i]` of (v, D). The others are M pairs (M, D). All items are of
    unit length.
    """
    scale = temperature(other_left, other_right)
    to_right, to_left = _log_mean_exp(left, other_right, scale), _log_mean_exp(right, other_left, scale)
    pieces = zip(torch.split(lefts, PIECE), torch.split(rights, PIECE), strict=True)
    cosine = torch.cat([(left[a] * right[b]).sum(1) for a, b in pieces])
    return cosine - scale / 2 * (to_right[lefts] + to_left[rights])


def _log_mean_exp(items: Tensor, others: Tensor, scale: Tensor) -> Tensor:
    """(n,) log of the mean exponential of the cosines of each item with others, over the temperature."""
    scaled = others.T / scale
    parts = [torch.logsumexp(part @ scaled, dim=1) for part in torch.split(items, PIECE)]
    return torch.cat(parts) - math.log(len(others))


def normalised_cosines(
    x: Tensor, y: Tensor, lefts: IntArray, rights: IntArray, numbers: IntArray
) -> tuple[FloatArray, FloatArray]:
    """The same of pairs of centred unit vectors (n, D), (n,), and of their left and right items in some rows (w,).

    `numbers` (n,) choose the others.
    """
    chosen = in_random_order(np.arange(len(x)), numbers)[:OTHERS]
    rows = torch.arange(len(x), device=x.device)
    strange = (torch.from_numpy(items).to(x.device) for items in (lefts, rights))
    both = [torch.cat([rows, items]) for items in strange]
    found = normalised_cosine(x, y, x[chosen], y[chosen], both[0], both[1]).double().cpu().numpy()
    return found[: len(x)], found[len(x) :]


def share_a_space(left: Tensor, right: Tensor, fold: npt.NDArray[np.uint8], *groups: IntArray) -> bool:
    """Whether raw vectors (n, D) and (n, E) seem to come from encoders with a common space.

    They do if both have the same width, and pairs have clearly higher cosines than shuffled pairs.
    """
    if left.shape[1] != right.shape[1]:
        return False
    x, y = (normalize(side - side.mean(0), dim=1) for side in (left, right))
    partner = shuffled(fold, *groups)
    rows = np.flatnonzero(partner >= 0)
    if not len(rows):
        return False
    paired = (x * y).sum(1).cpu().numpy()
    null = (x[rows] * y[partner[rows]]).sum(1).cpu().numpy()
    return separation(paired, null) > CLEAR and separated(paired, null, SURE)


@dataclass(frozen=True)
class Expectation:
    """Expected partners, for each fold by the pairs of the others."""

    directions: Tensor  # (D, k) of both sides
    to_right: Tensor  # (FOLDS, k, k)
    to_left: Tensor  # (FOLDS, k, k)

    @classmethod
    def of(cls, left: Tensor, right: Tensor, fold: npt.NDArray[np.uint8], trust: FloatArray) -> Expectation:
        """Learn from n pairs of raw vectors (n, D), each with a fold and a match probability."""
        x, y = normalize(left, dim=1), normalize(right, dim=1)
        directions = eigh(moments(x) + moments(y))[1][:, -DIRECTIONS:].to(x).contiguous()
        x, y = x @ directions, y @ directions
        weight = torch.from_numpy(trust).to(x)[:, None]

        def sums(number: int) -> Tensor:
            """(3, k, k) second moments of left and of right items, and their products."""
            here = torch.from_numpy(np.flatnonzero(fold == number)).to(x.device)
            a, b, w = x[here], y[here], weight[here]
            return torch.stack([product(w * a, a), product(w * b, b), product(w * a, b)])

        each = torch.stack(list(parallel_map(sums, range(FOLDS))))
        lefts, rights, ties = (each.sum(0) - each).unbind(1)
        return cls(directions, _solved(lefts, ties).to(x), _solved(rights, ties.mT).to(x))

    def measure(
        self, left: Tensor, right: Tensor, lefts: Tensor, rights: Tensor, fold: npt.NDArray[np.uint8]
    ) -> npt.NDArray[np.float32]:
        """(n, 2) cosines of pairs, and of their items with the expected ones, both ways added.

        Pair i has the left item `lefts[i]` of (u, D) and the right item `rights[i]` of (v, D), both raw vectors.
        """
        x, y = normalize(left, dim=1), normalize(right, dim=1)
        found = np.empty((len(fold), 2), dtype=np.float32)
        a, b = x @ self.directions, y @ self.directions
        for number in np.unique(fold):
            here = np.flatnonzero(fold == number)
            places = torch.from_numpy(here).to(x.device)
            i, j = lefts[places], rights[places]
            expected = cosine_similarity(a[i] @ self.to_right[number], b[j])
            expected += cosine_similarity(b[j] @ self.to_left[number], a[i])
            found[here] = torch.column_stack([(x[i] * y[j]).sum(1), expected]).cpu().numpy()
        return found


def _solved(spread: Tensor, ties: Tensor) -> Tensor:
    """(FOLDS, k, k) regressions from second moments (FOLDS, k, k) and products with the other side."""
    floor = REGULARISATION * torch.diagonal(spread, dim1=1, dim2=2).mean(1).clamp(min=1e-12)
    ridge = floor[:, None, None] * torch.eye(spread.shape[-1], dtype=spread.dtype)
    # One at a time: LU of a batch fails in MKL with several threads.
    return torch.stack([torch.linalg.solve(a, b) for a, b in zip(spread + ridge, ties, strict=True)])
