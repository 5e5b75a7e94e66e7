"""What the rows of an audit add up to: parts of a data set are counted apart, and their tallies are added."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from mispair.auditing.cuts import USUAL_CUTS, cuts, parts
from mispair.auditing.scoring.judge import Judge
from mispair.functional.logistic import FloatArray
from mispair.pairs.pairs import IntArray

SIDES = ("left", "right")
SHARED = "item is shared by pairs that have nothing else in common"
NEARLY_ALL = 0.8  # noise rate from which on pairs that cannot be told from shuffled ones have nothing in common
BINS = 40  # of the histograms of the report
SHOWN = 20  # unreadable rows in the report


class MeasureSummary(BaseModel):
    """One ingredient of the match score.

    Attributes:
        weight: Its share of the score; those of all measures add up to 1.
        separation: AUROC of the observed pairs against shuffled ones.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    weight: float
    separation: float


@dataclass(frozen=True)
class Tally:
    """Counts of some rows of an audit.

    Attributes:
        pairs: Number of rows.
        scored: Readable ones.
        flagged: Flagged ones.
        different: Number of different readable pairs, of those among them that count as mismatched by other rules than
            the mixture, and the expected number of mismatched ones among the latter.
        below: (c, 4) what is below each cut, see `cuts.below_cuts`.
        by_match: (BINS,) pairs by match score, from 0 to 1.
        expected_matched: (BINS,) expected number of matched ones among them.
        by_sum: (BINS,) pairs by combined score, in `score_range`.
        unreadable: Number of rows by what is wrong with them.
        reasons: Number of rows by what they show.
        bad: Row number, id and status of the first unreadable rows.
        parts: Counts by value of a column, see `cuts.count_parts`.
    """

    pairs: int
    scored: int
    flagged: int
    different: FloatArray
    below: FloatArray
    by_match: IntArray
    expected_matched: FloatArray
    by_sum: IntArray
    unreadable: Counter[str]
    reasons: Counter[str]
    bad: list[tuple[int, str, str]]
    parts: Mapping[str, IntArray]

    def __add__(self, other: Tally) -> Tally:
        sums = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)[:-2]}
        together = dict(self.parts)
        for name, counts in other.parts.items():
            together[name] = together[name] + counts if name in together else counts
        return Tally(**sums, bad=sorted(self.bad + other.bad)[:SHOWN], parts=together)

    def metrics(self, judge: Judge, threshold: float) -> dict[str, Any]:
        """The metrics that follow from the counts, as `AuditSummary` has them."""
        combination = judge.combination
        rate, low, high = map(self._of_all, rates_of(judge))
        return {
            "pairs": self.pairs,
            "scored": self.scored,
            "flagged": self.flagged,
            "noise_rate": rate,
            "noise_rate_low": low,
            "noise_rate_high": high,
            "nothing_in_common": combination.high == 1 and combination.rate > NEARLY_ALL,
            "flag_below": threshold,
            "cuts": cuts(cut_values(threshold), self.below),
            "parts": parts(self.parts, judge.null),
            "unreadable": dict(sorted(self.unreadable.items())),
            "reasons": dict(self.reasons),
            "measures": {
                name: MeasureSummary(weight=float(weight), separation=float(separation))
                for name, weight, separation in zip(judge.names, combination.shares(), judge.separations, strict=True)
            },
        }

    def _of_all(self, rate: float) -> float:
        """The noise rate of all pairs, by that of the pairs that are learned from."""
        different, others, mismatched = self.different.tolist()
        return rate if not others else (rate * (different - others) + mismatched) / different


def cut_values(threshold: float) -> list[float]:
    """The cuts of the summary."""
    return sorted({*USUAL_CUTS, threshold})


def score_range(judge: Judge) -> tuple[float, float]:
    """Lowest and highest combined score of nearly all observed and shuffled pairs; never equal."""
    both = np.concatenate([judge.observed, judge.null])
    low, high = (float(np.quantile(both, share)) for share in (0.002, 0.998))
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def rates_of(judge: Judge) -> tuple[float, float, float]:
    return judge.combination.rate, judge.combination.low, judge.combination.high
