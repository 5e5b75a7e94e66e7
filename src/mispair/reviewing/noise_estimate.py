"""The noise rate from few decisions: the draw of pairs, the estimate and its interval.

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
- An annotator, such as a model, may answer on more of the drawn pairs than people decide on (two-phase sampling:
  Neyman, 1938). A logistic regression on score and answer, fitted to the decisions, predicts what people would decide,
  and the decisions correct it as they correct the scores. The estimate is unbiased however often the annotator errs; an
  annotator that seldom errs makes the interval short.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mispair.auditing.summary import NoiseEstimate, proportion_limits
from mispair.functional.logistic import FloatArray, newton, probability
from mispair.support.arrays import IntArray

DRAW = 4  # version of the draw: decisions on pairs that were drawn in another way cannot be used
EVEN = 0.2  # share of the draws that does not depend on the scores, which may be wrong
TEMPER = 1.5  # factor by which the log odds of the scores are taken to be too large for the draw
SURE = 1e-5  # no score is taken for surer than this
FOLDS = 10  # of the cross-fitting
CELLS = 100  # a unit of the log odds: pairs of the same cell are treated alike, which makes a million pairs quick
SLOPE, SLOPE_SPREAD = 0.8, 0.45  # prior of the factor that corrects the log odds of the scores, often too sure
OFFSET_SPREAD = 0.7  # of the shift of the log odds
WEIGHT, WEIGHT_SPREAD = 1.0, 1.0  # prior of what an annotator's answer adds to the log odds; at 1 it errs on 27 %
LEAN_SPREAD = 1.4  # of the shift of the log odds with an annotator, whose errors may be mostly of one kind
ASSUMED_ERROR, ASSUMED = 0.1, 10  # error of an annotator in a plan, and the decisions that the assumption counts as
CALLS_A_DECISION = 20  # a plan takes a decision of a person to cost as much as so many calls
PLANS = 60  # numbers of calls that are tried for a plan
Z = 1.96  # 95 %
LEAST = 60  # decisions before an interval is given
PRIOR = 200  # decisions that the variance expected by the scores counts as
WIDEST, HALVINGS = 30.0, 24  # of the search for the ends of the interval, in log odds
NO_ANSWERS: FloatArray = np.empty(0)


@dataclass(frozen=True)
class AnnotatorErrors:
    """Errors of an annotator, by people's decisions on drawn pairs."""

    matched: int  # pairs that match, by people
    false_alarms: int  # of these, how many the annotator calls mismatched
    mismatched: int  # pairs that do not match, by people
    misses: int  # of these, how many the annotator calls matched

    @property
    def both(self) -> int:
        return self.matched + self.mismatched

    @property
    def wrong(self) -> int:
        return self.false_alarms + self.misses

    @property
    def rate(self) -> float:
        """Share of wrong answers; NaN without any."""
        return self.wrong / self.both if self.both else float("nan")

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of `rate`."""
        return proportion_limits(self.wrong, self.both)

    def left_open(self, mismatch: FloatArray) -> FloatArray:
        """(N,) expected variance of a decision after the answer, given the probability of a mismatch before it."""
        alarm, miss = (
            (errors + ASSUMED_ERROR * ASSUMED) / (pairs + ASSUMED)
            for errors, pairs in ((self.false_alarms, self.matched), (self.misses, self.mismatched))
        )
        variance = np.zeros_like(mismatch)
        for if_mismatched, if_matched in ((1 - miss, alarm), (miss, 1 - alarm)):  # says mismatched; says matched
            is_mismatch, is_match = mismatch * if_mismatched, (1 - mismatch) * if_matched
            variance += is_mismatch * is_match / np.maximum(is_mismatch + is_match, 1e-300)
        return variance


def annotator_errors(mismatched: npt.NDArray[np.floating], answers: npt.NDArray[np.floating]) -> AnnotatorErrors:
    """Count contradictions of decisions (k,) and answers (n,) on the first drawn pairs."""
    both = min(len(mismatched), len(answers))
    people, annotator = mismatched[:both], answers[:both]
    answered = ~np.isnan(annotator)
    matched, mismatch = answered & (people == 0), answered & (people == 1)
    counts = matched, matched & (annotator == 1), mismatch, mismatch & (annotator == 0)
    return AnnotatorErrors(*(int(np.count_nonzero(one)) for one in counts))


@dataclass(frozen=True)
class Plan:
    """Expected effort for an interval."""

    calls: int  # drawn pairs that the annotator answers on, those so far included; 0 if answers would not help
    decisions: int  # drawn pairs that people decide on, those so far included
    alone: int  # drawn pairs that people would decide on without the annotator


@dataclass(frozen=True)
class Population:
    """Pairs whose noise rate is estimated from decisions on some of them."""

    mismatch: FloatArray  # (N,) probability that each pair is mismatched
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

    def by_sample(
        self, rows: IntArray, mismatched: npt.NDArray[np.floating], stands_for: FloatArray | None = None
    ) -> NoiseEstimate:
        """The noise rate from decisions (k,) on the pairs `rows`, drawn at random.

        `stands_for` is the number of pairs that each of them stands for, up to a factor; by default it is equal.
        """
        odds, cells, _ = self._cells
        total, weights = len(self.mismatch), np.ones(len(rows)) if stands_for is None else stands_for
        inclusion = np.minimum(1, weights.sum() / total / weights)
        missed = np.zeros((FOLDS, len(odds)))
        np.add.at(missed, (self._fold[rows], cells[rows]), (1 / inclusion - 1) / inclusion)  # for 1 / inclusion pairs
        none = np.full(len(rows), np.nan)
        return self._estimate(len(rows), rows, mismatched, none, inclusion, inclusion, missed)

    def _estimate(
        self,
        count: int,
        drawn: npt.NDArray[np.signedinteger],
        y: npt.NDArray[np.floating],
        says: FloatArray,
        asked: FloatArray,
        inclusion: FloatArray,
        missed: FloatArray,
    ) -> NoiseEstimate:
        """The noise rate and its interval, see `Draw.estimate`.

        Args:
            count: Number of decisions, those that left the pair open included.
            drawn: (n,) the drawn pairs.
            y: (n,) decisions, NaN without one.
            says: (n,) answers of an annotator, NaN without one.
            asked: (n,) probability a to be answered.
            inclusion: (n,) probability d to be decided.
            missed: (F, C) sum of 1/a - 1 over the pairs of each fold and cell.
        """
        odds, cells, counts = self._cells
        cell, fold, total = cells[drawn], self._fold[drawn], len(self.mismatch)
        told, answered, x = ~np.isnan(y), ~np.isnan(says), odds[cell]

        others = [told & (fold != own) for own in range(FOLDS)]
        fits = [recalibrate(x[other], y[other]) for other in others]
        expected = np.stack([probability(slope * odds + offset) for slope, offset in fits])  # (F, C)
        by_score = expected[fold, cell]
        by_both = by_score.copy()
        for own in range(FOLDS) if answered.any() else ():
            fit, here = others[own] & answered, answered & (fold == own)
            by_both[here] = probability(_log_odds(recalibrate(x[fit], y[fit], says[fit]), x[here], says[here]))
        corrections = (by_both - by_score) / asked + np.where(told, y - by_both, 0.0) / inclusion
        rate = ((counts * expected).sum() + corrections.sum()) / total

        slope, offset = recalibrate(x[told], y[told])
        size, scaled = counts.sum(axis=0), slope * odds
        # A sum of squares is expected to be that of p (1 - p) + (p - expected)^2, which is linear in p.
        linear, constant = (missed * (1 - 2 * expected)).sum(axis=0), float((missed * expected**2).sum())
        undecided, scaled_both = 1 / inclusion - 1 / asked, slope * x
        if answered.any():
            fit = told & answered
            all_fit = recalibrate(x[fit], y[fit], says[fit])
            scaled_both[answered] = _log_odds(all_fit, x[answered], says[answered]) - offset
        missed_both = undecided / asked  # the answered pairs stand for all
        linear_both, constant_both = missed_both * (1 - 2 * by_both), float((missed_both * by_both**2).sum())

        def at(shift: float) -> tuple[float, float]:
            """A possible rate, and the variance of the estimate at this rate."""
            p, both = probability(scaled + shift), probability(scaled_both + shift)
            return float(size @ p) / total, float(linear @ p + linear_both @ both) + constant + constant_both

        squares = (1 / asked - 1) * (y - by_score) ** 2 + undecided * (y - by_both) ** 2
        return no_surprise(count, float(rate), at, offset, (squares / inclusion)[told].sum(), total)


@dataclass(frozen=True)
class Draw(Population):
    """A random order of the pairs, for the noise rate."""

    @cached_property
    def _cell_rates(self) -> FloatArray:
        """(C,) r of the pairs of each cell."""
        odds, _, counts = self._cells
        q, size = probability(odds / TEMPER), counts.sum(axis=0)
        spread = np.sqrt(q * (1 - q))
        return np.asarray((1 - EVEN) * spread / (size * spread).sum() + EVEN / max(1.0, size.sum()))

    @property
    def rates(self) -> FloatArray:
        """(N,) r: a pair is in a sample of n with the probability min(1, n r)."""
        return np.asarray(self._cell_rates[self._cells[1]])

    @cached_property
    def priorities(self) -> FloatArray:
        """(N,) expected sample size for each pair to be drawn."""
        return np.random.default_rng(self.seed).random(len(self.mismatch)) / self.rates

    @cached_property
    def order(self) -> npt.NDArray[np.int32]:
        """(N,) the pairs in drawn order."""
        return self.priorities.argsort(kind="stable").astype(np.int32)

    def inclusion(self, count: int, pairs: npt.NDArray[np.signedinteger] | slice = slice(None)) -> FloatArray:
        """Probability of pairs to be among the first `count` drawn ones, given the others' priorities."""
        return np.asarray(self._cell_inclusion(count)[self._cells[1][pairs]])

    def _cell_inclusion(self, count: int) -> FloatArray:
        if count >= len(self.order):
            return np.ones(len(self._cell_rates))
        return np.asarray(np.minimum(1, self.priorities[self.order[count]] * self._cell_rates))

    def estimate(
        self, mismatched: npt.NDArray[np.floating], answers: npt.NDArray[np.floating] = NO_ANSWERS
    ) -> NoiseEstimate | None:
        """The noise rate from the decisions on the first drawn pairs.

        With f what the score predicts, g what score and answer predict, a and d the probabilities to be answered and
        to be decided, the estimate is the mean over all pairs of f + (g - f) / a [answered] + (y - g) / d [decided].
        Decided pairs are among the answered ones, so each pair adds (1/a - 1) (y - f)^2 + (1/d - 1/a) (y - g)^2 to its
        variance. Without answers g is f and a is d.

        Args:
            mismatched: (k,) for the first k pairs of `order`: 1 mismatched, 0 matched, NaN left open. A pair that was
                left open counts with the predicted probability.
            answers: (n,) what an annotator says of the first n pairs of `order`, likewise; NaN without an answer.

        Returns:
            None below `LEAST` decisions, unless all pairs were decided; None without pairs.
        """
        count, total = len(mismatched), len(self.mismatch)
        if count < min(LEAST, total) or not total:
            return None
        _, cells, counts = self._cells
        drawn = self.order[: max(count, len(answers))]
        cell = cells[drawn]
        asked, inclusion = self._cell_inclusion(len(drawn)), self._cell_inclusion(count)  # (C,)
        y, says = _padded(mismatched, len(drawn)), _padded(answers, len(drawn))
        return self._estimate(count, drawn, y, says, asked[cell], inclusion[cell], counts * (1 - asked) / asked)

    def plan(
        self,
        half_width: float,
        mismatched: npt.NDArray[np.floating] = NO_ANSWERS,
        answers: npt.NDArray[np.floating] = NO_ANSWERS,
        most_calls: int | None = None,
        calls: int | None = None,
    ) -> Plan:
        """The cheapest sufficient calls and decisions, by the expected variance of `estimate`.

        Args:
            half_width: Half of the wanted interval.
            mismatched: Decisions so far, as for `estimate`.
            answers: Answers so far.
            most_calls: Pairs that the annotator may answer, earlier ones included; None for any number.
            calls: Pairs that it will answer, even if fewer are cheaper.
        """
        odds, cells, counts = self._cells
        size, total, decided = counts.sum(axis=0), len(self.mismatch), len(mismatched)
        told = ~np.isnan(mismatched)
        slope, offset = recalibrate(odds[cells[self.order[:decided][told]]], mismatched[told])
        p = probability(slope * odds + offset)
        left_open = annotator_errors(mismatched, answers).left_open(p)

        def suffices(calls: int, decisions: int) -> bool:
            asked, inclusion = self._cell_inclusion(max(calls, decisions)), self._cell_inclusion(decisions)
            variance = (1 / asked - 1) * p * (1 - p) + (1 / inclusion - 1 / asked) * left_open
            return bool(Z * np.sqrt(size @ variance) <= half_width * total)

        def fewest(calls: int, low: int, high: int) -> int:
            """The fewest decisions from `low` to `high` that suffice with these calls; `high` is known to suffice."""
            return low + bisect_left(range(low, high), True, key=lambda decisions: suffices(calls, decisions))

        least = min(total, max(LEAST, decided))
        alone = fewest(0, least, total)
        if calls is not None:
            calls = min(calls, total)
            return Plan(calls, fewest(calls, least, alone), alone)
        best, most = Plan(0, alone, alone), min(total, total if most_calls is None else most_calls)
        for tried in np.unique(np.geomspace(max(LEAST, len(answers)), max(most, 1), PLANS).astype(int)).tolist():
            one = Plan(tried, fewest(tried, least, alone), alone)
            is_cheaper = CALLS_A_DECISION * one.decisions + one.calls < CALLS_A_DECISION * best.decisions + best.calls
            if is_cheaper and one.calls <= most:
                best = one
        return best


