"""Turn measures into match probabilities, without labels.

Shuffled pairs are mismatched. So the scores of the observed pairs are a mixture: a share of them, the noise rate, is
distributed like the scores of shuffled pairs, the rest like scores of matched pairs. That gives the noise rate, the
probability that a pair with some score matches, and the weight of each measure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import isotonic_regression
from scipy.special import betaincinv

from mispair.functional.logistic import FloatArray, logistic, probability
from mispair.functional.metrics import auroc
from mispair.support.arrays import IntArray

QUANTILES = np.linspace(0.2, 0.9, 15)  # of the shuffled pairs' scores
SURE = 0.501  # up to this one matched pairs are assumed to be rare
LOW_CUTS, HIGH_CUT = (0.05, 0.2), 0.5  # quantiles of the shuffled pairs' scores that the interval's ends come from
MOSTLY = 0.25  # noise rate above which accidental agreement may have been learned from
ROUNDS = 3  # of fitting the weights and estimating again which pairs match
SHUFFLED, CLOSE = 0.5, 1.0  # how much a shuffled pair, and all close ones together, count beside the observed ones
PIECE = 1 << 18  # rows scored at a time
CURVE = 0.05  # share of the logistic curve in the probability
MAX_CHECKED_WEIGHT = 10.0  # weight of a pair that a person has checked, who may be mistaken
GROUP, MOST_GROUPS = 20, 50  # pairs with about the same score that share a probability; at most so many groups
NATURAL = 0.15  # log odds for a standard deviation of the measures that shuffled pairs do not weigh
RIDGE = 10.0  # L2 penalty on the weights
FAR = (-8.0, 12.0)  # standard deviations at which measures are clipped


def noise_rate(observed: FloatArray, shuffled: FloatArray) -> float:
    """Estimate the share of observed scores with the distribution of the shuffled ones.

    At low scores, where matched pairs are rare, the ratio of the observed to the shuffled density is that share. It is
    averaged up to where the ratio begins to rise.
    """
    return _rate(np.sort(observed), np.sort(shuffled))


def _rate(observed: FloatArray, shuffled: FloatArray) -> float:
    """The noise rate of scores in ascending order."""
    bounds = _quantiles(shuffled)
    # With equal scores, more of the shuffled ones than the quantile lie at or below it: they are counted.
    below, expected = (np.searchsorted(scores, bounds, side="right") / len(scores) for scores in (observed, shuffled))
    ratios = below / expected
    sure = QUANTILES <= SURE
    rate = float(ratios[sure].mean())
    error = math.sqrt(max(rate, 1 / len(observed)) / (SURE * len(observed)))  # of a count over all that are below
    # Quantiles count less and less from half a standard error to one and a half: a sharp end would make the rate leap.
    flat = np.minimum.accumulate(np.clip(1.5 - (ratios - rate) / error, 0, 1))
    return float(np.clip(np.average(ratios, weights=QUANTILES * np.maximum(flat, sure)), 0, 1))


def _quantiles(shuffled: FloatArray) -> FloatArray:
    place = QUANTILES * (len(shuffled) - 1)
    low, high = shuffled[np.floor(place).astype(np.int64)], shuffled[np.ceil(place).astype(np.int64)]
    return np.asarray(low + (place - np.floor(place)) * (high - low))


def rate_bounds(shuffled: FloatArray) -> FloatArray:
    """Ascending scores at which `noise_rate` and `noise_interval` count the observed ones."""
    ascending = np.sort(shuffled)
    return np.unique([*_quantiles(ascending), *(np.quantile(ascending, cut) for cut in (*LOW_CUTS, HIGH_CUT))])


def noise_interval(
    observed: FloatArray, shuffled: FloatArray, unbiased: tuple[FloatArray, FloatArray] | None = None
) -> tuple[float, float]:
    """95 % interval of the noise rate.

    Both ends come from a count of observed scores below a quantile of the shuffled ones, by Clopper and Pearson's exact
    limits, so the interval is never empty, even if the count is 0. The uncertainty of the quantile is added. They
    use different quantiles, because learning can change the scores. Some matched pairs score low, which
    raises the count: the less so the lower the quantile, so the lower end is the least of two. And where hardly any
    pair matches, accidental agreement was learned from, which raises the scores of mismatched pairs. `unbiased` are
    scores of observed and of shuffled pairs without this error, perhaps weak ones; they limit the upper end.
    """
    sides = np.sort(observed), np.sort(shuffled)
    rate = _rate(*sides)
    low, high = min(_limit(*sides, cut, upper=False) for cut in LOW_CUTS), _limit(*sides, HIGH_CUT, upper=True)
    if unbiased is not None and rate > MOSTLY:
        limit = _limit(np.sort(unbiased[0]), np.sort(unbiased[1]), HIGH_CUT, upper=True)
        high = max(high, limit) if separated(*unbiased) else 1.0
    return max(0.0, min(low, rate)), min(1.0, max(high, rate))


def separation(observed: npt.NDArray[np.floating], shuffled: npt.NDArray[np.floating]) -> float:
    """AUROC of observed against shuffled scores; 0.5 is chance, and noise lowers it."""
    both = np.concatenate([observed, shuffled])
    found = auroc(both, np.arange(len(both)) < len(observed))
    return 0.5 if found is None else found


def separated(observed: FloatArray, shuffled: FloatArray, errors: float = 1.96) -> bool:
    """Whether observed scores are higher than shuffled ones, by Mann and Whitney's test: at 2.5 % by default."""
    n, m = len(observed), len(shuffled)
    return separation(observed, shuffled) > 0.5 + errors * math.sqrt((n + m + 1) / (12 * n * m))


