"""Figures of a comparison, drawn by matplotlib: SVG in the page, SVG and PDF as files."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.style import context
from matplotlib.ticker import MaxNLocator, NullLocator

from mispair import methods
from mispair.bench.report.rows import NoiseLevel, ResultRow, noise_levels
from mispair.bench.suite.results_folder import Results
from mispair.bench.suite.suite import Part
from mispair.config import Config
from mispair.errors import ConfigError
from mispair.settings import RepairSettings
from mispair.support.formatting import clean, slug
from mispair.training.settings import every_setting

WIDTH, HEIGHT = 3.5, 2.4  # inches: a column of a paper; the height of the plot without its legend
LEGEND_ROW = 0.165  # inches
LONGEST_LABEL = 44  # characters of the legend that fit in the width
CHARACTER, COLUMN, POINTS = 4.9, 40, 268  # widths in points: of a character, of the rest of a legend entry, of all
LEAST_RSUM, LEAST_PERCENT = 2.0, 10.0  # spans of the y axis: smaller differences are not blown up to the full height
LOGARITHMIC, MOST_LINEAR = ("bank_size",), 50  # settings; ratio of the largest to the smallest value
MOST_MARKERS = 12
LINE_STYLES = ("-", "--", ":", "-.", (0, (8, 2)), (0, (4, 1, 1, 1)), (0, (1, 2)), (0, (6, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
# Names are CSS variables of the page, which has other values for dark mode.
COLORS = {
    "ink": "#1d2430", "soft": "#5c6573", "line": "#e2e0da", "shade": "#eceae4", "good": "#12704f", "bad": "#b83a2a",
    "s0": "#0b62a4", "s1": "#c2540a", "s2": "#11704e", "s3": "#8a3c8f",
    "s4": "#6b6200", "s5": "#a61b4b", "s6": "#3d4754", "s7": "#00717d",
}  # fmt: skip
PAPER = "#ffffff"
SERIES_COLORS = [COLORS[f"s{number}"] for number in range(8)]
STYLE: dict[str, Any] = {
    "font.size": 8, "font.family": "sans-serif", "text.parse_math": False, "text.color": COLORS["ink"],
    "axes.edgecolor": COLORS["soft"], "axes.labelcolor": COLORS["ink"], "axes.linewidth": 0.6,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "axes.grid": True, "axes.grid.axis": "y", "grid.color": COLORS["line"], "grid.linewidth": 0.6,
    "axes.facecolor": PAPER, "figure.facecolor": PAPER,
    "xtick.color": COLORS["soft"], "ytick.color": COLORS["soft"],
    "xtick.labelcolor": COLORS["ink"], "ytick.labelcolor": COLORS["ink"],
    "lines.linewidth": 1.3, "lines.markersize": 3.5, "errorbar.capsize": 2.5,
    "legend.frameon": False, "legend.borderaxespad": 0.2, "legend.labelspacing": 0.3, "legend.handlelength": 2.2,
    "svg.fonttype": "none", "svg.hashsalt": "mispair", "pdf.fonttype": 42,
}  # fmt: skip


@dataclass(frozen=True)
class ReportFigure:
    """A figure of the report."""

    name: str  # of its files, without the ending
    title: str
    caption: str  # the seeds behind it and what is missing; why there is no plot, if so
    plot: Figure | None = None  # None without data

    @cached_property
    def svg(self) -> str:
        return self._saved("svg", {"Date": None, "Creator": None, "Title": clean(self.title)}).decode()

    @property
    def pdf(self) -> bytes:
        return self._saved("pdf", {"CreationDate": None, "Title": clean(self.title)})

    def inline_svg(self) -> Markup:
        """Make the figure for an HTML page: transparent, with CSS colours and unique ids."""
        svg = self.svg
        svg = svg[svg.index("<svg") :].replace("<svg ", '<svg role="img" ', 1)
        svg = re.sub(r"<metadata>.*?</metadata>|<style [^>]*>.*?</style>|(?<=<g) id=\"[^\"]*\"", "", svg, flags=re.S)
        svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{self.name}-", svg).replace(PAPER, "none")
        for name, color in COLORS.items():
            svg = svg.replace(color, f"var(--{name}, {color})")
        return Markup(svg)  # matplotlib has escaped all texts

    def _saved(self, kind: str, metadata: dict[str, str | None]) -> bytes:
        assert self.plot is not None
        file = io.BytesIO()
        with _style(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from font")  # labels may be in any script
            self.plot.savefig(file, format=kind, metadata=metadata)
        return file.getvalue()


def part_figures(results: Results, part: Part) -> list[ReportFigure]:
    """The figures of a part, for each noise ratio; none for tables."""
    if part.kind not in PLOTS:
        return []
    figures = []
    for level in noise_levels(results, part):
        groups = [level.rows] if part.kind in ("validation", "sweep") else [[row] for row in level.rows]
        figures += [_figure(level, rows, one_of_several=len(groups) > 1) for rows in groups]
    return figures


def _figure(level: NoiseLevel, rows: Sequence[ResultRow], *, one_of_several: bool) -> ReportFigure:
    part = level.part
    names = [slug(part.name), *([f"{100 * level.noise_ratio:g}"] if len(part.noise_ratio) > 1 else [])]
    title = level.title
    if one_of_several:
        names.append(_row_name(part, rows[0].label))
        title += f": {rows[0].label}"
    draw, reason = PLOTS[part.kind]
    plot = _drawn(draw, level, rows)
    caption = seeds_phrase(level, rows) if plot is not None else _why_empty(rows, reason)
    return ReportFigure("-".join(names), title, caption, plot)


def _row_name(part: Part, label: str) -> str:
    """A number is added if the names of two rows differ only in punctuation."""
    labels = [row.label for row in part.rows]
    doubled = [slug(one) for one in labels].count(slug(label)) > 1
    return f"{slug(label)}-{labels.index(label) + 1}" if doubled else slug(label)


def seeds_phrase(level: NoiseLevel, rows: Sequence[ResultRow]) -> str:
    """`Mean ± sd over 3 seeds.`, and the missing rows."""
    counts = sorted({len(row.done) for row in rows if row.done})
    missing = [level.full_label(row) for row in rows if not row.done]
    seeds = "–".join(dict.fromkeys([str(counts[0]), str(counts[-1])]))
    phrase = "One seed." if counts[-1] == 1 else f"Mean ± sd over {seeds} seeds."
    return f"{phrase} Missing: {'; '.join(missing)}." if missing else phrase


def _why_empty(rows: Sequence[ResultRow], reason: str) -> str:
    if any(row.done for row in rows):
        return f"No figure: {reason}."
    failed = sum(len(row.failed) for row in rows)
    return f"No figure yet: 0 of {sum(len(row.cells) for row in rows)} trainings done, {failed} failed."


def _style() -> AbstractContextManager[None]:
    """The same style with any matplotlibrc."""
    return context(["default", STYLE])


def _drawn(
    draw: Callable[[Axes, NoiseLevel, Sequence[ResultRow]], bool], level: NoiseLevel, rows: Sequence[ResultRow]
) -> Figure | None:
    """A plot with its legend below; None without data."""
    with _style():
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        axes = figure.add_subplot()
        if not draw(axes, level, rows):
            return None
        handles, labels = axes.get_legend_handles_labels()
        columns = max(1, min(len(labels), int(POINTS / (CHARACTER * max(map(len, labels)) + COLUMN))))
        figure.set_size_inches(WIDTH, HEIGHT + LEGEND_ROW * math.ceil(len(labels) / columns))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    return figure


def _label(label: str) -> str:
    """Shorten a text for the legend; matplotlib hides labels with a leading underscore."""
    label = clean(" ".join(label.split())).lstrip("_") or "-"
    return label if len(label) <= LONGEST_LABEL else label[: LONGEST_LABEL - 1].rstrip() + "…"


def _plot_series(
    axes: Axes, number: int, label: str, values: Mapping[float, Sequence[float]], *, band: bool = True
) -> None:
    """The mean over the seeds at each x, with one sample standard deviation as a band or as error bars."""
    xs = sorted(x for x in values if values[x])
    x, mean = np.array(xs, dtype=float), np.array([np.mean(values[x]) for x in xs])
    std = np.array([np.std(values[x], ddof=1) if len(values[x]) > 1 else 0.0 for x in xs])
    color, every = SERIES_COLORS[number % len(SERIES_COLORS)], math.ceil(len(x) / MOST_MARKERS)
    axes.plot(
        x, mean, color=color, label=_label(label), linestyle=LINE_STYLES[number % len(LINE_STYLES)],
        marker=MARKERS[number % len(MARKERS)], markevery=((len(x) - 1) % every, every),
    )  # fmt: skip
    if band and len(x) > 1 and std.any():
        axes.fill_between(x, mean - std, mean + std, color=color, alpha=0.16, linewidth=0)
    elif std.any():
        axes.errorbar(x, mean, yerr=std, fmt="none", color=color)


def _widen(axes: Axes, span: float) -> None:
    low, high = axes.get_ylim()
    if high - low < span:
        middle = (low + high) / 2
        axes.set_ylim(middle - span / 2, middle + span / 2)


def _grouped(values: Mapping[str, float | None]) -> dict[float, str]:
    """Each value, followed by the rows that have it in brackets; by nothing if all rows have it."""
    known = dict.fromkeys(value for value in values.values() if value is not None)
    rows = {value: [row for row, own in values.items() if own == value] for value in known}
    return {value: "" if len(of) == len(values) else f" ({', '.join(of)})" for value, of in rows.items()}


def _plot_validation(axes: Axes, level: NoiseLevel, rows: Sequence[ResultRow]) -> bool:  # noqa: ARG001 - one signature
    """rSum on the validation pairs by the epochs trained."""
    plotted, last = dict[str, ResultRow](), 0.0
    for row in rows:
        values: dict[float, list[float]] = {}
        for record in row.done:
            for epoch in record.validation:
                values.setdefault(epoch.epoch + 1, []).append(epoch.rsum)
        if values:
            _plot_series(axes, len(plotted), row.label, values)
            plotted[row.label], last = row, max(last, *values)
    if not plotted:
        return False
    for epochs, who in _grouped({label: row.config.warmup_epochs for label, row in plotted.items()}).items():
        if 0 < epochs <= last:
            axes.axvspan(0, epochs, color=COLORS["shade"], linewidth=0, zorder=0.5, label=_label(f"warm-up{who}"))
    for epochs, who in _grouped({label: noisy_from(row.config) for label, row in plotted.items()}).items():
        if 0 < epochs <= last:
            _mark(axes, epochs, f"noisy pairs used{who}")
    axes.set(xlabel="epochs trained", ylabel="validation rSum", xlim=(0, 1.02 * last))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _widen(axes, LEAST_RSUM)
    return True


def noisy_from(config: Config) -> int | None:
    """Number of epochs before noisy pairs take part; None if they never do."""
    try:
        start = methods.select(config).noisy_from(config)
    except ConfigError:  # the method of these results is not installed here
        return None
    return None if start is None else config.warmup_epochs + start


def _mark(axes: Axes, x: float, label: str) -> None:
    axes.axvline(x, color=COLORS["ink"], linewidth=0.8, linestyle=(0, (2, 3)), label=_label(label))


def _plot_labels(axes: Axes, level: NoiseLevel, rows: Sequence[ResultRow]) -> bool:  # noqa: ARG001
    """Density of a method's labels y* before its last epoch, both networks together."""
    (row,) = rows
    known = all(record.data.mismatch is not None for record in row.done)
    names = ("matched pairs", "mismatched pairs") if known else ("clean part", "noisy part")
    for name, color, linestyle, counts in zip(
        names,
        (COLORS["good"], COLORS["bad"]),
        ("-", "--"),
        zip(*(record.label_counts() for record in row.done), strict=True),
        strict=False,
    ):
        densities = [np.array(bins) * len(bins) / sum(bins) for bins in counts if sum(bins)]
        if densities:
            edges = np.linspace(0, 1, len(densities[0]) + 1)
            mean = np.mean(densities, axis=0)
            average = float((mean * (edges[:-1] + edges[1:]) / 2).mean())
            axes.stairs(
                mean, edges, color=color, linewidth=1.3, linestyle=linestyle, label=f"{name} (mean {average:.2f})"
            )
            std = np.std(densities, axis=0, ddof=1) if len(densities) > 1 else np.zeros_like(mean)
            axes.stairs(mean + std, edges, baseline=mean - std, fill=True, color=color, alpha=0.16, linewidth=0)
    axes.set(xlabel="label y* (0: mismatched, 1: matched)", ylabel="density", xlim=(0, 1), ylim=(0, None))
    return bool(axes.patches)


