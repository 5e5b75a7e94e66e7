"""Copies of a data set in the layout it came in: without the flagged pairs, or with better partners for them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.compute

from mispair.errors import ConflictError, ExistsError, TooFewError, WriteError
from mispair.pairs.edits import Edits
from mispair.pairs.source import Source
from mispair.pairs.tables import read_parquet
from mispair.support.files import Json, read_json, write_atomically
from mispair.support.formatting import byte_size, listed
from mispair.support.owned_folder import delete_beside, replacing_folder

COPY_MARK = ".copy.json"  # the audit that a copy belongs to, and its files
MANIFEST = "manifest.csv"  # what became of each pair, beside a copy
SURE = 0.9  # probability from which a suggested partner takes the place of a wrong one
_COLUMNS = ("is_mismatch", "suggested_right", "suggested_right_score", "suggested_left", "suggested_left_score")


def clean_edits(table: pyarrow.Table) -> Edits:
    """Leave out the flagged and the unreadable pairs of an audit's table."""
    return Edits.keeping(~np.asarray(table.column("is_mismatch").fill_null(True), dtype=np.bool_))


def mended_edits(table: pyarrow.Table, source: Source, least: float = SURE) -> Edits:
    """Give flagged pairs their surest suggested partner on either side; leave out those without one above `least`."""
    clean = clean_edits(table)
    keep, moved = clean.keep.copy(), [clean.image_from.copy(), clean.caption_from.copy()]
    flagged = np.asarray(pyarrow.compute.equal(table.column("is_mismatch"), True).fill_null(False), dtype=np.bool_)
    sides = ("left", "right")
    scores = np.stack([np.asarray(table.column(f"suggested_{side}_score").fill_null(-1)) for side in sides])
    best = scores.argmax(axis=0)
    for number, side in enumerate(sides):
        rows = np.flatnonzero(flagged & (best == number) & (scores[number] >= least))
        if len(rows):
            moved[number][rows] = source.find(table.column(f"suggested_{side}").take(rows).to_pylist())
            keep[rows] = True
    return Edits(keep, moved[0], moved[1])


def read_edits(path: Path, source: Source, *, mend: bool) -> Edits:
    """`mended_edits` or `clean_edits` of an audit's table in a file."""
    table = read_parquet(path, _COLUMNS)
    return mended_edits(table, source).each_once(source.groups) if mend else clean_edits(table)


def write_copy(
    source: Source,
    edits: Edits,
    out: str | Path,
    overwrite: bool = False,
    *,
    request: Mapping[str, Json] | None = None,
    also: Callable[[Path], None] | None = None,
) -> Path:
    """Write an edited copy of the data, in the layout it came in, to a folder outside the data.

    `is_copied` recognises the copy by `request`; `also` writes other files to its folder.
    """
    if len(edits) != len(source):
        raise ValueError(f"edits of {len(edits)} rows for {len(source)}")
    if not edits.keep.any():
        raise TooFewError("no pair is kept, so there is nothing to write", where=source.name, advice="Keep more.")
    out = Path(out).resolve()
    check_copy(source.folder, source.files, out, overwrite)
    size = source.size(edits)
    with replacing_folder(out) as folder:
        free = shutil.disk_usage(folder).free
        if size > free:
            raise WriteError(f"only {byte_size(free)} are free", where=out, expected=f"{byte_size(size)} for the copy")
        source.write(edits, folder)
        if also is not None:
            also(folder)
        mark = {"request": request, "files": sorted(_names(folder))}
        write_atomically(folder / COPY_MARK, json.dumps(mark).encode())
    return out


def is_copied(out: Path, request: Mapping[str, Json]) -> bool:
    """Whether the folder is a copy for this request; deletes the rest of an interrupted writing."""
    mark = read_json(out / COPY_MARK)
    if not isinstance(mark, dict) or mark.get("request") != json.loads(json.dumps(request)):
        return False
    delete_beside(out)
    return True


def check_copy(folder: Path | None, files: Iterable[Path], out: Path, overwrite: bool) -> None:
    """Raise if no copy of a data set in `folder` or `files` may be written to `out`.

    Only an earlier copy is replaced, because a folder may be named by mistake.
    """
    out = out.resolve()
    files = [path.resolve() for path in files]
    places = files if folder is None else [folder.resolve(), *files]
    if any(out.is_relative_to(place) for place in places) or any(file.is_relative_to(out) for file in files):
        advice = "Choose a folder outside it."
        raise ConflictError("the audited data is here, and is never changed", where=out, advice=advice)
    if out.exists() and not out.is_dir():
        raise ExistsError("a file", where=out, advice="Choose a folder.")
    there = _names(out)
    if not there:
        return
    another = "Choose another folder."
    if not overwrite:
        advice = "Replace an earlier copy with `overwrite`, or choose another folder."
        raise ExistsError("the folder is not empty", where=out, advice=advice)
    mark = read_json(out / COPY_MARK)
    known = mark.get("files") if isinstance(mark, dict) else None
    if not isinstance(known, list):
        raise ExistsError(f"the folder has no {COPY_MARK}, so it is not known to be a copy", where=out, advice=another)
    others = sorted(there.difference([COPY_MARK], known))
    if others:
        what = f"the folder also holds {listed(others)}, which is not part of the copy and would be lost"
        raise ExistsError(what, where=out, advice=another)


def _names(folder: Path) -> set[str]:
    """The files in a folder, relative to it."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