def _padded(values: npt.NDArray[np.floating], size: int) -> FloatArray:
    """The values, and NaN behind them."""
    return np.concatenate([values, np.full(size - len(values), np.nan)])


def no_surprise(
    count: int, rate: float, at: Callable[[float], tuple[float, float]], offset: float, observed: float, total: int
) -> NoiseEstimate:
    """An estimate with the interval of the rates at which it would not be surprising.

    Args:
        count: Number of decisions.
        rate: The estimate.
        at: Of a shift of the log odds, the rate and `total`^2 times the variance of the estimate if it is the true one.
        offset: The shift by the recalibrated scores.
        observed: The variance by the errors of the decisions.
        total: Number of pairs.
    """
    modelled = at(offset)[1]
    # Few decisions say little about the variance: at first it is mostly the one by the recalibrated scores. Errors that
    # happen to be smaller do not count: whoever looks after each decision would stop at just that moment.
    factor = max(1.0, (count * observed / modelled + PRIOR) / (count + PRIOR)) if modelled else 0.0

    def end(sign: int) -> float:
        def beyond(shift: float) -> bool:
            possible, variance = at(shift)
            return bool(possible + sign * Z * np.sqrt(factor * variance) / total > rate)

        return at(_first(beyond))[0] if factor else rate

    low, middle, high = np.clip([end(1), rate, end(-1)], 0, 1).tolist()
    return NoiseEstimate(decisions=count, rate=middle, low=min(low, middle), high=max(middle, high))


