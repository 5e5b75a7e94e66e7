"""The report of a comparison: one page for people, and its tables and figures as files for papers and programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PurePath
from typing import Any

from jinja2 import Template
from markupsafe import Markup

from mispair import __version__
from mispair.bench.report import exports
from mispair.bench.report.figures import Figure, part_figures, percent
from mispair.bench.report.notes import common_notes
from mispair.bench.report.rows import shares
from mispair.bench.report.summary import (
    SuiteState,
    data_said,
    distinct,
    headline,
    ranking_of,
    state_of,
    state_sentence,
    versions_of,
)
from mispair.bench.report.tables import Table, paper_tables, part_tables
from mispair.bench.suite.record import Record
from mispair.bench.suite.suite import Part, Suite
from mispair.support.files import write_atomically
from mispair.support.formatting import clean, slug
from mispair.support.html import template
from mispair.support.thumbnails import thumbnail

ENDINGS = ("", ".jpg", ".png")  # of picture files, after the name in the data set
PICTURE, MOST_COMMANDS = 200, 10  # pixels; of those that made the records
GROUPS = {
    "right": "Right pairs",
    "wrong": "Wrong pairs",
    "new text": "Given a new text",
    "new image": "Given a new image",
}


@dataclass(frozen=True)
class Picture:
    """A picture of an example: what it is to the pair, and itself as a data URI if there is a file."""

    role: str
    name: str
    source: str
    is_true: bool | None = None  # whether it is the one that the text was written for, if that is known


@dataclass(frozen=True)
class Example:
    """A training pair and what was made of it."""

    is_wrong: bool
    text: str
    label: float
    pictures: tuple[Picture, ...]
    new_text: str | None


@dataclass(frozen=True)
class Examples:
    """The examples of one training, by kind."""

    title: str
    groups: dict[str, list[Example]]


@dataclass(frozen=True)
class Section:
    """A part of the suite on the page."""

    id: str
    title: str
    tables: list[Table]
    figures: list[Figure]
    examples: list[Examples]
    notes: list[str]


def write_report(
    suite: Suite, seeds: int, records: Mapping[str, Record], out: Path, images: Path | None, command: str
) -> list[Path]:
    """Writes `index.html`, `tables.md`, `tables.tex`, `results.csv` and `figures/*.svg`.

    Args:
        suite: The comparison.
        seeds: How many trainings there are to be of each kind.
        records: What has ended, by the name of the cell.
        out: Folder to write to.
        images: Folder with the pictures of the data set, for examples.
        command: What has been called.

    Returns:
        The files, the page first.

    Raises:
        DataError: A file cannot be written.
    """
    sections = [_section(suite, part, seeds, records, images) for part in suite.parts]
    state = state_of(suite, seeds, records)
    files = {
        "index.html": render(suite, seeds, records, sections, command),
        "tables.md": _markdown(suite, sections, state),
        "tables.tex": _latex(suite, sections, state),
        "results.csv": exports.results_csv(suite, seeds, records),
        **{f"figures/{figure.name}.svg": figure.svg for one in sections for figure in one.figures if figure.svg},
    }
    for name, content in files.items():
        write_atomically(out / name, clean(content).encode())
    return [out / name for name in files]


def render(suite: Suite, seeds: int, records: Mapping[str, Record], sections: Sequence[Section], command: str) -> str:
    """The page as HTML. Nothing in it is fetched from anywhere, and nothing in it runs."""
    state, ranking, common = state_of(suite, seeds, records), ranking_of(suite, seeds, records), _common_notes(sections)
    return _template().render(
        suite=suite,
        sections=_without(common, sections),
        common=common,
        state=state,
        said=state_sentence(state),
        ranking=ranking,
        headline=headline(state, ranking),
        data=data_said(suite, state.done),
        seeds=seeds,
        pairs=sorted({int(record.data["pairs"]) for record in state.done if "pairs" in record.data}),
        seconds=sum(record.seconds for record in state.done),
        devices=distinct(record.environment.get("device") for record in state.done),
        groups=GROUPS,
        versions={"mispair": __version__, **versions_of(state.done)},
        command=command,
        commands=distinct(record.environment.get("command") for record in state.done)[:MOST_COMMANDS],
    )


@cache
def _template() -> Template:
    return template("bench.html", percent=percent, drawing=Markup)


# ---------------------------------------------------------------------- files


def _markdown(suite: Suite, sections: Sequence[Section], state: SuiteState) -> str:
    parts = [f"# {exports.plain_markdown(suite.title)}", state_sentence(state)]
    for section in sections:
        if section.tables:
            parts += [
                f"## {exports.plain_markdown(section.title)}",
                *(exports.markdown(table).strip() for table in section.tables),
            ]
    return "\n\n".join(parts) + "\n"


def _latex(suite: Suite, sections: Sequence[Section], state: SuiteState) -> str:
    """Tables for a document that uses the packages booktabs and graphicx."""
    about = " ".join(f"{suite.title}: {state_sentence(state)}".split())
    found = [exports.latex(table).strip() for section in sections for table in section.tables]
    return "\n\n".join([rf"% {about} \usepackage{{booktabs,graphicx}}", *found]) + "\n"


# ---------------------------------------------------------------------- sections


def _section(suite: Suite, part: Part, seeds: int, records: Mapping[str, Record], images: Path | None) -> Section:
    examples = _examples(suite, part, seeds, records, images) if part.kind == "examples" else []
    tables = [make(suite, part, seeds, records) for make in (part_tables, paper_tables)]
    return Section(
        id=slug(part.name),
        title=part.title,
        tables=[table for made in tables for table in made],
        figures=part_figures(suite, part, seeds, records),
        examples=examples,
        notes=[
            *(_example_notes(examples, images) if part.kind == "examples" else []),
            *([] if any(tables) else _source_notes(suite, part, seeds, records)),
        ],
    )


def _source_notes(suite: Suite, part: Part, seeds: int, records: Mapping[str, Record]) -> list[str]:
    """Dev protocol, noise and all else that a figure comes from, as under a table."""
    found = (common_notes(share) for share in shares(suite, part, seeds, records))
    return list(dict.fromkeys(note for notes in found for note in notes))


def _examples(
    suite: Suite, part: Part, seeds: int, records: Mapping[str, Record], images: Path | None
) -> list[Examples]:
    """The examples of the first seed that has any, for each row and share of noise."""
    found = []
    for share in shares(suite, part, seeds, records):
        for line in share.lines:
            record = next((record for record in line.records.values() if record.examples), None)
            if record is not None:
                title = f"{line.label} at {percent(share.noise)} noise, seed {record.config.get('seed', 0)}"
                found.append(Examples(title, _groups(record, images)))
    return found


def _groups(record: Record, images: Path | None) -> dict[str, list[Example]]:
    groups: dict[str, list[Example]] = {kind: [] for kind in GROUPS}
    for found in record.examples:
        if found.get("kind") in groups:
            groups[found["kind"]].append(_example(found, images))
    return {kind: group for kind, group in groups.items() if group}


def _example(found: Mapping[str, Any], images: Path | None) -> Example:
    is_wrong = bool(found.get("wrong", found["kind"] == "wrong"))
    true = found.get("true_image")

    def picture(role: str, name: Any) -> Picture:
        return Picture(role, str(name), _picture(images, str(name)), None if true is None else name == true)

    pictures = [picture("in the data", found["image"])]
    if "new_image" in found:
        pictures.append(picture("given instead", found["new_image"]))
        if is_wrong and true is not None:
            pictures.append(picture("written for, never shown", true))
    new_text = found.get("new_text")
    return Example(is_wrong, str(found["text"]), float(found["label"]), tuple(pictures), new_text)


def _picture(images: Path | None, name: str) -> str:
    """A picture of the data set as a data URI; empty if there is none of this name."""
    inside = PurePath(name)
    if images is None or not name or "\0" in name or inside.is_absolute() or ".." in inside.parts:
        return ""
    for ending in ENDINGS:
        if uri := thumbnail(images / f"{name}{ending}", PICTURE).uri:
            return uri
    return ""


def _example_notes(examples: Sequence[Examples], images: Path | None) -> list[str]:
    if not examples:
        return ["There are no examples yet: they come with a training of REPAIR that has ended, on pairs with texts."]
    shown = [
        bool(picture.source)
        for one in examples for group in one.groups.values() for example in group for picture in example.pictures
    ]  # fmt: skip
    if all(shown):
        return []
    if images is None or not images.is_dir():
        return ["No folder with the pictures was given, so only their names are here."]
    return [f"{shown.count(False)} of {len(shown)} pictures are not in {images}, or cannot be read."]


def _common_notes(sections: Sequence[Section]) -> list[str]:
    """What the notes of all tables say, if there are several."""
    found = [table.notes for section in sections for table in section.tables]
    return [note for note in found[0] if all(note in notes for notes in found)] if len(found) > 1 else []


def _without(common: Sequence[str], sections: Sequence[Section]) -> list[Section]:
    """The sections, each note where it is new: not if it is of all tables, or of a table above in the section."""
    kept = []
    for section in sections:
        said, shown = set(common), []
        for table in section.tables:
            shown.append(replace(table, notes=[note for note in table.notes if note not in said]))
            said.update(table.notes)
        kept.append(replace(section, tables=shown, notes=[note for note in section.notes if note not in common]))
    return kept
