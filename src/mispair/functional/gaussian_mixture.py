"""Clean pairs by two-component mixtures over the losses, with every degenerate case defined.

A Gaussian mixture of one dimension needs no library: it starts from the best cut of the sorted losses into two groups,
and the rest is a dozen vector operations. Regularisation and stopping rule are those of the published code (NCR and the
methods built on it: at most 10 rounds, tolerance 1e-2, 5e-4 added to each variance).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[Any]
ROUNDS, TOLERANCE, ADDED_VARIANCE = 10, 1e-2, 5e-4
CONVERGED = 200, 1e-6  # rounds and tolerance of a fit that runs to its end
FALLBACK = 0.01  # share that is called noisy when the mixture finds none; fewer clean pairs are no group


@dataclass(frozen=True)
class GaussianMixture:
    """Two Gaussians, the one with the lower mean first."""

    weights: FloatArray  # (2,)
    means: FloatArray  # (2,)
    variances: FloatArray  # (2,)

    def lower_posterior(self, x: FloatArray) -> FloatArray:
        """Posterior probability of the lower component; it never rises with the value.

        Beyond the two means the wider component wins at both ends, so that the very smallest losses would count as
        noisy. There the probability at the mean is kept.
        """
        return np.asarray(self._responsibilities(np.clip(x, *self.means))[0])

    def _log_densities(self, x: FloatArray) -> FloatArray:
        mean, variance = self.means[:, None], self.variances[:, None]
        log_normal = -0.5 * ((x - mean) ** 2 / variance + np.log(2 * np.pi * variance))
        return np.asarray(log_normal + np.log(self.weights)[:, None])

    def _responsibilities(self, x: FloatArray) -> FloatArray:
        joint = self._log_densities(x)
        return np.asarray(np.exp(joint - np.logaddexp(*joint)))


def fit_gaussians(x: FloatArray, rounds: int = ROUNDS, tolerance: float = TOLERANCE) -> GaussianMixture:
    """Expectation maximisation from the best cut of the values into two groups."""
    x = np.asarray(x, dtype=np.float64)
    lower = x <= best_cut(x)
    mixture = _maximise(x, np.stack([lower, ~lower]).astype(np.float64))
    bound = -np.inf
    for _ in range(rounds):
        joint = mixture._log_densities(x)
        total = np.logaddexp(*joint)
        mixture = _maximise(x, np.exp(joint - total))
        before, bound = bound, float(total.mean())
        if abs(bound - before) < tolerance:
            break
    order = np.argsort(mixture.means, kind="stable")
    return GaussianMixture(mixture.weights[order], mixture.means[order], mixture.variances[order])


def _maximise(x: FloatArray, shares: FloatArray) -> GaussianMixture:
    total = shares.sum(axis=1) + 10 * np.finfo(np.float64).eps
    means = shares @ x / total
    variances = (shares * (x - means[:, None]) ** 2).sum(axis=1) / total + ADDED_VARIANCE
    return GaussianMixture(total / len(x), means, variances)


def best_cut(x: FloatArray) -> float:
    """Largest value of the lower of two groups with the least variance inside: 2-means in one dimension, exactly.

    >>> best_cut(np.array([0.1, 0.9, 0.2, 0.8]))
    0.2
    """
    ordered = np.sort(x)
    below = np.arange(1, len(x))
    sums = np.cumsum(ordered)
    # The variance inside is the whole less what lies between the groups, so the latter is made as large as possible.
    between = sums[:-1] ** 2 / below + (sums[-1] - sums[:-1]) ** 2 / (len(x) - below)
    return float(ordered[:-1][between.argmax()])


def clean_probability(losses: FloatArray, *, converged: bool = False) -> FloatArray:
    """Probability w of being clean: the posterior of the mixture's lower component over min-max losses.

    The published code stops the fit early; with `converged` it runs to its end.

    Losses that are all equal, or too few, say nothing: then every pair is called clean, with a warning.
    """
    scaled = min_max(losses)
    if scaled is None:
        return np.ones(len(losses))
    stop = CONVERGED if converged else (ROUNDS, TOLERANCE)
    return fit_gaussians(scaled, *stop).lower_posterior(scaled)


def min_max(losses: FloatArray) -> FloatArray | None:
    """Scale the losses to [0, 1]; None, with a warning, if they are all equal."""
    losses = np.asarray(losses, dtype=np.float64)
    spread = np.ptp(losses) if len(losses) > 1 else 0.0
    if np.isfinite(losses).all() and spread > 0:
        return np.asarray((losses - losses.min()) / spread)
    warnings.warn("The losses of the pairs do not differ; all of them are taken for clean.", stacklevel=3)
    return None


def is_clean(w: FloatArray, threshold: float = 0.5) -> npt.NDArray[np.bool_]:
    """Clean pairs: w > p. If all are clean, the lowest 1 % are called noisy.

    NCR calls all noisy that are not above the value at 1 %; where values are equal that can be everything.
    """
    clean = above(w, threshold)
    if (w > threshold).all():
        clean[np.argsort(w, kind="stable")[: int(FALLBACK * len(w))]] = False
    return clean


def above(w: FloatArray, threshold: float) -> npt.NDArray[np.bool_]:
    """w > p; if hardly any pair is, w >= its median, as there are no two groups."""
    clean = np.asarray(w > threshold)
    return np.asarray(w >= np.median(w)) if clean.sum() < FALLBACK * len(w) else clean
