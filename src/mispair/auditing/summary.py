"""The metrics of an audit: noise rates, effects of cuts, and detection of simulated mismatches.

Parts of a data set are counted apart, and their counts are added.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError
from scipy.special import betaincinv

from mispair.auditing.match_scores import MatchScores, new_match_scores
from mispair.auditing.scoring.calibration import noise_interval, noise_rate, rate_bounds
from mispair.auditing.scoring.exchanges import Trial, lowered
from mispair.auditing.scoring.judge import Judge
from mispair.auditing.scoring.recalibration import LEAST
from mispair.errors import ConflictError, DamagedError, InvalidValueError
from mispair.functional.logistic import FloatArray, probability
from mispair.pairs.pairs import MATCH_THRESHOLD
from mispair.pairs.source import Source
from mispair.support.arrays import IntArray
from mispair.support.files import read_regular
from mispair.support.formatting import listed, percent

NOTHING_IN_COMMON = "These two sides have nothing to do with each other, or nearly all pairs are mismatched"
USUAL_CUTS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
SHARD = "shard"  # the value of `by` that means the files of the input
SIDES = ("left", "right")
SHARED = "item is shared by pairs that have nothing else in common"
MOST_REPEATED = 1 << 22  # scores of a part in memory
MOST_PARTS = 100  # parts of a data set in the summary, the largest first
FALSE_ALARMS = 0.01  # share of the matched pairs
FEW = 20  # simulated pairs, below which nothing is said
NEARLY_ALL = 0.8  # noise rate from which on pairs that cannot be told from shuffled ones have nothing in common
BINS = 40  # of the histograms of the report
SHOWN = 20  # unreadable rows in the report
SMALLEST = 0.0001  # share that is written as more than 0
BLIND = 0.1  # share of pairs that may be mismatched beyond the noise rate's interval before people are asked
SURPRISING = 3.0  # standard deviations between the mismatched pairs that people find and those that are expected
BAD_SHARE = 0.01  # unreadable pairs above this share deserve a warning


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MeasureSummary(_Frozen):
    """One ingredient of the match score."""

    weight: float  # its share of the score; the shares of all measures add up to 1
    separation: float  # AUROC of the observed pairs against shuffled ones


class CutSummary(_Frozen):
    """Pairs with a match score below a value."""

    flag_below: float  # the value
    flagged: int  # number of pairs
    mismatched: float  # estimated share of mismatched ones among them
    mismatched_low: float  # lower end of its 95 % interval
    mismatched_high: float  # upper end


class Part(_Frozen):
    """The pairs with one value of a column, or of one file."""

    value: str  # or the name of the file
    pairs: int  # number of scored pairs
    flagged: int  # number of flagged pairs
    noise_rate: float  # estimated share of mismatched ones
    noise_rate_low: float  # lower end of its 95 % interval
    noise_rate_high: float  # upper end


class Detection(_Frozen):
    """Detection of mismatches of one kind, simulated by exchanging partners of trusted pairs."""

    kind: str  # "random", "similar" (among the ten nearest of each other), or "most_similar" (among the three nearest)
    by: str = ""  # which items are similar: "left", "right", "both", or "either"; empty if none is
    found: float  # share of them below the cut
    found_at_1_percent: float  # the same where 1 % of the pairs that seem to match are below the cut
    # Upper end of the 95 % interval of the noise rate if the mismatched pairs are like these. Partners that are even
    # more alike hide better.
    at_most: float
    example: list[str] = []  # ids of two pairs with an exchange of median difficulty; empty for random exchanges

    def words(self, left: str = "left item", right: str = "right item") -> str:
        """The kind, as in "exchanged ...", with these names of an item of either side."""
        alike = "the most similar" if self.kind == "most_similar" else "similar"
        items = {"left": f"{left}s", "right": f"{right}s", "both": f"{left}s and {right}s"}.get(self.by, "items")
        return f"between {alike} {items}" if self.by else "at random"


class NoiseEstimate(_Frozen):
    """The noise rate by decisions of people on drawn pairs."""

    decisions: int
    rate: float  # estimated share of mismatched pairs, as these people see it
    low: float  # lower end of its 95 % interval
    high: float  # upper end

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    @property
    def sentence(self) -> str:
        """The rate in words."""
        rate, low, high = (percent(share, self.high) for share in (self.rate, self.low, self.high))
        return f"By {self.decisions:,} decisions on drawn pairs, {rate} are mismatched ({low} to {high})."


class Checked(_Frozen):
    """Pairs that people have checked, and what the audit thinks of them without the checks."""

    pairs: int
    mismatched: int
    expected: float  # number of mismatched ones by the match scores
    error: float  # standard deviation of this number
    learned: bool  # whether the match scores of other pairs follow the checks

    @classmethod
    def of(cls, matched: FloatArray, match: npt.NDArray[np.floating], *, learned: bool) -> Checked | None:
        """Of checks (n,), 1 matched and 0 mismatched, and match scores without them; None if there are none."""
        if not len(matched):
            return None
        wrong, error = 1 - match.astype(np.float64), math.sqrt(float((match * (1.0 - match)).sum()))
        mismatched = int(np.count_nonzero(matched == 0))
        return cls(pairs=len(matched), mismatched=mismatched, expected=wrong.sum(), error=error, learned=learned)

    @classmethod
    def of_scores(cls, scores: MatchScores) -> Checked | None:
        """Of the checks among all evidence."""
        if not scores.checked:
            return None
        match = replace(scores, recalibration=None, checked={}).match()
        rows = np.array([row for row in scores.checked if not np.isnan(match[row])], dtype=np.int64)
        matched = np.array([scores.checked[row] for row in rows.tolist()])
        return cls.of(matched, match[rows], learned=scores.recalibration is not None)

    @property
    def is_surprising(self) -> bool:
        """Whether the audit by itself expects another number of mismatched pairs."""
        return abs(self.mismatched - self.expected) > SURPRISING * max(self.error, 1.0)

    @property
    def sentence(self) -> str:
        """Both numbers in words."""
        then = "The match scores follow the checks."
        if not self.learned:
            then = f"Check at least {LEAST} pairs, so that the match scores learn from them."
        return (
            f"People call {self.mismatched:,} of {self.pairs:,} checked pairs mismatched; the audit by itself expects "
            f"{self.expected:,.0f}. {then}"
        )


class AuditSummary(_Frozen):
    """The metrics of an audit, as in `summary.json`.

    Attributes:
        pairs: All pairs.
        scored: Those that could be read.
        flagged: Pairs with a match score below `flag_below`.
        noise_rate: Estimated share of pairs with unrelated sides.
        noise_rate_low: Lower end of its 95 % interval.
        noise_rate_high: Upper end.
        close_rate: Estimated share of pairs that are close, but contradicted by the other partners of their left item
            or exchanged with a similar pair; not part of the noise rate. None if unknown.
        close_rate_low: Lower end of its 95 % interval.
        close_rate_high: Upper end.
        detections: Which share of mismatches that are made on purpose would be found, by kind.
        decided: The noise rate by decisions of people; None without them.
        checked: Pairs that people have checked; None without any.
        nothing_in_common: Whether the pairs cannot be told from shuffled ones: nearly all are mismatched, or the two
            sides have nothing to do with each other.
        flag_below: The cut: match score below which pairs are flagged.
        cuts: Number of flagged pairs at this and at other thresholds.
        by: Column, or "shard", by which `parts` are made.
        parts: Noise rates of parts of the data.
        unreadable: Number of pairs by problem.
        reasons: Number of pairs by visible problem: shared items, captions and images.
        near_duplicates_left: Pairs with a left item (nearly) equal to the left item of another pair.
        near_duplicates_right: The same for right items.
        suggested_right: Flagged pairs with a suggested right item.
        suggested_left: Flagged pairs with a suggested left item.
        measures: The ingredients of the match score, by name.
        notes: Notes for the reader.
        seconds: Time of the audit.
        stages: Seconds of each part of it.
    """

    pairs: int
    scored: int
    flagged: int
    noise_rate: float
    noise_rate_low: float
    noise_rate_high: float
    close_rate: float | None = None
    close_rate_low: float | None = None
    close_rate_high: float | None = None
    detections: list[Detection] = []
    decided: NoiseEstimate | None = None
    checked: Checked | None = None
    nothing_in_common: bool = False
    flag_below: float = MATCH_THRESHOLD
    cuts: list[CutSummary] = []
    by: str | None = None
    parts: list[Part] = []
    unreadable: dict[str, int]
    reasons: dict[str, int] = {}
    near_duplicates_left: int
    near_duplicates_right: int
    suggested_right: int
    suggested_left: int
    measures: dict[str, MeasureSummary]
    notes: list[str]
    seconds: float
    stages: dict[str, float]

    @property
    def rates(self) -> tuple[str, str, str]:
        """The noise rate and the two ends of its interval, in per cent with the same decimals."""
        rate, low, high = self.noise_rate, self.noise_rate_low, self.noise_rate_high
        return percent(rate, high), percent(low, high), percent(high, high)

    @property
    def at_most(self) -> float:
        """Upper bound of the share of mismatched pairs, between similar items included.

        Partners that are even more alike, or similar on both sides, look like matches to any encoder.
        """
        counted = (one for one in self.detections if one.kind == "similar" and one.by != "both")
        return max([self.noise_rate_high, *(one.at_most for one in counted)])

    @property
    def may_be_blind(self) -> bool:
        """Whether many more pairs may be mismatched than the audit finds, without decisions on drawn pairs."""
        return self.decided is None and self.at_most - self.noise_rate_high > BLIND

    @property
    def is_contradicted(self) -> bool:
        """Whether people find more or fewer mismatched pairs than the audit by itself."""
        decided = self.decided
        if decided is None:
            return self.checked is not None and self.checked.is_surprising
        return decided.low > self.noise_rate_high or decided.high < self.noise_rate_low

    @property
    def rate_sentence(self) -> str:
        """The noise rate in words."""
        rate, low, high = self.rates
        if self.noise_rate < SMALLEST:
            high = percent(max(self.noise_rate_high, SMALLEST))
            return f"At most {high} of the pairs have nothing to do with each other."
        return f"About {rate} of the pairs have nothing to do with each other ({low} to {high})."

    @property
    def rate_sentences(self) -> list[str]:
        """The noise rate, its upper bound, and the decisions of people."""
        found = [self.rate_sentence]
        if self.at_most > self.noise_rate_high:
            unknown = f"rule out that {percent(self.at_most)} of the pairs are mismatched"
            if self.at_most >= 0.995:  # 100 % when rounded
                unknown = "tell how many there are"
            found.append(f"Mismatches between similar items can look like matches: this audit cannot {unknown}.")
        if self.decided is not None:
            found.append(self.decided.sentence)
            if self.is_contradicted:
                more = "more" if self.decided.rate > self.noise_rate else "less"
                used = self.checked is not None and self.checked.learned
                then = "The match scores follow" if used else "Audit again to use"
                found.append(f"That is {more} than the audit sees by itself. {then} these decisions.")
        elif self.checked is not None and self.is_contradicted:
            found.insert(0, self.checked.sentence)
        return found

    @property
    def advice(self) -> list[str]:
        """What to do about a noise rate that the audit does not know."""
        unknown = self.decided is None and (self.may_be_blind or self.is_contradicted)
        return ["In a review, decide on about 100 drawn pairs to know the rate."] if unknown else []

    @property
    def too_many_unreadable(self) -> bool:
        """Whether more than 1 % of the pairs could not be read."""
        return self.pairs - self.scored > BAD_SHARE * self.pairs

    @classmethod
    def read(cls, path: Path) -> AuditSummary:
        """Reads `summary.json`.

        Raises:
            DamagedError: It cannot be read.
        """
        try:
            return cls.model_validate_json(read_regular(path))
        except (OSError, ValidationError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is damaged or of another version"
            what = f"the summary cannot be read ({reason})"
            raise DamagedError(what, where=path, advice="Audit again with `overwrite`.") from None


def share_of(text: str | float) -> float:
    """A share from 0 to 1, of a number or a text such as "80%" or "0.8".

    >>> share_of("80%"), share_of("0.8"), share_of(0.8)
    (0.8, 0.8, 0.8)

    Raises:
        InvalidValueError: It is not in (0, 1].
    """
    try:
        value = float(text[:-1]) / 100 if isinstance(text, str) and text.strip().endswith("%") else float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise InvalidValueError(repr(text), where="keep_best", expected="a fraction of the pairs such as 80% or 0.8")
    return value


def threshold(match: npt.NDArray[np.floating], flag_below: float | None, keep_best: str | float | None) -> float:
    """Pairs are flagged below this match score; `match` is NaN for unreadable rows.

    Equal scores are flagged together or not. `keep_best` is a share of the readable pairs.
    """
    if flag_below is not None:
        return flag_below
    known = np.sort(match[~np.isnan(match)])
    if keep_best is None or not len(known):
        return MATCH_THRESHOLD
    dropped = min(len(known) - 1, math.floor(len(known) * (1 - share_of(keep_best)) + 1e-9))
    return float(known[dropped])


def check_cut(flag_below: float | None, keep_best: str | float | None) -> None:
    """Raise if the cut is invalid.

    Raises:
        ConfigError: It is not a match score or fraction, or both are given.
    """
    if flag_below is not None and keep_best is not None:
        raise ConflictError("`flag_below` and `keep_best` are both given", advice="Give one of them.")
    if flag_below is not None and not 0 <= flag_below <= 1:
        raise InvalidValueError(str(flag_below), where="flag_below", expected="a match score from 0 to 1")
    if keep_best is not None:
        share_of(keep_best)


def below_cuts(
    match: npt.NDArray[np.floating], rate: tuple[float, float, float], pairs: int, values: Sequence[float]
) -> FloatArray:
    """Count the pairs below each cut, (c, 4); the results of parts of a data set add up.

    Columns: the number of pairs, the expected number of mismatched ones, and that number if the noise rate is the lower
    or the upper end of its interval. `rate` has the noise rate and both ends, `pairs` is the number of readable pairs
    of the whole data set.
    """
    below = (1 - match[match < value].astype(np.float64) for value in values)
    return np.array([[len(wrong), wrong.sum(), *_at_ends(wrong, rate, pairs)] for wrong in below])


def cuts(values: Sequence[float], below: FloatArray) -> list[CutSummary]:
    """Flagged pairs of each cut, by `below_cuts`.

    The share of mismatched pairs among the flagged ones is their mean probability. If the noise rate is an end of its
    interval instead of the estimate, the odds of every pair change by the same factor (Saerens et al., 2002); that and
    the error of a share of so many pairs make the interval.
    """
    found = []
    for value, (count, *wrong) in zip(values, below.tolist(), strict=True):
        middle, low, high = _interval(int(count), *wrong) if count else (0.0, 0.0, 0.0)
        found.append(
            CutSummary(
                flag_below=value, flagged=int(count), mismatched=middle, mismatched_low=low, mismatched_high=high
            )
        )
    return found


def share_interval(wrong: FloatArray, rate: tuple[float, float, float], pairs: int) -> tuple[float, float, float]:
    """Share of mismatched pairs among some of all pairs, and its 95 % interval.

    `wrong` (k,) is the probability that each of them is mismatched, `rate` the noise rate of all pairs and both ends of
    its interval.
    """
    return _interval(len(wrong), float(wrong.sum()), *_at_ends(wrong, rate, pairs))


def _interval(count: int, wrong: float, wrong_low: float, wrong_high: float) -> tuple[float, float, float]:
    """A share of `count` pairs and its interval, by the expected numbers of mismatched ones."""
    middle = wrong / count
    limits = proportion_limits(wrong, count)
    ends = wrong_low / count, wrong_high / count
    low, high = (math.hypot(middle - end, middle - limit) for end, limit in zip(ends, limits, strict=True))
    return middle, max(0.0, middle - low), min(1.0, middle + high)


def proportion_limits(found: float, count: int) -> tuple[float, float]:
    """Clopper and Pearson's 95 % limits of a share, by `found` of `count`."""
    low = betaincinv(found, count - found + 1, 0.025) if found > 0 else 0.0
    return float(low), float(betaincinv(found + 1, count - found, 0.975)) if found < count else 1.0


