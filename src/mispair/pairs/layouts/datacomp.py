"""DataComp's metadata: `STEM.parquet` (uid, url, text, ...) beside `STEM.npz` with the vectors of two CLIP models."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.compute

from mispair.errors import NotFoundError, ShapeError
from mispair.pairs.edits import Edits, TableCopies
from mispair.pairs.layouts import SUBSET
from mispair.pairs.npy import parse_header, write_array
from mispair.pairs.shards import SideRows
from mispair.pairs.source import Source
from mispair.pairs.tables import open_table
from mispair.support.arrays import IntArray
from mispair.support.files import regular, replacing, unreadable

MODELS = ("l14", "b32")  # the better one first
_AGAIN = "Download the file again."
_MOST_DEFLATED = 1032  # bytes that one compressed byte can stand for
_UID = r"^[0-9a-fA-F]{1,32}$"


@dataclass(frozen=True)
class NpzRows:
    """One array (n, D) of an .npz file, mapped into memory only while a block of it is read."""

    path: Path
    name: str
    shape: tuple[int, int]
    dtype: np.dtype[Any]
    offset: int | None

    def read(self, rows: slice | IntArray) -> npt.NDArray[Any]:
        if self.offset is None:
            return _load(self.path, self.name)[rows]
        return np.array(np.memmap(self.path, self.dtype, "r", self.offset, self.shape)[rows])


def find_datacomp(folder: Path) -> list[Path]:
    """The tables of a folder in this layout, or of `metadata` in it; empty where it has another layout."""
    for place in (folder, folder / "metadata"):
        tables = sorted(path for path in place.glob("*.parquet") if path.with_suffix(".npz").is_file())
        if tables:
            return tables
    return []


def open_datacomp(folder: Path, model: str | None = None) -> Source:
    """Open a folder of metadata with the vectors of a model, "l14" or "b32"; by default the first one."""
    tables = find_datacomp(folder)
    archives = [path.with_suffix(".npz") for path in tables]
    members = [_members(path) for path in archives]
    there = [name for name in MODELS if {f"{name}_img", f"{name}_txt"} <= members[0].keys()]
    if (model is not None and model not in there) or not there:
        wanted = [model] if model else MODELS
        raise NotFoundError(
            f"found {', '.join(members[0]) or 'nothing'}",
            where=archives[0],
            expected=" or ".join(f"{name}_img and {name}_txt" for name in wanted),
        )
    chosen = model or there[0]
    sides = []
    for side in ("img", "txt"):
        name = f"{chosen}_{side}"
        for path, arrays in zip(archives, members, strict=True):
            if name not in arrays or arrays[name].shape[1] != members[0][name].shape[1]:
                raise ShapeError(f"no {name} as in {archives[0].name}", where=path, advice=_AGAIN)
        sides.append(SideRows.of([arrays[name] for arrays in members]))
    table = open_table(*tables)
    for part, arrays in zip(table.parts, members, strict=True):
        rows = arrays[f"{chosen}_img"].shape[0]
        if len(part) != rows:
            raise ShapeError(f"{len(part):,} rows, and {rows:,} vectors beside it", where=part.path, advice=_AGAIN)
    source = DataComp(
        sides[0],
        sides[1],
        layout="datacomp",
        name=str(folder),
        files=(*tables, *archives),
        table=table,
        folder=folder,
        joint=True,
        shards=table.shards,
    )
    return source.described_by(table)


class DataComp(Source):
    """Writes tables and arrays of the same names, with all arrays, and `subset.npy`."""

    def write(self, edits: Edits, out: Path) -> None:
        assert self.table is not None
        assert self.folder is not None
        self.check_no_rewritten(edits)
        caption, uid = self.table.find("caption"), self.table.find("id")
        scores = tuple(name for name in self.table.columns if name.endswith("_similarity_score"))
        of_image = tuple(name for name in self.table.columns if name not in (caption, uid, *scores))
        ids = None if uid is not None else self.ids
        TableCopies(self.table, of_image, caption, self.folder, ids, scores).write(edits, out)
        archives = [path for path in self.files if path.suffix == ".npz"]
        members = [_members(path) for path in archives]
        sides = {name: SideRows.of([arrays[name] for arrays in members]) for name in members[0]}
        for path, start, stop in zip(archives, self.left.starts, self.left.starts[1:], strict=False):
            rows, images, captions = edits.part(int(start), int(stop))
            if len(rows):
                places = {"img": images, "txt": captions}
                arrays = {
                    name: side.gather(places.get(name.rpartition("_")[2], rows), side.dtype)
                    for name, side in sides.items()
                }
                with replacing(out / path.relative_to(self.folder)) as file:
                    np.savez(file, **arrays)  # type: ignore[arg-type]
        subset = uid_subset(self.ids(edits.rows))
        if subset is not None:
            write_array(out / SUBSET, subset)


def uid_subset(uids: Sequence[str]) -> npt.NDArray[np.void] | None:
    """DataComp's subset file: each uid of 32 hexadecimal digits as two 64-bit numbers, sorted; None for other ids.

    >>> uid_subset(["0000000000000002000000000000000a", "00000000000000010000000000000002"]).tolist()
    [(1, 2), (2, 10)]
    """
    texts = pyarrow.array(uids, pyarrow.large_string())
    if not len(texts) or not pyarrow.compute.all(pyarrow.compute.match_substring_regex(texts, _UID)).as_py():
        return None
    padded = (uid.zfill(32) for uid in uids)
    pairs = ((int(uid[:16], 16), int(uid[16:], 16)) for uid in padded)
    return np.sort(np.fromiter(pairs, dtype=np.dtype("u8,u8"), count=len(uids)))


def _members(path: Path) -> dict[str, NpzRows]:
    """The arrays of two dimensions in an .npz file; reads only headers."""
    found = {}
    try:
        with regular(path).open("rb") as file, zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                with archive.open(entry) as member:
                    header = parse_header(member, f"{path}: {entry.filename}")
                stored = entry.compress_type == zipfile.ZIP_STORED
                if len(header.shape) != 2 or header.by_column or header.dtype.kind != "f":
                    continue
                offset = _begin(file, entry) + header.offset if stored else None
                held = path.stat().st_size - offset if offset is not None else entry.compress_size * _MOST_DEFLATED
                if header.nbytes > held or header.offset + header.nbytes > entry.file_size:
                    raise ValueError("its end is missing")
                name, (rows, width) = entry.filename.removesuffix(".npy"), header.shape
                found[name] = NpzRows(path.absolute(), name, (rows, width), header.dtype, offset)
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise unreadable(path, error, advice=_AGAIN) from None
    return found


def _begin(file: Any, entry: zipfile.ZipInfo) -> int:
    """Offset of the content of a stored entry: after its local header of 30 bytes, its name and its extra field."""
    place = file.tell()
    file.seek(entry.header_offset + 26)
    lengths = np.frombuffer(file.read(4), "<u2")
    file.seek(place)
    return entry.header_offset + 30 + int(lengths.sum())


@lru_cache(maxsize=2)  # both sides of the file that is read
def _load(path: Path, name: str) -> npt.NDArray[Any]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return np.asarray(arrays[name])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise unreadable(path, error, advice=_AGAIN) from None
