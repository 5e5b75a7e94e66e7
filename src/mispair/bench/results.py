"""A results folder: which suite it is of, and the records in it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from mispair.bench.record import Record, read_record
from mispair.bench.runner import CELLS
from mispair.bench.suite import Suite, read_suite
from mispair.config import find_packaged
from mispair.errors import ConfigError, DataError
from mispair.files import write_atomically

SUITE, ABOUT = "suite.toml", "suite.json"


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


def claim_folder(folder: Path, name: str, suite: Suite, seeds: int) -> None:
    """Notes which suite a folder is of. A suite may grow: what is there already still counts.

    Raises:
        ConfigError: It is of another suite, or holds something else.
    """
    if (folder / SUITE).is_file():
        before = read_results(folder)
        if before.suite.name != suite.name:
            raise ConfigError(f"{folder} holds the results of the suite {before.suite.name}; give another --out.")
        seeds = max(seeds, before.seeds)
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not a results folder; give another --out, nothing was changed.")
    about = {"name": suite.name, "data": suite.data, "seeds": seeds, "noise_file": suite.noise_file}
    write_atomically(folder / ABOUT, (json.dumps(about, indent=1) + "\n").encode())
    write_atomically(folder / SUITE, find_packaged("suite", name).read_bytes())


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