def _odds(rate: float, count: int) -> float:
    rate = min(max(rate, 0.5 / count), 1 - 0.5 / count)
    return rate / (1 - rate)


def _at_ends(wrong: FloatArray, rate: tuple[float, float, float], pairs: int) -> list[float]:
    """Sums of probabilities at both ends of the interval of the noise rate."""
    odds, *ends = (_odds(value, pairs) for value in rate)
    return [float((end / odds * wrong / (end / odds * wrong + 1 - wrong)).sum()) for end in ends]


def values_by(source: Source, by: str) -> list[str]:
    """The value of each row in a column, or the name of its file, to group noise rates by.

    Raises:
        InvalidValueError: The column does not exist.
    """
    if by == SHARD and source.shards:
        return [name for name, size in source.shards for _ in range(size)]
    table = source.table
    if table is None or by not in table.columns:
        known = [*(() if table is None else table.columns), *([SHARD] if source.shards else [])]
        there = f"one of {listed(known)}" if known else "an input with columns"
        raise InvalidValueError(f"no column {by!r} in {source.name}", where="by", expected=there)
    return [value for batch in table.batches([by]) for value in batch[0].to_pylist()]


def count_parts(
    values: Sequence[str], sums: FloatArray, shuffled: FloatArray, flagged: npt.NDArray[np.bool_]
) -> dict[str, IntArray]:
    """Count the pairs with each value; the results of parts of a data set add up.

    For each value: the number of pairs with combined measures up to each of `rate_bounds` and above the last, and the
    number of flagged ones.
    """
    bounds, readable = rate_bounds(shuffled), np.flatnonzero(~np.isnan(sums))
    names, number = np.unique(np.asarray(values, dtype=object)[readable].astype(str), return_inverse=True)
    found = np.zeros((len(names), len(bounds) + 2), dtype=np.int64)
    np.add.at(found, (number, np.searchsorted(bounds, sums[readable])), 1)
    np.add.at(found[:, -1], number, flagged[readable])
    return dict(zip(names.tolist(), found, strict=True))


