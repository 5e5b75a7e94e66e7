"""A common space of two embeddings that have none: regularised canonical correlation, fitted across folds.

Left and right vectors are brought to directions in which true partners correlate. How much they do is measured on the
fold that a space was not fitted to, so directions that were only memorised count for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import isotonic_regression
from torch import Tensor
from torch.nn.functional import normalize

from mispair.auditing.scoring.folds import FOLDS
from mispair.compute.threads import parallel_map
from mispair.data.pairs import IntArray
from mispair.functional.logistic import FloatArray

MOST_CORRELATED, LEAST_CORRELATED = 0.98, 0.02  # directions above count as this, directions below for nothing
MOST_DIRECTIONS = 256
NOTHING = 1e-5  # a strength below this share of the first one's is rounding error
PIECE = 4096  # pairs multiplied out at a time


@dataclass(frozen=True)
class CommonSpace:
    """Where left and right vectors can be compared: their dot product is the evidence that they are partners."""

    left: Tensor  # (D, k) directions, scaled by what they are worth
    right: Tensor  # (E, k)
    correlation: Tensor  # (k,) of true partners along each
    refined_left: Tensor | None = None  # (D, k) directions that tell partners from others; `left` if there are none
    refined_right: Tensor | None = None  # (E, k)

    def compared_left(self, left: Tensor) -> Tensor:
        """(n, k) where left items (n, D) are compared with right ones: of unit length."""
        return normalize(left @ (self.left if self.refined_left is None else self.refined_left), dim=1)

    def compared_right(self, right: Tensor) -> Tensor:
        """The same for right items (n, E)."""
        return normalize(right @ (self.right if self.refined_right is None else self.refined_right), dim=1)


class CommonSpaceFitter:
    """Fits a space for every fold on the pairs of the other folds.

    Second moments add up, so each pair is multiplied out once, whatever the number of folds.
    """

    def __init__(self, left: Tensor, right: Tensor, fold: np.ndarray, widths: tuple[int, int] | None = None) -> None:
        """
        Args:
            left: (n, D) centred.
            right: (n, E) centred.
            fold: (n,) fold of each pair.
            widths: Directions that the mean spread is taken over; D and E unless empty ones were left out.
        """
        self.left, self.right = left, right
        self.widths = (left.shape[1], right.shape[1]) if widths is None else widths
        self.places = [torch.from_numpy(np.flatnonzero(fold == number)).to(left.device) for number in range(FOLDS)]
        self.spreads = [self._whitened(side) for side in (left, right)]

    def _scaled(self, number: int, regularisation: float) -> list[Tensor]:
        sides = zip(self.spreads, self.widths, strict=True)
        return [_scaled(spread[number], regularisation, width) for spread, width in sides]

    def _whitened(self, side: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Spread along each of the principal directions of the pairs outside each fold, and these directions."""
        moments = torch.stack([product(side[places], side[places]) for places in self.places])
        counts = torch.tensor([len(places) for places in self.places], dtype=torch.float64)
        others = (moments.sum(0) - moments) / (counts.sum() - counts).clamp(min=1)[:, None, None]
        return [(values.clamp(min=0), vectors) for values, vectors in parallel_map(torch.linalg.eigh, others)]

    def fit(self, trust: Tensor, regularisation: float) -> list[CommonSpace]:
        """A space for each fold.

        Args:
            trust: (n,) probability that each pair matches. It weights the cross-covariance only: the items of a
                mismatched pair are still items.
            regularisation: Added to the spread along every direction, as a multiple of its mean.
        """
        weighted = self.right * trust[:, None].to(self.right.dtype)
        ties = torch.stack([product(self.left[places], weighted[places]) for places in self.places])
        sums = torch.stack([trust[places].sum() for places in self.places]).cpu().double()
        others = (ties.sum(0) - ties) / (sums.sum() - sums).clamp(min=1e-12)[:, None, None]

        def fit(number: int) -> tuple[Tensor, Tensor]:
            left, right = self._scaled(number, regularisation)
            return _canonical(others[number], left, right)

        return self._calibrated(list(parallel_map(fit, range(FOLDS))), trust)

    def regression(self, lefts: IntArray, rights: IntArray, regularisation: float) -> FloatArray:
        """(k,) how well left items of some rows go with right items of others by a regression on all other folds.

        The score x' Cxx^-1 Cxy Cyy^-1 y, with regularised covariances. Weaker than the measures in a space, but nothing
        about it was chosen by the pairs of the fold: mismatched pairs score exactly as shuffled ones do.
        """
        ties = torch.stack([product(self.left[places], self.right[places]) for places in self.places])
        scores = torch.zeros(len(lefts), dtype=torch.float64)
        where = np.full(len(self.left), -1)
        for number, places in enumerate(self.places):
            where[places.cpu().numpy()] = number
        for number, other in enumerate(ties.sum(0) - ties):
            left, right = self._scaled(number, regularisation)
            weights = left @ (left.T @ other @ right) @ right.T
            here = np.flatnonzero(where[lefts] == number)
            x, y = self.left[lefts[here]].cpu().double(), self.right[rights[here]].cpu().double()
            scores[torch.from_numpy(here)] = ((x @ weights) * y).sum(1)
        return np.asarray(scores.numpy())

    def _calibrated(self, fitted: list[tuple[Tensor, Tensor]], trust: Tensor) -> list[CommonSpace]:
        """Scales directions by how much partners correlate along them where they were not fitted."""
        directions = min(a.shape[1] for a, _ in fitted)
        fitted = [(a[:, :directions], b[:, :directions]) for a, b in fitted]
        both, left, right = (torch.zeros(directions, dtype=torch.float64) for _ in range(3))
        believed = count = 0.0
        for places, (a, b) in zip(self.places, fitted, strict=True):
            u, v = self.left[places] @ a.to(self.left), self.right[places] @ b.to(self.right)
            w = trust[places].to(u.dtype)[:, None]
            both += (w * u * v).sum(0).cpu().double()
            left, right = left + u.square().sum(0).cpu().double(), right + v.square().sum(0).cpu().double()
            believed, count = believed + float(w.sum()), count + len(places)
        left, right = ((side / count).sqrt().clamp(min=1e-12) for side in (left, right))
        measured = both / max(believed, 1e-12) / (left * right)
        r = torch.from_numpy(isotonic_regression(measured.numpy(), increasing=False).x.copy()).clamp(0, MOST_CORRELATED)
        kept = max(1, min(int((r >= LEAST_CORRELATED).sum()), MOST_DIRECTIONS))
        r = r[:kept].clamp(min=1e-6)
        worth = (r / (1 - r * r)).sqrt()
        spaces = [
            CommonSpace(a[:, :kept] * worth / left[:kept], b[:, :kept] * worth / right[:kept], r) for a, b in fitted
        ]
        place = self.left.device
        return [CommonSpace(*(part.float().to(place) for part in (s.left, s.right, s.correlation))) for s in spaces]


