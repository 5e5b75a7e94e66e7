"""What a plot shows, and the axes that hold it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape

from mispair.auditing.report.charts import round_step
from mispair.support.formatting import clean


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


WIDTH, HEIGHT = 560, 240  # of the drawing with all its margins; of the plot
TOP, BOTTOM = 36, 56  # margins
FONT, WIDEST_FONT = 14, 17  # a page may enlarge the text that far on a narrow screen
ROW = 19  # height of a line of text
SAMPLE = 26  # length of the piece of a line beside its name
ASIDE = 7  # between the first and the last of several bars
MOST_MARKERS = 12
LONGEST_LABEL, LONGEST_MARK = 24, 44  # characters

COLOURS = {"paper": "#ffffff", "ink": "#1d2430", "soft": "#5c6573", "rule": "#e2e0da", "shade": "#eceae4",
           "right": "#12704f", "wrong": "#b83a2a",
           "s0": "#0b62a4", "s1": "#c2540a", "s2": "#12704f", "s3": "#8a3c8f",
           "s4": "#6b6200", "s5": "#a61b4b", "s6": "#3d4754", "s7": "#00717d"}  # fmt: skip
DASHES = ("none", "7 4", "2 3", "10 3 2 3", "12 5", "4 2", "1 4", "8 3 2 3 2 3")
MARKERS = (
    "m-4,0 a4,4 0 1,0 8,0 a4,4 0 1,0 -8,0 z",  # disc
    "m-3.6,-3.6 h7.2 v7.2 h-7.2 z",  # square
    "m0,-4.8 l4.6,8 h-9.2 z",  # triangle
    "m0,-5.2 l5.2,5.2 l-5.2,5.2 l-5.2,-5.2 z",  # diamond
    "m0,4.8 l4.6,-8 h-9.2 z",  # triangle on its tip
    "m-1.3,-4.8 h2.6 v3.5 h3.5 v2.6 h-3.5 v3.5 h-2.6 v-3.5 h-3.5 v-2.6 h3.5 z",  # plus
    "m-4.5,-2 h9 v4 h-9 z",  # bar
    "m-2,-4.5 h4 v9 h-4 z",  # upright bar
)


@dataclass(frozen=True)
class Frame:
    """Where the plot is inside the drawing."""

    x: Axis
    y: Axis
    left: float
    right: float
    top: float
    aside: float = 0.0  # by how much a line is moved, so that its bars do not stand on those of another

    def across(self, value: float) -> float:
        return self.left + (self.right - self.left) * self.x.share(value) + self.aside

    def down(self, value: float) -> float:
        return self.top + HEIGHT * (1 - self.y.share(value))

    @property
    def bottom(self) -> float:
        return self.top + HEIGHT


@dataclass(frozen=True)
class Density:
    """The density of the labels of one kind of pairs: for each bin the mean over the seeds, and its spread."""

    label: str
    style: str
    bins: tuple[Point, ...]

    def share_from(self, edge: int) -> float:
        """Share of the pairs in the bins from this one on."""
        return sum(point.y for point in self.bins[edge:]) / len(self.bins)


# ---------------------------------------------------------------------- drawing


def line_drawing(
    title: str,
    caption: str,
    axes: tuple[Axis, Axis],
    lines: Sequence[Curve],
    *,
    marks: Sequence[Mark] = (),
    shades: Sequence[float] = (),
    bands: bool = False,
) -> str:
    """Lines over an axis; `shades` reach from the left end to a value; spreads are bands, or else bars."""
    right = SAMPLE + 18 + max(_text_width(_cut(line.label, LONGEST_LABEL)) for line in lines)
    frame = _frame(axes, right=right, rows=len(marks))
    parts = [_shade(frame, value) for value in shades]
    parts += [_rules(frame), *(_mark(frame, mark, row) for row, mark in enumerate(marks))]
    if shades:
        parts.append(_text(frame.left + 6, frame.top + 16, "warm-up"))
    frames = [frame] * len(lines) if bands else _side_by_side(frame, lines)
    for number, (own, line) in enumerate(zip(frames, lines, strict=True)):
        parts.append(_band(own, line, number) if bands else _bars(own, line, number))
    parts += [_curve(own, line, number) for number, (own, line) in enumerate(zip(frames, lines, strict=True))]
    parts += _names(frames, lines)
    return _document(frame, title, caption, parts)


def _side_by_side(frame: Frame, lines: Sequence[Curve]) -> list[Frame]:
    """A frame for each line, moved a little if there are bars."""
    if not any(point.spread for line in lines for point in line.points):
        return [frame] * len(lines)
    return [replace(frame, aside=ASIDE * (number / max(1, len(lines) - 1) - 0.5)) for number in range(len(lines))]


def density_drawing(title: str, caption: str, heaps: Sequence[Density]) -> str:
    """Histograms as outlines over [0, 1]: the first kind filled, the second one dashed."""
    top = max(point.y + point.spread for heap in heaps for point in heap.bins)
    axes = replace(from_zero("label y*", 1.0), name="label y*: 0 is wrong, 1 is right"), from_zero("density", top)
    frame = _frame(axes, right=18, rows=1)
    parts, x = [_rules(frame)], frame.left
    for heap in heaps:
        parts += [_heap(frame, heap), _heap_sample(x, frame.top - 10, heap)]
        x += SAMPLE + 30 + _text_width(heap.label)
    return _document(frame, title, caption, parts)


def _frame(axes: tuple[Axis, Axis], *, right: float, rows: int) -> Frame:
    x, y = axes
    left = 14 + max(_text_width(label) for _, label in y.ticks)
    return Frame(x, y, left, WIDTH - right, TOP + ROW * rows)


def _document(frame: Frame, title: str, caption: str, parts: Iterable[str]) -> str:
    height = _n(frame.bottom + BOTTOM)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            f'role="img" font-family="system-ui, sans-serif" font-size="{FONT}">',
            f"<title>{_escaped(title)}</title>",
            f"<desc>{_escaped(caption)}</desc>",
            f'<rect {_ink("paper")} fill="currentColor" width="{WIDTH}" height="{height}"/>',
            *(part for part in parts if part),
            "</svg>\n",
        ]
    )


def _rules(frame: Frame) -> str:
    """The axes with their names, ticks and grid."""
    parts = [_text(2, 16, frame.y.name)]
    for value, label in frame.y.ticks:
        y = frame.down(value)
        parts.append(_stroke("rule", frame.left, y, frame.right, y))
        parts.append(_text(frame.left - 8, y + 5, label, anchor="end"))
    labelled = set(_readable(frame))
    for tick in frame.x.ticks:
        x = frame.across(tick[0])
        parts.append(_stroke("soft", x, frame.bottom, x, frame.bottom + 5))
        if tick in labelled:
            parts.append(_text(x, frame.bottom + 21, tick[1], anchor="middle"))
    middle = max((frame.left + frame.right) / 2, min(WIDTH / 2, _text_width(frame.x.name) / 2 + 2))
    parts.append(_text(middle, frame.bottom + 46, frame.x.name, anchor="middle"))
    parts.append(_stroke("soft", frame.left, frame.bottom, frame.right, frame.bottom))
    return "\n".join(parts)


def _readable(frame: Frame) -> list[tuple[float, str]]:
    """The ticks whose labels do not touch the label before."""
    kept: list[tuple[float, str]] = []
    end = -math.inf
    for value, label in frame.x.ticks:
        half = _text_width(_cut(label, LONGEST_LABEL)) / 2
        if frame.across(value) - half >= end + 6:
            kept.append((value, label))
            end = frame.across(value) + half
    return kept


def _shade(frame: Frame, value: float) -> str:
    width = _n(frame.across(value) - frame.left)
    place = f'x="{_n(frame.left)}" y="{_n(frame.top)}" width="{width}" height="{HEIGHT}"'
    return f'<rect {_ink("shade")} fill="currentColor" fill-opacity="0.7" {place}/>'


def _mark(frame: Frame, mark: Mark, row: int) -> str:
    x, y = frame.across(mark.x), frame.top - 8 - ROW * row
    before = frame.x.share(mark.x) > 0.5
    label = _text(x - 5 if before else x + 5, y, _cut(mark.label, LONGEST_MARK), "ink", "end" if before else "start")
    return _stroke("ink", x, y - 10, x, frame.bottom, dash="2 4", width=1.2) + label


def _curve(frame: Frame, line: Curve, number: int) -> str:
    """A line and its markers, which tell their values."""
    places = [(frame.across(point.x), frame.down(point.y)) for point in line.points]
    path = "M" + " L".join(f"{_n(x)},{_n(y)}" for x, y in places)
    every = math.ceil(len(places) / MOST_MARKERS)
    parts = [f'<path d="{path}" {_dashed(number)}/>'] if len(places) > 1 else []
    for index, (point, (x, y)) in enumerate(zip(line.points, places, strict=True)):
        if index % every == (len(places) - 1) % every:
            told = _escaped(f"{line.label}, {point.x:g}: {point.said()}")
            parts.append(_marker(x, y, number, f"<title>{told}</title>"))
    return f"<g {_ink(_style(number))}>" + "\n".join(parts) + "</g>"


def _band(frame: Frame, line: Curve, number: int) -> str:
    """The area of one standard deviation on either side of a line."""
    if len(line.points) < 2 or not any(point.spread for point in line.points):
        return _bars(frame, line, number)
    above = [(frame.across(point.x), frame.down(point.y + point.spread)) for point in line.points]
    below = [(frame.across(point.x), frame.down(point.y - point.spread)) for point in line.points]
    return _area([*above, *reversed(below)], _style(number))


def _bars(frame: Frame, line: Curve, number: int) -> str:
    """One standard deviation above and below each point."""
    parts = []
    for point in line.points:
        if point.spread:
            x, high, low = frame.across(point.x), frame.down(point.y + point.spread), frame.down(point.y - point.spread)
            cap = " ".join(f"M{_n(x - 5)},{_n(y)} H{_n(x + 5)}" for y in (high, low))
            parts.append(f'<path d="M{_n(x)},{_n(high)} V{_n(low)} {cap}" fill="none" stroke="currentColor"/>')
    return f"<g {_ink(_style(number))}>" + "".join(parts) + "</g>" if parts else ""


def _names(frames: Sequence[Frame], lines: Sequence[Curve]) -> list[str]:
    """The name of each line beside its end, with a piece of it."""
    lasts = [line.points[-1] for line in lines]
    ends = [(frame.across(last.x), frame.down(last.y)) for frame, last in zip(frames, lasts, strict=True)]
    frame = frames[0]
    heights = _apart([y for _, y in ends], frame.top + 4, frame.bottom - 4, ROW)
    parts = []
    for number, (line, (x, y), height) in enumerate(zip(lines, ends, heights, strict=True)):
        start = frame.right + 10
        leader = _n(x + 6), _n(y), _n(start - 2), _n(height)
        d = "M{},{} L{},{}".format(*leader)
        sample = f'<path d="M{_n(start)},{_n(height)} H{_n(start + SAMPLE)}" {_dashed(number)}/>'
        parts.append(
            f'<g {_ink(_style(number))}><path d="{d}" fill="none" stroke="currentColor" stroke-width="0.8" '
            f'stroke-opacity="0.5"/>{sample}{_marker(start + SAMPLE / 2, height, number)}</g>'
            + _text(start + SAMPLE + 5, height + 5, _cut(line.label, LONGEST_LABEL), "ink")
        )
    return parts


def _apart(wanted: Sequence[float], top: float, bottom: float, gap: float) -> list[float]:
    """Heights near the wanted ones that leave room between each other.

    >>> _apart([50.0, 52.0, 99.0], 0.0, 100.0, 20.0)
    [50.0, 70.0, 99.0]
    """
    gap = min(gap, (bottom - top) / max(1, len(wanted) - 1))
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    heights = [min(bottom, max(top, wanted[index])) for index in order]
    for index in range(1, len(heights)):
        heights[index] = max(heights[index], heights[index - 1] + gap)
    for index, limit in enumerate(reversed(range(len(heights)))):
        heights[limit] = min(heights[limit], bottom - gap * index)
    placed = dict(zip(order, heights, strict=True))
    return [placed[index] for index in range(len(wanted))]


def _heap(frame: Frame, heap: Density) -> str:
    lowest, highest = ([(p, p.y + sign * p.spread) for p in heap.bins] for sign in (-1, 1))
    outline = _steps(frame, [point.y for point in heap.bins])
    path = f"M{_n(frame.left)},{_n(frame.bottom)} " + " ".join(f"L{_n(x)},{_n(y)}" for x, y in outline)
    path += f" L{_n(frame.right)},{_n(frame.bottom)}"
    told = "; ".join(f"y* {p.x:.3g}: {p.said()}" for p in heap.bins)
    parts = [f'<path d="{path}" {_heap_paint(heap.style)}><title>{_escaped(f"{heap.label}: {told}")}</title></path>']
    if any(point.spread for point in heap.bins):
        upper, lower = (_steps(frame, [value for _, value in side]) for side in (highest, lowest))
        parts.append(_area([*upper, *reversed(lower)], heap.style))
    return f"<g {_ink(heap.style)}>" + "".join(parts) + "</g>"


def _heap_paint(style: str) -> str:
    """Right pairs are a filled heap, wrong ones a dashed outline."""
    fill = 'fill="currentColor" fill-opacity="0.22"' if style == "right" else 'fill="none" stroke-dasharray="7 4"'
    return f'{fill} stroke="currentColor" stroke-width="2.2" stroke-linejoin="round"'


def _heap_sample(x: float, y: float, heap: Density) -> str:
    d = f"M{_n(x)},{_n(y + 5)} V{_n(y - 7)} H{_n(x + SAMPLE)} V{_n(y + 5)}"
    sample = f'<g {_ink(heap.style)}><path d="{d}" {_heap_paint(heap.style)}/></g>'
    return sample + _text(x + SAMPLE + 7, y + 5, heap.label, "ink")


def _steps(frame: Frame, values: Sequence[float]) -> list[tuple[float, float]]:
    """Two corners for each bin."""
    bins = len(values)
    return [(frame.across(side / bins), frame.down(value)) for i, value in enumerate(values) for side in (i, i + 1)]


def _area(corners: Sequence[tuple[float, float]], style: str) -> str:
    path = "M" + " L".join(f"{_n(x)},{_n(y)}" for x, y in corners) + " Z"
    return f'<path {_ink(style)} d="{path}" fill="currentColor" fill-opacity="0.16"/>'


def _marker(x: float, y: float, number: int, inside: str = "") -> str:
    shape = MARKERS[number % len(MARKERS)]
    return f'<path d="M{_n(x)},{_n(y)} {shape}" fill="currentColor">{inside}</path>'


def _dashed(number: int) -> str:
    dash = DASHES[number % len(DASHES)]
    return f'fill="none" stroke="currentColor" stroke-width="2.2" stroke-linejoin="round" stroke-dasharray="{dash}"'


def _style(number: int) -> str:
    return f"s{number % len(DASHES)}"


def _stroke(style: str, x1: float, y1: float, x2: float, y2: float, *, dash: str = "", width: float = 1) -> str:
    ends = f'x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}"'
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line {_ink(style)} stroke="currentColor" stroke-width="{width}"{dashes} {ends}/>'


def _text(x: float, y: float, text: str, style: str = "soft", anchor: str = "start") -> str:
    place = f'x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}"'
    return f'<text {_ink(style)} fill="currentColor" {place}>{_escaped(text)}</text>'


def _ink(style: str) -> str:
    return f'class="{style}" color="{COLOURS[style]}"'


def _escaped(text: str) -> str:
    return escape(clean(text))


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


def _text_width(text: str) -> float:
    """About how wide a text is at most."""
    return 0.55 * WIDEST_FONT * len(text)


def _n(value: float) -> str:
    """A coordinate; what rounds to zero has no sign.

    >>> _n(-0.001), _n(12.3456)
    ('0', '12.35')
    """
    return f"{round(value, 2) + 0.0:g}"