def parts(counts: Mapping[str, IntArray], shuffled: FloatArray) -> list[Part]:
    """The noise rate of the pairs with each value, the largest part first, by `count_parts`."""
    found, places = [], np.append(rate_bounds(shuffled), np.inf)
    for value in sorted(sorted(counts), key=lambda value: -counts[value][:-1].sum())[:MOST_PARTS]:
        *below, flagged = counts[value].tolist()
        shrunk = max(1, sum(below) // MOST_REPEATED)  # a longer array would change no digit that is shown
        observed = np.repeat(places, np.array(below) // shrunk)
        low, high = noise_interval(observed, shuffled)
        found.append(
            Part(
                value=value,
                pairs=sum(below),
                flagged=flagged,
                noise_rate=noise_rate(observed, shuffled),
                noise_rate_low=low,
                noise_rate_high=high,
            )
        )
    return found


@dataclass(frozen=True)
class Tally:
    """Counts over some rows of an audit."""

    pairs: int  # number of rows
    scored: int  # readable ones
    flagged: int  # flagged ones
    # number of different readable pairs, of those among them that count as mismatched by other rules than the mixture,
    # and the expected number of mismatched ones among the latter
    different: FloatArray
    below: FloatArray  # (c, 4) what is below each cut, see `below_cuts`
    by_match: IntArray  # (BINS,) pairs by match score, from 0 to 1
    expected_matched: FloatArray  # (BINS,) expected number of matched ones among them
    by_sum: IntArray  # (BINS,) pairs by combined score, in `score_range`
    unreadable: Counter[str]  # number of rows by what is wrong with them
    reasons: Counter[str]  # number of rows by what they show
    bad: list[tuple[int, str, str]]  # row number, id and status of the first unreadable rows
    parts: Mapping[str, IntArray]  # counts by value of a column, see `count_parts`

    def __add__(self, other: Tally) -> Tally:
        sums = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)[:-2]}
        together = dict(self.parts)
        for name, counts in other.parts.items():
            together[name] = together[name] + counts if name in together else counts
        return Tally(**sums, bad=sorted(self.bad + other.bad)[:SHOWN], parts=together)

    def metrics(self, judge: Judge, threshold: float) -> dict[str, Any]:
        """Metrics of `AuditSummary` by the counts."""
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
        """The noise rate of all pairs, from the noise rate of the learned pairs."""
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


