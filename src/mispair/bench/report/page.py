"""The report of a comparison: one page, and its tables and figures as files for papers and programs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath

from mispair import __version__
from mispair.bench.report import exports
from mispair.bench.report.figures import ReportFigure, part_figures
from mispair.bench.report.rows import ResultRow, noise_levels, percent
from mispair.bench.report.tables import READING, ReportTable, part_tables, provenance_table
from mispair.bench.suite.record import PairExample
from mispair.bench.suite.results_folder import Results
from mispair.bench.suite.suite import Part
from mispair.support.files import write_atomically
from mispair.support.formatting import clean, slug
from mispair.support.html import template
from mispair.support.thumbnails import thumbnail

ENDINGS = ("", ".jpg", ".png")  # of image files, after the name in the data set
IMAGE_SIZE, MOST_COMMANDS = 200, 10  # pixels; commands that made the records
EXAMPLE_KINDS = {
    "matched": "Matched pairs",
    "mismatched": "Mismatched pairs",
    "new text": "Text replaced",
    "new image": "Image replaced",
}


@dataclass(frozen=True)
class Section:
    """A part of the suite on the page."""

    title: str
    id: str
    tables: list[ReportTable]
    figures: list[ReportFigure]
    examples: dict[str, tuple[PairExample, ...]]  # by the training that they are of
    notes: list[str]


def best_row(results: Results) -> tuple[ResultRow, str] | None:
    """The row with the highest rSum in the first table, at its largest noise ratio with results, and the noise."""
    part = next((part for part in results.suite.parts if part.kind == "retrieval"), None)
    levels = [] if part is None else noise_levels(results, part)
    for level in sorted(levels, key=lambda level: -level.noise_ratio):
        if level.compared:
            where = f"at {percent(level.noise_ratio)} noise" if level.noise_ratio else "without injected noise"
            return max(level.compared, key=lambda row: row.mean), where
    return None


def write_report(results: Results, out: Path, images: Path | None, command: str) -> list[Path]:
    """Write `index.html`, `tables.md`, `tables.tex`, `results.csv`, `figures/*.svg` and `figures/*.pdf`.

    `images` is the folder with the images of examples. Return the files, the page first.
    """
    suite, done = results.suite, results.done
    best, where = best_row(results) or (None, "")
    thumbnails: dict[str, str] = {}  # by the name in the data set
    sections = [_section(results, part, images, thumbnails) for part in suite.parts]
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
        kinds=EXAMPLE_KINDS,
        thumbnails=thumbnails,
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
        "tables.tex": exports.LATEX.get_template("tables.tex").render(content),
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


def _section(results: Results, part: Part, images: Path | None, thumbnails: dict[str, str]) -> Section:
    examples = _examples(results, part) if part.kind == "examples" else {}
    names = {name for some in examples.values() for pair in some for name in pair.images.values()}
    thumbnails |= {name: _thumbnail(images, name) for name in names}
    notes = []
    if part.kind == "examples" and not examples:
        notes = ["No examples yet: they come from a finished training of REPAIR on pairs with texts."]
    elif missing := sum(not thumbnails[name] for name in names):
        notes = [f"{missing} of {len(names)} images are not in {images}, or cannot be read."]
        if images is None or not images.is_dir():
            notes = ["There is no folder with the images, so only their names are shown."]
    return Section(
        part.title, slug(part.name), part_tables(results, part), part_figures(results, part), examples, notes
    )


def _examples(results: Results, part: Part) -> dict[str, tuple[PairExample, ...]]:
    """The examples of the first seed with any, for each row and noise ratio."""
    found = {}
    for level in noise_levels(results, part):
        for row in level.rows:
            for seed, record in row.records.items():
                if record.examples:
                    found[f"{row.label} at {percent(level.noise_ratio)} noise, seed {seed}"] = record.examples
                    break
    return found


def _thumbnail(images: Path | None, name: str) -> str:
    """An image of the data set as a data URI; empty without an image of this name."""
    inside = PurePath(name)
    if images is None or not name or "\0" in name or inside.is_absolute() or ".." in inside.parts:
        return ""
    uris = (thumbnail(images / f"{name}{ending}", IMAGE_SIZE).uri for ending in ENDINGS)
    return next(filter(None, uris), "")
