"""The report of a comparison: one page, and its tables and figures as files for papers and programs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mispair import __version__
from mispair.bench.report import exports
from mispair.bench.report.figures import ReportFigure, part_figures
from mispair.bench.report.rows import ResultRow, noise_levels, percent
from mispair.bench.report.tables import READING, ReportTable, part_tables, provenance_table
from mispair.bench.suite.results_folder import Results
from mispair.support.files import write_atomically
from mispair.support.formatting import clean, slug
from mispair.support.html import template

MOST_COMMANDS = 10  # commands that made the records


@dataclass(frozen=True)
class Section:
    """A part of the suite on the page."""

    title: str
    id: str
    tables: list[ReportTable]
    figures: list[ReportFigure]


def best_row(results: Results) -> tuple[ResultRow, str] | None:
    """The row with the highest rSum in the first table, at its largest noise ratio with results, and the noise."""
    part = next((part for part in results.suite.parts if part.kind == "retrieval"), None)
    levels = [] if part is None else noise_levels(results, part)
    for level in sorted(levels, key=lambda level: -level.noise_ratio):
        if level.compared:
            where = f"at {percent(level.noise_ratio)} noise" if level.noise_ratio else "without injected noise"
            return max(level.compared, key=lambda row: row.mean), where
    return None


def write_report(results: Results, out: Path, command: str) -> list[Path]:
    """Write the page, `tables.md`, `results.csv`, `figures/*.svg` and `figures/*.pdf`; return them, the page first."""
    suite, done = results.suite, results.done
    best, where = best_row(results) or (None, "")
    sections = [
        Section(part.title, slug(part.name), part_tables(results, part), part_figures(results, part))
        for part in suite.parts
    ]
    provenance = provenance_table(done)
    titled = [(section.title, section.tables) for section in sections if section.tables]
    titled += [(provenance.title, [provenance])] if done else []
    page = template(
        "bench.html", percent=percent
    ).render(  # it fetches nothing and has no scripts
        results=results,
        headline=f"{best.label}: rSum {best.score} {where}." if best else str(results),
        noise_ratios=sorted({noise_ratio for part in suite.parts for noise_ratio in part.noise_ratio}),
        train_sets=_distinct(record.data.name for record in done),
        test_sets=_distinct(record.data.tested_on for record in done),
        best=best,
        where=where,
        pairs=sorted({record.data.pairs for record in done if record.data.pairs is not None}),
        seconds=sum(record.seconds for record in done),
        devices=_distinct(record.environment.device for record in done if record.environment),
        sections=sections,
        reading=READING,
        provenance=provenance,
        command=command,
        commands=_distinct(record.environment.command for record in done if record.environment)[:MOST_COMMANDS],
        version=__version__,
    )
    content = {"title": suite.title, "progress": str(results), "reading": READING, "titled": titled}
    texts = {
        "index.html": page,
        "tables.md": exports.MARKDOWN.get_template("tables.md").render(content),
        "results.csv": exports.results_csv(results),
    }
    files = {name: clean(text).encode() for name, text in texts.items()}
    for figure in (figure for section in sections for figure in section.figures if figure.plot is not None):
        files[f"figures/{figure.name}.svg"] = figure.svg.encode()
        files[f"figures/{figure.name}.pdf"] = figure.pdf
    for name, data in files.items():
        write_atomically(out / name, data)
    return [out / name for name in files]


def _distinct(values: Iterable[str | None]) -> list[str]:
    return list(dict.fromkeys(value for value in values if value is not None))