def _limit(observed: FloatArray, shuffled: FloatArray, quantile: float, *, upper: bool) -> float:
    """One end of the interval, of scores in ascending order."""
    n, m = len(observed), len(shuffled)
    bound = np.quantile(shuffled, quantile)
    count, expected = np.searchsorted(observed, bound, side="right"), np.searchsorted(shuffled, bound, "right") / m
    share = float(betaincinv(count + 1, n - count, 0.975) if upper else betaincinv(count, n - count + 1, 0.025))
    if count == (n if upper else 0):
        share = float(upper)
    middle = count / n / expected
    error = math.hypot(share / expected - middle, 1.96 * middle * math.sqrt((1 - expected) / (expected * m)))
    return float(middle + error if upper else middle - error)


def match_probability(observed: FloatArray, shuffled: FloatArray, rate: float) -> FloatArray:
    """Match probability of each observed pair; it never falls with the score.

    The rate is taken as at least half a pair, so that scores still order the pairs at a rate of 0.
    """
    rate = max(rate, 0.5 / len(observed))
    scores = np.concatenate([observed, shuffled])
    order = scores.argsort(kind="stable")
    is_observed = (order < len(observed)).astype(np.float64)
    share = np.empty(len(scores))
    share[order] = isotonic_regression(is_observed).x  # share of observed pairs among those with about this score
    share = share[: len(observed)]
    density = share / len(observed) / np.maximum((1 - share) / len(shuffled), 1e-12)  # of observed over shuffled
    return np.clip(1 - rate / np.maximum(density, 1e-12), 0, 1)


def trust(observed: FloatArray, shuffled: FloatArray) -> FloatArray:
    """Match probability of each observed pair, by one score."""
    return match_probability(observed, shuffled, noise_rate(observed, shuffled))


@dataclass(frozen=True)
class Combination:
    """Combine measures to one score, the log odds of a match, and to a probability."""

    centre: FloatArray  # (m,) mean of each measure over shuffled pairs
    spread: FloatArray  # (m,) its standard deviation
    weights: FloatArray  # (m,)
    natural: FloatArray  # (m,) weights of the measures that are added to the log odds ...
    bend: FloatArray  # (2,) ... of a pair against a shuffled one: slope and offset
    knots: FloatArray  # (k,) weighted sums of the measures
    chances: FloatArray  # (k,) probability that a pair with such a sum matches; linear in between
    slope: float  # of a logistic curve that is mixed in, so that different sums get different odds
    offset: float
    rate: float  # noise rate
    low: float
    high: float

    def score(self, measures: npt.NDArray[np.floating]) -> FloatArray:
        """(n,) log odds from (n, m) measures."""
        sums = self.sums(measures)
        for start in range(0, len(sums), PIECE):
            sums[start : start + PIECE] = self.log_odds(sums[start : start + PIECE])
        return sums

    def sums(self, measures: npt.NDArray[np.floating]) -> FloatArray:
        """(n,) weighted sums of the measures, in pieces: there may be millions."""
        sums = np.empty(len(measures))
        for start in range(0, len(measures), PIECE):
            part = standardised(measures[start : start + PIECE], self.centre, self.spread)
            sums[start : start + PIECE] = _sums(part, self.weights, self.natural, self.bend)
        return sums

    def log_odds(self, sums: FloatArray) -> FloatArray:
        """(n,) log odds from weighted sums."""
        chance, curve = np.interp(sums, self.knots, self.chances), self.slope * sums + self.offset
        matched, mismatched = (
            (1 - CURVE) * part + CURVE * probability(sign * curve) for part, sign in ((chance, 1), (1 - chance, -1))
        )
        return np.asarray(np.log(matched) - np.log(mismatched))

    def shares(self) -> FloatArray:
        """(m,) share of each measure in the score."""
        sizes = np.abs(self.weights) * (self.bend[0] if self.natural.any() else 1) + self.natural
        return sizes / max(float(sizes.sum()), 1e-12)


def standardised(measures: npt.NDArray[np.floating], centre: FloatArray, spread: FloatArray) -> FloatArray:
    return np.clip((measures - centre) / spread, *FAR)


