"""Tables with a column of images and one of captions: text files, parquet, and tables in memory.

The images are paths, or they are in the table itself: bytes, or `{"bytes", "path"}` as Hugging Face's datasets have it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute

from mispair.errors import ShapeError, TooFewError
from mispair.pairs.edits import WITH_IMAGES, Edits, TableCopies
from mispair.pairs.other_libraries import as_table
from mispair.pairs.row_ids import RowIds, Texts, from_table, id_column, numbers
from mispair.pairs.source import ImageFiles, Source
from mispair.pairs.tables import Roles, Table, TablePart, open_table
from mispair.support.arrays import IntArray
from mispair.support.files import read_regular

_CAPTION_NUMBER = re.compile(r"#\d+$")  # behind the names of images in Flickr8k.token.txt, which has no header


def open_pairs(table: Table, images: Path, root: Path | None = None) -> Source:
    """The pairs of a table; image paths start from `images`, and several files lie in `root`."""
    image, caption = table.require({"image_path": "images", "caption": "captions"})
    # A group says which rows share their image, so it comes with the image.
    group = table.find("group")
    copies = TableCopies(table, (image,) if group is None else (image, group), caption, root)
    kind = _EmbeddedImages if copies.embedded else _ImagePaths
    return kind(copies, image, caption, images)


def open_files(paths: Sequence[Path], root: Path | None, images: Path | None, columns: Roles) -> Source:
    """The pairs of a table in files; see `opening.Layout`."""
    table = open_table(*paths, columns=columns, lenient=root is None)
    return open_pairs(table, images or root or paths[0].parent, root)


def open_table_given(table: Any, images: str | Path | None, columns: Roles) -> Source:
    """The pairs of a table of another library."""
    content = as_table(table)
    if content is None:
        expected = "a table of pandas, polars, pyarrow or datasets, or the path of one"
        raise ShapeError(f"a {type(table).__name__}", where="the table", expected=expected)
    pairs = open_pairs(Table.of(content, "the given table", columns), Path(images or ""))
    pairs.allow_outside = True  # the program that calls names them itself
    return pairs


class _TablePairs(Source):
    """Base of both kinds of tables."""

    copies: TableCopies

    def _of(self, copies: TableCopies) -> None:
        self.copies, self.table = copies, copies.table
        self.shards = copies.table.shards if len(copies.table.parts) > 1 else ()

    def write(self, edits: Edits, out: Path) -> None:
        self.copies.write(edits, out)


class TableRows(_TablePairs):
    """The rows of any table, with or without images and captions."""

    def __init__(self, table: Table, root: Path | None = None) -> None:
        self._of(TableCopies(table, (), None, root))
        self.name, self.files, self.folder = str(root or table.parts[0].path), table.files, root
        found = from_table(table)
        self.names = found if found.ids is not None else RowIds(pyarrow.array(np.arange(len(table))).cast("string"))


class _ImagePaths(ImageFiles, _TablePairs):
    """Pairs of a table with image paths."""

    def __init__(self, copies: TableCopies, image: str, caption: str, images: Path) -> None:
        self._of(copies)
        self.outside, table = images, copies.table
        named = table.find("id")
        paths, captions = (table.texts(column).to_pylist() for column in (image, caption))
        names = [""] * len(paths) if named is None else table.texts(named).to_pylist()
        first = table.parts[0]
        if first.format is not None and not first.format.header:
            if named is None:
                names = [path if _CAPTION_NUMBER.search(path) else "" for path in paths]
            paths = [_CAPTION_NUMBER.sub("", path) for path in paths]
        records = list(zip(names, paths, captions, strict=True))
        super().__init__(str(copies.root or first.path), table.files, records, images)


class _EmbeddedImages(_TablePairs):
    """Pairs of a table with images in it."""

    def __init__(self, copies: TableCopies, image: str, caption: str, images: Path) -> None:
        self._of(copies)
        table = copies.table
        self.name, self.files = str(copies.root or table.parts[0].path), table.files
        self._image, self._folder, self.inside = image, images, True
        if not len(table):
            raise TooFewError("no pairs", where=self.name, expected="at least one image with a caption")
        column, text = table.find("id"), pyarrow.large_string()
        paths = [cells for part in table.parts for cells in self._paths(part)]
        self._image_paths = table.joined(image, paths).fill_null("")
        self.captions = Texts(pyarrow.compute.utf8_trim_whitespace(table.texts(caption)))
        self.image_names = Texts(self._image_paths)
        named = table.texts(column) if column else pyarrow.nulls(len(table), text).fill_null("")
        self.names = RowIds(id_column(named, self._image_paths))

    @cached_property
    def groups(self) -> IntArray | None:
        """By the content of images without a name of their own: names may be missing or shared."""
        codes = np.asarray(self._image_paths.dictionary_encode().indices)
        unnamed = np.asarray(pyarrow.compute.equal(self._image_paths, ""))
        alone = (np.bincount(codes)[codes] == 1) & ~unnamed
        if alone.all():
            return None
        hashes = np.arange(len(alone))
        start = 0
        for part in self.copies.table.parts:
            for batch in part.records([self._image], WITH_IMAGES):
                for row in np.flatnonzero(~alone[start : start + len(batch)]).tolist():
                    content, path = _content(batch.column(0)[row].as_py())
                    hashes[start + row] = hash(content or path) or start + row
                start += len(batch)
        return numbers(pyarrow.array(hashes))

    def _paths(self, part: TablePart) -> list[Any]:
        """The paths beside the bytes; parquet reads them without the bytes."""
        kind, text = part.schema.field(self._image).type, pyarrow.large_string()
        if not pyarrow.types.is_struct(kind) or kind.get_field_index("path") < 0:
            return [pyarrow.nulls(len(part), text)]
        column = f"{self._image}.path" if part.get is None else self._image
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
