"""A results folder: which suite it is of, and the records in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mispair.bench.suite.record import RECORD, Record, noise_hash, read_record
from mispair.bench.suite.runner import CELLS
from mispair.bench.suite.suite import Cell, Suite, kept_as, read_suite
from mispair.config import find_packaged
from mispair.errors import ConfigError, DataError
from mispair.support.files import write_atomically

SUITE, ABOUT = "suite.toml", "suite.json"
OWN = {SUITE, ABOUT, CELLS, "report"}  # what may be in a results folder before it says what it is


@dataclass(frozen=True)
class Results:
    """What a results folder is about."""

    suite: Suite
    seeds: int

    def records(self, folder: Path) -> dict[str, Record]:
        """By the name of the cell, as far as they have ended."""
        cells = self.suite.cells(self.seeds)
        found = {cell.name: read_record(folder / CELLS / cell.name) for cell in cells}
        return {name: record for name, record in found.items() if record is not None}

    def others(self, folder: Path) -> list[str]:
        """Records in the folder that a report leaves out: damaged ones, and those of no row of the suite."""
        known = self.records(folder)
        return sorted({path.parent.name for path in (folder / CELLS).glob(f"*/{RECORD}")} - known.keys())


def check_folder(folder: Path, suite: Suite) -> Suite:
    """The suite as this folder has it: with the noise files that it was begun with. Nothing is changed.

    Raises:
        ConfigError: It is of another suite, was begun without noise files, or holds something else.
    """
    about = _about(folder)
    if not about:
        others = not folder.is_dir() or {path.name for path in folder.iterdir() if path.name[0] != "."} - OWN
        if folder.exists() and others:
            raise ConfigError(f"{folder} exists and is not a results folder; give another --out, nothing was changed.")
        return suite
    if about["name"] != suite.name:
        raise ConfigError(f"{folder} holds the results of the suite {about['name']}; give another --out.")
    begun = any((folder / CELLS).glob(f"*/{RECORD}"))
    if begun and suite.noise_file is not None and about["noise_file"] is None:
        raise ConfigError(
            f"{folder} was begun without --noise-file, with noise drawn by seed; leave it out, or give another --out."
        )
    return suite if suite.noise_file is not None else replace(suite, noise_file=about["noise_file"])


def claim_folder(folder: Path, name: str, suite: Suite, seeds: int) -> None:
    """Notes which suite a folder is of, with all that a report needs. A suite may grow: what is there still counts."""
    seeds = max(seeds, _about(folder).get("seeds", 0))
    about = {"name": suite.name, "data": suite.data, "seeds": seeds, "noise_file": suite.noise_file}
    for row in (row for part in suite.parts for row in part.rows):
        if row.file is not None:
            write_atomically(folder / kept_as(row.recipe), row.file.read_bytes())
    write_atomically(folder / SUITE, find_packaged("suite", name).read_bytes())
    write_atomically(folder / ABOUT, (json.dumps(about, indent=1) + "\n").encode())


def check_data(folder: Path, cells: Sequence[Cell], pairs: int) -> None:
    """Refuses data of another size, and other noise files, than those of what has ended already.

    Raises:
        ConfigError: They are others.
    """
    files = {cell.config.noise_file for cell in cells}  # some, of shares that are not trained now, may be missing
    hashes = {file: noise_hash(file) for file in files if file is None or Path(file).is_file()}
    for cell in cells:
        record = read_record(folder / CELLS / cell.name)
        if record is None or record.status == "failed":
            continue
        theirs = record.data.get("noise_file")
        if hashes.get(cell.config.noise_file, theirs) != theirs:
            raise ConfigError(
                f"{folder} holds trainings with another noise file than {cell.config.noise_file}: one whose SHA-256 "
                f"begins with {str(record.data['noise_file'])[:12]}; give the same --noise-file, or another --out."
            )
        if record.data.get("pairs", pairs) != pairs:
            raise ConfigError(
                f"{folder} holds trainings on {record.data['pairs']:,} pairs, but {cell.config.data} has {pairs:,}; "
                "give the same --data, or another --out."
            )


def _about(folder: Path) -> dict[str, Any]:
    """What a folder says about itself; nothing if it is new."""
    try:
        found = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        return {"name": str(found["name"]), "seeds": int(found["seeds"]), "noise_file": found["noise_file"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def read_results(folder: Path) -> Results:
    """What a folder holds.

    Raises:
        DataError: It is no results folder.
    """
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        suite = replace(read_suite(folder / SUITE), **{key: about[key] for key in ("name", "data", "noise_file")})
        return Results(suite, int(about["seeds"]))
    except (OSError, ValueError, KeyError, TypeError):
        raise DataError(f"{folder} is not a results folder of `mispair bench run`.") from None
