"""A results folder: its suite, its records and its running cells.

`suite.toml` is a copy of the suite, `suite.json` says how it was called, and `cells/NAME/` holds one training each.
Several processes, also on several machines, may work in one folder: each cell is locked by the process that trains it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from mispair.bench.suite.record import RECORD, Record, noise_hash, read_record
from mispair.bench.suite.suite import Cell, Suite, kept_as, read_suite
from mispair.config import Config, find_packaged
from mispair.errors import ChangedError, ConfigError, ExistsError, InvalidValueError, NotFoundError
from mispair.pairs.layouts.opening import find_folder
from mispair.pairs.pairs import Pairs
from mispair.support.files import check_name, read_regular, write_atomically
from mispair.training.splits import load_splits
from mispair.training.trainer import check_networks

SUITE, INFO, CELLS, LOCK = "suite.toml", "suite.json", "cells", "claim.lock"
OWN_FILES = {SUITE, INFO, CELLS, "report"}  # what may be in a results folder before it has `suite.json`
PATIENCE = 0.2  # seconds to wait for a lock, because `is_claimed` takes it for a moment


@dataclass(frozen=True)
class ResultsInfo:
    """The content of `suite.json`."""

    name: str  # of the suite
    data: str
    seeds: int
    noise_file: str | None


_INFO = TypeAdapter(ResultsInfo)


@dataclasses.dataclass(frozen=True)
class Results:
    """A suite and its ended trainings."""

    suite: Suite
    seeds: int  # trainings that there should be of each row
    records: Mapping[str, Record]  # done or failed, by the name of the cell
    ignored: Sequence[str] = ()  # damaged records, and those of no row of the suite

    @cached_property
    def cells(self) -> list[Cell]:
        """All trainings of the suite."""
        return self.suite.cells(self.seeds)

    @property
    def done(self) -> list[Record]:
        return self._ended("done")

    @property
    def failed(self) -> list[Record]:
        return self._ended("failed")

    @property
    def missing(self) -> int:
        return len(self.cells) - len(self.done) - len(self.failed)

    def _ended(self, status: str) -> list[Record]:
        ended = (self.records[cell.name] for cell in self.cells if cell.name in self.records)
        return [record for record in ended if record.status == status]

    def __str__(self) -> str:
        failed = f", {len(self.failed)} failed ({', '.join(one.name for one in self.failed)})" if self.failed else ""
        missing = f", {self.missing} missing" if self.missing else ""
        return f"{len(self.done)} of {len(self.cells)} trainings done{failed}{missing}."


def cell_folder(results: Path, cell: Cell) -> Path:
    return results / CELLS / cell.name


@contextmanager
def claimed(folder: Path) -> Iterator[bool]:
    """Lock a cell: True if it is ours inside the block, False if another process has it.

    A lock of the operating system, not a marker file: the system releases it however its process ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=PATIENCE, poll_interval=PATIENCE / 10)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def is_claimed(folder: Path) -> bool:
    """Whether a process is training a cell."""
    if not (folder / LOCK).is_file():
        return False
    lock = FileLock(folder / LOCK)
    try:
        with lock.acquire(blocking=False):
            return False
    except Timeout:
        return True
    except OSError:  # a folder that we cannot write
        return False


def prepare(
    results: Path, source: str, requested: Suite, data: str | None, seeds: int, only: Sequence[str]
) -> list[Cell]:
    """Check folder, noise files and data, and begin the folder; return the trainings."""
    suite = check_folder(results, requested)
    check_noise_files(suite, suite.cells(seeds, only))
    place = data or suite.data
    if place != "shapes":  # workers and later calls may have another working directory
        place = str(find_folder(place).resolve())
    suite = replace(suite, data=place)
    cells = suite.cells(seeds, only)
    waiting = [cell.config for cell in cells if read_record(cell_folder(results, cell)) is None]
    # Once with every noise file. It must be the data of all records, whatever `only` says: they share a table.
    trained = [load_splits(config).train for config in {config.noise_file: config for config in waiting}.values()]
    if trained:
        check_data(results, suite.cells(seeds), len(trained[0]))
        _check_models(waiting, trained[0])
    write_info(results, source, suite, seeds)
    return cells


