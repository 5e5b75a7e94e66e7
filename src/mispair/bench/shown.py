"""What a figure is drawn from, and the words that go with it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from mispair.bench.axes import Point
from mispair.bench.record import Record
from mispair.bench.suite import Cell, Part, Place
from mispair.config import Config
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


@dataclass(frozen=True)
class Shown:
    """A part of a suite at one share of noise: the trainings that a figure is drawn from."""

    part: Part
    noise: float
    cells: Mapping[Place, Cell]
    records: Mapping[str, Record]
    seeds: int
    row: str | None = None  # where each of several rows has a figure of its own

    @property
    def name(self) -> str:
        share = [] if len(self.part.noise) == 1 else [f"{100 * self.noise:g}"]
        return "-".join([slug(self.part.name), *share, *self._row_name()])

    def _row_name(self) -> list[str]:
        """Of a row that has a figure of its own; with its number, where two names differ in signs only."""
        if self.row is None:
            return []
        rows = [row.label for row in self.part.rows]
        same = [slug(row) for row in rows].count(slug(self.row)) > 1
        return [slug(self.row), *([str(rows.index(self.row) + 1)] if same else [])]

    @property
    def title(self) -> str:
        share = "" if len(self.part.noise) == 1 else f", {percent(self.noise)} noise"
        return f"{self.part.title}{share}{'' if self.row is None else f': {self.row}'}"

    def by_row(self) -> list[tuple[Shown, str]]:
        """The same for each row alone."""
        rows = [row.label for row in self.part.rows]
        return [(replace(self, row=row if len(rows) > 1 else None), row) for row in rows]

    def config(self, row: str, value: Any = None) -> Config:
        return self.cells[Place(row, self.noise, value, 0)].config

    def ended(self, row: str, value: Any = None) -> list[Record]:
        """The records of the seeds that have ended well."""
        places = [Place(row, self.noise, value, seed) for seed in range(self.seeds)]
        found = [self.records.get(self.cells[place].name) for place in places]
        return [record for record in found if record is not None and record.status == "done"]

    def without(self, caption: str) -> Figure:
        """No figure, and why."""
        return Figure(self.name, self.title, caption, "")

    def nothing(self, rows: Sequence[str]) -> str:
        """Why there is no figure of these rows."""
        names = {cell.name for place, cell in self.cells.items() if place.row in rows and place.noise == self.noise}
        failed = sum(name in self.records and self.records[name].status == "failed" for name in names)
        each = "its only training has" if len(names) == 1 else f"none of its {len(names)} trainings has"
        ended = f"{each} {'not ' if len(names) == 1 else ''}ended well"
        return f"There is no figure yet: {ended}{f' ({failed} failed)' if failed else ''}."


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
    fewer = [f"{label} has {count}" for label, count in counts.items() if 0 < count < most]
    return sentences(
        f"{behind}{f' ({listed(fewer)})' if fewer else ''}" + (f", of {seeds} asked for" if most < seeds else ""),
        f"Not there yet: {listed(absent, '; ')}" if absent else "",
    ).removesuffix(".")


def sentences(*said: str) -> str:
    return " ".join(f"{sentence}." for sentence in said if sentence)


def listed(words: Sequence[str], between: str = ", ") -> str:
    return between.join(words)