def _first(holds: Callable[[float], bool]) -> float:
    """The least shift with a condition true from there on."""
    low, high = -WIDEST, WIDEST
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def recalibrate(
    log_odds: FloatArray,
    mismatched: npt.NDArray[np.floating],
    answers: npt.NDArray[np.floating] | None = None,
) -> list[float]:
    """Slope of the log odds, weight of the answers if there are any, and offset, by decisions; all are (k,).

    They have the greatest posterior density of a logistic regression with Gaussian priors (Platt, 1999).
    """
    ones = np.ones_like(log_odds)
    if answers is None:
        design, priors = np.stack([log_odds, ones]), [(SLOPE, SLOPE_SPREAD), (0.0, OFFSET_SPREAD)]
    else:
        design = np.stack([log_odds, 2 * answers - 1, ones])
        priors = [(SLOPE, SLOPE_SPREAD), (WEIGHT, WEIGHT_SPREAD), (0.0, LEAN_SPREAD)]
    middle, spreads = np.array(priors).T
    precision = spreads**-2.0

    def loss(beta: FloatArray) -> float:
        z = beta @ design
        return float((np.logaddexp(0, z) - mismatched * z).sum() + precision @ (beta - middle) ** 2 / 2)

    def derivatives(beta: FloatArray) -> tuple[FloatArray, FloatArray]:
        p = probability(beta @ design)
        gradient = design @ (p - mismatched) + precision * (beta - middle)
        return gradient, (design * (p * (1 - p))) @ design.T + np.diag(precision)

    weights: list[float] = newton(middle, loss, derivatives).tolist()
    return weights


def _log_odds(fit: list[float], log_odds: FloatArray, answers: npt.NDArray[np.floating]) -> FloatArray:
    """Log odds of a mismatch by the score and an answer, with the fit of `recalibrate`."""
    slope, weight, offset = fit
    return np.asarray(slope * log_odds + weight * (2 * answers - 1) + offset)


def most_instructive(mismatch: FloatArray, seed: int) -> npt.NDArray[np.int32]:
    """(N,) the pairs in the order of their use for learning: the least certain first.

    Among pairs of about the same uncertainty the order is random, so that look-alikes do not come in a row.
    """
    q = np.clip(np.asarray(mismatch, dtype=np.float64), SURE, 1 - SURE)
    entropy = -q * np.log2(q) - (1 - q) * np.log2(1 - q)
    shuffled = np.random.default_rng(seed).permutation(np.arange(len(q), dtype=np.int32))
    level = np.rint(-10 * entropy).astype(np.int8)
    return shuffled[np.argsort(level[shuffled], kind="stable")]
