"""Checks of a results folder, its data and its noise files before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mispair.bench.suite.record import noise_hash, read_record
from mispair.bench.suite.results_folder import cell_folder, check_folder, write_info
from mispair.bench.suite.suite import Cell, Suite
from mispair.config import Config
from mispair.errors import ChangedError, ConfigError, InvalidValueError, NotFoundError
from mispair.pairs.layouts.loading import find_folder
from mispair.pairs.pairs import Pairs
from mispair.training.splits import load_splits
from mispair.training.trainer import check_networks


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
    """Refuse data of another size, or other noise files, than those of the records."""
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
