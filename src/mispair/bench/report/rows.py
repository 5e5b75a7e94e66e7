"""The rows of tables and figures: the trainings of each row at one noise ratio, as far as they have ended."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import isnan, nan
from statistics import fmean, stdev
from typing import Any

from mispair.bench.suite.record import Record
from mispair.bench.suite.results_folder import Results
from mispair.bench.suite.suite import Cell, Part, Suite
from mispair.config import Config
from mispair.settings import MendSettings

MISSING, FAILED = "-", "failed"


def percent(ratio: float) -> str:
    """A ratio in per cent.

    >>> percent(0.4), percent(0.125)
    ('40\\xa0%', '12.5\\xa0%')
    """
    return f"{100 * ratio:g}\xa0%"


@dataclass(frozen=True)
class TrainingResult:
    """Retrieval on the test pairs after one training."""

    networks: int
    metrics: dict[str, float]  # the six recalls and rSum, of averaged networks where there are several
    averaged: float | None  # rSum of several networks averaged; None with one network
    single: float | None  # mean rSum of the networks by themselves; None where it was not measured


def _result(record: Record, *, folds: bool) -> TrainingResult | None:
    """None if the training failed, or was not tested on the folds of the part."""
    networks = record.networks
    if record.status != "done" or not networks or (folds and "folds" not in record.test):
        return None
    metrics = record.averaged(folds=folds)
    if networks == 1:
        return TrainingResult(1, metrics, None, metrics["rsum"])
    return TrainingResult(networks, metrics, metrics["rsum"], None if folds else record.single()["rsum"])


@dataclass(frozen=True)
class ResultRow:
    """The trainings of one row of a table, or one curve of a figure: only the seed differs."""

    label: str
    value: Any  # of the setting that is swept
    folds: bool
    cells: dict[int, Cell]  # by seed
    records: dict[int, Record]  # of those that have ended, done or failed

    @cached_property
    def results(self) -> dict[int, TrainingResult]:
        results = {seed: _result(record, folds=self.folds) for seed, record in self.records.items()}
        return {seed: result for seed, result in results.items() if result is not None}

    @property
    def rsums(self) -> list[float]:
        return [result.metrics["rsum"] for result in self.results.values()]

    @property
    def mean(self) -> float:
        """Mean rSum over the seeds."""
        return fmean(self.rsums)

    @property
    def sd(self) -> float | None:
        """Sample standard deviation of rSum over the seeds; one seed has none."""
        return stdev(self.rsums) if len(self.rsums) > 1 else None

    @property
    def score(self) -> str:
        if self.sd is None:
            return f"{self.mean:.1f}, one seed"
        return f"{self.mean:.1f}\xa0±\xa0{self.sd:.1f}, {len(self.rsums)} seeds"

    @property
    def is_averaged(self) -> bool:
        """Whether its results are averages of several networks."""
        return all(result.networks > 1 for result in self.results.values())

    @property
    def done(self) -> list[Record]:
        return [record for record in self.records.values() if record.status == "done"]

    @property
    def failed(self) -> dict[int, Record]:
        return {seed: record for seed, record in self.records.items() if record.status == "failed"}

    @property
    def is_oracle(self) -> bool:
        """Whether it is trained by the truth: an upper bound, not ranked among the methods."""
        config = self.config
        return config.method == "oracle" or (config.method == "mend" and config.of(MendSettings).trust == "truth")

    @property
    def config(self) -> Config:
        """Settings of the first seed."""
        return next(iter(self.cells.values())).config

    @property
    def placeholder(self) -> str:
        """The text of a cell without a number."""
        return FAILED if self.failed else MISSING

    def count(self, seeds: int) -> str:
        """`2 of 3` if some seeds are missing."""
        if not seeds:
            return self.placeholder
        return str(seeds) if seeds == len(self.cells) else f"{seeds} of {len(self.cells)}"


@dataclass(frozen=True)
class NoiseLevel:
    """A part at one noise ratio: the content of one table or figure."""

    suite: Suite
    part: Part
    noise_ratio: float
    rows: list[ResultRow]

    @property
    def name(self) -> str:
        return f"{self.part.name}-noise-{self.noise_ratio * 100:g}"

    @property
    def title(self) -> str:
        several = len(self.part.noise_ratio) > 1
        return f"{self.part.title}, {percent(self.noise_ratio)} noise" if several else self.part.title

    @property
    def ranked(self) -> list[ResultRow]:
        return [row for row in self.rows if not row.is_oracle]

    @property
    def compared(self) -> list[ResultRow]:
        """The ranked rows with comparable rSum: rows of averaged networks, or else all rows."""
        rows = [row for row in self.ranked if row.results]
        return [row for row in rows if row.is_averaged] or rows

    @property
    def is_mixed(self) -> bool:
        """Whether some rows are of averaged networks and some are not."""
        return len({row.is_averaged for row in self.ranked if row.results}) > 1

    def published(self, row: ResultRow) -> float | None:
        """rSum of the paper."""
        rsums = self.part.paper.get(row.label)
        rsum = nan if rsums is None else rsums[self.part.noise_ratio.index(self.noise_ratio)]
        return None if isnan(rsum) else rsum

    def full_label(self, row: ResultRow) -> str:
        """The label of a row, with its value in a sweep."""
        return row.label if self.part.setting is None else f"{row.label}, {self.part.setting} = {row.value}"


def noise_levels(results: Results, part: Part) -> list[NoiseLevel]:
    grouped: dict[float, dict[tuple[str, Any], dict[int, Cell]]] = {}
    for key, cell in part.cells(results.suite, results.seeds).items():
        grouped.setdefault(key.noise_ratio, {}).setdefault((key.row, key.value), {})[key.seed] = cell

    def row(label: str, value: Any, cells: dict[int, Cell]) -> ResultRow:
        ended = {seed: results.records[cell.name] for seed, cell in cells.items() if cell.name in results.records}
        return ResultRow(label, value, part.folds, cells, ended)

    return [
        NoiseLevel(results.suite, part, noise_ratio, [row(*key, cells) for key, cells in rows.items()])
        for noise_ratio, rows in grouped.items()
    ]
