"""The noise rate from few decisions: which pairs to ask for, the estimate and its interval.

Active statistical inference (Zrnic and Candes, 2024): a pair is drawn with a probability that grows with the
uncertainty of its match score, and the decisions correct the mean of the scores. The estimate is unbiased however bad
the scores are; good scores make its interval short, and the decisions say how good they are.

- The draw is sequential (priority sampling: Duffield, Lund and Thorup, 2007). Every pair has a random priority, the
  sample size at which it is drawn, so that the pairs in the order of their priorities are a sample of every size. With
  the first k of them decided, pair i was drawn with the probability min(1, n r_i), n the priority of the next pair.
- The draw takes scores for less sure than they say, since they often are. Wrong pairs with a high score are rare, and
  each counts for many; they are drawn more often so.
- The scores are recalibrated by the decisions, those of each tenth of the pairs by the decisions on all others
  (cross-fitting), so that no decision corrects itself and the estimate stays unbiased.
- The interval holds the rates at which the estimate would be no surprise: as Wilson's interval of a proportion (1927),
  it takes the variance at each such rate and not at the estimated one, which is too small whenever the estimate is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mispair.functional.logistic import FloatArray, newton, probability

DRAW = 4  # version of the draw: decisions on pairs that were drawn in another way cannot be used
EVEN = 0.2  # share of the draws that does not depend on the scores, which may be wrong
TEMPER = 1.5  # factor by which the log odds of the scores are taken to be too large for the draw
SURE = 1e-5  # no score is taken for surer than this
FOLDS = 10  # of the cross-fitting
CELLS = 100  # a unit of the log odds: pairs of the same cell are treated alike, which makes a million pairs quick
SLOPE, SLOPE_SPREAD = 0.8, 0.45  # prior of the factor that corrects the log odds of the scores, often too sure
OFFSET_SPREAD = 0.7  # of the shift of the log odds
Z = 1.96  # 95 %
LEAST = 60  # decisions before an interval is given
PRIOR = 200  # decisions that the variance expected by the scores counts as
WIDEST, HALVINGS = 30.0, 24  # of the search for the ends of the interval, in log odds


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
    def _cells(self) -> tuple[FloatArray, npt.NDArray[np.int16], FloatArray]:
        """Pairs of equal log odds: the odds (C,), the cell of each pair (N,), pairs of each fold in a cell (F, C)."""
        q = np.clip(np.asarray(self.mismatch, dtype=np.float64), SURE, 1 - SURE)
        rounded = np.rint(np.log(q / (1 - q)) * CELLS).astype(np.int16)
        first = int(rounded.min(initial=0))
        present = np.bincount(rounded - first) > 0
        cells = (np.cumsum(present, dtype=np.int16) - 1)[rounded - first]
        odds = (np.flatnonzero(present) + first) / CELLS
        counts = np.bincount(self._fold * len(odds) + cells, minlength=FOLDS * len(odds)).reshape(FOLDS, -1)
        return odds, cells, counts.astype(np.float64)

    @cached_property
    def _fold(self) -> npt.NDArray[np.int32]:
        """(N,) the fold of each pair."""
        return np.random.default_rng([self.seed, 1]).integers(0, FOLDS, len(self.mismatch), dtype=np.int32)

    @cached_property
    def _cell_rates(self) -> FloatArray:
        """(C,) r of the pairs of each cell."""
        odds, _, counts = self._cells
        q, size = probability(odds / TEMPER), counts.sum(axis=0)
        spread = np.sqrt(q * (1 - q))
        return np.asarray((1 - EVEN) * spread / (size * spread).sum() + EVEN / max(1.0, size.sum()))

    @property
    def rates(self) -> FloatArray:
        """(N,) r: the probability that a pair is in a sample of n is min(1, n r)."""
        return np.asarray(self._cell_rates[self._cells[1]])

    @cached_property
    def priorities(self) -> FloatArray:
        """(N,) expected sample size at which each pair is drawn."""
        return np.random.default_rng(self.seed).random(len(self.mismatch)) / self.rates

    @cached_property
    def order(self) -> npt.NDArray[np.int32]:
        """(N,) the pairs in the order in which they are drawn."""
        return self.priorities.argsort(kind="stable").astype(np.int32)

    def inclusion(self, count: int, pairs: npt.NDArray[np.signedinteger] | slice = slice(None)) -> FloatArray:
        """Probability with which pairs are among the first `count` drawn ones, given the others' priorities."""
        return np.asarray(self._cell_inclusion(count)[self._cells[1][pairs]])

    def _cell_inclusion(self, count: int) -> FloatArray:
        if count >= len(self.order):
            return np.ones(len(self._cell_rates))
        return np.asarray(np.minimum(1, self.priorities[self.order[count]] * self._cell_rates))

    def estimate(self, mismatched: npt.NDArray[np.floating]) -> NoiseEstimate | None:
        """The noise rate from the decisions on the first drawn pairs.

        Args:
            mismatched: (k,) for the first k pairs of `order`: 1 mismatched, 0 matched, NaN left open. A pair that was
                left open counts with the probability by its recalibrated score.

        Returns:
            None below `LEAST` decisions, unless all pairs were decided; None without pairs.
        """
        count, total = len(mismatched), len(self.mismatch)
        if count < min(LEAST, total) or not total:
            return None
        odds, cells, counts = self._cells
        drawn = self.order[:count]
        cell, fold, told = cells[drawn], self._fold[drawn], ~np.isnan(mismatched)
        others = [told & (fold != own) for own in range(FOLDS)]
        fits = [recalibrate(odds[cell[other]], mismatched[other]) for other in others]
        expected = np.stack([probability(slope * odds + offset) for slope, offset in fits])  # (F, C)
        inclusion = self._cell_inclusion(count)
        error = np.where(told, mismatched - expected[fold, cell], 0.0) / inclusion[cell]
        rate = ((counts * expected).sum() + error.sum()) / total

        slope, offset = recalibrate(odds[cell[told]], mismatched[told])
        missed, size, scaled = counts * (1 - inclusion) / inclusion, counts.sum(axis=0), slope * odds
        # The variance is the sum of missed (p (1 - p) + (p - expected)^2), which is linear in p.
        linear, constant = (missed * (1 - 2 * expected)).sum(axis=0), float((missed * expected**2).sum())

        def at(shift: float) -> tuple[float, float]:
            """A rate that is possible, and the variance of the estimate if it is the true one."""
            p = probability(scaled + shift)
            return float(size @ p) / total, float(linear @ p) + constant

        observed, modelled = ((1 - inclusion[cell]) * error**2).sum(), at(offset)[1]
        # Few decisions say little about the variance: at first it is mostly the one by the recalibrated scores. Errors
        # that happen to be smaller do not count: whoever looks after each decision would stop at just that moment.
        factor = max(1.0, (count * observed / modelled + PRIOR) / (count + PRIOR)) if modelled else 0.0

        def end(sign: int) -> float:
            def beyond(shift: float) -> bool:
                possible, variance = at(shift)
                return bool(possible + sign * Z * np.sqrt(factor * variance) / total > rate)

            return at(_first(beyond))[0] if factor else float(rate)

        low, middle, high = np.clip([end(1), rate, end(-1)], 0, 1).tolist()
        return NoiseEstimate(count, middle, min(low, middle), max(middle, high))


