"""Evidence about scores: shuffled pairs, an audit, or pairs checked by people.

Scores are compared by their ranks, so that nothing depends on their scale: a cosine, a sigmoid of it and its logarithm
give the same probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
from scipy.optimize import isotonic_regression
from scipy.special import ndtri
from scipy.stats import rankdata, spearmanr

from mispair.auditing.scoring.calibration import combine, noise_interval, positive_weights, separated, trust
from mispair.auditing.summary import proportion_limits, share_interval
from mispair.calibrating.cuts import Ranked
from mispair.errors import ConflictError, TooFewError
from mispair.functional.logistic import FloatArray, logistic, probability
from mispair.pairs.pairs import MATCH_THRESHOLD
from mispair.reviewing.noise_estimate import LEAST, Population, recalibrate
from mispair.support.arrays import IntArray
from mispair.support.formatting import percent

LEAST_PAIRS, LEAST_SHUFFLED = 50, 100
MOST_SHUFFLED = 100_000  # pairs that are made of the vectors
POOL, CLOSE_BY, SAME = 3_000, 10, 0.98  # rows among which look-alikes are searched; nearest ones; cosine of duplicates
SAME_ORDER = 0.99  # rank correlation of a score and the cosine that it was made of, perhaps rounded
RIDGE = 1e-3
ENDS = 0.1  # share of the pairs that are the best, and the worst, by a score
NOTHING_TO_DO = "pairs that have nothing to do with each other"


@dataclass(frozen=True)
class View(Ranked):
    """The pairs as one kind of evidence ranks them."""

    evidence: str  # "shuffled", "vectors", "audit" or "checked"
    wrong: str  # kind of pairs it calls wrong
    count: int  # shuffled, audited or checked pairs
    look_alikes_found: float | None = None  # share of pairs with a look-alike's partner that seem mismatched
    at_most: float | None = None  # largest possible share of wrong pairs, if more than `high`


def normal_scores(*parts: FloatArray) -> list[FloatArray]:
    """The ranks of each column among all parts (n, m), as quantiles of a normal distribution; ties share the mean rank.

    >>> [part.round(2).tolist() for part in normal_scores(np.array([[1.0], [9.0]]), np.array([[2.0]]))]
    [[[-0.97], [0.97]], [[0.0]]]
    """
    both = np.concatenate(parts)
    ranks = ndtri((rankdata(both, axis=0) - 0.5) / len(both))
    return np.split(ranks, np.cumsum([len(part) for part in parts])[:-1])


def by_shuffled(
    scores: FloatArray, shuffled: FloatArray, columns: Sequence[str], close: FloatArray | None = None
) -> View:
    """Model scores (n, m) as a mixture of scores of shuffled pairs (s, m) and of others.

    `close` are the scores (c, m) of pairs with the partner of a look-alike.
    """
    _enough(len(scores), LEAST_PAIRS, "pairs with a score")
    _enough(len(shuffled), LEAST_SHUFFLED, "shuffled pairs")
    close = np.empty((0, len(columns))) if close is None else close
    observed, null, near = normal_scores(scores, shuffled, close)
    for column, one, other in zip(columns, observed.T, null.T, strict=True):
        if separated(other, one):
            raise _reversed(column, "shuffled pairs score higher than yours")
        if len(columns) == 1 and not separated(one, other):
            advice = "Either (nearly) all pairs are wrong, or this score does not show it. Check 100 random pairs."
            raise ConflictError(f"shuffled pairs score as high as yours in {column!r}", where="score", advice=advice)
    first = trust(observed.mean(1), null.mean(1))
    found = combine(observed, null, near, np.zeros(len(near)), first)
    sums, null_sums, near_sums = (found.sums(part) for part in (observed, null, near))
    rates = found.rate, found.low, found.high
    order, match = scores[:, 0] if len(columns) == 1 else sums, probability(found.log_odds(sums))
    interval = partial(_like_shuffled, rates, sums, np.sort(null_sums))
    view = View(order, match, *rates, "shuffled", NOTHING_TO_DO, len(shuffled), interval=interval)
    if not len(near):
        return view
    seen = float((probability(found.log_odds(near_sums)) < MATCH_THRESHOLD).mean())
    at_most = max(found.high, noise_interval(sums, near_sums)[1])
    return replace(view, evidence="vectors", look_alikes_found=seen, at_most=at_most)


def _like_shuffled(
    rate: tuple[float, float, float], sums: FloatArray, shuffled: FloatArray, some: IntArray
) -> tuple[float, float]:
    """95 % interval of the share of wrong pairs among those from a score up: as many as shuffled pairs get there.

    The rate comes from the same shuffled pairs, so that its error and that of their count are added. Chance, in the
    number of wrong pairs that get there, is independent of both.
    """
    independent = min(len(shuffled), len(sums))  # more share their items
    there = (1 - np.searchsorted(shuffled, sums[some].min()) / len(shuffled)) * independent
    get_there, all_to_some = there / independent, len(sums) / len(some)
    share = rate[0] * get_there * all_to_some
    ends = []
    for side, other in enumerate(rate[1:]):
        by_rate = (other - rate[0]) * get_there * all_to_some
        by_count = rate[0] * (proportion_limits(there, independent)[side] - get_there) * all_to_some
        by_chance = proportion_limits(min(share, 1.0) * len(some), len(some))[side] - share
        ends.append(share + math.copysign(math.hypot(by_rate + by_count, by_chance), side - 0.5))
    return max(0.0, ends[0]), min(1.0, ends[1])


def by_vectors(
    score: FloatArray, left: npt.NDArray[np.floating], right: npt.NDArray[np.floating], column: str, seed: int = 0
) -> View:
    """The same for a score (n,) that rises with the cosine of two vectors (n, D): mispair makes the shuffled pairs."""
    _enough(len(score), LEAST_PAIRS, "pairs with a score")
    alike = 0.0
    if left.shape[1] == right.shape[1]:
        cosine = _cosines(left, right, np.arange(len(left)), np.arange(len(left)))
        alike = float(spearmanr(score, cosine).statistic)
    if not alike >= SAME_ORDER:
        raise ConflictError(
            f"{column!r} is not the cosine of these vectors (rank correlation {alike:.2f})",
            where="left",
            expected="the vectors that the score was made of",
            advice="Score a few hundred shuffled pairs in the same way (`shuffled`), or audit the vectors (`audit`).",
        )
    rng = np.random.default_rng(seed)
    groups = [_equal_rows(side) for side in (left, right)]
    rows = np.resize(rng.permutation(len(score)), min(MOST_SHUFFLED, 20 * len(score)))
    partners = (rows + rng.integers(1, len(score), len(rows))) % len(score)
    null = _cosines(left, right, *_mismatched(rows, partners, groups))
    near = _cosines(left, right, *_mismatched(*_look_alikes(left, right, rng), groups))
    found = by_shuffled(cosine[:, None], null[:, None], [column], near[:, None])
    return replace(found, order=score, count=len(null))


def _cosines(
    left: npt.NDArray[np.floating], right: npt.NDArray[np.floating], rows: IntArray, partners: IntArray
) -> FloatArray:
    """Cosines of pairs of rows, some at a time: there may be millions."""
    found = np.empty(len(rows))
    for start in range(0, len(rows), POOL):
        a, b = (np.asarray(side[part[start : start + POOL]], dtype=np.float64)
                for side, part in ((left, rows), (right, partners)))  # fmt: skip
        norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        found[start : start + POOL] = (a * b).sum(1) / np.maximum(norms, 1e-12)
    return found


def _equal_rows(vectors: npt.NDArray[np.floating]) -> IntArray:
    """(n,) equal for rows with the same vector: captions of one photo, or one caption of several photos."""
    parts = (np.asarray(vectors[start : start + POOL]) for start in range(0, len(vectors), POOL))
    hashes = np.array([hash(row.tobytes()) for part in parts for row in part], dtype=np.int64)
    return np.asarray(np.unique(hashes, return_inverse=True)[1], dtype=np.int64)


def _mismatched(rows: IntArray, partners: IntArray, groups: Sequence[IntArray]) -> tuple[IntArray, IntArray]:
    """Pairs of rows without a shared item: a photo with another caption of its own is not wrong."""
    different = np.all([group[rows] != group[partners] for group in groups], axis=0)
    return rows[different], partners[different]


def _look_alikes(
    left: npt.NDArray[np.floating], right: npt.NDArray[np.floating], rng: np.random.Generator
) -> tuple[IntArray, IntArray]:
    """Rows, and one of the nearest rows of each by the left side, then by the right side."""
    pool = rng.permutation(len(left))[:POOL]
    near = []
    for side in (left, right):
        x = np.asarray(side[pool], dtype=np.float32)
        x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
        alike = x @ x.T
        alike[alike > SAME] = -1  # itself, and duplicates
        count = min(CLOSE_BY, len(pool) - 1)
        nearest = np.argpartition(-alike, count - 1, axis=1)[:, :count]
        near.append(pool[nearest[np.arange(len(pool)), rng.integers(0, count, len(pool))]])
    return np.tile(pool, 2), np.concatenate(near)


def by_audit(
    scores: FloatArray,
    match: FloatArray,
    rate: tuple[float, float, float],
    columns: Sequence[str],
    at_most: float | None = None,
) -> View:
    """The probabilities of an audit of the same rows, by score.

    Args:
        scores: (n, m) the columns.
        match: (n,) match scores of the audit.
        rate: Its noise rate, and both ends of its interval.
        columns: Names of the columns.
        at_most: Largest possible share of mismatched pairs.
    """
    _enough(len(scores), LEAST_PAIRS, "pairs with a score")
    order, _ = _fitted(scores, scores, match, columns, "the audit")
    chances, contrast = sharpened(order, match)

    def interval(some: IntArray) -> tuple[float, float]:
        """Interval of the rate: from the rate itself, the count, and the errors of both mean match scores."""
        wrong, *ends = share_interval(1 - chances[some], rate, len(chances))
        errors = (part.std() / math.sqrt(len(part)) for part in (match[some], match))
        error = 1.96 * math.hypot(*errors) / contrast
        low, high = (math.hypot(end - wrong, error) for end in ends)
        return max(0.0, wrong - low), min(1.0, wrong + high)

    return View(order, chances, *rate, "audit", NOTHING_TO_DO, len(scores), at_most=at_most, interval=interval)


def sharpened(order: FloatArray, match: FloatArray) -> tuple[FloatArray, float]:
    """(n,) probability of a match by score, from the mean match score of an audit there; and a - b.

    An audit is certain about few pairs, so its mean lies between the mean of matched pairs, a, and of mismatched pairs,
    b. If the audit errs independently of the score, it is P a + (1 - P) b, which is solved for P. A score of the same
    vectors is not independent; the means of its best and worst pairs then reach beyond a and b, which are moved there.
    """
    by_score, share = _rising(order, match), float(match.mean())
    ordered = np.sort(by_score)
    worst, best = (max(1, int(min(ENDS, part / 2) * len(match))) for part in (1 - share, share))
    a = max(float(match @ match / max(match.sum(), 1e-12)), float(ordered[-best:].mean()))
    b = min(float(match @ (1 - match) / max((1 - match).sum(), 1e-12)), float(ordered[:worst].mean()))
    return (by_score, 1.0) if a - b < 1e-9 else (np.clip((by_score - b) / (a - b), 0, 1), a - b)


def _rising(order: FloatArray, target: FloatArray) -> FloatArray:
    """(n,) isotonic regression; equal scores get the same."""
    _, place, counts = np.unique(order, return_inverse=True, return_counts=True)
    means = np.bincount(place, target) / counts
    return np.asarray(np.clip(isotonic_regression(means, weights=counts).x, 0, 1)[place])


def _fitted(
    known: FloatArray, scores: FloatArray, target: FloatArray, columns: Sequence[str], by: str
) -> tuple[FloatArray, FloatArray]:
    """An order of the pairs and their log odds of a match, by logistic regression on the normal scores.

    Args:
        known: (k, m) columns of the pairs that the target is known of.
        scores: (n, m) of all pairs.
        target: (k,) probability that these match.
        columns: Names of the columns.
        by: Source of the target, for messages.
    """
    everything, x = normal_scores(scores, known)
    worth = np.ones(len(x))
    weights = positive_weights(x, target, worth, RIDGE)
    if not weights.any():
        raise _reversed(columns[0], f"by {by} pairs with higher scores match less often, or as often")
    sums = x @ weights
    slope, offset = logistic(sums[:, None], target, worth, RIDGE)
    all_sums = everything @ weights
    return scores[:, 0] if len(columns) == 1 else all_sums, float(slope[0]) * all_sums + offset


def by_checked(
    scores: FloatArray,
    rows: IntArray,
    matched: npt.NDArray[np.bool_],
    columns: Sequence[str],
    stands_for: FloatArray | None = None,
    base: View | None = None,
) -> View:
    """Probabilities and the noise rate from checked pairs.

    Args:
        scores: (n, m) the columns of all pairs.
        rows: (k,) checked pairs, a random sample.
        matched: (k,) whether each of them matches.
        columns: Names of the columns.
        stands_for: (k,) how many pairs each stands for, up to a factor; equally many by default.
        base: Initial probabilities from another kind of evidence; by default from the checked pairs.
    """
    _enough(len(rows), min(LEAST, len(scores)), "checked pairs")
    wrong = 1.0 - matched.astype(np.float64)
    if base is None:
        if wrong.min() == wrong.max():
            what = f"all {len(rows):,} checked pairs are {'wrong' if wrong[0] else 'right'}"
            raise TooFewError(what, expected="some of each", advice="Check more pairs, or give other evidence as well.")
        order, log_odds = _fitted(scores[rows], scores, matched.astype(np.float64), columns, "the checked pairs")
    else:
        share = np.clip(base.match, 1e-5, 1 - 1e-5)
        order, log_odds = base.order, np.log(share / (1 - share))
    found = Population(probability(-log_odds), 0).by_sample(rows, wrong, stands_for)
    slope, offset = recalibrate(-log_odds[rows], wrong)
    if slope <= 0:
        raise _reversed(columns[0], "the checked pairs with higher scores match less often")
    match = probability(slope * log_odds - offset)

    def interval(some: IntArray) -> tuple[float, float]:
        """The noise rate by the checked pairs among them, as for all pairs."""
        places = np.full(len(scores), -1)
        places[some] = np.arange(len(some))
        inside = places[rows] >= 0
        if not inside.any():
            return 0.0, 1.0
        weights = None if stands_for is None else stands_for[inside]
        part = Population(1 - match[some], 0).by_sample(places[rows[inside]], wrong[inside], weights)
        return part.low, part.high

    ends = found.rate, found.low, found.high
    return View(order, match, *ends, "checked", "pairs that people call wrong", len(rows), interval=interval)


def disagreement(views: Sequence[View]) -> str:
    """A note if the intervals of two kinds of evidence exclude each other."""
    for number, one in enumerate(views):
        for other in views[number + 1 :]:
            if one.low > other.high or other.low > one.high:
                rates = " and ".join(f"{percent(view.rate)} by {view.evidence}" for view in (one, other))
                return f"The noise rates disagree: {rates}. Trust the checked pairs; they follow your own standard."
    return ""


def _enough(count: int, least: int, what: str) -> None:
    if count < least:
        raise TooFewError(f"{count:,} {what}", expected=f"at least {least:,}")


def _reversed(column: str, what: str) -> ConflictError:
    advice = "Negate the column if lower is better, as for a distance."
    return ConflictError(f"{column!r}: {what}", where="score", advice=advice)
