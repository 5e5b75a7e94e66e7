"""Mixtures of two Beta distributions over values between 0 and 1 (BiCro over losses, MSCN over similarities).

The published code depends on packages that are no longer maintained, and evaluates the posterior of values exactly at 0
or 1, where it is not a number. Here values are kept away from both ends throughout.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lgamma
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[Any]
EDGE = 1e-4  # values are kept so far from 0 and 1
ROUNDS, FLOOR = 10, 1e-12  # rounds of a fit; least responsibility
GRID = 1001  # points at which a posterior is evaluated in any case
LEAST, MOST = 1e-2, 1e4  # bounds of alpha and beta: constant values would make them infinite


@dataclass(frozen=True)
class BetaMixture:
    """Two Beta distributions in any order."""

    alphas: FloatArray  # (2,)
    betas: FloatArray  # (2,)
    weights: FloatArray  # (2,)

    @property
    def means(self) -> FloatArray:
        return np.asarray(self.alphas / (self.alphas + self.betas))

    def posterior(self, x: FloatArray, component: int) -> FloatArray:
        """Posterior probability of a component, for each value; it never rises for the lower component.

        A wide component may win at both ends. So from the place between the means where neither wins the lower
        component's probability may only rise towards 0 and only fall towards 1.
        """
        lower = int(self.means.argmin())
        between = np.linspace(self.means.min(), self.means.max(), GRID)
        middle = between[np.abs(self.raw_posterior(between, lower) - 0.5).argmin()]
        grid = np.linspace(EDGE, 1 - EDGE, GRID)  # so that the result does not depend on which values are given
        points = np.concatenate([inner(x), grid, [middle]])
        order = np.argsort(points, kind="stable")
        raw = self.raw_posterior(points[order], lower)
        center = int(np.searchsorted(points[order], middle))
        raw[: center + 1] = np.maximum.accumulate(raw[center::-1])[::-1]
        raw[center:] = np.minimum.accumulate(raw[center:])
        falling = np.empty(len(points))
        falling[order] = raw
        return falling[: len(x)] if component == lower else 1 - falling[: len(x)]

    def raw_posterior(self, x: FloatArray, component: int) -> FloatArray:
        """The same as published; not a number where both densities are 0 or infinite."""
        with np.errstate(divide="ignore", invalid="ignore"):
            joint = self._log_densities(np.asarray(x, dtype=np.float64))
            return np.asarray(np.exp(joint[component] - np.logaddexp(*joint)))

    def _log_densities(self, x: FloatArray) -> FloatArray:
        pairs = zip(self.alphas, self.betas, strict=True)
        constant = np.array([lgamma(a + b) - lgamma(a) - lgamma(b) for a, b in pairs]) + np.log(self.weights)
        powers = (self.alphas - 1)[:, None] * np.log(x) + (self.betas - 1)[:, None] * np.log1p(-x)
        return np.asarray(powers + constant[:, None])


LOW_FIRST = BetaMixture(np.array([1.0, 2.0]), np.array([2.0, 1.0]), np.array([0.5, 0.5]))  # BiCro's start


def fit_betas(x: FloatArray, start: BetaMixture = LOW_FIRST, rounds: int = ROUNDS) -> BetaMixture:
    """Expectation maximisation, each component by its weighted mean and variance."""
    x = inner(x)
    mixture = start
    for _ in range(rounds):
        joint = mixture._log_densities(x)
        shares = np.maximum(np.exp(joint - np.logaddexp(*joint)), FLOOR)
        mixture = by_moments(x, shares / shares.sum(axis=0))
    return mixture


def by_moments(x: FloatArray, shares: FloatArray) -> BetaMixture:
    """The two distributions with the means and variances of the values, shared out between them by (2, N) `shares`."""
    x = inner(x)
    total = shares.sum(axis=1)
    means = shares @ x / total
    variances = (shares * (x - means[:, None]) ** 2).sum(axis=1) / total
    strength = means * (1 - means) / np.maximum(variances, np.finfo(np.float64).tiny) - 1
    alphas, betas = (np.clip(part * strength, LEAST, MOST) for part in (means, 1 - means))
    return BetaMixture(alphas, betas, total / total.sum())


def inner(x: FloatArray) -> FloatArray:
    """Values kept away from 0 and 1."""
    return np.clip(np.asarray(x, dtype=np.float64), EDGE, 1 - EDGE)
