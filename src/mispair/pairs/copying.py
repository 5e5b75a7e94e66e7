"""Parts of a copy of any layout: rows of arrays, files, and tables."""

from __future__ import annotations

import csv
import io
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.compute
import pyarrow.parquet

from mispair.pairs.edits import Edits, LookUp
from mispair.pairs.pairs import IntArray
from mispair.pairs.shards import Side
from mispair.pairs.tables import BATCH, Table, TablePart, TextFormat
from mispair.support.files import replacing

IN_MEMORY = "pairs.parquet"  # the copy of a table that has no file
WITH_IMAGES = 256  # rows with their images that are held in memory
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class TableCopies:
    """Writes edited copies of a table."""

    table: Table
    of_image: tuple[str, ...]  # the column of images, then others that come with an image
    caption: str | None  # column of captions
    root: Path | None = None  # folder of its files; None for a single file or a table in memory
    ids: LookUp | None = None  # looks up ids, to add a column of them
    of_pair: tuple[str, ...] = ()  # columns of scores; they become empty for a new pair

    @property
    def embedded(self) -> bool:
        """Whether the images are in the table."""
        if not self.of_image:
            return False
        kind = self.table.parts[0].schema.field(self.of_image[0]).type
        if pyarrow.types.is_struct(kind):
            return bool(kind.get_field_index("bytes") >= 0)
        return bool(pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind))

    def _place(self, part: TablePart) -> str:
        """The name of the copy of a part."""
        if not part.is_file:
            return IN_MEMORY
        return part.path.name if self.root is None else part.path.relative_to(self.root).as_posix()

    def write(self, edits: Edits, out: Path) -> None:
        start = 0
        for part in self.table.parts:
            stop = start + len(part)
            if edits.keep[start:stop].any():
                with replacing(out / self._place(part)) as file:
                    batches = self._edited(part, start, edits)
                    if part.format is None:
                        _write_parquet(part, batches, file)
                    else:
                        new = [text for row, text in edits.rewritten.items() if start <= row < stop]
                        _write_text(_able_to_hold(part.format, new), batches, file)
            start = stop

    def _edited(self, part: TablePart, start: int, edits: Edits) -> Iterator[Any]:
        """The written rows of a part as record batches."""
        for batch in part.records(size=WITH_IMAGES if self.embedded else BATCH):
            rows, images, captions = edits.part(start, start + len(batch))
            kept = batch.take(pyarrow.array(rows - start))
            for column in self.of_image:
                kept = self._moved(kept, column, rows, images)
            if self.caption is not None:
                kept = self._moved(kept, self.caption, rows, captions)
                if not edits.rewritten.keys().isdisjoint(rows.tolist()):
                    cells = kept.column(self.caption).to_pylist()
                    texts = [edits.rewritten.get(row, cell) for row, cell in zip(rows.tolist(), cells, strict=True)]
                    kept = _with_column(kept, self.caption, pyarrow.array(texts, kept.column(self.caption).type))
            for column in self.of_pair:
                own, fits = kept.column(column), pyarrow.array((rows == images) & (rows == captions))
                values = pyarrow.compute.if_else(fits, own, pyarrow.scalar(None, own.type))
                kept = _with_column(kept, column, values)
            if self.ids is not None:
                kept = kept.append_column("id", pyarrow.array(self.ids(rows), pyarrow.string()))
            yield kept
            start += len(batch)

    def _moved(self, batch: Any, column: str, rows: IntArray, sources: IntArray) -> Any:
        """The batch with cells from other rows."""
        own = batch.column(column)
        own = own.cast(self.table.kind(column) or own.type)
        moved = np.flatnonzero(rows != sources)
        if not len(moved):
            return _with_column(batch, column, own)
        places = np.arange(len(rows))
        places[moved] = len(rows) + np.arange(len(moved))
        both = pyarrow.concat_arrays([own, self.table.take(column, sources[moved]).combine_chunks().cast(own.type)])
        return _with_column(batch, column, both.take(pyarrow.array(places)))


def _with_column(batch: Any, column: str, values: Any) -> Any:
    place = batch.schema.get_field_index(column)
    return batch.set_column(place, batch.schema.field(place).with_type(values.type), values)


def _write_parquet(part: TablePart, batches: Iterator[Any], file: IO[bytes]) -> None:
    first = next(batches)
    # The notes of the schema tell Hugging Face's datasets which columns are images.
    schema = first.schema.with_metadata(part.schema.metadata)
    with pyarrow.parquet.ParquetWriter(file, schema) as writer:
        for batch in chain([first], batches):
            writer.write_batch(batch.replace_schema_metadata(schema.metadata))


def _able_to_hold(style: TextFormat, captions: Iterable[str]) -> TextFormat:
    """The format of a table, in UTF-8 if its encoding lacks a character of new captions."""
    try:
        "".join(captions).encode(style.encoding)
        return style
    except UnicodeEncodeError:
        return replace(style, encoding="utf-8-sig")  # with the mark by which spreadsheets know it


def _write_text(style: TextFormat, batches: Iterator[Any], file: IO[bytes]) -> None:
    text = io.TextIOWrapper(file, style.encoding, errors="replace", newline="", write_through=True)
    writer = csv.writer(
        text, delimiter=style.separator, quoting=style.quoting, lineterminator=style.line_end,
        quotechar=None if style.quoting == csv.QUOTE_NONE else '"',
    )  # fmt: skip
    first = next(batches)
    if style.header:
        writer.writerow(first.schema.names)
    for batch in chain([first], batches):
        rows: Iterable[Sequence[str]] = zip(*(column.to_pylist() for column in batch.columns), strict=True)
        if style.quoting == csv.QUOTE_NONE:  # a rewritten caption cannot hold what would end its cell
            rows = ([re.sub(rf"[{style.separator}\r\n]", " ", cell) for cell in row] for row in rows)
        writer.writerows(rows)
    text.flush()
    text.detach()


def copy_files(files: Iterable[Path], folder: Path, out: Path) -> None:
    """Files of a folder to the same places in another one."""
    for path in files:
        place = out / path.relative_to(folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)


def write_vectors(path: Path, side: Side, rows: IntArray) -> None:
    """Write the vectors at some rows of a side as one .npy file, in their own type."""
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
