"""What is said above the tables: how much is done, which method is best, what was trained on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from mispair.bench.report.figures import percent
from mispair.bench.report.rows import ResultRow, shares
from mispair.bench.suite.record import Record
from mispair.bench.suite.suite import Part, Suite

VERSIONS = ("python", "torch", "numpy", "device", "platform")


@dataclass(frozen=True)
class Reached:
    """What a row of a table has reached: rSum, over its seeds."""

    label: str
    rsum: float
    spread: float
    seeds: int


@dataclass(frozen=True)
class Ranking:
    """The rows of a part at one share of noise, the best first."""

    part: Part
    noise: float
    rows: list[Reached]
    competitors: int  # rows that there are to be
    seeds: int

    @property
    def is_complete(self) -> bool:
        return len(self.rows) == self.competitors and all(row.seeds == self.seeds for row in self.rows)


@dataclass(frozen=True)
class SuiteState:
    """How much of a suite is done."""

    cells: int
    done: list[Record]
    failed: list[Record]

    @property
    def missing(self) -> int:
        return self.cells - len(self.done) - len(self.failed)


def state_of(suite: Suite, seeds: int, records: Mapping[str, Record]) -> SuiteState:
    names = [cell.name for cell in suite.cells(seeds)]
    found = [records[name] for name in names if name in records]
    done, failed = ([record for record in found if record.status == status] for status in ("done", "failed"))
    return SuiteState(len(names), done, failed)


def state_sentence(state: SuiteState) -> str:
    """How much is done, in a sentence."""
    parts = [f"{len(state.done)} of {_trainings(state.cells)} done"]
    if state.failed:
        parts.append(f"{len(state.failed)} failed: " + ", ".join(record.name for record in state.failed))
    if state.missing:
        parts.append(f"{state.missing} not yet made")
    return "; ".join(parts) + "."


def _trainings(number: int) -> str:
    return f"{number} training{'s' * (number != 1)}"


def ranking_of(suite: Suite, seeds: int, records: Mapping[str, Record]) -> Ranking | None:
    """The first table of results, at its largest share of noise that has any."""
    part = next((part for part in suite.parts if part.kind == "retrieval"), None)
    if part is None:
        return None
    for share in sorted(shares(suite, part, seeds, records), key=lambda share: -share.noise):
        found = [_reached(line) for line in share.competing if line.results]
        if found:
            return Ranking(part, share.noise, sorted(found, key=lambda row: -row.rsum), len(share.competing), seeds)
    return None


def _reached(line: ResultRow) -> Reached:
    rsums = [result.shown["rsum"] for result in line.results.values()]
    return Reached(line.label, fmean(rsums), stdev(rsums) if len(rsums) > 1 else 0.0, len(rsums))


def headline(state: SuiteState, ranking: Ranking | None) -> str:
    """The result in one sentence."""
    if not state.done:
        return "No training has ended well yet."
    if ranking is None:
        return f"{len(state.done)} of {_trainings(state.cells)} compared."
    best, *others = ranking.rows
    where = f"at {percent(ranking.noise)} noise" if ranking.noise else "without added noise"
    if not others:
        return f"{best.label} reaches an rSum of {best.rsum:.1f} {where}."
    as_much = [row.label for row in others if f"{row.rsum:.1f}" == f"{best.rsum:.1f}"]
    if as_much:
        return f"{_and([best.label, *as_much])} have the same highest rSum {where}: {best.rsum:.1f}."
    so_far, after = "" if ranking.is_complete else "So far, ", f"next is {others[0].label}, {others[0].rsum:.1f}"
    return f"{so_far}{best.label} has the highest rSum {where}: {best.rsum:.1f}; {after}."


def data_said(suite: Suite, done: Sequence[Record]) -> str:
    """What was trained and tested on."""
    trained, tested = (distinct(record.data.get(key) for record in done) for key in ("name", "tested_on"))
    said = [f"Trained on {_and(trained)}, tested on {_and(tested)}."] if trained and tested else []
    wrong = sorted({noise for part in suite.parts for noise in part.noise if noise})
    if wrong:
        said.append(f"Of the training pairs {_and([percent(noise) for noise in wrong], 'or')} are wrong on purpose.")
    else:
        said.append("No pair is wrong on purpose.")
    return " ".join(said)


def versions_of(done: Sequence[Record]) -> dict[str, str]:
    found = {name: distinct(record.environment.get(name) for record in done) for name in VERSIONS}
    return {name: _and(values) for name, values in found.items() if values}


def distinct(values: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(str(value) for value in values if value is not None))


def _and(words: Sequence[str], last: str = "and") -> str:
    """
    >>> _and(["NCR", "DECL", "REPAIR"]), _and(["NCR"])
    ('NCR, DECL and REPAIR', 'NCR')
    """
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"
