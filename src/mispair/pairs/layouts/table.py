"""Tables with a column of images and one of captions: text files, parquet, and tables in memory.

The images are paths, or they are in the table itself: bytes, or `{"bytes", "path"}` as Hugging Face's datasets have it.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np

from mispair.errors import TooFewError
from mispair.pairs.edits import Edits, LookUp
from mispair.pairs.pairs import IntArray
from mispair.pairs.raw import ImageFiles, RawLayout
from mispair.pairs.row_ids import RowIds, Texts, id_column, numbers
from mispair.pairs.tables import BATCH, Table, TablePart, TextFormat
from mispair.support.files import read_regular, replacing

IN_MEMORY = "pairs.parquet"  # the copy of a table that has no file
_WITH_IMAGES = 256  # rows with their images that are held in memory
_CAPTION_NUMBER = re.compile(r"#\d+$")  # behind the names of images in Flickr8k.token.txt, which has no header


def open_pairs(table: Table, images: Path, root: Path | None = None) -> RawLayout:
    """The pairs of a table with columns of images and captions.

    Args:
        table: The table.
        images: Folder that the image paths start from.
        root: Folder that the files of the table are in; the one file by default.
    """
    image, caption = table.require({"image_path": "images", "caption": "captions"})
    # A group says which rows share their image, so it comes with the image.
    group = table.find("group")
    copies = TableCopies(table, (image,) if group is None else (image, group), caption, root)
    kind = _EmbeddedImages if copies.embedded else _ImagePaths
    return kind(copies, image, caption, images)


@dataclass(frozen=True)
class TableCopies:
    """Writes edited copies of a table.

    Attributes:
        table: The table.
        of_image: Its columns that describe the image, which come with it: the image itself first.
        caption: Its column of captions, if it has one.
        root: Folder that its files are in; None for a single file or a table in memory.
        ids: Looks up the ids of rows, for a table that shall get a column of them.
        of_pair: Columns that say how well image and caption fit, which are empty for a new pair.
    """

    table: Table
    of_image: tuple[str, ...]
    caption: str | None
    root: Path | None = None
    ids: LookUp | None = None
    of_pair: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return str(self.root or self.table.parts[0].path)

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(part.path for part in self.table.parts if part.is_file)

    @property
    def embedded(self) -> bool:
        """Whether the images are in the table."""
        import pyarrow

        if not self.of_image:
            return False
        kind = self.table.parts[0].schema.field(self.of_image[0]).type
        if pyarrow.types.is_struct(kind):
            return any(kind.field(place).name == "bytes" for place in range(kind.num_fields))
        return bool(pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind))

    def owns(self, name: str) -> bool:
        return any(name == self.place(part) for part in self.table.parts)

    def size(self, edits: Edits) -> int:
        total = sum(path.stat().st_size for path in self.files)
        return int(total * edits.keep.mean())

    def write(self, edits: Edits, out: Path) -> None:
        start = 0
        for part in self.table.parts:
            if edits.keep[start : start + len(part)].any():
                with replacing(out / self.place(part)) as file:
                    batches = self._edited(part, start, edits)
                    if part.format is None:
                        _write_parquet(part, batches, file)
                    else:
                        new = [text for row, text in edits.rewritten.items() if start <= row < start + len(part)]
                        _write_text(_able_to_hold(part.format, new), batches, file)
            start += len(part)

    def place(self, part: TablePart) -> str:
        """The name of the copy of a part."""
        if not part.is_file:
            return IN_MEMORY
        return part.path.name if self.root is None else part.path.relative_to(self.root).as_posix()

    def _edited(self, part: TablePart, start: int, edits: Edits) -> Iterator[Any]:
        """The written rows of a part as record batches."""
        import pyarrow
        import pyarrow.compute

        for batch in part.records(size=_WITH_IMAGES if self.embedded else BATCH):
            rows, images, captions = edits.part(start, start + len(batch))
            kept = batch.take(pyarrow.array(rows - start))
            for column in self.of_image:
                kept = self._moved(kept, column, rows, images)
            if self.caption is not None:
                kept = self._rewritten(self._moved(kept, self.caption, rows, captions), rows, edits)
            for column in self.of_pair:
                fits = pyarrow.array((rows == images) & (rows == captions))
                values = pyarrow.compute.if_else(
                    fits, kept.column(column), pyarrow.scalar(None, kept.column(column).type)
                )
                kept = _with_column(kept, column, values)
            if self.ids is not None:
                kept = kept.append_column("id", pyarrow.array(self.ids(rows), pyarrow.string()))
            yield kept
            start += len(batch)

    def _moved(self, batch: Any, column: str, rows: IntArray, sources: IntArray) -> Any:
        """The batch with cells from other rows."""
        import pyarrow

        moved = np.flatnonzero(rows != sources)
        if not len(moved):
            return batch
        values = self.table.take(column, sources[moved]).combine_chunks()
        places = np.arange(len(rows))
        places[moved] = len(rows) + np.arange(len(moved))
        both = pyarrow.concat_arrays([batch.column(column), values.cast(batch.column(column).type)])
        return _with_column(batch, column, both.take(pyarrow.array(places)))

    def _rewritten(self, batch: Any, rows: IntArray, edits: Edits) -> Any:
        import pyarrow

        if self.caption is None or not any(int(row) in edits.rewritten for row in rows):
            return batch
        cells = batch.column(self.caption).to_pylist()
        texts = [edits.rewritten.get(int(row), cell) for row, cell in zip(rows, cells, strict=True)]
        return _with_column(batch, self.caption, pyarrow.array(texts, batch.column(self.caption).type))


class _TablePairs(RawLayout):
    """What both kinds of tables have in common."""

    copies: TableCopies

    def _of(self, copies: TableCopies) -> None:
        parts = copies.table.parts
        self.copies, self.table = copies, copies.table
        self.shards = tuple((part.path.stem, len(part)) for part in parts) if len(parts) > 1 else ()

    def owns(self, name: str) -> bool:
        return self.copies.owns(name)

    def size(self, edits: Edits) -> int:
        return self.copies.size(edits)

    def write(self, edits: Edits, out: Path) -> None:
        self.copies.write(edits, out)


class _ImagePaths(ImageFiles, _TablePairs):
    """Pairs of a table that has the paths of the images."""

    def __init__(self, copies: TableCopies, image: str, caption: str, images: Path) -> None:
        self._of(copies)
        self.outside, table = images, copies.table
        named = table.find("id")
        columns = [image, caption, *([] if named is None else [named])]
        first = table.parts[0]
        numbered = first.format is not None and not first.format.header
        records: list[tuple[str, str, str]] = []
        for batch in table.batches(columns):
            paths, captions, *ids = (cells.to_pylist() for cells in batch)
            names = ids[0] if ids else [path if numbered and _CAPTION_NUMBER.search(path) else "" for path in paths]
            if numbered:
                paths = [_CAPTION_NUMBER.sub("", path) for path in paths]
            records += zip(names, paths, captions, strict=True)
        super().__init__(copies.name, copies.files, records, images)


class _EmbeddedImages(_TablePairs):
    """Pairs of a table that holds the images."""

    def __init__(self, copies: TableCopies, image: str, caption: str, images: Path) -> None:
        import pyarrow
        import pyarrow.compute

        self._of(copies)
        self.name, self.files = copies.name, copies.files
        self._image, self._folder = image, images
        table = copies.table
        column, text = table.find("id"), pyarrow.large_string()
        captions, paths, ids = [], [], []
        for part in table.parts:
            captions += [cells for (cells,) in part.batches([caption])]
            ids += [cells for (cells,) in part.batches([column])] if column else []
            paths += self._paths(part)
        trimmed = pyarrow.compute.utf8_trim_whitespace(pyarrow.chunked_array(captions, text).combine_chunks())
        if not len(trimmed):
            raise TooFewError("no pairs", where=self.name, expected="at least one image with a caption")
        self._image_paths = pyarrow.chunked_array(paths, text).combine_chunks().fill_null("")
        self.captions, self.image_names = Texts(trimmed), Texts(self._image_paths)
        named = pyarrow.chunked_array(ids, text).combine_chunks() if ids else pyarrow.nulls(len(trimmed), text)
        self.names = RowIds(id_column(named.fill_null(""), self._image_paths))

    @cached_property
    def groups(self) -> IntArray | None:
        """By the content of images without a name of their own: a name may be missing, or that of other images, too."""
        import pyarrow
        import pyarrow.compute

        codes = np.asarray(self._image_paths.dictionary_encode().indices)
        unnamed = np.asarray(pyarrow.compute.equal(self._image_paths, ""))
        alone = (np.bincount(codes)[codes] == 1) & ~unnamed
        if alone.all():
            return None
        hashes = np.arange(len(alone))
        start = 0
        for part in self.copies.table.parts:
            for batch in part.records([self._image], _WITH_IMAGES):
                for row in np.flatnonzero(~alone[start : start + len(batch)]).tolist():
                    content, path = _content(batch.column(0)[row].as_py())
                    hashes[start + row] = hash(content or path) or start + row
                start += len(batch)
        return numbers(pyarrow.array(hashes))

    def _paths(self, part: TablePart) -> list[Any]:
        """The paths beside the bytes; parquet reads them without the bytes."""
        import pyarrow

        kind, text = part.schema.field(self._image).type, pyarrow.large_string()
        if not pyarrow.types.is_struct(kind) or kind.get_field_index("path") < 0:
            return [pyarrow.nulls(len(part), text)]
        column = self._image if part.in_memory else f"{self._image}.path"
        return [batch.column(0).field("path").cast(text) for batch in part.records([column])]

    def read_image(self, row: int) -> bytes:
        content, path = _content(self.copies.table.take(self._image, np.array([row]))[0].as_py())
        if content is not None:
            return content
        if not path:
            raise FileNotFoundError("no image is named")
        return read_regular(self._folder / path)  # datasets that refer to files


def _content(cell: Any) -> tuple[bytes | None, str]:
    """The bytes of an image and its path, where they are there."""
    known = cell if isinstance(cell, dict) else {"bytes": cell}
    return known.get("bytes"), str(known.get("path") or "")


def _with_column(batch: Any, column: str, values: Any) -> Any:
    import pyarrow

    place = batch.schema.get_field_index(column)
    arrays = [values if place == number else array for number, array in enumerate(batch.columns)]
    return pyarrow.RecordBatch.from_arrays(arrays, schema=batch.schema)


def _write_parquet(part: TablePart, batches: Iterator[Any], file: IO[bytes]) -> None:
    import pyarrow.parquet

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