def combine(
    observed: npt.NDArray[np.floating],
    shuffled: npt.NDArray[np.floating],
    close: npt.NDArray[np.floating],
    alike: FloatArray,
    trust: FloatArray,
    checked: FloatArray | None = None,
    unbiased: tuple[FloatArray, FloatArray] | None = None,
    natural: npt.NDArray[np.bool_] | None = None,
) -> Combination:
    """Fit the weights of the measures.

    Args:
        observed: (n, m) measures of the pairs.
        shuffled: (s, m) measures of shuffled pairs.
        close: (c, m) measures of pairs with the partner of a near neighbour. They raise the weights of measures that
            detect small mistakes.
        alike: (c,) how right each of these is, from 0 (mismatched) to 1 (as good as matched).
        trust: (n,) a first estimate of the probability that each pair matches.
        checked: (n,) decisions: 1 matched, 0 mismatched, NaN for all other pairs.
        unbiased: Scores as in `noise_interval`.
        natural: (m,) measures that order the pairs which shuffled ones are not like.
    """
    natural = np.zeros(observed.shape[1], dtype=np.bool_) if natural is None else natural
    centre, spread = shuffled.mean(0, dtype=np.float64), shuffled.std(0, dtype=np.float64) + 1e-9
    a, b, c = (standardised(part, centre, spread) for part in (observed, shuffled, close))
    known = np.zeros(len(a), dtype=bool) if checked is None else ~np.isnan(checked)
    worth = np.where(known, _checked_weight(known), 1.0)
    rate = 0.0
    for _ in range(ROUNDS):
        if checked is not None:
            trust = np.where(known, np.nan_to_num(checked), trust)
        weights = positive_weights(
            np.concatenate([a, b, c]),
            np.concatenate([trust, np.zeros(len(b)), alike]),
            np.concatenate([worth, np.full(len(b), SHUFFLED), np.full(len(c), CLOSE * len(a) / max(len(c), 1))]),
            RIDGE,
            np.flatnonzero(~natural),
        )
        score, null = a @ weights, b @ weights
        rate = noise_rate(score, null)
        trust = match_probability(score, null, rate)
    low, high = noise_interval(score, null, unbiased)
    if high == 1 and unbiased is not None and not separated(*unbiased):
        rate = max(rate, noise_rate(*unbiased))
    target = trust if checked is None else np.where(known, np.nan_to_num(checked), trust)
    # A checked pair counts once here: checked pairs are no random sample of the pairs with such a score.
    slope, offset = logistic(score[:, None], target, np.ones(len(a)), 1e-3)
    bend, added = np.array([max(float(slope[0]), 1e-6), offset]), np.zeros(len(natural))
    if natural.any():
        added[natural] = 1 / (a[:, natural].std(0) + 1e-9)
        added *= NATURAL / ((a @ added).std() + 1e-9)
        score = _sums(a, weights, added, bend)
        slope, offset = logistic(score[:, None], target, np.ones(len(a)), 1e-3)
    steepness = max(float(slope[0]), 1e-6)
    curve = _curve(score, target)
    return Combination(centre, spread, weights, added, bend, *curve, steepness, offset, rate, low, high)


def _sums(measures: FloatArray, weights: FloatArray, natural: FloatArray, bend: FloatArray) -> FloatArray:
    """(n,) weighted sums of standardised measures.

    Shuffled pairs have the score distribution of mismatched pairs. Whether a pair is like them counts
    fully; how far it is above them says little about how well it matches. So the log of the probability stops growing
    there, and the natural measures order the pairs.
    """
    sums = measures @ weights
    return sums if not natural.any() else measures @ natural - np.logaddexp(0, -(bend[0] * sums + bend[1]))


def positive_weights(
    x: FloatArray, target: FloatArray, worth: FloatArray, ridge: float, used: IntArray | None = None
) -> FloatArray:
    """Weights (m,) of measures, each the better the higher; a measure with a negative weight is left out.

    Measures are correlated, so without labels a negative weight is an accident of the fit: it makes the sum worse than
    its best measure.
    """
    weights, used = np.zeros(x.shape[1]), np.arange(x.shape[1]) if used is None else used
    while len(used):
        found, _ = logistic(x[:, used], target, worth, ridge)
        if (found >= 0).all():
            weights[used] = found
            break
        used = used[found >= 0]
    return weights


def _curve(score: FloatArray, target: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Mean score and mean target of groups of pairs with about the same score; the targets never fall."""
    groups = np.array_split(score.argsort(kind="stable"), int(np.clip(len(score) // GROUP, 2, MOST_GROUPS)))
    knots, chances = (np.array([values[group].mean() for group in groups]) for values in (score, target))
    return knots, isotonic_regression(chances, weights=[len(group) for group in groups]).x


def _checked_weight(known: npt.NDArray[np.bool_]) -> float:
    """Weight of a checked pair: all checked ones together at most a tenth of the rest."""
    return float(np.clip(0.1 * len(known) / max(1, int(known.sum())), 1.0, MAX_CHECKED_WEIGHT))
