"""What a cut flags, and noise rates of parts of a data set."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict
from scipy.special import betaincinv

from mispair.auditing.scoring.calibration import noise_interval, noise_rate, rate_bounds
from mispair.errors import ConflictError, InvalidValueError
from mispair.functional.logistic import FloatArray
from mispair.pairs.pairs import MATCH_THRESHOLD, IntArray
from mispair.pairs.source import Source
from mispair.support.formatting import listed

USUAL_CUTS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
SHARD = "shard"  # the value of `by` that means the files of the input
MOST_REPEATED = 1 << 22  # scores of a part in memory
MOST_PARTS = 100  # parts of a data set in the summary, the largest first


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Cut(_Frozen):
    """Pairs with a match score below a value.

    Attributes:
        flag_below: The value.
        flagged: How many there are.
        mismatched: Estimated share of mismatched ones among them.
        mismatched_low: Lower end of its 95 % interval.
        mismatched_high: Upper end.
    """

    flag_below: float
    flagged: int
    mismatched: float
    mismatched_low: float
    mismatched_high: float


class Part(_Frozen):
    """The pairs with one value of a column, or of one file.

    Attributes:
        value: The value, or the name of the file.
        pairs: How many could be scored.
        flagged: How many of them are flagged.
        noise_rate: Estimated share of mismatched ones.
        noise_rate_low: Lower end of its 95 % interval.
        noise_rate_high: Upper end.
    """

    value: str
    pairs: int
    flagged: int
    noise_rate: float
    noise_rate_low: float
    noise_rate_high: float


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
    """The match score below which pairs are flagged.

    Args:
        match: (N,) match scores; NaN where a row could not be read.
        flag_below: A value of one's own.
        keep_best: Share of the readable pairs that shall not be flagged; equal scores are flagged together or not.
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
        ConfigError: It is no match score or fraction, or there are two.
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
    """Return (c, 4) what is below each cut; the results of parts of a data set add up.

    Columns: the number of pairs, the expected number of mismatched ones, and that number if the noise rate is the lower
    or the upper end of its interval.

    Args:
        match: (n,) match scores; NaN where a row could not be read.
        rate: Noise rate, and both ends of its interval.
        pairs: Number of readable pairs of the whole data set.
        values: The cuts.
    """
    below = (1 - match[match < value].astype(np.float64) for value in values)
    return np.array([[len(wrong), wrong.sum(), *_at_ends(wrong, rate, pairs)] for wrong in below])


def cuts(values: Sequence[float], below: FloatArray) -> list[Cut]:
    """What each cut flags, by `below_cuts`.

    The share of mismatched pairs among the flagged ones is their mean probability. If the noise rate is an end of its
    interval instead of the estimate, the odds of every pair change by the same factor (Saerens et al., 2002); that and
    the error of a share of so many pairs make the interval.
    """
    found = []
    for value, (count, *wrong) in zip(values, below.tolist(), strict=True):
        middle, low, high = _interval(int(count), *wrong) if count else (0.0, 0.0, 0.0)
        found.append(
            Cut(flag_below=value, flagged=int(count), mismatched=middle, mismatched_low=low, mismatched_high=high)
        )
    return found


def share_interval(wrong: FloatArray, rate: tuple[float, float, float], pairs: int) -> tuple[float, float, float]:
    """Share of mismatched pairs among some of all pairs, and its 95 % interval.

    Args:
        wrong: (k,) probability that each of them is mismatched.
        rate: Noise rate of all pairs, and both ends of its interval.
        pairs: How many pairs there are.
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
    """Clopper and Pearson's 95 % limits of a share, of which so many were found among a count."""
    low = betaincinv(found, count - found + 1, 0.025) if found > 0 else 0.0
    return float(low), float(betaincinv(found + 1, count - found, 0.975)) if found < count else 1.0


def _odds(rate: float, count: int) -> float:
    rate = min(max(rate, 0.5 / count), 1 - 0.5 / count)
    return rate / (1 - rate)


def _at_ends(wrong: FloatArray, rate: tuple[float, float, float], pairs: int) -> list[float]:
    """Sums of probabilities whose odds change as those of the noise rate do at both ends of its interval."""
    odds, *ends = (_odds(value, pairs) for value in rate)
    return [float((end / odds * wrong / (end / odds * wrong + 1 - wrong)).sum()) for end in ends]


def values_by(source: Source, by: str) -> list[str]:
    """The value of each row by which noise rates are given: of a column, or the name of its file.

    Raises:
        InvalidValueError: There is no such column.
    """
    if by == SHARD and source.shards:
        return [name for name, size in source.shards for _ in range(size)]
    table = source.table
    if table is None or by not in table.columns:
        known = [*(() if table is None else table.columns), *([SHARD] if source.shards else [])]
        there = f"one of {listed(known)}" if known else "an input with columns"
        raise InvalidValueError(f"{source.name} has no column {by!r}", where="by", expected=there)
    return [value for batch in table.batches([by]) for value in batch[0].to_pylist()]


def count_parts(
    values: Sequence[str], sums: FloatArray, shuffled: FloatArray, flagged: npt.NDArray[np.bool_]
) -> dict[str, IntArray]:
    """Count the pairs with each value; the results of parts of a data set add up.

    Args:
        values: (N,) value of each pair.
        sums: (N,) combined measures; NaN where a row could not be read.
        shuffled: The same of shuffled pairs.
        flagged: (N,) whether each pair is flagged.

    Returns:
        For each value the number of pairs up to each of `rate_bounds` and above the last, and of flagged ones.
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
