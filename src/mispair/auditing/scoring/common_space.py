"""A common space of two unrelated embeddings: regularised canonical correlation, fitted across folds.

Left and right vectors are brought to directions in which true partners correlate. How much they do is measured on the
fold that a space was not fitted to, so directions that were only memorised count for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.optimize import isotonic_regression
from torch import Tensor
from torch.nn.functional import normalize

from mispair.auditing.scoring.folds import FOLDS, ONE_OUT
from mispair.compute.threads import parallel_each, parallel_map
from mispair.functional.eigenvectors import eigh
from mispair.functional.logistic import FloatArray
from mispair.support.arrays import IntArray

MOST_CORRELATED, LEAST_CORRELATED = 0.98, 0.02  # directions above count as this, directions below for nothing
MOST_DIRECTIONS = 256
NOTHING = {torch.float64: 1e-5, torch.float32: 1e-3}  # a strength below this share of the first's is rounding error
LEAST_DIRECTIONS = 256  # main directions of either side in use, at least; ...
PAIRS_A_DIRECTION = 4  # ... more with more pairs
PIECE = 4096  # pairs multiplied out at a time
COLUMNS = 128  # of second moments computed at a time


@dataclass(frozen=True)
class CommonSpace:
    """A space of left and right vectors: their dot product is the evidence for partners."""

    left: Tensor  # (D, k) directions, scaled by what they are worth
    right: Tensor  # (E, k)
    correlation: Tensor  # (k,) of true partners along each
    refined_left: Tensor | None = None  # (D, k) directions that tell partners from others; `left` if there are none
    refined_right: Tensor | None = None  # (E, k)

    def compared_left(self, left: Tensor) -> Tensor:
        """(n, k) left items (n, D) in the space, of unit length."""
        return normalize(left @ (self.left if self.refined_left is None else self.refined_left), dim=1)

    def compared_right(self, right: Tensor) -> Tensor:
        """The same for right items (n, E)."""
        return normalize(right @ (self.right if self.refined_right is None else self.refined_right), dim=1)


# (D, m) and (E, m), then (3, m) sums of u v by trust, u^2 and v^2 over the left-out folds, where u and v are the sides
# along each direction, and the sum of the trust
Directions = tuple[Tensor, Tensor, Tensor, float]


class CommonSpaceFitter:
    """Fits a space for every fold on the pairs of the other folds.

    The principal directions of a side use all its items and ignore the pairing, so mismatched pairs do not affect them.
    Only the link between the two sides is learned without the fold. Second moments are
    additive, so each pair is multiplied once for any number of folds, and all regularisations share the products.
    """

    def __init__(self, left: Tensor, right: Tensor, fold: np.ndarray, widths: tuple[int, int] | None = None) -> None:
        """Take centred pairs (n, D) and (n, E), their folds (n,), and the directions in use, D and E by default."""
        self.fold = fold
        self.places = [torch.from_numpy(np.flatnonzero(fold == number)).to(left.device) for number in range(FOLDS)]
        widths = (left.shape[1], right.shape[1]) if widths is None else widths
        self.left, self.right = (Side.of(side, width) for side, width in zip((left, right), widths, strict=True))
        self._last: tuple[Tensor, Tensor] | None = None  # trust, and the products by it

    @property
    def items(self) -> tuple[Tensor, Tensor]:
        """Left and right items along their principal directions, (n, k) and (n, l)."""
        return self.left.items, self.right.items

    def turned_back(self, space: CommonSpace) -> CommonSpace:
        """The space of the given items, from a space of `items`."""
        return replace(space, left=self.left.turned_back(space.left), right=self.right.turned_back(space.right))

    def fit_several(
        self, trust: Tensor, regularisations: Sequence[float], without: Sequence[Sequence[int]] = ONE_OUT
    ) -> list[list[CommonSpace]]:
        """Fit spaces of `items`, by each regularisation and without some folds each time.

        A regularisation is a multiple of the mean spread; it is added to the spread along every direction. `trust`
        (n,), the probability that each pair matches, weights the cross-covariance only: the items of a mismatched pair
        are still items.
        """
        ties, sums = self._ties(trust), torch.stack([trust[places].sum() for places in self.places]).cpu().double()
        total, precision = ties.sum(0), self.left.items.dtype

        def fit(which: tuple[float, Sequence[int]]) -> Directions:
            regularisation, out = which
            others = (total - ties[list(out)].sum(0)) / (sums.sum() - sums[list(out)].sum()).clamp(min=1e-12)
            sides = (side.scale(regularisation).to(precision) for side in (self.left, self.right))
            a, b = _canonical(others.to(precision), *sides)
            places = torch.cat([self.places[number] for number in out])
            u, v = (side[places] @ directions.to(side) for side, directions in zip(self.items, (a, b), strict=True))
            w = trust[places].to(u.dtype)[:, None]
            products = torch.stack([(w * u * v).sum(0), u.square().sum(0), v.square().sum(0)])
            return a, b, products.cpu().double(), float(w.sum())

        fitted = list(parallel_map(fit, [(one, out) for one in regularisations for out in without]))
        cut = range(0, len(fitted), len(without))
        left_out = sum(len(self.places[number]) for out in without for number in out)
        return [self._calibrated(fitted[start : start + len(without)], left_out) for start in cut]

    def _ties(self, trust: Tensor) -> Tensor:
        """(FOLDS, D, E) weighted cross-products of each fold, along the principal directions."""
        if self._last is None or not torch.equal(self._last[0], trust):
            weight = trust[:, None].to(self.right.items.dtype)
            left, right = self.items

            def tied(places: Tensor) -> Tensor:
                return product(left[places], weight[places] * right[places])

            self._last = trust, torch.stack(list(parallel_map(tied, self.places)))
        return self._last[1]

    def regression(self, lefts: IntArray, rights: IntArray, regularisation: float) -> FloatArray:
        """(k,) how well left items of some rows go with right items of others by a regression on all other folds.

        The score x' Cxx^-1 Cxy Cyy^-1 y, with regularised covariances. Weaker than the measures in a space, but nothing
        about it was chosen by the pairs of the fold: mismatched pairs score exactly as shuffled ones do.
        """
        left, right = self.left.items, self.right.items
        ties = self._ties(torch.ones(len(left)).to(left))
        scales = self.left.scale(regularisation).square(), self.right.scale(regularisation).square()
        total, scores = ties.sum(0), np.zeros(len(lefts))

        def score(number: int) -> None:
            weights = (scales[0][:, None] * (total - ties[number]) * scales[1]).to(left)
            here = np.flatnonzero(self.fold[lefts] == number)
            own, which = np.unique(lefts[here], return_inverse=True)
            expected = (left[own] @ weights)[which]
            scores[here] = (expected * right[rights[here]]).sum(1).double().cpu().numpy()

        parallel_each(score, range(FOLDS))
        return scores

    def _calibrated(self, fitted: Sequence[Directions], pairs: int) -> list[CommonSpace]:
        """Scale directions by the correlation of partners in the left-out folds, of so many pairs together."""
        each_a, each_b, products, believed = zip(*fitted, strict=True)
        directions = min(a.shape[1] for a in each_a)
        both, left, right = torch.stack([one[:, :directions] for one in products]).sum(0)
        left, right = ((side / max(pairs, 1)).sqrt().clamp(min=1e-12) for side in (left, right))
        measured = both / max(sum(believed), 1e-12) / (left * right)
        r = torch.from_numpy(isotonic_regression(measured.numpy(), increasing=False).x.copy()).clamp(0, MOST_CORRELATED)
        kept = max(1, int((r >= LEAST_CORRELATED).sum()))
        r = r[:kept].clamp(min=1e-6)
        worth = (r / (1 - r * r)).sqrt()
        return [
            CommonSpace(
                (a[:, :kept] * worth / left[:kept]).to(self.left.items),
                (b[:, :kept] * worth / right[:kept]).to(self.right.items),
                r.float().to(self.left.items.device),
            )
            for a, b in zip(each_a, each_b, strict=True)
        ]


@dataclass(frozen=True)
class Side:
    """The items of one side along their principal directions."""

    items: Tensor  # (n, k)
    spread: Tensor  # (k,) mean square along each direction
    directions: Tensor  # (D, k)
    width: int  # directions that the mean spread is taken over

    @classmethod
    def of(cls, side: Tensor, width: int) -> Side:
        values, vectors = eigh(moments(side) / max(len(side), 1))
        kept = max(LEAST_DIRECTIONS, len(side) // PAIRS_A_DIRECTION)
        values, vectors = values.flip(0)[:kept].clamp(min=0), vectors.flip(1)[:, :kept].to(side).contiguous()
        return cls(side @ vectors, values, vectors, width)

    def scale(self, regularisation: float) -> Tensor:
        """(k,) one over the regularised spread (root mean square) along each direction."""
        floor = regularisation * self.spread.sum() / self.width + torch.finfo(torch.float64).tiny
        return (self.spread + floor).rsqrt()

    def turned_back(self, directions: Tensor) -> Tensor:
        """(D, m) from coordinates along the principal directions (k, m) to those of the items."""
        return (self.directions @ directions.to(self.directions)).float()


def product(a: Tensor, b: Tensor) -> Tensor:
    """a' b on the host: pieces in float32, their sum in float64."""
    total = torch.zeros(a.shape[1], b.shape[1], dtype=torch.float64)
    for start in range(0, len(a), PIECE):
        total += (a[start : start + PIECE].T @ b[start : start + PIECE]).cpu().double()
    return total


