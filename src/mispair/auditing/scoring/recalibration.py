"""Learn from people's decisions, and score all pairs by them.

Shuffled pairs show which pairs have nothing to do with each other. People may ask for more: that code answers the
question, that a title names the product. A Bayesian logistic regression on their decisions learns the difference,

    z = slope * l + offset + left . u + right . v,

where l are the log odds of the audit and `left` and `right` are the centred unit vectors of a pair. The priors are
Gaussian. Those of slope and offset expect log odds that are somewhat too sure (as Platt scaling does); the audit may
also have hardly any spread, and then the slope is free to stretch it. Three models are averaged by their evidence
(Laplace's approximation): without the vectors, which only add noise if the audit is already right; with the same prior
for every direction; and with a wider prior for directions along which the vectors of all pairs spread widely.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mispair.functional.logistic import FloatArray, newton, probability

LEAST, MOST = 30, 2000  # decisions that are learned from: at least, and at most
SLOPE, SLOPE_VARIANCE = 0.8, 0.2  # prior of the slope; STRETCH is added in units of the spread of the log odds
STRETCH = 0.3
OFFSET_VARIANCE = 4.0
PRIORS = np.log([0.5, 0.25, 0.25])  # of the models
# Prior variance of the log odds from the vectors of each side, by model: equal for all directions, or by their spread.
ALIKE, SPREAD = np.array([0.0, 1.0, 0.0]), np.array([0.0, 0.0, 0.5])
LEAST_SLOPE = 0.05
SUREST = 8.0  # log odds beyond this count as this


@dataclass(frozen=True)
class Recalibration:
    """A model of people's decisions."""

    slope: float  # factor of the log odds of the audit
    offset: float  # what is added to them
    left: FloatArray  # (D,) weights of the left vectors, centred and of unit length
    right: FloatArray  # (E,) weights of the right vectors

    @classmethod
    def fit(
        cls,
        log_odds: FloatArray,
        left: npt.NDArray[np.floating],
        right: npt.NDArray[np.floating],
        matched: FloatArray,
        spread: float,
        typical: Sequence[npt.NDArray[np.floating]],
    ) -> Recalibration | None:
        """Learn from n decided pairs; None if they are fewer than `LEAST`.

        Args:
            log_odds: (n,) that each pair matches, by the audit.
            left: (n, D) centred unit vectors.
            right: (n, E) the same.
            matched: (n,) decisions: 1 matched, 0 mismatched.
            spread: Standard deviation of the log odds of all pairs.
            typical: (m, D) and (m, E) centred unit vectors of any pairs.
        """
        if len(matched) < LEAST:
            return None
        chosen = np.random.default_rng(0).permutation(len(matched))[:MOST]
        log_odds, matched = clipped(log_odds[chosen]), matched[chosen]
        sides = [side[chosen].astype(np.float64) for side in (left, right)]
        stretch = SLOPE_VARIANCE + STRETCH / max(spread, 1e-3) ** 2
        ends = np.column_stack([math.sqrt(stretch) * log_odds, np.full(len(matched), math.sqrt(OFFSET_VARIANCE))])
        priors = [
            [same * np.eye(side.shape[1]) + wide * _spread(others) for same, wide in zip(ALIKE, SPREAD, strict=True)]
            for side, others in zip(sides, typical, strict=True)
        ]
        covariances = [
            sum((side @ prior @ side.T for side, prior in zip(sides, of_sides, strict=True)), ends @ ends.T)
            for of_sides in zip(*priors, strict=True)
        ]
        models = [_fit(SLOPE * log_odds, covariance, matched) for covariance in covariances]
        evidence = PRIORS + np.array([found for _, found in models])
        weight = np.exp(evidence - evidence.max())
        residuals = (weight / weight.sum())[:, None] * np.array([residual for residual, _ in models])
        by_left, by_right = (
            np.sum([prior @ (side.T @ one) for prior, one in zip(each, residuals, strict=True)], axis=0)
            for side, each in zip(sides, priors, strict=True)
        )
        both = residuals.sum(axis=0)
        return cls(SLOPE + stretch * float(both @ log_odds), OFFSET_VARIANCE * float(both.sum()), by_left, by_right)

    def by_vectors(self, left: npt.NDArray[np.floating], right: npt.NDArray[np.floating]) -> FloatArray:
        """(n,) log odds by the vectors of pairs, centred unit vectors as in `fit`."""
        return np.asarray(left @ self.left + right @ self.right)

    def match(
        self, match: npt.NDArray[np.floating], left: npt.NDArray[np.floating], right: npt.NDArray[np.floating]
    ) -> FloatArray:
        """(n,) match scores by these people, from the audit's match scores and the centred unit vectors of the
        pairs."""
        with np.errstate(divide="ignore"):
            log_odds = np.log(match, dtype=np.float64) - np.log1p(-match, dtype=np.float64)
        return np.asarray(probability(self.log_odds(log_odds, self.by_vectors(left, right))))

    def log_odds(self, log_odds: FloatArray, by_vectors: npt.NDArray[np.floating]) -> FloatArray:
        """(n,) log odds of a match by these people, from the audit's log odds and the ones by the vectors."""
        # The order of the audit is never turned: decisions on a part of the pairs say too little for that.
        return np.asarray(max(self.slope, LEAST_SLOPE) * clipped(log_odds) + self.offset + by_vectors)


def _spread(unit: npt.NDArray[np.floating]) -> FloatArray:
    """Second moments (D, D) of vectors (m, D); the quadratic form of a typical vector is 1."""
    moments = unit.T.astype(np.float64) @ unit
    return np.asarray(moments * len(unit) / np.square(moments).sum())


def clipped(log_odds: FloatArray) -> FloatArray:
    return np.clip(np.asarray(log_odds, dtype=np.float64), -SUREST, SUREST)


def _fit(expected: FloatArray, covariance: FloatArray, matched: FloatArray) -> tuple[FloatArray, float]:
    """A Gaussian process classifier: the residuals (n,) at the mode, and the log evidence (Laplace's approximation).

    The mode is expected + covariance @ residuals, with residuals = matched - probability(mode); `expected` (n,) and
    `covariance` (n, n) are those of the prior.
    """
    root = np.linalg.cholesky(covariance + 1e-8 * np.trace(covariance) / len(matched) * np.eye(len(matched)))

    def loss(beta: FloatArray) -> float:
        z = expected + root @ beta
        return float((np.logaddexp(0, z) - matched * z).sum() + beta @ beta / 2)

    def derivatives(beta: FloatArray) -> tuple[FloatArray, FloatArray]:
        p = probability(expected + root @ beta)
        return root.T @ (p - matched) + beta, (root.T * (p * (1 - p))) @ root + np.eye(len(beta))

    mode = newton(np.zeros(len(matched)), loss, derivatives)
    evidence = -loss(mode) - np.linalg.slogdet(derivatives(mode)[1])[1] / 2
    return matched - probability(expected + root @ mode), float(evidence)
