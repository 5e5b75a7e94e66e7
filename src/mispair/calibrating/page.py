"""The page of a calibration: one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import jinja2
import numpy as np

from mispair.auditing.report import charts
from mispair.auditing.report.page import count, pairs
from mispair.calibrating.cuts import Cut, Ranked
from mispair.calibrating.evidence import View
from mispair.support.formatting import percent
from mispair.support.html import template

BINS, LEVELS = 40, 12  # of the histogram; at most so many different scores get a bar each
POINTS = 200  # of the curve
NAMES = {
    "shuffled": "scores of shuffled pairs",
    "vectors": "shuffled pairs of the same vectors",
    "audit": "an audit of the same rows",
    "checked": "checked rows",
}


def render(cut: Cut | None, views: Sequence[View], **shown: object) -> str:
    """The page as HTML, without scripts and external files.

    The last view counts. The template names what is `shown`: `source`, `column`, `cuts`, `notes` and `command`.
    """
    view = views[-1]
    histogram, lowest, highest = score_histogram(view)
    place = None
    if cut is not None:
        half_a_bar = 0.5 / len(histogram.bars) if len(histogram.bars) < BINS else 0.0  # levels are kept whole
        place = charts.WIDTH * float(np.clip((cut.least - lowest) / (highest - lowest) - half_a_bar, 0, 1))
    return _template().render(
        views=views,
        view=view,
        cut=cut,
        histogram=histogram,
        curve=purity_curve(view),
        place=place,
        kept=0 if cut is None else charts.WIDTH * cut.kept / len(view.match),
        scored=len(view.match),
        names=NAMES,
        percent=percent,
        width=charts.WIDTH,
        height=charts.HEIGHT,
        **shown,
    )


@cache
def _template() -> jinja2.Template:
    return template("calibrate.html", count=count, pairs=pairs, number=lambda value: f"{value:.4g}")


def score_histogram(ranked: Ranked) -> tuple[charts.Histogram, float, float]:
    """Pairs by score, and the ends of the axis; equal bins, or one for each of a few different scores."""
    levels = np.unique(ranked.order)
    steps = np.diff(levels)
    if 1 < len(levels) <= LEVELS and steps.max() < 1.01 * steps.min():
        lowest, highest = levels[0] - steps[0] / 2, levels[-1] + steps[0] / 2
        bins = len(levels)
    else:
        lowest, highest = np.quantile(ranked.order, [0.001, 0.999])
        lowest, highest, bins = (lowest, highest, BINS) if highest > lowest else (lowest - 0.5, lowest + 0.5, BINS)
    places = ranked.order.clip(lowest, highest)
    there, _ = np.histogram(places, bins, (lowest, highest))
    matched, _ = np.histogram(places, bins, (lowest, highest), weights=ranked.match)
    chart = charts.histogram(there.tolist(), matched.tolist(), float(lowest), float(highest))
    return chart, float(lowest), float(highest)


def purity_curve(ranked: Ranked) -> tuple[charts.Axes, str]:
    """The purity of every cut as an SVG path; a point for about each of `POINTS` numbers of pairs."""
    kept, purities = ranked.purities
    some = np.unique(np.linspace(0, len(kept) - 1, POINTS).astype(int))
    kept, purities, total = kept[some], purities[some], len(ranked.match)
    base = float(np.floor(min(purities.min(), 0.999) * 10) / 10)
    steps = round((1 - base) * 10)
    heights = charts.HEIGHT * (1 - (purities - base) / (1 - base))
    ys = [(charts.HEIGHT * (1 - step / steps), percent(base + step / 10)) for step in range(steps + 1)]
    xs = [(charts.WIDTH * part / 4, f"{total * part / 4:,.0f}") for part in range(0, 5, 2)]
    points = (f"{charts.WIDTH * x / total:.1f},{y:.1f}" for x, y in zip(kept, heights, strict=True))
    return charts.Axes(1.0, xs, ys), f"M{' L'.join(points)}"
