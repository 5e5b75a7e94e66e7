"""Edits of the rows of a data set, and edited copies of tables."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.parquet

from mispair.pairs.tables import BATCH, Table, TablePart, TextFormat
from mispair.support.arrays import IntArray, Mask
from mispair.support.files import replacing

LookUp = Callable[[IntArray], list[str]]  # texts of rows
IN_MEMORY = "pairs.parquet"  # the copy of a table that has no file
WITH_IMAGES = 256  # rows with their images that are held in memory


@dataclass(frozen=True)
class Edits:
    """The image and caption of each of N rows in a copy."""

    keep: Mask  # (N,) whether the row is written
    image_from: IntArray  # (N,) the row whose image it gets, by default its own
    caption_from: IntArray  # (N,) likewise
    rewritten: Mapping[int, str] = field(default_factory=dict)  # new captions by row, instead of `caption_from`

    def __post_init__(self) -> None:
        if not self.keep.shape == self.image_from.shape == self.caption_from.shape or self.keep.dtype != np.bool_:
            raise ValueError("keep must be N booleans, image_from and caption_from N row numbers")

    def __len__(self) -> int:
        return len(self.keep)

    @classmethod
    def keeping(cls, keep: Mask) -> Edits:
        """Keep some rows unchanged, and leave out the others."""
        own = np.arange(len(keep))
        return cls(np.asarray(keep), own, own)

    @property
    def rows(self) -> IntArray:
        """The kept rows, ascending."""
        return np.flatnonzero(self.keep)

    @property
    def repaired(self) -> IntArray:
        """The kept rows with another image or caption."""
        own = np.arange(len(self))
        changed = (self.image_from != own) | (self.caption_from != own)
        changed[list(self.rewritten)] = True
        return np.flatnonzero(changed & self.keep)

    def repeats(self, groups: IntArray | None) -> Mask:
        """(N,) whether a kept row repeats the image and the caption of a kept row before it.

        Two pairs that exchanged their captions become one by re-pairing the image of one and the caption of the other.
        Rows of one group share their image.
        """
        rows = np.setdiff1d(self.rows, list(self.rewritten))
        images = self.image_from[rows] if groups is None else groups[self.image_from[rows]]
        first = np.unique(images * len(self) + self.caption_from[rows], return_index=True)[1]
        found = np.zeros(len(self), dtype=bool)
        found[np.delete(rows, first)] = True
        return found

    def each_once(self, groups: IntArray | None) -> Edits:
        """Leave out rows after the first with the same image and caption."""
        return replace(self, keep=self.keep & ~self.repeats(groups))

    def with_unmatched(self, groups: IntArray | None) -> Edits:
        """Keep all rows: give unused images and captions to those that were left out."""
        rewritten = np.isin(np.arange(len(self)), list(self.rewritten))
        return replace(
            self,
            keep=np.ones(len(self), dtype=bool),
            image_from=_with_unused(self.image_from, ~self.keep, self.keep, groups),
            caption_from=_with_unused(self.caption_from, ~self.keep, self.keep & ~rewritten, None),
        )

    def part(self, start: int, stop: int) -> tuple[IntArray, IntArray, IntArray]:
        """The written rows from start to stop, and where their images and captions come from."""
        rows = np.flatnonzero(self.keep[start:stop]) + start
        return rows, self.image_from[rows], self.caption_from[rows]


def _with_unused(taken: IntArray, free: Mask, using: Mask, groups: IntArray | None) -> IntArray:
    """Give each free row (N,) an item that none of the rows `using` theirs has `taken`: its own, if possible."""
    own = np.arange(len(taken))
    item = own if groups is None else groups
    used = np.isin(item, item[taken[using]])
    wanting = np.flatnonzero(free & used)
    unused = np.flatnonzero(~used & ~np.isin(item, item[free]))
    unused = unused[np.unique(item[unused], return_index=True)[1]][: len(wanting)]
    taken = np.where(free, own, taken)
    taken[wanting[: len(unused)]] = unused
    return taken


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
                fits = (rows == images) & (rows == captions) & ~np.isin(rows, list(edits.rewritten))
                own = kept.column(column)
                values = pyarrow.compute.if_else(pyarrow.array(fits), own, pyarrow.scalar(None, own.type))
                kept = _with_column(kept, column, values)
            if self.ids is not None:
                kept = kept.append_column("id", pyarrow.array(self.ids(rows), pyarrow.string()))
            yield kept
            start += len(batch)

    def _moved(self, batch: Any, column: str, rows: IntArray, sources: IntArray) -> Any:
        """The batch with cells from other rows; a missing one from row -1."""
        own = batch.column(column)
        own = own.cast(self.table.kind(column) or own.type)
        moved = np.flatnonzero(rows != sources)
        if not len(moved):
            return _with_column(batch, column, own)
        places = np.arange(len(rows))
        places[moved] = len(rows) + np.arange(len(moved))
        others = self.table.take(column, np.maximum(sources[moved], 0)).combine_chunks()
        both = pyarrow.concat_arrays([own, others.cast(own.type)])
        return _with_column(batch, column, both.take(pyarrow.array(places, mask=sources < 0)))


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
