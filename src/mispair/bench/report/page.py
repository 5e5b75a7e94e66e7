"""The report of a comparison: one page, and its tables and figures as files for papers and programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePath
from statistics import fmean, stdev

from jinja2 import Template

from mispair import __version__
from mispair.bench.report import exports
from mispair.bench.report.figures import ReportFigure, part_figures
from mispair.bench.report.rows import NoiseLevel, ResultRow, noise_levels, percent
from mispair.bench.report.tables import READING, ReportTable, part_tables, provenance_table
from mispair.bench.suite.examples import PairExample
from mispair.bench.suite.record import Record
from mispair.bench.suite.results_folder import Results
from mispair.bench.suite.suite import Part, Suite
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
class Progress:
    """How many trainings of a suite have ended."""

    cells: int
    done: list[Record]
    failed: list[Record]

    @classmethod
    def of(cls, results: Results) -> Progress:
        names = [cell.name for cell in results.suite.cells(results.seeds)]
        ended = [results.records[name] for name in names if name in results.records]
        done, failed = ([record for record in ended if record.status == status] for status in ("done", "failed"))
        return cls(len(names), done, failed)

    @property
    def missing(self) -> int:
        return self.cells - len(self.done) - len(self.failed)

    def __str__(self) -> str:
        failed = f", {len(self.failed)} failed ({', '.join(one.name for one in self.failed)})" if self.failed else ""
        missing = f", {self.missing} missing" if self.missing else ""
        return f"{len(self.done)} of {self.cells} trainings done{failed}{missing}."


@dataclass(frozen=True)
class Score:
    """rSum of a row over its seeds."""

    label: str
    mean: float
    sd: float | None  # None with one seed
    seeds: int

    @classmethod
    def of(cls, row: ResultRow) -> Score:
        return cls(row.label, fmean(row.rsums), stdev(row.rsums) if len(row.rsums) > 1 else None, len(row.rsums))

    def __str__(self) -> str:
        if self.sd is None:
            return f"{self.mean:.1f}, one seed"
        return f"{self.mean:.1f}\xa0±\xa0{self.sd:.1f}, {self.seeds} seeds"


@dataclass(frozen=True)
class Ranking:
    """The rows of a part at one noise ratio by their mean rSum, the best first; without the oracle, and without single
    networks where there are averaged ones."""

    level: NoiseLevel
    scores: list[Score]
    is_complete: bool  # whether no row and no seed is missing

    @classmethod
    def of(cls, results: Results) -> Ranking | None:
        """Of the first table of results, at its largest noise ratio with any result."""
        part = next((part for part in results.suite.parts if part.kind == "retrieval"), None)
        levels = [] if part is None else noise_levels(results, part)
        for level in sorted(levels, key=lambda level: -level.noise_ratio):
            scores = sorted((Score.of(row) for row in level.compared), key=lambda score: -score.mean)
            if scores:
                return cls(level, scores, all(len(row.results) == results.seeds for row in level.ranked))
        return None

    @property
    def where(self) -> str:
        return f"at {percent(self.level.noise_ratio)} noise" if self.level.noise_ratio else "without injected noise"


def headline(progress: Progress, ranking: Ranking | None) -> str:
    """The best row against the best of the others."""
    if ranking is None:
        return str(progress)
    best, *others = ranking.scores
    if not others:
        return f"{best.label}: rSum {best} {ranking.where}."
    second, start = others[0], "" if ranking.is_complete else "So far, "
    if ranking.level.is_mixed:
        start += "of averaged networks, " if start else "Of averaged networks, "
    gap = best.mean - second.mean
    if gap < 0.05:
        return f"{start}{best.label} and {second.label} have the same rSum {ranking.where} ({best.mean:.1f})."
    return (
        f"{start}{best.label} has the highest rSum {ranking.where} ({best}): {gap:.1f} more than the best of the "
        f"others, {second.label} ({second}), {_against_spread(gap, best, second)}."
    )


def _against_spread(gap: float, best: Score, second: Score) -> str:
    """What a difference of two means says beside the standard deviations over the seeds."""
    if best.sd is None or second.sd is None:
        return "but one seed shows no spread"
    return f"{'more than' if gap > max(best.sd, second.sd) else 'within'} the spread over the seeds"


@dataclass(frozen=True)
class ShownImage:
    """An image of an example."""

    role: str
    name: str
    source: str  # data URI; empty if there is no file
    is_true: bool | None = None  # whether the text was written for it, if that is known


@dataclass(frozen=True)
class ShownExample:
    """A training pair with its images."""

    pair: PairExample
    images: tuple[ShownImage, ...]


@dataclass(frozen=True)
class ExampleGroup:
    """The examples of one training, by kind."""

    title: str
    kinds: dict[str, list[ShownExample]]


@dataclass(frozen=True)
class Section:
    """A part of the suite on the page."""

    id: str
    title: str
    tables: list[ReportTable]
    figures: list[ReportFigure]
    examples: list[ExampleGroup]
    notes: list[str]


def write_report(results: Results, out: Path, images: Path | None, command: str) -> list[Path]:
    """Write `index.html`, `tables.md`, `tables.tex`, `results.csv`, `figures/*.svg` and `figures/*.pdf`.

    Args:
        results: The comparison.
        out: Folder to write to.
        images: Folder with the images of the data set, for examples.
        command: The command line, for the page.

    Returns:
        The files, the page first.
    """
    suite, progress, ranking = results.suite, Progress.of(results), Ranking.of(results)
    sections, done = [_section(results, part, images) for part in suite.parts], progress.done
    provenance = provenance_table(done)
    titled = [(section.title, section.tables) for section in sections if section.tables]
    titled += [(provenance.title, [provenance])] if done else []
    page = _template().render(  # it fetches nothing and has no scripts
        suite=suite,
        headline=headline(progress, ranking),
        noise_ratios=sorted({noise_ratio for part in suite.parts for noise_ratio in part.noise_ratio}),
        train_sets=_distinct(record.data.name for record in done),
        test_sets=_distinct(record.data.tested_on for record in done),
        progress=progress,
        ranking=ranking,
        seeds=results.seeds,
        pairs=sorted({record.data.pairs for record in done if record.data.pairs is not None}),
        seconds=sum(record.seconds for record in done),
        devices=_distinct(record.environment.device for record in done if record.environment),
        sections=sections,
        kinds=EXAMPLE_KINDS,
        reading=READING,
        provenance=provenance,
        command=command,
        commands=_distinct(record.environment.command for record in done if record.environment)[:MOST_COMMANDS],
        version=__version__,
    )
    texts = {
        "index.html": page,
        "tables.md": _markdown(suite, progress, titled),
        "tables.tex": _latex(suite, progress, titled),
        "results.csv": exports.results_csv(results),
    }
    files = {name: clean(text).encode() for name, text in texts.items()}
    for figure in (figure for section in sections for figure in section.figures if figure.plot is not None):
        files[f"figures/{figure.name}.svg"] = figure.svg.encode()
        files[f"figures/{figure.name}.pdf"] = figure.pdf
    for name, content in files.items():
        write_atomically(out / name, content)
    return [out / name for name in files]


@cache
def _template() -> Template:
    return template("bench.html", percent=percent)


def _distinct(values: Iterable[str | None]) -> list[str]:
    return list(dict.fromkeys(value for value in values if value is not None))


def _markdown(suite: Suite, progress: Progress, titled: Iterable[tuple[str, list[ReportTable]]]) -> str:
    parts = [f"# {exports.plain_markdown(suite.title)}", str(progress), "\n".join(f"- {line}" for line in READING)]
    for title, tables in titled:
        parts += [f"## {exports.plain_markdown(title)}", *(exports.markdown(table).strip() for table in tables)]
    return "\n\n".join(parts) + "\n"


def _latex(suite: Suite, progress: Progress, titled: Iterable[tuple[str, list[ReportTable]]]) -> str:
    """Tables for a document that uses the packages booktabs and graphicx."""
    start = " ".join(f"{suite.title}: {progress}".split())
    comments = [rf"% {start} \usepackage{{booktabs,graphicx}}", *(f"% {line}" for line in READING)]
    tables = [exports.latex(table).strip() for _, group in titled for table in group]
    return "\n\n".join(["\n".join(comments), *tables]) + "\n"


def _section(results: Results, part: Part, images: Path | None) -> Section:
    examples = _examples(results, part, images) if part.kind == "examples" else []
    return Section(
        id=slug(part.name),
        title=part.title,
        tables=part_tables(results, part),
        figures=part_figures(results, part),
        examples=examples,
        notes=_example_notes(examples, images) if part.kind == "examples" else [],
    )


def _examples(results: Results, part: Part, images: Path | None) -> list[ExampleGroup]:
    """The examples of the first seed that has any, for each row and noise ratio."""
    groups = []
    for level in noise_levels(results, part):
        for row in level.rows:
            seed, record = next(((seed, one) for seed, one in row.records.items() if one.examples), (0, None))
            if record is not None:
                title = f"{row.label} at {percent(level.noise_ratio)} noise, seed {seed}"
                shown = [_shown(pair, images) for pair in record.examples]
                kinds = {kind: [one for one in shown if one.pair.kind == kind] for kind in EXAMPLE_KINDS}
                groups.append(ExampleGroup(title, {kind: some for kind, some in kinds.items() if some}))
    return groups


def _shown(pair: PairExample, images: Path | None) -> ShownExample:
    def image(role: str, name: str) -> ShownImage:
        is_true = None if pair.true_image is None else name == pair.true_image
        return ShownImage(role, name, _image(images, name), is_true)

    shown = [image("in the data", pair.image)]
    if pair.new_image is not None:
        shown.append(image("replacement", pair.new_image))
        if pair.is_mismatched and pair.true_image is not None:
            shown.append(image("true, not in training", pair.true_image))
    return ShownExample(pair, tuple(shown))


def _image(images: Path | None, name: str) -> str:
    """An image of the data set as a data URI; empty if there is none of this name."""
    inside = PurePath(name)
    if images is None or not name or "\0" in name or inside.is_absolute() or ".." in inside.parts:
        return ""
    for ending in ENDINGS:
        if uri := thumbnail(images / f"{name}{ending}", IMAGE_SIZE).uri:
            return uri
    return ""


def _example_notes(examples: Sequence[ExampleGroup], images: Path | None) -> list[str]:
    if not examples:
        return ["No examples yet: they come from a finished training of REPAIR on pairs with texts."]
    has_file = [
        bool(image.source)
        for group in examples for kind in group.kinds.values() for one in kind for image in one.images
    ]  # fmt: skip
    if all(has_file):
        return []
    if images is None or not images.is_dir():
        return ["There is no folder with the images, so only their names are shown."]
    return [f"{has_file.count(False)} of {len(has_file)} images are not in {images}, or cannot be read."]
