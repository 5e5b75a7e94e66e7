"""Whether a folder holds the very audit that is asked for, so that nothing has to be done again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mispair import __version__
from mispair.config import read_recipe
from mispair.errors import DataError
from mispair.support.files import write_atomically
from mispair.support.formatting import listed

TABLE, SUMMARY = "pairs.parquet", "summary.json"
WRITTEN = (TABLE, "pairs.csv", "suggestions.csv", "report.html", SUMMARY)
ENDED = "ended.json"


def asked(
    places: Mapping[str, Path | None],
    settings: Mapping[str, object],
    checked: Mapping[str, bool] | None,
    made: Sequence[Path],
) -> dict[str, str]:
    """What an audit depends on, by its names on the command line.

    Args:
        places: Files and folders that are read; of a training run also the data it was trained on.
        settings: Other arguments.
        checked: What a person has found.
        made: Folders that the audit itself writes, which may lie in those that are read.
    """
    answers = json.dumps(sorted((checked or {}).items()))
    return {
        "the version of mispair": __version__,
        **{name: _state(place, made) for name, place in places.items()},
        **{name: str(value) for name, value in settings.items()},
        "--checked": hashlib.sha256(answers.encode()).hexdigest(),
    }


def _state(place: Path | None, made: Sequence[Path]) -> str:
    """The place, and a hash of the names, sizes and times of all files there."""
    if place is None:
        return ""
    digest = hashlib.sha256()
    for path in sorted(path for root in (place, *_trained_on(place)) for path in _files(root, made)):
        found = path.stat()
        digest.update(json.dumps([os.fspath(path), found.st_size, found.st_mtime_ns]).encode())
    return f"{place.resolve()} {digest.hexdigest()}"


def _trained_on(run: Path) -> list[Path]:
    """The data of a training run; nothing for any other place."""
    settings = run / "config.toml"
    if not settings.is_file() or not (run / "best.safetensors").is_file():
        return []
    config = read_recipe(settings)
    return [Path(config.data), *(Path(path) for path in (config.noise_file,) if path)]


def _files(root: Path, made: Sequence[Path]) -> Iterator[Path]:
    root = root.resolve()
    inside = (path for path in root.rglob("*") if path.is_file()) if root.is_dir() else (root,) * root.is_file()
    own = [path.resolve() for path in made]
    return (path for path in inside if not any(path.is_relative_to(folder) for folder in own))


def has_ended(out: Path, wanted: Mapping[str, str]) -> bool:
    """Whether the folder holds this audit.

    Raises:
        DataError: It holds another one.
    """
    there = _read(out).get("asked")
    if not isinstance(there, dict) or not all((out / name).is_file() for name in WRITTEN):
        return False
    changed = [name for name in wanted if there.get(name) != wanted[name]]
    if changed:
        raise DataError(
            f"{out} holds an audit of other pairs or with other settings ({listed(changed)} changed since); give "
            "another --out to keep it, or --overwrite to replace it."
        )
    return True


def write_ended(out: Path, wanted: Mapping[str, str], clean: Path | None) -> None:
    """Notes that all was done, with the clean copy if there is one."""
    note = {"asked": dict(wanted), "clean": None if clean is None else str(clean.resolve())}
    write_atomically(out / ENDED, (json.dumps(note, indent=2) + "\n").encode())


def has_copied(out: Path, clean: Path) -> bool:
    """Whether the last clean copy of a finished audit was written to this folder, and is there."""
    return _read(out).get("clean") == str(clean.resolve()) and clean.is_dir()


def _read(out: Path) -> dict[str, Any]:
    """The note of a finished audit; empty where there is none."""
    try:
        found = json.loads((out / ENDED).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
