"""Two arrays of vectors with a table; and what the copies of all layouts of vectors have in common."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mispair.errors import ConflictError
from mispair.pairs.edits import Edits
from mispair.pairs.layouts.table import TableCopies
from mispair.pairs.origin import Origin
from mispair.pairs.pairs import IntArray
from mispair.pairs.result_tables import write_table
from mispair.pairs.shards import Side
from mispair.pairs.source import Source
from mispair.support.files import replacing

_CHUNK_BYTES = 1 << 24
OWN_TABLE = "ids.csv"  # where the data has none


def check_no_rewritten(source: Source, edits: Edits) -> None:
    """Raise if captions were rewritten, because these have no vectors."""
    if edits.rewritten:
        raise ConflictError(
            f"{len(edits.rewritten):,} captions were rewritten, and this data set has vectors instead of captions",
            where=source.name,
            advice="Write a copy of the images and captions, and encode that.",
        )


def table_copies(source: Source, root: Path | None = None) -> TableCopies | None:
    """The table of a source, which gets ids where it has none, since positions change."""
    table = source.table
    if table is None:
        return None
    ids = None if table.find("id") is not None else source.ids
    of_image = tuple(filter(None, (table.find("image_path"), table.find("group"))))
    return TableCopies(table, of_image, table.find("caption"), root, ids)


@dataclass(frozen=True)
class Arrays:
    """`left.npy`, `right.npy` and a table, for arrays in files and in memory."""

    source: Source

    def owns(self, name: str) -> bool:
        copies = table_copies(self.source)
        return name in ("left.npy", "right.npy") or (name == OWN_TABLE if copies is None else copies.owns(name))

    def size(self, edits: Edits) -> int:
        return vectors_size(self.source, edits)

    def write(self, edits: Edits, out: Path) -> None:
        import pyarrow

        source, rows = self.source, edits.rows
        check_no_rewritten(source, edits)
        write_vectors(out / "left.npy", source.left, edits.image_from[rows])
        write_vectors(out / "right.npy", source.right, edits.caption_from[rows])
        copies = table_copies(source)
        if copies is not None:
            copies.write(edits, out)
            return
        columns: dict[str, Any] = {"id": source.ids(rows)}
        if source.has_texts:
            columns["caption"] = source.texts(edits.caption_from[rows])
        if source.groups is not None:
            columns["group"] = source.groups[edits.image_from[rows]]
        write_table(out / OWN_TABLE, [pyarrow.table(columns)])


def other_splits(source: Source, found: Iterable[str]) -> list[str]:
    """The splits of a data set, without the one that was audited; none where it has no splits."""
    return [] if source.split is None else [split for split in found if split != source.split]


def copy_files(files: Iterable[Path], folder: Path, out: Path) -> None:
    """Files of a folder to the same places in another one."""
    for path in files:
        place = out / path.relative_to(folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)


def copy_origin(folder: Path, out: Path) -> None:
    """Says of a copy which encoders its features are of, where the data says it."""
    origin = Origin.read(folder)
    if origin is not None:
        origin.write(out)


def is_array_file(name: str) -> bool:
    """Whether a copy of arrays in memory may contain a file of this name."""
    return name in ("left.npy", "right.npy", OWN_TABLE)


def vectors_size(source: Source, edits: Edits) -> int:
    """Bytes of the copied vectors."""
    return len(edits.rows) * sum(side.width * side.dtype.itemsize for side in (source.left, source.right))


def write_vectors(path: Path, side: Side, rows: IntArray) -> None:
    """The vectors at some rows of a side as one .npy file, in the type in which they are stored."""
    dtype = side.dtype
    write_rows(path, lambda wanted: side.gather(wanted, dtype), rows)


def write_rows(
    path: Path, read: Callable[[IntArray], npt.NDArray[Any]], rows: IntArray, times: IntArray | None = None
) -> None:
    """Some rows of an array as one .npy file, a few megabytes at a time; row i `times[i]` times."""
    first = read(rows[:1])
    total = len(rows) if times is None else int(times.sum())
    header = {"descr": first.dtype.str, "fortran_order": False, "shape": (total, *first.shape[1:])}
    step = max(1, _CHUNK_BYTES // max(1, first.nbytes))
    with replacing(path) as file:
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, len(rows), step):
            values = read(rows[start : start + step])
            if times is not None:
                values = np.repeat(values, times[start : start + step], axis=0)
            file.write(np.ascontiguousarray(values).tobytes())
