"""What the paper of REPAIR reports: every number of its tables, to stand beside ours."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mispair.support.terminal import COLUMNS

RECALLS = tuple(name for name in COLUMNS if name != "rsum")


@dataclass(frozen=True)
class Published:
    """A line of one of the paper's tables.

    Attributes:
        table: As the key `paper` of a suite's part has it.
        data: The paper's name of the data set.
        noise: Share of wrong pairs put in; None where the paper does not tell.
        method: As a suite's rows are called.
        recalls: By name, as our own figures; empty where only rSum is given.
        rsum: None where the paper has no number.
        hours: Of training.
        extra_bytes: Of the memory bank.
        star: Marked with *: the authors of REPAIR trained it themselves, with the public code.
    """

    table: str
    data: str
    noise: float | None
    method: str
    recalls: dict[str, float]
    rsum: float | None
    hours: float | None
    extra_bytes: int | None
    star: bool

    @property
    def model(self) -> str:
        """The network, as the setting `model` has it. The methods against noise are with SGR outside Table V."""
        if self.method == "SCAN":
            return "scan"
        return "vse" if self.table == "table-5" or self.method.startswith("VSE-inf") else "sgr"


@cache
def lines() -> tuple[Published, ...]:
    """All lines of all tables, in the paper's order."""
    with Path(__file__).with_name("paper.csv").open(encoding="utf-8", newline="") as file:
        return tuple(_line(found) for found in csv.DictReader(file))


@cache
def tables() -> tuple[str, ...]:
    """Names of all tables, as the key `paper` has them."""
    return tuple(dict.fromkeys(line.table for line in lines()))


def find(table: str, data: str, noise: float, method: str) -> Published | None:
    """The line of a table, if the paper has it.

    >>> find("table-1", "Flickr30K", 0.4, "REPAIR").rsum
    492.8
    """
    for line in lines():
        if (line.table, line.data, line.method) == (table, data, method) and line.noise in (None, noise):
            return line
    return None


def is_of_paper(table: str, data: str) -> bool:
    """Whether a table of the paper is about this data set."""
    return any((line.table, line.data) == (table, data) for line in lines())


def _line(found: dict[str, str]) -> Published:
    return Published(
        table=found["table"],
        data=found["data"],
        noise=_number(found["noise"]),
        method=found["method"],
        recalls={name: float(found[name]) for name in RECALLS if found[name]},
        rsum=_number(found["rsum"]),
        hours=_number(found["hours"]),
        extra_bytes=int(found["extra_bytes"]) if found["extra_bytes"] else None,
        star=found["star"] == "1",
    )


def _number(text: str) -> float | None:
    return float(text) if text else None