def check_noise_files(suite: Suite, cells: Sequence[Cell]) -> None:
    """Refuse missing noise files: the training would write them."""
    if suite.noise_file is None:
        return
    if "{ratio}" not in suite.noise_file:
        expected = "a name with {ratio}, as each has its file"
        raise InvalidValueError(suite.noise_file, where="noise_file", expected=expected)
    files = sorted({cell.config.noise_file for cell in cells if cell.config.noise_file})
    if missing := [path for path in files if not Path(path).is_file()]:
        advice = "Give the file of every noise ratio, or leave out `noise_file`"
        raise NotFoundError("no such file", where=missing[0], advice=advice)


def check_data(folder: Path, cells: Sequence[Cell], pairs: int) -> None:
    """Refuse data with another size, or other noise files, than in the records."""
    files = {cell.config.noise_file for cell in cells}  # those of noise ratios that are not trained now may be missing
    hashes = {file: noise_hash(file) for file in files if file is None or Path(file).is_file()}
    for cell in cells:
        record = read_record(cell_folder(folder, cell))
        if record is None or record.status == "failed":
            continue
        theirs = record.data.noise_file
        if hashes.get(cell.config.noise_file, theirs) != theirs:
            raise ChangedError(
                f"trained with another noise file than {cell.config.noise_file}: its SHA-256 begins with "
                f"{str(theirs)[:12]}",
                where=folder,
                advice="Give the same `noise_file`, or another `out`",
            )
        if record.data.pairs not in (None, pairs):
            raise ChangedError(
                f"trained on {record.data.pairs:,} pairs, but {cell.config.data} has {pairs:,}",
                where=folder,
                advice="Give the same `data`, or another `out`",
            )


def _check_models(configs: Sequence[Config], train: Pairs) -> None:
    """Refuse data of the wrong kind for all trainings, such as regions for two towers of vectors."""
    for config in configs:
        try:
            check_networks(config, train)
            return
        except ConfigError as error:
            refused = error
    raise refused


def check_folder(folder: Path, suite: Suite) -> Suite:
    """The suite with the noise files of this folder; refuse any other suite. Nothing is changed."""
    check_name(folder)
    info = _read_info(folder)
    if info is None:
        others = not folder.is_dir() or {path.name for path in folder.iterdir() if path.name[0] != "."} - OWN_FILES
        if folder.exists() and others:
            raise ExistsError("not a results folder; nothing was changed", where=folder, advice="Give another `out`")
        return suite
    if info.name != suite.name:
        raise ChangedError(f"results of the suite {info.name}", where=folder, advice="Give another `out`")
    begun = any((folder / CELLS).glob(f"*/{RECORD}"))
    if begun and suite.noise_file is not None and info.noise_file is None:
        raise ChangedError(
            "begun without `noise_file`, with noise drawn by seed",
            where=folder,
            advice="Leave out `noise_file`, or give another `out`",
        )
    return suite if suite.noise_file is not None else replace(suite, noise_file=info.noise_file)


def write_info(folder: Path, name: str, suite: Suite, seeds: int) -> None:
    """Write the suite and the inputs of a report. A suite may grow: existing records stay valid."""
    before = _read_info(folder)
    info = ResultsInfo(suite.name, suite.data, max(seeds, before.seeds if before else 0), suite.noise_file)
    for row in (row for part in suite.parts for row in part.rows):
        if row.file is not None:
            write_atomically(folder / kept_as(row.recipe), row.file.read_bytes())
    write_atomically(folder / SUITE, find_packaged("suite", name).read_bytes())
    write_atomically(folder / INFO, _INFO.dump_json(info, indent=1) + b"\n")


def _read_info(folder: Path) -> ResultsInfo | None:
    """None for a new folder."""
    try:
        return _INFO.validate_json(read_regular(folder / INFO))
    except (OSError, ValidationError):
        return None


def read_results(folder: Path) -> Results:
    """The suite and the records of a results folder."""
    info = _read_info(folder)
    if info is None or not (folder / SUITE).is_file():
        raise NotFoundError("not a results folder", where=folder, expected="one of `mispair bench run`")
    suite = replace(read_suite(folder / SUITE), name=info.name, data=info.data, noise_file=info.noise_file)
    found = {cell.name: read_record(cell_folder(folder, cell)) for cell in suite.cells(info.seeds)}
    records = {name: record for name, record in found.items() if record is not None}
    there = {path.parent.name for path in (folder / CELLS).glob(f"*/{RECORD}")}
    return Results(suite, info.seeds, records, sorted(there - records.keys()))
