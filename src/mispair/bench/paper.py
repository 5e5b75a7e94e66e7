"""The results of the REPAIR paper: every number of its tables, to compare ours with."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from mispair.support.terminal import COLUMNS

RECALLS = tuple(name for name in COLUMNS if name != "rsum")


@dataclass(frozen=True)
class PaperResult:
    """A row of one of the paper's tables; None without a number."""

    table: str  # as the key `paper` of a suite's part has it
    data: str  # the paper's name of the data set
    method: str  # as the rows of a suite are called
    star: bool  # marked with *: the authors of REPAIR trained it themselves, with the public code
    recalls: dict[str, float]  # named as our own metrics; empty where only rSum is given
    noise_ratio: float | None = None
    rsum: float | None = None
    hours: float | None = None  # of training
    extra_bytes: int | None = None  # of the memory bank

    @property
    def model(self) -> str:
        """The network, as the setting `model` names it. Methods against noise use SGR outside Table V."""
        if self.method == "SCAN":
            return "scan"
        return "vse" if self.table == "table-5" or self.method.startswith("VSE-inf") else "sgr"


@cache
def results() -> tuple[PaperResult, ...]:
    """All rows of all tables, in the paper's order."""
    with Path(__file__).with_name("paper.csv").open(encoding="utf-8", newline="") as file:
        rows = [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]
    known = [{**row, "recalls": {name: row[name] for name in RECALLS if name in row}} for row in rows]
    return TypeAdapter(tuple[PaperResult, ...]).validate_python(known)


@cache
def tables() -> tuple[str, ...]:
    """Names of all tables, as the key `paper` has them."""
    return tuple(dict.fromkeys(result.table for result in results()))


def find(table: str, data: str, noise_ratio: float, method: str) -> PaperResult | None:
    """A row of a table, if the paper has it.

    >>> find("table-1", "Flickr30K", 0.4, "REPAIR").rsum
    492.8
    """
    for result in results():
        key = result.table, result.data, result.method
        if key == (table, data, method) and result.noise_ratio in (None, noise_ratio):
            return result
    return None


def has_data(table: str, data: str) -> bool:
    """Whether a table of the paper is about this data set."""
    return any((result.table, result.data) == (table, data) for result in results())