def _first(holds: Callable[[float], bool]) -> float:
    """The least shift at which something holds, if it holds from there on."""
    low, high = -WIDEST, WIDEST
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def recalibrate(log_odds: FloatArray, mismatched: npt.NDArray[np.floating]) -> tuple[float, float]:
    """Slope and offset of the log odds that fit the answers best (Platt, 1999), with Gaussian priors.

    Args:
        log_odds: (k,) by the scores.
        mismatched: (k,) the answers, 0 or 1.
    """
    middle, precision = np.array([SLOPE, 0.0]), np.array([SLOPE_SPREAD, OFFSET_SPREAD]) ** -2.0
    design = np.stack([log_odds, np.ones_like(log_odds)])

    def loss(beta: FloatArray) -> float:
        z = beta @ design
        return float((np.logaddexp(0, z) - mismatched * z).sum() + precision @ (beta - middle) ** 2 / 2)

    def derivatives(beta: FloatArray) -> tuple[FloatArray, FloatArray]:
        p = probability(beta @ design)
        gradient = design @ (p - mismatched) + precision * (beta - middle)
        return gradient, (design * (p * (1 - p))) @ design.T + np.diag(precision)

    slope, offset = newton(middle, loss, derivatives)
    return float(slope), float(offset)


def most_instructive(mismatch: FloatArray, seed: int) -> npt.NDArray[np.int32]:
    """(N,) the pairs in the order in which decisions on them teach the audit most: the least certain first.

    Among pairs of about the same uncertainty the order is random, so that look-alikes do not come in a row.
    """
    q = np.clip(np.asarray(mismatch, dtype=np.float64), SURE, 1 - SURE)
    entropy = -q * np.log2(q) - (1 - q) * np.log2(1 - q)
    shuffled = np.random.default_rng(seed).permutation(np.arange(len(q), dtype=np.int32))
    level = np.rint(-10 * entropy).astype(np.int8)
    return shuffled[np.argsort(level[shuffled], kind="stable")]
