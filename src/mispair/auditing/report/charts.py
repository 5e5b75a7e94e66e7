"""The charts of the report as coordinates from the upper left corner. The template draws them as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 460, 210


@dataclass(frozen=True)
class Axes:
    """Numbers at the axes, and their places."""

    top: float  # what the full height stands for
    xs: list[tuple[float, str]]
    ys: list[tuple[float, str]]

    @property
    def margin(self) -> float:
        """Width of the numbers at the vertical axis."""
        return 12 + 10.5 * max(len(label) for _, label in self.ys)

    def height(self, value: float) -> float:
        return HEIGHT * value / self.top


@dataclass(frozen=True)
class Bar:
    """A bin of the histogram: mismatched pairs below, matched ones on top."""

    low: float
    high: float
    pairs: int
    expected_matched: float
    x: float
    width: float
    mismatched: float  # heights
    matched: float


@dataclass(frozen=True)
class Histogram:
    axes: Axes
    bars: list[Bar]


@dataclass(frozen=True)
class Curves:
    """Outlines of two histograms as data of SVG paths."""

    axes: Axes
    observed: str
    shuffled: str


def histogram(
    pairs: Sequence[int], expected_matched: Sequence[float], lowest: float = 0, highest: float = 1
) -> Histogram:
    """Draw pairs by score, in equal bins, and the expected number of matched ones."""
    axes, bins, bars = _axes(lowest, highest, max(pairs)), len(pairs), []
    step = (highest - lowest) / bins
    gap = min(1.0, WIDTH / bins / 8)
    for i, (number, expected) in enumerate(zip(pairs, expected_matched, strict=True)):
        matched = min(max(expected, 0.0), number)
        heights = axes.height(number - matched), axes.height(matched)
        bars.append(
            Bar(
                lowest + i * step, lowest + (i + 1) * step, number, matched,
                WIDTH * i / bins + gap, WIDTH / bins - 2 * gap, *heights,
            )
        )  # fmt: skip
    return Histogram(axes, bars)


def curves(observed: Sequence[float], shuffled: Sequence[float], lowest: float, highest: float) -> Curves:
    """Two histograms over the same bins from `lowest` to `highest`."""
    axes = _axes(lowest, highest, max(*observed, *shuffled))
    return Curves(axes, _outline(observed, axes), _outline(shuffled, axes))


def _outline(numbers: Sequence[float], axes: Axes) -> str:
    width = WIDTH / len(numbers)
    steps = (f"V{HEIGHT - axes.height(number):.1f} H{(i + 1) * width:.1f}" for i, number in enumerate(numbers))
    return f"M0,{HEIGHT} {' '.join(steps)} V{HEIGHT}"


def _axes(low: float, high: float, most: float) -> Axes:
    """Make axes from `low` to `high`, and from 0 to a round number above `most`."""
    step = max(1.0, round_step(most / 5))
    steps = math.ceil(most / step - 1e-9)
    top = steps * step
    ys = [(HEIGHT * (1 - i / steps), f"{i * step:,.0f}") for i in range(steps + 1)]
    step = round_step((high - low) / 5)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    ticks = [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    return Axes(top, [(WIDTH * (x - low) / (high - low), f"{x:.{decimals}f}") for x in ticks], ys)


def round_step(least: float) -> float:
    """Return the first of ..., 0.5, 1, 2, 5, 10, 20, ... from `least` on.

    >>> round_step(1750), round_step(0.2), round_step(7)
    (2000.0, 0.2, 10.0)
    """
    unit = 10.0 ** math.floor(math.log10(least))
    return next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= least * (1 - 1e-9))
