"""The noise rate from few decisions: which pairs to ask for, the estimate and its interval.

Active statistical inference (Zrnic and Candes, 2024): a pair is drawn with a probability that grows with the
uncertainty of its match score, and the decisions correct the mean of the scores. The estimate is unbiased however bad
the scores are; good scores make its interval short, and the decisions say how good they are.

The draw is sequential (priority sampling: Duffield, Lund and Thorup, 2007). Every pair has a random priority, the
sample size at which it is drawn, so that the pairs in the order of their priorities are a sample of every size. With
the first k of them decided, pair i was drawn with the probability min(1, n r_i), n the priority of the next pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import scipy.optimize

from mispair.data.pairs import IntArray
from mispair.functional.logistic import FloatArray, probability

EVEN = 0.3  # share of the draws that does not depend on the scores, which may be wrong
SURE = 0.002  # no score is taken for surer than this
SLOPE, SLOPE_SPREAD = 0.9, 0.15  # prior of the factor that corrects the log odds of the scores, often overconfident
OFFSET_SPREAD = 0.7  # of the shift of the log odds
DOUBT = 0.5  # standard deviations by which the slope is taken to be smaller, as few decisions say little about it
Z = 1.96  # 95 %
LEAST = 60  # decisions before an interval is given
PRIOR = 300  # decisions that the variance expected by the scores counts as


@dataclass(frozen=True)
class NoiseEstimate:
    """A noise rate by decisions.

    Attributes:
        decided: Decisions that it rests on.
        rate: Share of mismatched pairs.
        low: Lower end of its 95 % interval.
        high: Upper end.
    """

    decided: int
    rate: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


@dataclass(frozen=True)
class Draw:
    """The order in which pairs are drawn for the noise rate.

    Args:
        mismatch: (N,) probability that each pair is mismatched, by its match score.
        seed: Seed of the draw.
    """

    mismatch: FloatArray
    seed: int

    @cached_property
    def _q(self) -> FloatArray:
        return np.clip(np.asarray(self.mismatch, dtype=np.float64), SURE, 1 - SURE)

    @cached_property
    def _log_odds(self) -> FloatArray:
        return np.asarray(np.log(self._q / (1 - self._q)))

    def _expected_error(self, drawn: IntArray, mismatched: npt.NDArray[np.floating]) -> FloatArray:
        """(N,) squared error of each score that the decisions so far let expect."""
        told = ~np.isnan(mismatched)
        slope, offset, doubt = recalibrate(self._log_odds[drawn[told]], mismatched[told])
        p = probability(np.clip(slope - DOUBT * doubt, 0, 1) * self._log_odds + offset)
        return np.asarray(p * (1 - p) + (p - self._q) ** 2)

    @cached_property
    def rates(self) -> FloatArray:
        """(N,) r: the probability that a pair is in a sample of n is min(1, n r)."""
        spread = np.sqrt(self._q * (1 - self._q))
        return np.asarray((1 - EVEN) * spread / spread.sum() + EVEN / len(spread))

    @cached_property
    def priorities(self) -> FloatArray:
        """(N,) expected sample size at which each pair is drawn."""
        return np.random.default_rng(self.seed).random(len(self._q)) / self.rates

    @cached_property
    def order(self) -> IntArray:
        """(N,) the pairs in the order in which they are drawn."""
        return self.priorities.argsort(kind="stable")

    def inclusion(self, count: int) -> FloatArray:
        """(N,) probability with which each pair is among the first `count` drawn ones, given the others' priorities."""
        if count >= len(self.order):
            return np.ones(len(self.order))
        return np.asarray(np.minimum(1, self.priorities[self.order[count]] * self.rates))

    def estimate(self, mismatched: npt.NDArray[np.floating]) -> NoiseEstimate | None:
        """The noise rate from the decisions on the first drawn pairs.

        Args:
            mismatched: (k,) for the first k pairs of `order`: 1 mismatched, 0 matched, NaN left open. A pair that was
                left open counts with the probability by its score.

        Returns:
            None below `LEAST` decisions, unless all pairs were decided.
        """
        count, total = len(mismatched), len(self._q)
        if count < min(LEAST, total):
            return None
        drawn = self.order[:count]
        every = self.inclusion(count)
        inclusion, expected = every[drawn], self._q[drawn]
        error = np.where(np.isnan(mismatched), 0.0, mismatched - expected)
        rate = (self._q.sum() + (error / inclusion).sum()) / total
        observed = ((1 - inclusion) * (error / inclusion) ** 2).sum()
        # Few decisions say little about the variance: at first it is mostly the one that the scores expect, corrected
        # for how well they were calibrated so far.
        by_scores = ((1 - every) / every * self._expected_error(drawn, mismatched)).sum()
        variance = max(observed, (count * observed + PRIOR * by_scores) / (count + PRIOR))
        half = Z * np.sqrt(variance) / total
        low, high = np.clip([rate - half, rate + half], 0, 1)
        return NoiseEstimate(count, float(np.clip(rate, 0, 1)), float(low), float(high))


def recalibrate(log_odds: FloatArray, mismatched: npt.NDArray[np.floating]) -> tuple[float, float, float]:
    """Slope and offset of the log odds that fit the answers best (Platt, 1999), with Gaussian priors.

    Args:
        log_odds: (k,) by the scores.
        mismatched: (k,) the answers, 0 or 1.

    Returns:
        Both, and the standard deviation of the slope (Laplace's approximation).
    """
    middle, spread = np.array([SLOPE, 0.0]), np.array([SLOPE_SPREAD, OFFSET_SPREAD])
    design = np.stack([log_odds, np.ones_like(log_odds)])

    def loss(beta: FloatArray) -> tuple[float, FloatArray]:
        z = beta @ design
        away = (beta - middle) / spread
        value = (np.logaddexp(0, z) - mismatched * z).sum() + away @ away / 2
        return float(value), np.asarray(design @ (probability(z) - mismatched) + away / spread)

    found = scipy.optimize.minimize(loss, middle, jac=True, method="BFGS").x
    p = probability(found @ design)
    curvature = (design * p * (1 - p)) @ design.T + np.diag(1 / spread**2)
    return float(found[0]), float(found[1]), float(np.sqrt(np.linalg.inv(curvature)[0, 0]))


def most_instructive(mismatch: FloatArray, seed: int) -> IntArray:
    """(N,) the pairs in the order in which decisions on them teach the audit most: the least certain first.

    Among pairs of about the same uncertainty the order is random, so that look-alikes do not come in a row.
    """
    q = np.clip(np.asarray(mismatch, dtype=np.float64), SURE, 1 - SURE)
    entropy = -q * np.log2(q) - (1 - q) * np.log2(1 - q)
    return np.argsort(-np.round(entropy, 1) + 1e-3 * np.random.default_rng(seed).random(len(q)), kind="stable")
