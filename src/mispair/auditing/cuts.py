"""What a cut flags, and noise rates of parts of a data set."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict
from scipy.special import betaincinv

from mispair.auditing.scoring.calibration import noise_interval, noise_rate
from mispair.errors import ConflictError, InvalidValueError
from mispair.functional.logistic import FloatArray
from mispair.pairs.pairs import MATCH_THRESHOLD
from mispair.pairs.source import Source
from mispair.support.formatting import listed

USUAL_CUTS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
SHARD = "shard"  # the value of `by` that means the files of the input
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


def cuts(
    match: npt.NDArray[np.floating], rate: tuple[float, float, float], values: Sequence[float] = USUAL_CUTS
) -> list[Cut]:
    """What each cut flags.

    The share of mismatched pairs among the flagged ones is their mean probability. If the noise rate is an end of its
    interval instead of the estimate, the odds of every pair change by the same factor (Saerens et al., 2002); that and
    the error of a share of so many pairs make the interval.

    Args:
        match: (n,) match scores of readable pairs.
        rate: Noise rate, and both ends of its interval.
        values: The cuts.
    """
    found = []
    for value in sorted(set(values)):
        wrong = 1 - match[match < value].astype(np.float64)
        middle, low, high = share_interval(wrong, rate, len(match)) if len(wrong) else (0.0, 0.0, 0.0)
        found.append(
            Cut(flag_below=value, flagged=len(wrong), mismatched=middle, mismatched_low=low, mismatched_high=high)
        )
    return found


def share_interval(wrong: FloatArray, rate: tuple[float, float, float], pairs: int) -> tuple[float, float, float]:
    """Share of mismatched pairs among some of all pairs, and its 95 % interval.

    Args:
        wrong: (k,) probability that each of them is mismatched.
        rate: Noise rate of all pairs, and both ends of its interval.
        pairs: How many pairs there are.
    """
    odds = [_odds(value, pairs) for value in rate]
    middle = float(wrong.mean())
    ends = [_shifted(wrong, other / odds[0]) for other in odds[1:]]
    limits = proportion_limits(middle * len(wrong), len(wrong))
    low, high = (math.hypot(middle - end, middle - limit) for end, limit in zip(ends, limits, strict=True))
    return middle, max(0.0, middle - low), min(1.0, middle + high)


def proportion_limits(found: float, count: int) -> tuple[float, float]:
    """Clopper and Pearson's 95 % limits of a share, of which so many were found among a count."""
    low = betaincinv(found, count - found + 1, 0.025) if found > 0 else 0.0
    return float(low), float(betaincinv(found + 1, count - found, 0.975)) if found < count else 1.0


def _odds(rate: float, count: int) -> float:
    rate = min(max(rate, 0.5 / count), 1 - 0.5 / count)
    return rate / (1 - rate)


def _shifted(probability: FloatArray, factor: float) -> float:
    """Mean of probabilities whose odds are multiplied."""
    return float((factor * probability / (factor * probability + 1 - probability)).mean())


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


def parts(values: Sequence[str], sums: FloatArray, shuffled: FloatArray, flagged: npt.NDArray[np.bool_]) -> list[Part]:
    """The noise rate of the pairs with each value, the largest part first.

    Args:
        values: (N,) value of each pair.
        sums: (N,) combined measures; NaN where a row could not be read.
        shuffled: The same of shuffled pairs.
        flagged: (N,) whether each pair is flagged.
    """
    readable = np.flatnonzero(~np.isnan(sums))
    names, number, counts = np.unique(np.asarray(values, dtype=object)[readable].astype(str),
                                      return_inverse=True, return_counts=True)  # fmt: skip
    found = []
    for place in np.argsort(-counts, kind="stable")[:MOST_PARTS]:
        rows = readable[number == place]
        low, high = noise_interval(sums[rows], shuffled)
        found.append(
            Part(
                value=str(names[place]),
                pairs=len(rows),
                flagged=int(flagged[rows].sum()),
                noise_rate=noise_rate(sums[rows], shuffled),
                noise_rate_low=low,
                noise_rate_high=high,
            )
        )
    return found