def detections(
    judge: Judge, scores: MatchScores, threshold: float, ids: Callable[[IntArray], list[str]]
) -> list[Detection]:
    """Detection of each kind of mismatch, at this cut of the match score.

    Exchanges between similar items are tried out in audits of up to 65,536 pairs. In larger ones, "similar" are the ten
    nearest items in a tenth of a sample, by their left or right side.
    """
    alone = judge.observed
    matched = alone[probability(judge.combination.log_odds(alone)) >= MATCH_THRESHOLD]
    if len(matched) < FEW:
        return []
    lowest = float(np.quantile(matched, FALSE_ALARMS))
    tried = [trial for trial in scores.trials if trial.sums.size >= FEW]
    by_sums = {"random": judge.null} | ({} if tried else {"similar": judge.similar})
    found = []
    for kind, sums in by_sums.items():
        if len(sums) >= FEW:
            detection = Detection(
                kind=kind,
                by="" if kind == "random" else "either",
                found=float((new_match_scores(judge, sums) < threshold).mean()),
                found_at_1_percent=float((sums < lowest).mean()),
                at_most=judge.combination.high if kind == "random" else noise_interval(alone, sums)[1],
            )
            found.append(detection)
    observed = scores.beside_others
    observed = observed[~np.isnan(observed)]
    cut = float(np.quantile(observed[probability(observed) >= MATCH_THRESHOLD], FALSE_ALARMS)) if tried else 0.0
    return found + [_tried(trial, judge, observed, cut, threshold, ids) for trial in tried]


def _tried(
    trial: Trial, judge: Judge, observed: FloatArray, cut: float, threshold: float, ids: Callable[[IntArray], list[str]]
) -> Detection:
    score = lowered(judge.combination.log_odds(trial.sums), trial.chance)
    match = new_match_scores(judge, trial.sums.reshape(-1)).reshape(-1, 2) * (1 - trial.chance)
    middle = score.min(axis=1).argsort()[len(score) // 2]
    return Detection(
        kind=trial.kind,
        by=trial.by,
        found=float((match < threshold).mean()),
        found_at_1_percent=float((score < cut).mean()),
        at_most=noise_interval(observed, score.reshape(-1))[1],
        example=ids(trial.couples[middle]),
    )