def _plot_eta(axes: Axes, level: NoiseLevel, rows: Sequence[ResultRow]) -> bool:  # noqa: ARG001
    """Detection of the mismatched pairs by the threshold eta."""
    (row,) = rows
    for number, name in enumerate(("accuracy", "precision", "recall")):
        values: dict[float, list[float]] = {}
        for point in (point for record in row.done for point in record.eta):
            if (value := getattr(point, name)) is not None:
                values.setdefault(point.eta, []).append(100 * value)
        if values:  # there is no precision where nothing is detected
            _plot_series(axes, number, name, values)
    if not axes.lines:
        return False
    eta = row.config.of(RepairSettings).eta
    _mark(axes, eta, f"recipe: eta = {eta:g}")
    axes.set(xlabel="eta (mismatched if w of both networks is below)", ylabel="per cent", xlim=(0, None))
    _widen(axes, LEAST_PERCENT)
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, -5), min(high, 105))  # a band of one sd may pass 0 and 100
    return True


def _plot_sweep(axes: Axes, level: NoiseLevel, rows: Sequence[ResultRow]) -> bool:
    """Test rSum by the values of a setting, of averaged networks and of single ones."""
    part, setting = level.part, str(level.part.setting)
    places = _setting_axis(axes, setting, part.values)
    curves: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        prefix = f"{row.label}, " if len(part.rows) > 1 else ""
        for result in row.results.values():
            measured = {"one network": result.single, "averaged networks": result.averaged, "single network": None}
            if result.averaged is not None:
                measured |= {"one network": None, "single network": result.single}
            for name, rsum in measured.items():
                if rsum is not None:
                    curves.setdefault(prefix + name, {}).setdefault(places[row.value], []).append(rsum)
    for number, (label, values) in enumerate(curves.items()):
        _plot_series(axes, number, label, values, band=False)
    if not curves:
        return False
    own = {row.label: places.get(row.settings.get(setting, every_setting(row.config)[setting])) for row in part.rows}
    for x, who in _grouped(own).items():
        _mark(axes, x, f"value of the recipe{who}")
    axes.set_ylabel("test rSum")
    _widen(axes, LEAST_RSUM)
    return True


def _setting_axis(axes: Axes, setting: str, values: Sequence[Any]) -> dict[Any, float]:
    """Scales the x axis for a setting; gives the place of each value."""
    axes.set_xlabel(setting)
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        places = {value: float(place) for place, value in enumerate(values)}
        axes.set_xticks(list(places.values()), [_label(str(value)) for value in places])
        axes.set_xlim(-0.5, len(places) - 0.5)
        return places
    low, high = min(values), max(values)
    if low > 0 and (setting in LOGARITHMIC or high / low > MOST_LINEAR):
        axes.set_xscale("log")
        axes.set_xticks(values, [f"{value:,}" if isinstance(value, int) else f"{value:g}" for value in values])
        axes.xaxis.set_minor_locator(NullLocator())
    return {value: float(value) for value in values}


PLOTS: dict[str, tuple[Callable[[Axes, NoiseLevel, Sequence[ResultRow]], bool], str]] = {
    "validation": (_plot_validation, "the data set has no validation pairs"),
    "labels": (_plot_labels, "the method gives no labels"),
    "eta": (_plot_eta, "the method does not split the pairs, or the truth is not known"),
    "sweep": (_plot_sweep, "no results on 1,000-image folds"),
}
