"""The figures of a comparison: validation over the epochs, density of the labels, thresholds and settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mispair.bench.axes import Axis, Curve, Mark, Point, around, extent_of, from_zero, whole_numbers
from mispair.bench.measured import Line, Share, shares
from mispair.bench.phases import noisy_from
from mispair.bench.plot import Heap, heap_drawing, line_drawing
from mispair.bench.record import Record
from mispair.bench.shown import (
    Figure,
    frame_of,
    is_finite,
    listed,
    mean_point,
    nothing,
    numbers,
    percent,
    sentences,
    spread_said,
    written,
)
from mispair.bench.suite import Part, Row, Suite

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


def _validation(share: Share) -> list[Figure]:
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
        _warm_up_said(warm, len(lines)),
        *(f"Noisy pairs come in after {_epoch_count(x)}{_whose(rows, len(lines))}" for x, rows in starts.items()),
        spread_said({line.label: len(line.done) for line in share.lines}, share.seeds, "bands"),
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


def _warm_up_said(warm: Mapping[int, Sequence[str]], all_rows: int) -> str:
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


def _labels(line: Line, frame: Figure) -> Figure:
    """The density of y*."""
    row, records = line.label, line.done
    kinds = [_densities(records, kind) for kind in ("labels_clean", "labels_noisy")]
    if not any(kinds):
        return frame.drawn(f"There is no figure: {row} gives no labels." if records else nothing([line]))
    known = all(record.data.get("mismatch") is not None for record in records)
    names = ("right pairs", "wrong pairs") if known else ("pairs taken for clean", "pairs taken for noisy")
    heaps = [Heap(name, style, found) for name, style, found in zip(names, _HEAPS, kinds, strict=True) if found]
    caption = sentences(
        f"y* is the label that {row} gave each pair before its last epoch",
        *(_heap_said(heap) for heap in heaps),
        "" if len(heaps) == 2 else f"There are no {names[not kinds[1]]}",
        spread_said({row: len(records)}, len(line.cells), "bands"),
    )
    return frame.drawn(caption, heap_drawing(frame.title, caption, heaps))


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


def _heap_said(heap: Heap) -> str:
    bins = len(heap.bins)
    edge = math.ceil(bins / 2)
    mean = sum(point.x * point.y for point in heap.bins) / bins
    return f"Of the {heap.label} {percent(heap.share_from(edge), 0)} have y* ≥ {edge / bins:.2g} (mean {mean:.2f})"


# ---------------------------------------------------------------------- eta


def _eta(line: Line, frame: Figure) -> Figure:
    """How well wrong pairs are found, by the threshold eta."""
    row, records = line.label, line.done
    lines = [Curve(name, _eta_points(records, name)) for name in ("accuracy", "precision", "recall")]
    if not lines[0].points:
        reason = f"There is no figure: {row} does not split the pairs, or nobody knows which are wrong."
        return frame.drawn(reason if records else nothing([line]))
    own = line.config.eta
    caption = sentences(
        _eta_said(own, lines),
        _accuracy_said(lines[0]),
        spread_said({row: len(records)}, len(line.cells), "bands"),
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


def _eta_said(own: float, lines: Sequence[Curve]) -> str:
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


def _accuracy_said(line: Curve) -> str:
    best, least = (pick(line.points, key=lambda point: point.y) for pick in (max, min))
    if f"{best.y:.1f}" == f"{least.y:.1f}":
        return f"Accuracy is {best.y:.1f}\xa0% at every eta" if len(line.points) > 1 else ""
    return f"Accuracy is highest at eta = {best.x:g} ({best.said()}\xa0%)"


# ---------------------------------------------------------------------- sweep


def _sweep(share: Share) -> list[Figure]:
    """Test rSum by the values of a setting."""
    part, setting, frame = share.part, str(share.part.setting), frame_of(share)
    row = "" if len(part.rows) == 1 else "{}, "
    counts = {f"{row.format(line.label)}{setting} = {written(line.value)}": len(line.done) for line in share.lines}
    axis, places = _settings(setting, part.values)
    lines = [curve for row in part.rows for curve in _sweep_curves(share, row.label, places)]
    if not lines:
        return [frame.drawn(nothing(share.lines))]
    caption = sentences(
        *(_sweep_said(line, places, part.values, setting) for line in lines),
        *(_own_said(row, setting, len(part.rows)) for row in part.rows),
        spread_said(counts, share.seeds, "bars"),
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


def _sweep_curves(share: Share, row: str, places: Sequence[float]) -> list[Curve]:
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


def _sweep_said(line: Curve, places: Sequence[float], values: Sequence[Any], setting: str) -> str:
    """The best and the least value of a line."""
    names = {place: f"{setting} = {written(value)}" for place, value in zip(places, values, strict=True)}
    best, least = (pick(line.points, key=lambda point: point.y) for pick in (max, min))
    label = line.label[0].upper() + line.label[1:]
    if len(line.points) == 1:
        return f"{label}: {best.said()} at {names[best.x]}"
    if f"{best.y:.1f}" == f"{least.y:.1f}":
        return f"{label}: {best.y:.1f} at every value"
    return f"{label}: highest at {names[best.x]} ({best.said()}), lowest at {names[least.x]} ({least.said()})"


def _own_said(row: Row, setting: str, rows: int) -> str:
    """The value that the recipe itself has."""
    own = row.settings.get(setting, getattr(row.read(), setting))
    return f"The recipe{'' if rows == 1 else f' of {row.label}'} has {setting} = {written(own)}"


def _by_row(draw: Callable[[Line, Figure], Figure], share: Share) -> list[Figure]:
    """A figure for each row."""
    several = len(share.lines) > 1
    return [draw(line, frame_of(share, line.label if several else None)) for line in share.lines]


_KINDS: dict[str, Callable[[Share], list[Figure]]] = {
    "validation": _validation,
    "labels": partial(_by_row, _labels),
    "eta": partial(_by_row, _eta),
    "sweep": _sweep,
}