def moments(items: Tensor) -> Tensor:
    """Second moments a' a of items (n, D), (D, D), in float64 on the host: `product(a, a)` with less work."""
    total = torch.zeros(items.shape[1], items.shape[1], dtype=torch.float64)
    for start in range(0, items.shape[1], COLUMNS):
        here = slice(start, start + COLUMNS)
        part = product(items[:, start:], items[:, here])
        total[start:, here], total[here, start:] = part, part.T
    return total


def _canonical(ties: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of canonical directions, the strongest first: (D, k), (E, k).

    `ties` (D, E) is the cross-covariance along principal directions, `left` (D,) and `right` (E,) are one over the
    regularised spread along these.
    """
    core = left[:, None] * ties * right
    if core.shape[0] > core.shape[1]:
        b, a = _canonical(ties.T, right, left)
        return a, b
    strengths, u = eigh(core @ core.T)  # several times as fast as a singular value decomposition
    u, strengths = u.flip(1), strengths.flip(0).clamp(min=0).sqrt()
    # With more dimensions than pairs the last directions are made of rounding errors, which differ between machines.
    there = min(MOST_DIRECTIONS, max(1, int((strengths > NOTHING[core.dtype] * strengths[0]).sum())))
    u, strengths = u[:, :there], strengths[:there]
    v = core.T @ u / strengths.clamp(min=1e-30)
    return left[:, None] * u, right[:, None] * v