def product(a: Tensor, b: Tensor) -> Tensor:
    """a' b, summed in pieces of float32 that add up in float64, on the host."""
    total = torch.zeros(a.shape[1], b.shape[1], dtype=torch.float64)
    for start in range(0, len(a), PIECE):
        total += (a[start : start + PIECE].T @ b[start : start + PIECE]).cpu().double()
    return total


def _scaled(spread: tuple[Tensor, Tensor], regularisation: float, width: int) -> Tensor:
    """(D, D) principal directions, each divided by its (regularised) spread."""
    values, vectors = spread
    floor = regularisation * values.sum() / width + torch.finfo(torch.float64).tiny
    return vectors / (values + floor).sqrt()


def _canonical(ties: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of directions along which the sides correlate, the strongest first: (D, k), (E, k)."""
    core = left.T @ ties @ right
    if core.shape[0] > core.shape[1]:
        b, a = _canonical(ties.T, right, left)
        return a, b
    strengths, u = torch.linalg.eigh(core @ core.T)  # several times as fast as a singular value decomposition
    u, strengths = u.flip(1), strengths.flip(0).clamp(min=0).sqrt()
    # With more dimensions than pairs the last directions are made of rounding errors, which differ between machines.
    there = max(1, int((strengths > NOTHING * strengths[0]).sum()))
    u, strengths = u[:, :there], strengths[:there]
    v = core.T @ u / strengths.clamp(min=1e-300)
    return left @ u, right @ v
