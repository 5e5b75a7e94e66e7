"""Tables of ids, captions and paths: parquet, or text whose encoding, separator and header are detected.

A text table is read once into Arrow record batches, in a temporary file unless it is small. Columns are streamed in
batches and single cells are looked up by row, so that a table of ten million rows takes no memory.

Text is parsed by Python's strict reader: pyarrow's takes all rows after a quotation mark that is never closed as one
cell, without an error.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
import tempfile
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mispair.errors import DataError
from mispair.pairs.pairs import IntArray
from mispair.support.files import LARGEST_JSON, regular
from mispair.support.formatting import listed

Role = Literal["id", "caption", "image_path", "group", "status"]
USUAL_NAMES: dict[Role, tuple[str, ...]] = {
    "id": ("id", "key", "uid", "pair_id", "sample_id", "caption_id"),
    "caption": ("caption", "text", "title", "sentence", "comment", "description", "alt_text", "alt"),
    "image_path": (
        "image_path", "image", "path", "img_path", "filepath", "file_path", "filename", "file_name", "image_name",
        "image_file", "image_filename", "img", "file", "photo", "picture",
    ),
    "group": ("group", "group_id"),
    "status": ("status",),
}  # fmt: skip
FLAGS: dict[Role, str] = {"id": "--id-column", "caption": "--caption-column", "image_path": "--image-column"}
IMAGE_SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"))
SEPARATORS = (",", "\t", ";", "|")
BATCH = 1 << 16
_UNQUOTED = "\t|"  # many programs write no quotes with these, so that a cell may begin with a quotation mark
_CHUNK = 1 << 14  # rows of a text file that are parsed at a time
_SMALL = 1 << 24  # bytes of a text file whose batches are kept in memory
_SMALL_PART, _MOST_KEPT = 1 << 16, 1 << 27  # bytes of one of several parquet files that is kept in memory, and of all
_PROBED = 50  # rows that tell how a file without a header is made
# Flickr8k.token.txt writes the number of the caption behind the name of the image.
_IMAGE_NAME = re.compile(rf"\S.*({'|'.join(map(re.escape, sorted(IMAGE_SUFFIXES)))})(#\d+)?", re.IGNORECASE)
Roles = Mapping[Role, str]
Quoting = Literal[0, 1, 3]


@dataclass(frozen=True)
class TextFormat:
    """How a text table is written.

    Attributes:
        encoding: As Python names it.
        separator: Between the cells of a row.
        quoting: `csv.QUOTE_MINIMAL`, `csv.QUOTE_ALL`, or `csv.QUOTE_NONE` where quotation marks mean themselves.
        header: Whether the first line has the names of the columns; else these are "1", "2" and so on.
        line_end: Behind each row.
    """

    encoding: str = "utf-8"
    separator: str = ","
    quoting: Quoting = csv.QUOTE_MINIMAL
    header: bool = True
    line_end: str = "\n"


@dataclass
class _Recent:
    """The chunk that was read last, because neighbouring rows are looked up one after the other."""

    key: tuple[Path, int, str] | None = None
    cells: Any = None


@dataclass(frozen=True)
class Part(ABC):
    """One file of a table."""

    path: Path
    columns: tuple[str, ...]
    starts: IntArray  # first row of each chunk, and the number of rows

    def __len__(self) -> int:
        return int(self.starts[-1])

    @abstractmethod
    def schema(self) -> Any:
        """The names and types of all columns (`pyarrow.Schema`)."""

    @abstractmethod
    def records(self, columns: Sequence[str] | None = None, size: int | None = None) -> Iterator[Any]:
        """Consecutive rows as they are stored (`pyarrow.RecordBatch`), of all columns by default, at most `size`."""

    @abstractmethod
    def _chunk(self, number: int, column: str) -> Any:
        """One column of a chunk as it is stored."""

    def batches(self, columns: Sequence[str]) -> Iterator[list[Any]]:
        """Consecutive rows of some columns, each as a pyarrow array of text without gaps."""
        for batch in self.records(columns):
            yield [_as_text(batch.column(name), name, self.path) for name in columns]

    def take(self, column: str, rows: IntArray, recent: _Recent) -> list[Any]:
        """One column at ascending rows, as it is stored, in one or several pyarrow arrays."""
        import pyarrow

        found = []
        for number in np.unique(np.searchsorted(self.starts, rows, side="right") - 1).tolist():
            start, stop = self.starts[number], self.starts[number + 1]
            inside = rows[np.searchsorted(rows, start) : np.searchsorted(rows, stop)] - start
            if recent.key != (self.path, number, column):
                recent.key, recent.cells = None, None  # freed before the next one is read
                recent.cells = self._chunk(number, column)
                recent.key = (self.path, number, column)
            found.append(recent.cells.take(pyarrow.array(inside)))
        return found


@dataclass(frozen=True)
class Parquet(Part):
    """One parquet file; its chunks are its row groups."""

    def schema(self) -> Any:
        import pyarrow
        import pyarrow.parquet

        try:
            return pyarrow.parquet.read_schema(self.path)
        except (OSError, UnicodeError, pyarrow.ArrowException) as error:
            raise _damaged(self.path, error) from None

    def records(self, columns: Sequence[str] | None = None, size: int | None = None) -> Iterator[Any]:
        import pyarrow
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(self.path) as file:
                yield from file.iter_batches(size or BATCH, columns=None if columns is None else list(columns))
        except (OSError, UnicodeError, pyarrow.ArrowException) as error:
            raise _damaged(self.path, error) from None

    def _chunk(self, number: int, column: str) -> Any:
        import pyarrow
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(self.path) as file:
                return file.read_row_group(number, columns=[column]).column(0).combine_chunks()
        except (OSError, UnicodeError, pyarrow.ArrowException) as error:
            raise _damaged(self.path, error) from None


@dataclass(frozen=True)
class Text(Part):
    """One text file, read into the batches of an Arrow file."""

    format: TextFormat
    reader: Any  # pyarrow.RecordBatchFileReader

    def schema(self) -> Any:
        return self.reader.schema

    def records(self, columns: Sequence[str] | None = None, size: int | None = None) -> Iterator[Any]:  # noqa: ARG002
        import pyarrow

        for number in range(self.reader.num_record_batches):
            batch = self.reader.get_batch(number)
            if columns is not None:  # copied, else a column that is kept would hold all others in memory
                copied = [pyarrow.concat_arrays([batch.column(name), batch.column(name)[:0]]) for name in columns]
                batch = pyarrow.record_batch(copied, list(columns))
            yield batch

    def _chunk(self, number: int, column: str) -> Any:
        return self.reader.get_batch(number).column(column)


@dataclass(frozen=True)
class InMemory(Part):
    """A pyarrow table, as one chunk."""

    table: Any

    @classmethod
    def of(cls, table: Any, name: str) -> InMemory:
        """The part of a `pyarrow.Table`; the name is for messages."""
        path = Path(name)
        return cls(path, _distinct(tuple(table.column_names), path), np.array([0, table.num_rows]), table)

    def schema(self) -> Any:
        return self.table.schema

    def records(self, columns: Sequence[str] | None = None, size: int | None = None) -> Iterator[Any]:
        table = self.table if columns is None else self.table.select(list(columns))
        yield from table.to_batches(size or BATCH)

    def _chunk(self, number: int, column: str) -> Any:  # noqa: ARG002
        return self.table.column(column)


@dataclass(frozen=True)
class Table:
    """One table in one or several files with the same columns.

    Attributes:
        parts: The files.
        roles: Columns that are known by other means than their names.
        blocks: The same rows to be read: many small files are one block. The parts by default.
    """

    parts: tuple[Part, ...]
    roles: Roles = field(default_factory=dict)
    blocks: tuple[Part, ...] = ()
    _recent: _Recent = field(default_factory=_Recent, init=False, repr=False, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def _read(self) -> tuple[Part, ...]:
        return self.blocks or self.parts

    @cached_property
    def _starts(self) -> IntArray:
        """First row of each block, and the number of rows; there may be thousands of blocks."""
        return np.cumsum([0, *map(len, self._read)])

    @property
    def columns(self) -> tuple[str, ...]:
        return self.parts[0].columns

    def find(self, role: Role) -> str | None:
        """The column for this role: the one that was named, or one with a usual name; None where there is none."""
        return self.roles.get(role) or find_column(self.columns, role)

    def require(self, roles: Mapping[Role, str]) -> list[str]:
        """The columns for these roles, which come with a word for what is in each.

        Raises:
            DataError: Some are missing; they are named at once.
        """
        found = {role: self.find(role) for role in roles}
        missing = [role for role, column in found.items() if column is None]
        if missing:
            what, flags = " or ".join(roles[role] for role in missing), " and ".join(FLAGS[role] for role in missing)
            raise DataError(
                f"{self.parts[0].path}: no column with a usual name for {what}; the columns are "
                f"{_quoted(self.columns)}. Name {'one' if len(missing) == 1 else 'two'} of them with {flags}."
            )
        return [column for column in found.values() if column is not None]

    def found(self) -> str:
        """The columns that are there, for messages."""
        return f"found the columns {listed(self.columns)}"

    def batches(self, columns: Sequence[str]) -> Iterator[list[Any]]:
        """Consecutive rows of some columns, each as a pyarrow array of text; a missing cell is an empty text."""
        for part in self._read:
            yield from part.batches(columns)

    def take(self, column: str, rows: IntArray) -> Any:
        """One column at any rows, in their order, as it is stored: a `pyarrow.ChunkedArray` that is read now."""
        import pyarrow

        pieces, order = self._pieces(column, rows)
        kind = pieces[0].type if pieces else self.parts[0].schema().field(column).type
        return pyarrow.chunked_array([piece.cast(kind) for piece in pieces], kind).take(pyarrow.array(order))

    def cells(self, column: str, rows: IntArray) -> list[str]:
        """The texts of one column at any rows, in their order, read from the file now."""
        pieces, order = self._pieces(column, rows)
        found = [text for piece in pieces for text in _as_text(piece, column, self.parts[0].path).to_pylist()]
        return [found[place] for place in order]

    def _pieces(self, column: str, rows: IntArray) -> tuple[list[Any], IntArray]:
        """The column at ascending rows as pyarrow arrays, and where in them each of the rows is."""
        order = np.argsort(rows, kind="stable")
        ascending = np.asarray(rows, dtype=np.int64)[order]
        starts, found = self._starts, list[Any]()
        with self._lock:
            for number in np.unique(np.searchsorted(starts, ascending, side="right") - 1).tolist():
                low, high = np.searchsorted(ascending, starts[number : number + 2])
                found += self._read[number].take(column, ascending[low:high] - starts[number], self._recent)
        back = np.empty(len(order), dtype=np.int64)
        back[order] = np.arange(len(order))
        return [chunk for piece in found for chunk in getattr(piece, "chunks", [piece])], back


def open_table(*paths: Path, columns: Roles | None = None, lenient: bool = False) -> Table:
    """Open a table.

    Args:
        paths: The files in their order: parquet, or text with one of `SEPARATORS`. Text is UTF-8, UTF-16, or else
            Windows-1252; it has a header line, unless its first line names an image file.
        columns: Columns that have no usual names.
        lenient: Whether rows of a text file may lack cells at the end, and blank rows are left out.

    Raises:
        DataError: A file is missing or damaged, a row has more or fewer cells than the header, a column is not there,
            or the files differ in their columns.
    """
    columns = columns or {}
    parts, kept, roles = list[Part](), list[Any](), list[Roles]()
    room = _MOST_KEPT if len(paths) > 1 else 0
    for path in paths:
        start, whole = _start(path)
        if start.startswith(b"PAR1"):
            file, content = _open_parquet(path, start if whole and room > 0 else None)
            room -= 0 if content is None else content.nbytes
            parts.append(file)
            kept.append(content)
        else:
            text, known = _open_text(path, columns, lenient=lenient)
            parts.append(text)
            kept.append(None)
            roles.append(known)
    for part in parts[1:]:
        if set(part.columns) != set(parts[0].columns):
            raise DataError(
                f"{part.path}: found the columns {listed(part.columns)}, but {parts[0].path.name} has "
                f"{listed(parts[0].columns)}; all files of one table need the same."
            )
    for role, column in columns.items():
        if column not in parts[0].columns:
            raise DataError(
                f'{paths[0]}: no column "{column}"; the columns are {_quoted(parts[0].columns)}. Name one of them with '
                f"{FLAGS[role]}."
            )
    return Table(tuple(parts), {**(roles[0] if roles else {}), **columns}, tuple(_blocks(parts, kept)))


def _blocks(parts: Sequence[Part], kept: Sequence[Any]) -> Iterator[Part]:
    """The parts, but consecutive ones whose content is known as one, where their columns have the same types.

    Args:
        parts: The files.
        kept: The content of each (`pyarrow.Table`), or None.
    """
    import pyarrow

    each = zip(parts, kept, strict=True)
    for schema, some in groupby(each, lambda one: None if one[1] is None else one[1].schema.remove_metadata()):
        if schema is None:
            yield from (part for part, _ in some)
            continue
        several = list(some)
        together = pyarrow.concat_tables([content.replace_schema_metadata() for _, content in several])
        yield InMemory.of(together.combine_chunks(), str(several[0][0].path))


def _quoted(columns: Sequence[str]) -> str:
    return listed([f'"{column}"' for column in columns])


def find_column(columns: Sequence[str], role: Role) -> str | None:
    """The column with a usual name for this role, whatever its case; None where there is none."""
    simple = [name.strip().lower().replace(" ", "_").replace("-", "_") for name in columns]
    return next((columns[simple.index(name)] for name in USUAL_NAMES[role] if name in simple), None)


def _damaged(path: Path, error: Exception) -> DataError:
    if isinstance(error, UnicodeEncodeError):
        return DataError(f"{path}: the name is not UTF-8, and tables with such names cannot be opened; rename it.")
    return DataError(f"{path}: the table cannot be read ({str(error).splitlines()[0]}); write it again.")


def _start(path: Path) -> tuple[bytes, bool]:
    """The first bytes of a table, and whether they are all of it.

    Raises:
        DataError: It is no table, or cannot be read.
    """
    try:
        with regular(path).open("rb") as file:
            start, more = file.read(_SMALL_PART), file.read(1)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; expected a table (.csv, .tsv or .parquet).") from None
    except OSError as error:
        raise DataError(f"{path}: the table cannot be read ({error.strerror}).") from None
    if not start:
        raise DataError(f"{path}: the file is empty; expected a table with a header line.")
    line = start[:4096]
    if not start.startswith(b"PAR1") and b"\x00" in line.partition(b"\n")[0] and _utf_16(line) is None:
        raise DataError(f"{path}: this is neither parquet nor text; save the table as CSV (UTF-8) or parquet.")
    return start, not more


def _utf_16(start: bytes) -> str | None:
    """The kind of UTF-16 of a file that starts like this, with or without a byte order mark; None for other texts."""
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    # The names of columns are mostly ASCII, of which every other byte is zero.
    even, odd = start[::2], start[1::2]
    for zeros, others, name in ((odd, even, "utf-16-le"), (even, odd, "utf-16-be")):
        if zeros and zeros.count(0) > len(zeros) // 2 and 0 not in others:
            return name
    return None


def text_encoding(path: Path) -> str:
    """The encoding of a text file: UTF-8, UTF-16, or else Windows-1252, which is what spreadsheets write.

    Raises:
        DataError: Some lines of a UTF-8 file are damaged, or one is too long.
    """
    with regular(path).open("rb") as file:
        start = file.read(4096)
        wide = _utf_16(start)
        file.seek(0)
        damaged, whole, first = 0, 0, 0
        for number, line in enumerate(iter(lambda: file.readline(LARGEST_JSON + 1), b""), 1):
            if len(line) > LARGEST_JSON:
                most = f"{LARGEST_JSON / 1e6:,.0f} MB"
                raise DataError(f"{path}: line {number:,} has more than the {most} that are read; is it a text?")
            if wide is None and not line.isascii():
                try:
                    line.decode()
                    whole += 1
                except UnicodeDecodeError:
                    damaged += 1
                    first = first or number
    if wide is not None:
        return wide
    if not damaged:
        return "utf-8-sig" if start.startswith(codecs.BOM_UTF8) else "utf-8"
    if whole >= damaged:  # hardly any text in another encoding is UTF-8 by accident
        raise DataError(f"{path}: line {first:,} is not UTF-8 as the other lines are; save the file again as UTF-8.")
    try:
        with path.open(encoding="cp1252") as text:
            for _ in text:
                pass
    except UnicodeDecodeError:  # five bytes mean nothing there
        return "latin-1"
    return "cp1252"


def decoded(content: bytes) -> str:
    """The text of a small file in any of these encodings; what means nothing in it is replaced."""
    if (wide := _utf_16(content[:4096])) is not None:
        return content.decode(wide, "replace")
    text = content.decode("utf-8-sig", "replace")
    if (
        "\ufffd" not in text or not content.decode(errors="ignore").isascii()
    ):  # whole; or UTF-8 that is damaged or cut off
        return text
    return content.decode("cp1252", "replace")


def _open_parquet(path: Path, content: bytes | None) -> tuple[Parquet, Any]:
    """A parquet file, and what it holds (`pyarrow.Table`) if its content is given and its cells are plain."""
    import pyarrow
    import pyarrow.parquet

    try:
        str(path).encode()  # pyarrow opens no file whose name is not UTF-8, and copies are made of the file
        with pyarrow.parquet.ParquetFile(path if content is None else pyarrow.BufferReader(content)) as file:
            groups, schema = file.metadata, file.schema_arrow
            sizes = [groups.row_group(group).num_rows for group in range(groups.num_row_groups)]
            keep = content is not None and all(map(_is_plain, schema.types))
            kept = file.read(use_threads=False) if keep else None
    except (OSError, UnicodeError, pyarrow.ArrowException) as error:
        raise _damaged(path, error) from None
    part = Parquet(path, _distinct(tuple(schema.names), path), np.cumsum([0, *sizes]))
    return part, kept if kept is not None and _is_valid(kept) else None


def _is_plain(kind: Any) -> bool:
    import pyarrow

    types = pyarrow.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_primitive(kind) or types.is_null(kind))


def _is_valid(table: Any) -> bool:
    """Whether all texts are UTF-8; the file of others is named when they are read."""
    import pyarrow

    try:
        table.validate(full=True)
    except pyarrow.ArrowException:
        return False
    return True


def _as_text(column: Any, name: str, path: Path) -> Any:
    import pyarrow

    try:
        text = column.cast(pyarrow.large_string())
        text.validate(full=True)  # parquet does not check that its texts are UTF-8
        return text.fill_null("")
    except pyarrow.ArrowException:
        raise DataError(
            f"{path}: the column {name} holds {column.type} or bytes that are not UTF-8; expected texts or numbers."
        ) from None


def _open_text(path: Path, named: Roles, *, lenient: bool) -> tuple[Text, Roles]:
    try:
        encoding = text_encoding(path)
        with path.open("rb") as file:
            line_end = "\r\n" if b"\r" in file.readline() else "\n"
    except OSError as error:
        raise DataError(f"{path}: the table cannot be read ({error.strerror}).") from None
    style, columns, roles = _sniff(path, TextFormat(encoding, line_end=line_end), named)
    try:
        if _all_quoted(path, style):
            style = replace(style, quoting=csv.QUOTE_ALL)
        return _read_text(path, columns, style, lenient=lenient), roles
    except _QuoteError:
        if style.separator not in _UNQUOTED:
            raise
    return _read_text(path, columns, replace(style, quoting=csv.QUOTE_NONE), lenient=lenient), roles


def _all_quoted(path: Path, style: TextFormat) -> bool:
    """Whether all cells of the first two rows have quotation marks around them."""
    quoted = io.StringIO(newline="")
    writer = csv.writer(quoted, delimiter=style.separator, quoting=csv.QUOTE_ALL, lineterminator=style.line_end)
    writer.writerows(islice(_records(path, style), 2))
    with path.open(encoding=style.encoding, newline="") as file:
        return file.read(len(quoted.getvalue())) == quoted.getvalue()


def _read_text(path: Path, columns: tuple[str, ...], style: TextFormat, *, lenient: bool) -> Text:
    """Copies all rows to an Arrow file that nobody else sees and that is deleted when it is closed."""
    import pyarrow

    schema = pyarrow.schema([(name, pyarrow.large_string()) for name in columns])
    records = islice(_records(path, style), int(style.header), None)
    rows = _checked(records, path, columns, style.separator, lenient=lenient)
    try:
        # In Arrow's own memory: a thread of Arrow that lets go of Python's while the process ends aborts it.
        small = path.stat().st_size <= _SMALL
        copy: Any = pyarrow.BufferOutputStream() if small else tempfile.TemporaryFile()  # noqa: SIM115
        sizes = []
        with pyarrow.ipc.new_file(copy, schema) as writer:
            while batch := list(islice(rows, _CHUNK)):
                arrays = [pyarrow.array(cells, pyarrow.large_string()) for cells in zip(*batch, strict=True)]
                writer.write_batch(pyarrow.record_batch(arrays, schema))
                sizes.append(len(batch))
        reader = pyarrow.ipc.open_file(copy.getvalue() if small else copy)
    except OSError as error:
        raise DataError(f"{path}: the table cannot be read ({error.strerror or error}).") from None
    return Text(path, columns, np.cumsum([0, *sizes]), style, reader)


def _checked(
    records: Iterable[list[str]], path: Path, columns: tuple[str, ...], separator: str, *, lenient: bool
) -> Iterator[list[str]]:
    """Rows with as many cells as the header."""
    width = len(columns)
    for row, cells in enumerate(records, 1):
        if lenient:
            if not any(map(str.strip, cells)):
                continue
            cells += [""] * (width - len(cells))
            if not any(map(str.strip, cells[width:])):
                del cells[width:]
        if len(cells) != width:
            raise DataError(
                f"{path}: row {row:,} has {len(cells)} cells and the header {width} ({listed(columns)}); put "
                f"quotation marks around cells that hold the separator {separator!r}."
            )
        yield cells


def _sniff(path: Path, style: TextFormat, named: Roles) -> tuple[TextFormat, tuple[str, ...], Roles]:
    """The separator that cuts the header into the most known names, then into the most cells; and those cells.

    Only the header is used: captions are full of commas and semicolons. Where it has no known name, but an image file,
    it is no header.
    """
    headers: dict[str, tuple[str, ...]] = {}
    refusal: DataError | None = None
    for separator in SEPARATORS:
        try:
            header = next(_records(path, replace(style, separator=separator)), [])
            headers[separator] = tuple(name.strip() for name in header)
        except DataError as error:  # a quoted header is wrong for all separators but its own
            refusal = refusal or error
    if refusal and not headers:
        raise refusal

    def known(separator: str) -> tuple[int, int]:
        columns = headers[separator]
        usual = sum(find_column(columns, role) is not None for role in USUAL_NAMES)
        return usual + sum(name in columns for name in named.values()), len(columns)

    best = max(headers, key=known)
    if not any(headers[best]):
        raise DataError(f"{path}: the file holds blank lines only; expected a header line and rows.")
    if not known(best)[0]:
        found = _sniff_rows(path, style)
        if found is not None:
            return found
    return replace(style, separator=best), _distinct(headers[best], path), {}


def _sniff_rows(path: Path, style: TextFormat) -> tuple[TextFormat, tuple[str, ...], Roles] | None:
    """The separator, names and roles of the columns of a file without a header.

    None where no separator makes rows of one length with an image file in one column.
    """
    found: list[tuple[int, str, list[list[str]], int]] = []
    for separator in SEPARATORS:
        quoted = replace(style, separator=separator)
        for one in (quoted, replace(quoted, quoting=csv.QUOTE_NONE)):
            try:
                rows = list(islice(_records(path, one), _PROBED))
            except DataError:
                continue
            if len({len(row) for row in rows}) == 1 and len(rows[0]) > 1:
                cells = [list(column) for column in zip(*rows, strict=True)]
                images = [all(_IMAGE_NAME.fullmatch(cell.strip()) for cell in column) for column in cells]
                if any(images):
                    found.append((len(cells), separator, cells, images.index(True)))
            break
    if not found:
        return None
    # A caption may have the same number of commas in all rows; the true separator makes fewer columns.
    width, separator, cells, image = min(found, key=lambda one: one[0])
    lengths = [-1 if place == image else sum(map(len, column)) for place, column in enumerate(cells)]
    names = tuple(str(place + 1) for place in range(width))
    roles: Roles = {"image_path": names[image], "caption": names[lengths.index(max(lengths))]}
    return replace(style, separator=separator, header=False), names, roles


def _distinct(columns: tuple[str, ...], path: Path) -> tuple[str, ...]:
    name, count = Counter(columns).most_common(1)[0]
    if count > 1:
        raise DataError(f"{path}: {count} columns are named {name!r}; give each its own name.")
    return columns


class _QuoteError(DataError):
    """A quotation mark stands where none may."""


def _records(path: Path, style: TextFormat) -> Iterator[list[str]]:
    """All rows with the header; empty lines are left out."""
    # Strict, else a forgotten quotation mark would take the rest of the file as one cell.
    bars = style.separator == "|"  # Flickr30K's table has spaces around them
    try:
        with path.open(encoding=style.encoding, newline="\n") as file:
            reader = csv.reader(
                file, delimiter=style.separator, quoting=style.quoting, skipinitialspace=bars, strict=True
            )
            try:
                yield from filter(None, reader)
            except csv.Error as error:
                raise _QuoteError(
                    f"{path}: line {reader.line_num:,} cannot be read ({error}); look for a quotation mark or a "
                    "carriage return that is not inside a quoted cell."
                ) from None
    except UnicodeError as error:
        name = style.encoding.upper()
        raise DataError(f"{path}: the text is not {name} ({error}); save the file again as UTF-8.") from None
    except OSError as error:
        raise DataError(f"{path}: the table cannot be read ({error.strerror}).") from None
