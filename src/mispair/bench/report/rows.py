"""What tables and figures are made of: the trainings of each line at one share of noise, as far as they have ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mispair.bench import paper
from mispair.bench.paper import Published
from mispair.bench.suite.record import Record
from mispair.bench.suite.suite import Cell, Part, Suite
from mispair.config import Config

MISSING, FAILED = "-", "failed"


@dataclass(frozen=True)
class Result:
    """What a training has reached.

    Attributes:
        networks: How many it has trained.
        shown: The six recalls and rSum, of averaged networks where there are two.
        averaged: rSum of two networks averaged; None with one network.
        alone: rSum of a network by itself; None where it was not measured.
    """

    networks: int
    shown: dict[str, float]
    averaged: float | None
    alone: float | None


def _result(record: Record, *, folds: bool) -> Result | None:
    """None if it has failed, or was not tested on slices where they are asked for."""
    networks = networks_of(record)
    if record.status != "done" or not networks or (folds and "folds" not in record.test):
        return None
    shown = record.averaged(folds=folds)
    if networks == 1:
        return Result(1, shown, None, shown["rsum"])
    return Result(networks, shown, shown["rsum"], None if folds else record.alone()["rsum"])


def networks_of(record: Record) -> int:
    return sum(name.startswith("network") for name in record.test)


def bank_bytes(record: Record) -> int | None:
    """Of the banks of all networks."""
    found = record.found.get("bank_bytes")
    if found is None:
        return None
    return int(sum(found)) if isinstance(found, list) else int(found) * max(1, networks_of(record))


@dataclass(frozen=True)
class ResultRow:
    """The trainings of one line of a table or figure: they differ in nothing but the seed."""

    label: str
    value: Any  # of the setting that is swept
    folds: bool
    cells: dict[int, Cell]
    records: dict[int, Record]  # of those that have ended, well or not

    @cached_property
    def results(self) -> dict[int, Result]:
        found = {seed: _result(record, folds=self.folds) for seed, record in self.records.items()}
        return {seed: result for seed, result in found.items() if result is not None}

    @property
    def done(self) -> list[Record]:
        return [record for record in self.records.values() if record.status == "done"]

    @property
    def failed(self) -> dict[int, Record]:
        return {seed: record for seed, record in self.records.items() if record.status == "failed"}

    @property
    def is_ceiling(self) -> bool:
        """Whether it knows which pairs are right, as nobody does: no competitor of the others."""
        return all(cell.config.method == "oracle" for cell in self.cells.values())

    @property
    def config(self) -> Config:
        """Of the first seed."""
        return next(iter(self.cells.values())).config

    @property
    def empty(self) -> str:
        """What stands where there is no figure."""
        return FAILED if self.failed else MISSING

    def count(self, found: int) -> str:
        """How many of the seeds there are."""
        if not found:
            return self.empty
        return str(found) if found == len(self.cells) else f"{found} of {len(self.cells)}"


@dataclass(frozen=True)
class NoiseLevel:
    """A part at one share of noise: what one table or figure is made of."""

    suite: Suite
    part: Part
    noise: float
    lines: list[ResultRow]

    @property
    def name(self) -> str:
        return f"{self.part.name}-noise-{self.noise * 100:g}"

    @property
    def title(self) -> str:
        return self.part.title + (f", {self.noise * 100:g} % noise" if len(self.part.noise) > 1 else "")

    @property
    def seeds(self) -> int:
        """How many trainings there are to be of each line."""
        return len(self.lines[0].cells)

    @property
    def competing(self) -> list[ResultRow]:
        return [line for line in self.lines if not line.is_ceiling]

    @property
    def has_paper(self) -> bool:
        """Whether numbers of the paper stand in the table."""
        return self.part.paper is not None and paper.is_of_paper(self.part.paper, paper_data(self.suite, self.part))

    @property
    def is_papers_data(self) -> bool:
        return self.has_paper and self.suite.paper_data in (None, self.suite.title)

    def published(self, line: ResultRow) -> Published | None:
        if self.part.paper is None:
            return None
        return paper.find(self.part.paper, paper_data(self.suite, self.part), self.noise, line.label)

    def comparable(self, line: ResultRow) -> Published | None:
        """What the paper reports of the same data set and network."""
        found = self.published(line) if self.is_papers_data else None
        return found if found is not None and found.model == line.config.model else None

    def says(self, line: ResultRow) -> str:
        """A line by its name, and its value in a sweep."""
        return line.label if self.part.setting is None else f"{line.label}, {self.part.setting} = {line.value}"


def shares(suite: Suite, part: Part, seeds: int, records: Mapping[str, Record]) -> list[NoiseLevel]:
    grouped: dict[float, dict[tuple[str, Any], dict[int, Cell]]] = {}
    for place, cell in part.cells(suite, seeds).items():
        grouped.setdefault(place.noise, {}).setdefault((place.row, place.value), {})[place.seed] = cell
    return [
        NoiseLevel(suite, part, noise, [_line(part, *key, cells, records) for key, cells in lines.items()])
        for noise, lines in grouped.items()
    ]


def _line(part: Part, label: str, value: Any, cells: dict[int, Cell], records: Mapping[str, Record]) -> ResultRow:
    ended = {seed: records[cell.name] for seed, cell in cells.items() if cell.name in records}
    return ResultRow(label, value, part.folds, cells, ended)


def paper_data(suite: Suite, part: Part) -> str:
    """The paper's name of the data set whose numbers stand beside those of a part."""
    name = suite.paper_data or suite.title
    if name == "MS-COCO":
        return "MS-COCO 1K" if part.folds else "MS-COCO 5K"
    return name
