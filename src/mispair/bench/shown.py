"""What a figure is drawn from, and the words that go with it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from mispair.bench.axes import Point
from mispair.bench.measured import Line, Share
from mispair.bench.suite import Part
from mispair.wording import slug


@dataclass(frozen=True)
class Figure:
    """A figure, or the reason why there is none yet.

    Attributes:
        name: Of its file, without the ending.
        title: What it shows.
        caption: What is to be seen there, in words; why there is nothing, if so.
        svg: The drawing; empty without records.
    """

    name: str
    title: str
    caption: str
    svg: str

    def drawn(self, caption: str, svg: str = "") -> Figure:
        """The same with its caption; without a drawing, that is the reason."""
        return replace(self, caption=caption, svg=svg)


def frame_of(share: Share, row: str | None = None) -> Figure:
    """A figure that is still to be drawn; of one row, where each of several has a figure of its own."""
    part, several = share.part, len(share.part.noise) > 1
    names = [slug(part.name), *([f"{100 * share.noise:g}"] if several else []), *_row_name(part, row)]
    title = f"{part.title}{f', {percent(share.noise)} noise' if several else ''}{'' if row is None else f': {row}'}"
    return Figure("-".join(names), title, "", "")


def _row_name(part: Part, row: str | None) -> list[str]:
    """With its number, where two names differ in signs only."""
    if row is None:
        return []
    rows = [one.label for one in part.rows]
    same = [slug(one) for one in rows].count(slug(row)) > 1
    return [slug(row), *([str(rows.index(row) + 1)] if same else [])]


def nothing(lines: Sequence[Line]) -> str:
    """Why there is no figure of these lines."""
    names = {cell.name for line in lines for cell in line.cells.values()}
    failed = {record.name for line in lines for record in line.failed.values()}
    each = "its only training has" if len(names) == 1 else f"none of its {len(names)} trainings has"
    ended = f"{each} {'not ' if len(names) == 1 else ''}ended well"
    return f"There is no figure yet: {ended}{f' ({len(failed)} failed)' if failed else ''}."


def percent(share: float, decimals: int | None = None) -> str:
    """A share in per cent, with as many decimals as asked for or needed.

    >>> percent(0.4), percent(0.125), percent(1 / 3, 1)
    ('40\\xa0%', '12.5\\xa0%', '33.3\\xa0%')
    """
    return f"{100 * share:g}\xa0%" if decimals is None else f"{100 * share:.{decimals}f}\xa0%"


def written(value: Any) -> str:
    """A value of a setting as people write it.

    >>> written(16384), written(0.15), written("smoothed")
    ('16,384', '0.15', 'smoothed')
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) and abs(value) < 10**9 else f"{value:g}"


def is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def numbers(values: Iterable[Any]) -> list[float]:
    return [float(value) for value in values if is_finite(value)]


def mean_point(x: float, values: Sequence[float]) -> Point:
    """Mean and standard deviation of some values."""
    return Point(float(x), fmean(values), stdev(values) if len(values) > 1 else 0.0)


def spread_said(counts: Mapping[str, int], seeds: int, what: str) -> str:
    """How many seeds stand behind the figure, and what is not there yet."""
    most = max(counts.values())
    behind = f"Mean of {most} seeds, {what} of ± one standard deviation" if most > 1 else "One seed"
    absent = [label for label, count in counts.items() if not count]
    fewer = [_has(count, [label for label in counts if counts[label] == count]) for count in _between(counts, most)]
    return sentences(
        f"{behind}{f' ({listed(fewer)})' if fewer else ''}" + (f", of {seeds} asked for" if most < seeds else ""),
        f"Not there yet: {listed(absent, '; ')}" if absent else "",
    ).removesuffix(".")


def _between(counts: Mapping[str, int], most: int) -> list[int]:
    return sorted({count for count in counts.values() if 0 < count < most})


def _has(count: int, labels: Sequence[str]) -> str:
    return f"{listed(labels, '; ')} {'has' if len(labels) == 1 else 'have'} {count}"


def sentences(*said: str) -> str:
    return " ".join(f"{sentence}." for sentence in said if sentence)


def listed(words: Sequence[str], between: str = ", ") -> str:
    return between.join(words)
