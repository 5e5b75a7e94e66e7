"""What a plot shows, and the axes that hold it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mispair.auditing.drawings import round_step


@dataclass(frozen=True)
class Axis:
    """From a value to a place between 0 and 1."""

    name: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    logarithmic: bool = False

    def share(self, value: float) -> float:
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return min(1.0, max(0.0, (value - low) / (high - low)))


@dataclass(frozen=True)
class Point:
    """A mean, and the standard deviation around it; 0 if there is only one value."""

    x: float
    y: float
    spread: float = 0.0

    def said(self) -> str:
        """The mean with its standard deviation, if it has one.

        >>> Point(1, 246.88).said(), Point(1, 246.88, 2.14).said()
        ('246.9', '246.9\\xa0±\\xa02.1')
        """
        return f"{self.y:.1f}" + (f"\xa0±\xa0{self.spread:.1f}" if self.spread else "")


@dataclass(frozen=True)
class Curve:
    label: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Mark:
    """An upright line, and what is written above it."""

    x: float
    label: str


def extent_of(lines: Sequence[Curve]) -> tuple[float, float]:
    """The lowest and the highest value, with what is around them."""
    points = [point for line in lines for point in line.points]
    return min(point.y - point.spread for point in points), max(point.y + point.spread for point in points)


def around(name: str, extent: tuple[float, float], least: float) -> Axis:
    """An axis between round numbers that holds the values, and is at least so wide."""
    low, high = extent
    least = max(least, 1e-6 * max(abs(low), abs(high)))
    if high - low < least:
        middle = (low + high) / 2
        low, high = middle - least / 2, middle + least / 2
    step = round_step((high - low) / 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Axis(name, first * step, last * step, _ticks(first, last, step))


def from_zero(name: str, high: float) -> Axis:
    """An axis from 0 to a value or the next round number."""
    step = round_step(max(high, 1e-9) / 5)
    last = math.ceil(high / step - 1e-9) or 1
    return Axis(name, 0.0, last * step, _ticks(0, last, step))


def whole_numbers(name: str, high: float) -> Axis:
    """An axis from 0 to a whole number."""
    step = max(1.0, round_step(high / 8))
    return Axis(name, 0.0, high, _ticks(0, math.floor(high / step + 1e-9), step))


def _ticks(first: int, last: int, step: float) -> tuple[tuple[float, str], ...]:
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return tuple((number * step, f"{number * step:,.{decimals}f}") for number in range(first, last + 1))
