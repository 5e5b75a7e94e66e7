"""Vectors as files or in memory: the clip-retrieval layout, and two arrays with a table."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mispair.errors import DataError
from mispair.pairs.edits import Edits
from mispair.pairs.layouts import clip_retrieval
from mispair.pairs.layouts.table import TableCopies
from mispair.pairs.origin import BASIS, MARK, Origin
from mispair.pairs.pairs import IntArray
from mispair.pairs.result_tables import write_table
from mispair.pairs.shards import File, Side
from mispair.pairs.source import Source
from mispair.support.files import replacing

_CHUNK_BYTES = 1 << 24
PARTS = ("img_emb", "text_emb", "metadata")
OWN_TABLE = "ids.csv"  # where the data has none


def check_no_rewritten(source: Source, edits: Edits) -> None:
    """Refuses captions that have no vectors.

    Raises:
        DataError: There are some.
    """
    if edits.rewritten:
        raise DataError(
            f"{source.name}: {len(edits.rewritten):,} captions were rewritten, and this data set has vectors instead "
            "of captions; write a copy of the images and captions, and encode that."
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
class ClipRetrieval:
    """Numbered shards of vectors and of a table. A shard of which nothing is left is left out.

    Of a folder with several splits the others are copied as they are, so that the copy can be trained on.
    """

    source: Source

    @property
    def _within(self) -> str:
        return f"{self.source.split}/" if self.source.split else ""

    def owns(self, name: str) -> bool:
        splits = [self._within, *(f"{split}/" for split in self._others)]
        places = (f"{split}{part}/{part}_*" for split in splits for part in PARTS)
        return name in (MARK, BASIS) or any(fnmatchcase(name, place) for place in places)

    def size(self, edits: Edits) -> int:
        return vectors_size(self.source, edits) + sum(path.stat().st_size for path in self._other_files())

    @property
    def _others(self) -> list[str]:
        """The splits that were not audited."""
        folder = self.source.folder
        return [] if folder is None else other_splits(self.source, clip_retrieval.found_splits(folder))

    def _other_files(self) -> list[Path]:
        folder = self.source.folder
        places = [] if folder is None else [folder / split / part for split in self._others for part in PARTS]
        return [path for place in places if place.is_dir() for path in sorted(place.glob(f"{place.name}_*"))]

    def write(self, edits: Edits, out: Path) -> None:
        source = self.source
        check_no_rewritten(source, edits)
        target = out / self._within
        for side, moved in ((source.left, edits.image_from), (source.right, edits.caption_from)):
            for shard, start in zip(side.shards, side.starts, strict=False):
                assert isinstance(shard, File)
                rows = np.flatnonzero(edits.keep[start : start + shard.shape[0]]) + int(start)
                if len(rows):
                    write_vectors(target / shard.path.parent.name / shard.path.name, side, moved[rows])
        assert source.folder is not None
        copy_origin(source.folder, out)
        copy_files(self._other_files(), source.folder, out)
        copies = table_copies(source, source.folder / self._within)
        if copies is not None:
            copies.write(edits, target)
        else:
            self._write_own_tables(edits, target)

    def _write_own_tables(self, edits: Edits, target: Path) -> None:
        """One table of ids a shard, where there was none."""
        import pyarrow

        for shard, start in zip(self.source.left.shards, self.source.left.starts, strict=False):
            assert isinstance(shard, File)
            rows = np.flatnonzero(edits.keep[start : start + shard.shape[0]]) + start
            if len(rows):
                number = shard.path.stem.rpartition("_")[2]
                table = pyarrow.table({"id": self.source.ids(rows)})
                write_table(target / "metadata" / f"metadata_{number}.parquet", [table])


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
