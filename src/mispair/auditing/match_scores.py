"""The match score of each pair, from log odds computed once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from mispair.auditing.scoring.calibration import PIECE
from mispair.auditing.scoring.exchanges import UNPROVED, Trial, lowered
from mispair.auditing.scoring.folds import sample
from mispair.auditing.scoring.judge import Judge
from mispair.auditing.scoring.reasons import Bits, wordless
from mispair.auditing.scoring.recalibration import LEAST, Recalibration, clipped
from mispair.auditing.scoring.scan import Scan
from mispair.auditing.scoring.shared_items import SharedItems
from mispair.auditing.scoring.siblings import Siblings
from mispair.functional.logistic import FloatArray, logistic, probability
from mispair.pairs.source import Source
from mispair.support.arrays import IntArray

AT_ONCE = 1 << 14  # rows whose vectors are read at a time
WORDLESS = 6  # of so many pairs whose caption has no word about an image, one is expected to match
Scores = npt.NDArray[np.float32]


@dataclass(frozen=True)
class MatchScores:
    """All evidence for the match scores."""

    log_odds: FloatArray  # (N,) log odds that each pair matches by its own measures; NaN where it could not be read
    limited: IntArray  # (k,) pairs of which only one in many is expected to match
    limits: Scores  # (k,) their highest match score
    siblings: Siblings | None = None  # how the right items of one left item agree; None where hardly any has several
    # (N,) probability that each pair has exchanged partners with a similar one; None if nothing speaks for it
    exchanged: Scores | None = None
    trials: Sequence[Trial] = ()  # exchanges that were made on purpose
    # rows that a person has checked: 1 matched, 0 mismatched
    checked: Mapping[int, float] = field(default_factory=dict)
    recalibration: Recalibration | None = None  # what these decisions say about all pairs; None where they are too few
    # (N,) log odds that it adds by the vectors of each pair
    by_vectors: Scores = field(default_factory=lambda: np.empty(0, dtype=np.float32))

    @classmethod
    def of(cls, judge: Judge, scan: Scan, items: SharedItems) -> Self:
        """Scores by the measures and by shared items."""
        return cls(judge.combination.score(scan.measures), *_limits(judge, scan, items.partners))

    def informed(self, judge: Judge, scan: Scan, items: SharedItems, checked: Mapping[int, float], seen: Bits) -> Self:
        """Add decisions of people and faults of captions."""
        many = np.maximum(items.partners, WORDLESS * wordless(seen))
        limited, limits = _limits(judge, scan, many)
        return replace(self, limited=limited, limits=limits, checked=checked)

    def recalibrated(self, source: Source, judge: Judge, device: torch.device) -> Self:
        """Learn from the decisions of people, if there are enough."""
        rows = np.array([row for row in self.checked if not np.isnan(self.log_odds[row])], dtype=np.int64)
        if len(rows) < LEAST:
            return self
        score = self.beside_others
        matched = np.array([self.checked[row] for row in rows.tolist()])
        found = learn_recalibration(source, judge, rows, matched, score[rows], score, device)
        assert found is not None
        by_vectors = np.empty(len(source), dtype=np.float32)
        for start in range(0, len(source), AT_ONCE):
            here = slice(start, min(start + AT_ONCE, len(source)))
            by_vectors[here] = found.by_vectors(*unit_vectors(source, judge, here, device))
        return replace(self, recalibration=found, by_vectors=by_vectors)

    @property
    def proved(self) -> Scores | None:
        """The probability of exchanges if there are more than by accident; else None."""
        return None if self.exchanged is None or self.exchanged.max() <= UNPROVED else self.exchanged

    @property
    def beside_others(self) -> FloatArray:
        """(N,) log odds by the measures of each pair and by other pairs."""
        score = self.log_odds if self.siblings is None else self.log_odds + self.siblings.penalty
        return score if self.exchanged is None else lowered(score, self.exchanged)

    @property
    def final(self) -> FloatArray:
        """(N,) log odds of a match; NaN for unreadable rows."""
        score = self.beside_others
        return score if self.recalibration is None else self.recalibration.log_odds(score, self.by_vectors)

    def alone(self) -> Scores:
        """(N,) match scores without the evidence of other pairs; NaN for unreadable rows."""
        return replace(self, siblings=None, exchanged=None).match()

    def match(self) -> Scores:
        """(N,) match scores; NaN for unreadable rows."""
        match = np.empty(len(self.log_odds), dtype=np.float32)
        penalty = None if self.siblings is None else self.siblings.penalty
        for start in range(0, len(match), PIECE):  # there may be millions
            here = slice(start, start + PIECE)
            score = self.log_odds[here]
            match[here] = probability(score if penalty is None else score + penalty[here])
        if self.exchanged is not None:
            match *= 1 - self.exchanged
        if self.recalibration is not None:
            match = np.asarray(probability(self.final), dtype=np.float32)
        match[self.limited] = np.minimum(match[self.limited], self.limits)
        for row, matched in self.checked.items():
            if not np.isnan(match[row]):
                match[row] = matched
        return match


def learn_recalibration(
    source: Source,
    judge: Judge,
    rows: IntArray,
    matched: FloatArray,
    log_odds: FloatArray,
    others: FloatArray,
    device: torch.device,
) -> Recalibration | None:
    """Learn from decided rows (n,), their decisions and their log odds; None if they are too few.

    `others` are the log odds of all pairs or of a sample, NaN if missing.
    """
    typical = unit_vectors(source, judge, sample(judge.rows, AT_ONCE), device)
    left, right = unit_vectors(source, judge, rows, device)
    return Recalibration.fit(log_odds, left, right, matched, float(np.nanstd(clipped(others))), typical)


def unit_vectors(
    source: Source, judge: Judge, rows: slice | IntArray, device: torch.device
) -> list[npt.NDArray[np.float32]]:
    """The centred unit vectors of both sides of some rows, (n, D) and (n, E)."""
    sides = zip(judge.transforms, source.tensors(rows, device), strict=True)
    return [np.asarray(transform(side).cpu().numpy()) for transform, side in sides]


def _limits(judge: Judge, scan: Scan, many: npt.NDArray[np.integer]) -> tuple[IntArray, Scores]:
    """Pairs with one expected match among n (N,), and the match probability of each.

    The evidence is how much more frequent such measures are among matched than among shuffled pairs.
    """
    rows = np.flatnonzero(many)
    if not len(rows):
        return rows, np.empty(0, dtype=np.float32)
    return rows, limits(judge, judge.combination.sums(scan.measures[rows]), many[rows])


def limits(judge: Judge, sums: FloatArray, many: npt.NDArray[np.integer]) -> Scores:
    """(n,) highest match scores of pairs with these sums of measures and one expected match among several."""
    rate = judge.combination.rate
    odds = np.maximum(density_ratio(judge, sums) - rate, 1e-12) / max(1 - rate, 1e-3) / (many - 1)
    return np.asarray(odds / (1 + odds), dtype=np.float32)


def density_ratio(judge: Judge, sums: FloatArray) -> FloatArray:
    """(n,) density ratio of weighted sums of measures between observed and shuffled pairs.

    The logarithm of the ratio is a straight line, so it also holds below all observed sums.
    """
    known = np.concatenate([judge.observed, judge.null])
    observed = np.arange(len(known)) < len(judge.observed)
    worth = np.where(observed, 1 / len(judge.observed), 1 / len(judge.null)) * len(known) / 2
    slope, offset = logistic(known[:, None], observed.astype(np.float64), worth, 1e-3)
    return np.asarray(np.exp(np.clip(sums * slope[0] + offset, -60, 60)))


def new_match_scores(judge: Judge, sums: FloatArray) -> Scores:
    """(n,) match scores of new pairs, by the weighted sums of their measures.

    Below the lowest sum that the judge has observed, the mixture says nothing: after learning from matched pairs alone,
    it would call every pair matched. There the density ratio decides, at a noise rate of at least half a pair.
    """
    combination = judge.combination
    match = np.asarray(probability(combination.log_odds(sums)), dtype=np.float32)
    new = np.flatnonzero(sums < judge.observed.min())
    if len(new):
        rate = max(combination.rate, 0.5 / len(judge.observed))
        match[new] = np.minimum(match[new], np.maximum(1 - rate / density_ratio(judge, sums[new]), 0))
    return match
