"""What a figure is drawn from, and the words that go with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, stdev
from typing import Any

from mispair.bench.report.plot import (
    Axis,
    Curve,
    Density,
    Mark,
    Point,
    around,
    density_drawing,
    extent_of,
    from_zero,
    line_drawing,
    whole_numbers,
)
from mispair.bench.report.rows import NoiseLevel, ResultRow, shares
from mispair.bench.suite.record import Record
from mispair.bench.suite.suite import Part, Row, Suite
from mispair.support.formatting import slug
from mispair.training.phases import noisy_from


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


def frame_of(share: NoiseLevel, row: str | None = None) -> Figure:
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


def nothing(lines: Sequence[ResultRow]) -> str:
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


def spread_sentence(counts: Mapping[str, int], seeds: int, what: str) -> str:
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


LEAST_RSUM, LEAST_SHARE = 2.0, 10.0  # points and per cent: smaller differences are not blown up to the full height
LOGARITHMIC, MOST_LINEAR = ("bank_size",), 50  # settings; ratio of the largest to the smallest value
_HEAPS = ("right", "wrong")


def part_figures(suite: Suite, part: Part, seeds: int, records: Mapping[str, Record]) -> list[Figure]:
    """The figures of a part, at each share of noise; none for parts that are tables.

    Args:
        suite: The comparison.
        part: One of its parts.
        seeds: How many trainings there are to be of each kind.
        records: What has ended, by the name of the cell.
    """
    draw = _KINDS.get(part.kind)
    if draw is None:
        return []
    return [figure for share in shares(suite, part, seeds, records) for figure in draw(share)]


# ---------------------------------------------------------------------- validation


def _validation(share: NoiseLevel) -> list[Figure]:
    """Validation rSum by the epochs trained."""
    frame = frame_of(share)
    lines = [Curve(line.label, points) for line in share.lines if (points := _epochs(line.done))]
    if not lines:
        known = any(line.done for line in share.lines)
        return [frame.drawn(_NO_VALIDATION if known else nothing(share.lines))]
    drawn = {line.label for line in lines}
    configs = {line.label: line.config for line in share.lines if line.label in drawn}
    last = max(point.x for line in lines for point in line.points)
    axes = whole_numbers("epochs trained", last), around("validation rSum, of 600", extent_of(lines), LEAST_RSUM)
    starts = _groups({row: noisy_from(config) for row, config in configs.items()}, last)
    warm = _groups({row: config.warmup_epochs for row, config in configs.items()}, last)
    marks = [Mark(x, "noisy pairs come in" + _whose(rows, len(lines))) for x, rows in starts.items()]
    caption = sentences(
        listed([_ending(line) for line in lines], "; "),
        _warm_up_sentence(warm, len(lines)),
        *(f"Noisy pairs come in after {_epoch_count(x)}{_whose(rows, len(lines))}" for x, rows in starts.items()),
        spread_sentence({line.label: len(line.done) for line in share.lines}, share.seeds, "bands"),
    )
    svg = line_drawing(frame.title, caption, axes, lines, marks=marks, shades=list(warm), bands=True)
    return [frame.drawn(caption, svg)]


_NO_VALIDATION = "There is no figure: the data set has no pairs for validation."


def _epochs(records: Sequence[Record]) -> tuple[Point, ...]:
    """Validation rSum after each epoch, over the seeds."""
    found: dict[int, list[float]] = {}
    for record in records:
        for entry in record.validation:
            if is_finite(entry.get("rsum")):
                found.setdefault(int(entry["epoch"]) + 1, []).append(float(entry["rsum"]))
    return tuple(mean_point(epoch, found[epoch]) for epoch in sorted(found))


def _groups(numbers: Mapping[str, int | None], last: float) -> dict[int, list[str]]:
    """The rows that share a number of epochs, of those inside the figure."""
    inside = sorted({number for number in numbers.values() if number is not None and 0 < number <= last})
    return {number: [row for row, own in numbers.items() if own == number] for number in inside}


def _warm_up_sentence(warm: Mapping[int, Sequence[str]], all_rows: int) -> str:
    if [len(rows) for rows in warm.values()] == [all_rows]:
        return "The warm-up is shaded"
    said = [f"{_epoch_count(epochs)}{_whose(rows, all_rows)}" for epochs, rows in warm.items()]
    return f"The warm-up is shaded: {listed(said, '; ')}" if said else ""


def _whose(rows: Sequence[str], all_rows: int) -> str:
    return "" if len(rows) == all_rows else f" ({', '.join(rows)})"


def _ending(line: Curve) -> str:
    """Where a line ends, and where it was at best."""
    last, best = line.points[-1], max(line.points, key=lambda point: point.y)
    said = f"{line.label} ends at {last.said()}"
    return said if best.y <= last.y else f"{said} (at best {best.said()}, after {_epoch_count(best.x)})"


def _epoch_count(number: float) -> str:
    return f"{number:.0f} epoch{'s' * (number != 1)}"


# ---------------------------------------------------------------------- labels


def _labels(line: ResultRow, frame: Figure) -> Figure:
    """The density of y*."""
    row, records = line.label, line.done
    kinds = [_densities(records, kind) for kind in ("labels_clean", "labels_noisy")]
    if not any(kinds):
        return frame.drawn(f"There is no figure: {row} gives no labels." if records else nothing([line]))
    known = all(record.data.get("mismatch") is not None for record in records)
    names = ("right pairs", "wrong pairs") if known else ("pairs taken for clean", "pairs taken for noisy")
    heaps = [Density(name, style, found) for name, style, found in zip(names, _HEAPS, kinds, strict=True) if found]
    caption = sentences(
        f"y* is the label that {row} gave each pair before its last epoch",
        *(_density_sentence(heap) for heap in heaps),
        "" if len(heaps) == 2 else f"There are no {names[not kinds[1]]}",
        spread_sentence({row: len(records)}, len(line.cells), "bands"),
    )
    return frame.drawn(caption, density_drawing(frame.title, caption, heaps))


def _densities(records: Sequence[Record], kind: str) -> tuple[Point, ...]:
    """Density in equal bins of [0, 1], both networks together; nothing where there are no such pairs."""
    found = []
    for record in records:
        networks = [counts for counts in record.found.get(kind) or [] if counts]
        total = sum(sum(counts) for counts in networks)
        if total:
            sums = [sum(column) for column in zip(*networks, strict=True)]
            found.append([len(sums) * count / total for count in sums])
    if not found:
        return ()
    bins = len(found[0])
    return tuple(mean_point((number + 0.5) / bins, [row[number] for row in found]) for number in range(bins))


def _density_sentence(heap: Density) -> str:
    bins = len(heap.bins)
    edge = math.ceil(bins / 2)
    mean = sum(point.x * point.y for point in heap.bins) / bins
    return f"Of the {heap.label} {percent(heap.share_from(edge), 0)} have y* ≥ {edge / bins:.2g} (mean {mean:.2f})"


# ---------------------------------------------------------------------- eta


def _eta(line: ResultRow, frame: Figure) -> Figure:
    """How well wrong pairs are found, by the threshold eta."""
    row, records = line.label, line.done
    lines = [Curve(name, _eta_points(records, name)) for name in ("accuracy", "precision", "recall")]
    if not lines[0].points:
        reason = f"There is no figure: {row} does not split the pairs, or nobody knows which are wrong."
        return frame.drawn(reason if records else nothing([line]))
    own = line.config.repair.eta
    caption = sentences(
        _eta_sentence(own, lines),
        _accuracy_sentence(lines[0]),
        spread_sentence({row: len(records)}, len(line.cells), "bands"),
    )
    highest = max(own, *(point.x for curve in lines for point in curve.points))
    name = "eta: wrong if w of both networks is below"
    lines = [curve for curve in lines if curve.points]  # there is no precision where nothing is found
    low, high = extent_of(lines)
    axes = from_zero(name, highest), around("per cent", (max(0.0, low), min(100.0, high)), LEAST_SHARE)
    marks = [Mark(own, f"eta = {own:g} in the recipe")]
    return frame.drawn(caption, line_drawing(frame.title, caption, axes, lines, marks=marks, bands=True))


def _eta_points(records: Sequence[Record], name: str) -> tuple[Point, ...]:
    found: dict[float, list[float]] = {}
    for record in records:
        for entry in record.eta:
            if is_finite(entry.get(name)):
                found.setdefault(float(entry["eta"]), []).append(100 * entry[name])
    return tuple(mean_point(eta, found[eta]) for eta in sorted(found))


def _eta_sentence(own: float, lines: Sequence[Curve]) -> str:
    """Precision and recall at the measured eta that is nearest to the one of the recipe."""
    _, precisions, recalls = lines
    recall = min(recalls.points, key=lambda point: abs(point.x - own))
    precision = next((point for point in precisions.points if point.x == recall.x), None)
    where = f"At eta = {recall.x:g}" + ("" if recall.x == own else f", next to {own:g} of the recipe")
    if precision is None:
        return f"{where}, no pair is found"
    return (
        f"{where}, {precision.said()}\xa0% of the pairs found are wrong indeed (precision), and "
        f"{recall.said()}\xa0% of the wrong ones are found (recall)"
    )


def _accuracy_sentence(line: Curve) -> str:
    best, least = (pick(line.points, key=lambda point: point.y) for pick in (max, min))
    if f"{best.y:.1f}" == f"{least.y:.1f}":
        return f"Accuracy is {best.y:.1f}\xa0% at every eta" if len(line.points) > 1 else ""
    return f"Accuracy is highest at eta = {best.x:g} ({best.said()}\xa0%)"


# ---------------------------------------------------------------------- sweep


def _sweep(share: NoiseLevel) -> list[Figure]:
    """Test rSum by the values of a setting."""
    part, setting, frame = share.part, str(share.part.setting), frame_of(share)
    row = "" if len(part.rows) == 1 else "{}, "
    counts = {f"{row.format(line.label)}{setting} = {written(line.value)}": len(line.done) for line in share.lines}
    axis, places = _settings(setting, part.values)
    lines = [curve for row in part.rows for curve in _sweep_curves(share, row.label, places)]
    if not lines:
        return [frame.drawn(nothing(share.lines))]
    caption = sentences(
        *(_sweep_sentence(line, places, part.values, setting) for line in lines),
        *(_own_sentence(row, setting, len(part.rows)) for row in part.rows),
        spread_sentence(counts, share.seeds, "bars"),
    )
    axes = axis, around("test rSum, of 600", extent_of(lines), LEAST_RSUM)
    return [frame.drawn(caption, line_drawing(frame.title, caption, axes, lines))]


def _settings(setting: str, values: Sequence[Any]) -> tuple[Axis, list[float]]:
    """The axis of a setting, and the place of each of its values there."""
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        ticks = tuple((float(place), written(value)) for place, value in enumerate(values))
        return Axis(setting, -0.5, len(values) - 0.5, ticks), [place for place, _ in ticks]
    places = [float(value) for value in values]
    ticks = tuple((place, written(value)) for place, value in sorted(set(zip(places, values, strict=True))))
    low, high = min(places), max(places)
    if low > 0 and (setting in LOGARITHMIC or high / low > MOST_LINEAR):
        room = max(high / low, 10.0) ** 0.05
        return Axis(f"{setting}, logarithmic", low / room, high * room, ticks, logarithmic=True), places
    room = 0.05 * (high - low) or 0.5 * abs(high) or 1.0
    return Axis(setting, low - room, high + room, ticks), places


def _sweep_curves(share: NoiseLevel, row: str, places: Sequence[float]) -> list[Curve]:
    """The averaged networks and a single one; only one line where there is only one network."""
    ended = {line.value: line.done for line in share.lines if line.label == row}
    by_value = list(zip(places, (ended[value] for value in share.part.values), strict=True))
    several = any("averaged" in record.test for _, records in by_value for record in records)
    measures: dict[str, Callable[[Record], Any]] = {
        "averaged" if several else "one network": lambda record: _averaged_rsum(record, share.part.folds)
    }
    if several and not share.part.folds:  # slices are measured for the averaged networks alone
        measures["single network"] = lambda record: record.alone().get("rsum")
    lines = []
    for name, measure in measures.items():
        found = [(place, numbers(measure(record) for record in records)) for place, records in by_value]
        points = tuple(
            sorted((mean_point(place, values) for place, values in found if values), key=lambda point: point.x)
        )
        label = name if len(share.part.rows) == 1 else row if not several else f"{row}, {name}"
        lines += [Curve(label, points)] if points else []
    return lines


def _averaged_rsum(record: Record, folds: bool) -> Any:
    return None if folds and "folds" not in record.test else record.averaged(folds=folds).get("rsum")


def _sweep_sentence(line: Curve, places: Sequence[float], values: Sequence[Any], setting: str) -> str:
    """The best and the least value of a line."""
    names = {place: f"{setting} = {written(value)}" for place, value in zip(places, values, strict=True)}
    best, least = (pick(line.points, key=lambda point: point.y) for pick in (max, min))
    label = line.label[0].upper() + line.label[1:]
    if len(line.points) == 1:
        return f"{label}: {best.said()} at {names[best.x]}"
    if f"{best.y:.1f}" == f"{least.y:.1f}":
        return f"{label}: {best.y:.1f} at every value"
    return f"{label}: highest at {names[best.x]} ({best.said()}), lowest at {names[least.x]} ({least.said()})"


def _own_sentence(row: Row, setting: str, rows: int) -> str:
    """The value that the recipe itself has."""
    own = row.settings.get(setting, getattr(row.read(), setting))
    return f"The recipe{'' if rows == 1 else f' of {row.label}'} has {setting} = {written(own)}"


def _by_row(draw: Callable[[ResultRow, Figure], Figure], share: NoiseLevel) -> list[Figure]:
    """A figure for each row."""
    several = len(share.lines) > 1
    return [draw(line, frame_of(share, line.label if several else None)) for line in share.lines]


_KINDS: dict[str, Callable[[NoiseLevel], list[Figure]]] = {
    "validation": _validation,
    "labels": partial(_by_row, _labels),
    "eta": partial(_by_row, _eta),
    "sweep": _sweep,
}
