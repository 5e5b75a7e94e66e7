"""Tables of ids, captions and paths: parquet, or text with detected encoding, separator and header.

A text table is converted once to Arrow record batches, in a temporary file unless it is small. Columns are streamed in
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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow
import pyarrow.parquet

from mispair.errors import DamagedError, NotFoundError, ShapeError
from mispair.support.arrays import IntArray
from mispair.support.files import LARGEST_JSON, regular, take_long_cells, unreadable
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
SETTINGS: dict[Role, str] = {"id": "`id_column`", "caption": "`caption_column`", "image_path": "`image_column`"}
IMAGE_SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"))
SEPARATORS = (",", "\t", ";", "|")
BATCH = 1 << 16
_UNQUOTED = "\t|"  # many programs write no quotes with these, so that a cell may begin with a quotation mark
_CHUNK = 1 << 14  # rows of a text file that are parsed at a time
_SMALL = 1 << 24  # bytes of a text file whose batches are kept in memory
_PROBED = 50  # rows that tell how a file without a header is made
# Flickr8k.token.txt writes the number of the caption behind the name of the image.
_IMAGE_NAME = re.compile(rf"\S.*({'|'.join(map(re.escape, sorted(IMAGE_SUFFIXES)))})(#\d+)?", re.IGNORECASE)
Roles = Mapping[Role, str]
Quoting = Literal[0, 1, 3]


@dataclass(frozen=True)
class TextFormat:
    """Format of a text table."""

    encoding: str = "utf-8"
    separator: str = ","
    quoting: Quoting = csv.QUOTE_MINIMAL  # QUOTE_NONE: quotation marks mean themselves
    header: bool = True  # otherwise the columns are "1", "2" and so on
    line_end: str = "\n"


@dataclass(frozen=True)
class TablePart:
    """One file of a table, or a table in memory."""

    path: Path  # of a table in memory: its name for messages
    schema: Any  # `pyarrow.Schema`
    starts: IntArray  # first row of each chunk that is read at once, and the number of rows
    # Reads a chunk (`pyarrow.RecordBatch`); None if chunks are the row groups of the parquet file.
    get: Callable[[int], Any] | None = None
    format: TextFormat | None = None  # of a text file
    is_file: bool = True

    def __len__(self) -> int:
        return int(self.starts[-1])

    def records(self, columns: Sequence[str] | None = None, size: int = BATCH) -> Iterator[Any]:
        """Consecutive rows as stored (`pyarrow.RecordBatch`), of all columns by default."""
        if self.get is None:
            with _reading(self.path), pyarrow.parquet.ParquetFile(self.path) as file:
                yield from file.iter_batches(size, columns=None if columns is None else list(columns))
            return
        for number in range(len(self.starts) - 1):
            batch = self.get(number)
            if columns is not None:  # copied, else a column that is kept would hold all others in memory
                copies = [pyarrow.concat_arrays([batch.column(name), batch.column(name)[:0]]) for name in columns]
                batch = pyarrow.record_batch(copies, list(columns))
            yield from (batch[start : start + size] for start in range(0, len(batch), size))

    def chunk(self, number: int, column: str) -> Any:
        """One column of a chunk as it is stored."""
        if self.get is not None:
            return self.get(number).column(column)
        with _reading(self.path), pyarrow.parquet.ParquetFile(self.path) as file:
            return file.read_row_group(number, columns=[column]).column(0)


@dataclass(frozen=True)
class Table:
    """One table in one or several files with the same columns."""

    parts: tuple[TablePart, ...]
    roles: Roles = field(default_factory=dict)  # columns without usual names
    # The chunk that was read last, because neighbouring rows are looked up one after the other.
    _recent: dict[tuple[int, str], Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, content: Any, name: str, roles: Roles | None = None) -> Table:
        """A `pyarrow.Table` in memory; the name is for messages."""
        path, batches = Path(name), content.to_batches()
        _check_distinct(content.column_names, path)
        starts = np.cumsum([0, *map(len, batches)])
        part = TablePart(path, content.schema, starts, batches.__getitem__, is_file=False)
        return cls((part,), roles or {})

    def __len__(self) -> int:
        return int(self._starts[-1])

    @cached_property
    def _chunks(self) -> list[tuple[TablePart, int]]:
        return [(part, number) for part in self.parts for number in range(len(part.starts) - 1)]

    @cached_property
    def _starts(self) -> IntArray:
        """First row of each chunk, and the number of rows."""
        sizes = [np.diff(part.starts) for part in self.parts]
        return np.cumsum(np.concatenate([[0], *sizes]), dtype=np.int64)

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.parts[0].schema.names)

    @property
    def shards(self) -> tuple[tuple[str, int], ...]:
        """Names of the files, and how many rows they have."""
        return tuple((part.path.stem, len(part)) for part in self.parts)

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(part.path for part in self.parts if part.is_file)

    def find(self, role: Role) -> str | None:
        """The column for this role: the named one, or one with a usual name; None if missing."""
        return self.roles.get(role) or find_column(self.columns, role)

    def require(self, roles: Mapping[Role, str]) -> list[str]:
        """The columns for these roles, each with a word for its content."""
        found = {role: self.find(role) for role in roles}
        missing = [role for role, column in found.items() if column is None]
        if missing:
            what = " or ".join(roles[role] for role in missing)
            raise no_column(f"no column with a usual name for {what}", self.parts[0].path, self.columns, missing)
        return [column for column in found.values() if column is not None]

    def found(self) -> str:
        """The columns, for messages."""
        return f"found the columns {listed(self.columns)}"

    def batches(self, columns: Sequence[str]) -> Iterator[list[Any]]:
        """Consecutive rows of some columns, each as a pyarrow array of text; a missing cell is an empty text."""
        for part in self.parts:
            for batch in part.records(columns):
                yield [_as_text(batch.column(name), name, part.path) for name in columns]

    def texts(self, column: str) -> Any:
        """All texts of a column as one `pyarrow.LargeStringArray`; a missing cell is an empty text."""
        return self.joined(column, [cells for (cells,) in self.batches([column])])

    def joined(self, column: str, chunks: Sequence[Any]) -> Any:
        """All texts of a column from its chunks; raise if the file is damaged, so that columns have unequal lengths."""
        found = pyarrow.chunked_array(chunks, pyarrow.large_string()).combine_chunks()
        if len(found) != len(self):
            what = f"the column {column} has {len(found):,} cells in {len(self):,} rows"
            raise DamagedError(what, where=self.parts[0].path, advice="Write the table again.")
        return found

    def kind(self, column: str) -> Any:
        """One type for the cells of a column of all files; None if missing.

        A file whose cells are all missing has no type of its own, in the column or in a part of it.
        """
        schemas = [pyarrow.schema([part.schema.field(column)]) for part in self.parts]
        try:
            return pyarrow.unify_schemas(schemas, promote_options="permissive").field(0).type
        except pyarrow.ArrowTypeError:  # such as numbers in one file and texts in another
            return None

    def take(self, column: str, rows: IntArray, *, text: bool = False) -> Any:
        """One column at any rows, in their order, as it is stored or as text: a `pyarrow.ChunkedArray`, read now."""
        order = np.argsort(rows, kind="stable")
        ascending = np.asarray(rows, dtype=np.int64)[order]
        starts, found = self._starts, list[Any]()
        kind = pyarrow.large_string() if text else self.kind(column)
        with self._lock:
            for place in np.unique(np.searchsorted(starts, ascending, side="right") - 1).tolist():
                low, high = np.searchsorted(ascending, starts[place : place + 2])
                part, number = self._chunks[place]
                if (place, column) not in self._recent:
                    self._recent.clear()  # freed before the next one is read
                    self._recent[place, column] = part.chunk(number, column)
                piece = self._recent[place, column].take(pyarrow.array(ascending[low:high] - starts[place]))
                piece = _as_text(piece, column, part.path) if text else piece
                piece = piece.cast(kind or (found[0].type if found else piece.type))
                found += getattr(piece, "chunks", [piece])
        back = np.empty(len(order), dtype=np.int64)
        back[order] = np.arange(len(order))
        kind = found[0].type if found else self.parts[0].schema.field(column).type
        return pyarrow.chunked_array(found, kind).take(pyarrow.array(back))

    def cells(self, column: str, rows: IntArray) -> list[str]:
        """The texts of one column at any rows, in their order, read from the file now."""
        found: list[str] = self.take(column, rows, text=True).to_pylist()
        return found


def open_table(*paths: Path, columns: Roles | None = None, lenient: bool = False) -> Table:
    """Open a table: parquet, or text with one of `SEPARATORS` in UTF-8, UTF-16 or else Windows-1252.

    The first line of a text is its header, unless it names an image file. `columns` have no usual names. A `lenient`
    reader leaves out blank rows of a text, and adds cells that are missing at the end of others.
    """
    columns = columns or {}
    parts, roles = list[TablePart](), dict[Role, str]()
    for path in paths:
        if _is_parquet(path):
            part = _open_parquet(path)
        else:
            part, known = _open_text(path, columns, lenient=lenient)
            roles = roles or known
        _check_distinct(part.schema.names, path)
        parts.append(part)
        found, first = part.schema.names, parts[0].schema.names
        if set(found) != set(first):
            raise ShapeError(
                f"found the columns {listed(found)}, but {parts[0].path.name} has {listed(first)}",
                where=part.path,
                expected="the same columns in all files of one table",
            )
    table = Table(tuple(parts), {**roles, **columns})
    for role, column in columns.items():
        if column not in table.columns:
            raise no_column(f'no column "{column}"', parts[0].path, table.columns, [role])
    return table


def find_column(columns: Sequence[str], role: Role) -> str | None:
    """The column with a usual name for this role in any case; None if missing."""
    simple = [name.strip().lower().replace(" ", "_").replace("-", "_") for name in columns]
    return next((columns[simple.index(name)] for name in USUAL_NAMES[role] if name in simple), None)


def no_column(what: str, path: Path, columns: Sequence[str], roles: Sequence[Role]) -> NotFoundError:
    """The error for missing columns."""
    there = listed([f'"{column}"' for column in columns])
    advice = f"Name {'it' if len(roles) == 1 else 'them'} with {' and '.join(SETTINGS[role] for role in roles)}."
    return NotFoundError(f"{what} among {there}", where=path, advice=advice)


def _check_distinct(columns: Sequence[str], path: Path) -> None:
    name, count = (Counter(columns).most_common(1) or [("", 0)])[0]
    if count > 1:
        raise ShapeError(f"{count} columns are named {name!r}", where=path, advice="Give each its own name.")


def _as_text(column: Any, name: str, path: Path) -> Any:
    try:
        text = column.cast(pyarrow.large_string())
        text.validate(full=True)  # parquet does not check that its texts are UTF-8
        return text.fill_null("")
    except pyarrow.ArrowException:
        what = f"the column {name} has {column.type} or bytes that are not UTF-8"
        raise ShapeError(what, where=path, expected="texts or numbers") from None


def _is_parquet(path: Path) -> bool:
    """Whether a table is parquet; raise if it is not text either."""
    try:
        with regular(path).open("rb") as file:
            start = file.read(4096)
    except OSError as error:
        raise unreadable(path, error, expected="a table (.csv, .tsv or .parquet)") from None
    if not start:
        raise DamagedError("the file is empty", where=path, expected="a table with a header line")
    if start.startswith(b"PAR1"):
        return True
    if b"\x00" in start.partition(b"\n")[0] and _utf_16(start) is None:
        advice = "Save the table as CSV (UTF-8) or parquet."
        raise DamagedError("neither parquet nor text", where=path, advice=advice)
    return False


def _open_parquet(path: Path) -> TablePart:
    with _reading(path):
        str(path).encode()  # pyarrow opens no file whose name is not UTF-8
        with pyarrow.parquet.ParquetFile(path) as file:
            groups, schema = file.metadata, file.schema_arrow
            sizes = [groups.row_group(group).num_rows for group in range(groups.num_row_groups)]
    return TablePart(path, schema, np.cumsum([0, *sizes]))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeError, pyarrow.ArrowException) as error:
        raise unreadable(path, error, advice="Write the table again.") from None


def read_parquet(path: Path, columns: Sequence[str] | None = None, optional: Sequence[str] = ()) -> Any:
    """A whole parquet file as a `pyarrow.Table`, or some columns and the existing ones of `optional`."""
    with _reading(path):
        names = pyarrow.parquet.read_schema(regular(path)).names
        wanted = None if columns is None else [*columns, *(name for name in optional if name in names)]
        return pyarrow.parquet.read_table(path, columns=wanted)


def text_encoding(path: Path) -> str:
    """The encoding of a text file: UTF-8, UTF-16, or else Windows-1252, as spreadsheets write it."""
    with regular(path).open("rb") as file:
        start = file.read(4096)
        wide = _utf_16(start)
        file.seek(0)
        damaged, whole, first = 0, 0, 0
        for number, line in enumerate(iter(lambda: file.readline(LARGEST_JSON + 1), b""), 1):
            if len(line) > LARGEST_JSON:
                most = f"at most {LARGEST_JSON / 1e6:,.0f} MB a line"
                raise DamagedError(f"line {number:,} is longer than text is", where=path, expected=most)
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
        what = f"line {first:,} is not UTF-8 as the other lines are"
        raise DamagedError(what, where=path, advice="Save the file again as UTF-8.")
    try:
        with path.open(encoding="cp1252") as text:
            for _ in text:
                pass
    except UnicodeDecodeError:  # five bytes mean nothing there
        return "latin-1"
    return "cp1252"


def decoded(content: bytes) -> str:
    """The text of a small file in any of these encodings; undefined bytes are replaced."""
    if (wide := _utf_16(content[:4096])) is not None:
        return content.decode(wide, "replace")
    text = content.decode("utf-8-sig", "replace")
    # Whole; or UTF-8 that is damaged or cut off.
    if "\ufffd" not in text or not content.decode(errors="ignore").isascii():
        return text
    return content.decode("cp1252", "replace")


def _utf_16(start: bytes) -> str | None:
    """The kind of UTF-16 of a file by its start, with or without a byte order mark; None for other texts."""
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    # Column names are mostly ASCII, and in UTF-16 every other byte of ASCII is zero.
    even, odd = start[::2], start[1::2]
    for zeros, others, name in ((odd, even, "utf-16-le"), (even, odd, "utf-16-be")):
        if zeros and zeros.count(0) > len(zeros) // 2 and 0 not in others:
            return name
    return None


def _open_text(path: Path, named: Roles, *, lenient: bool) -> tuple[TablePart, dict[Role, str]]:
    """A text file, converted, and columns recognised by their content."""
    try:
        encoding = text_encoding(path)
        with path.open("rb") as file:
            line_end = "\r\n" if b"\r" in file.readline() else "\n"
        style, columns, roles = _detect(path, TextFormat(encoding, line_end=line_end), named)
        try:
            if _all_quoted(path, style):
                style = replace(style, quoting=csv.QUOTE_ALL)
            return _converted(path, columns, style, lenient=lenient), roles
        except _QuoteError:
            if style.separator not in _UNQUOTED:
                raise
        return _converted(path, columns, replace(style, quoting=csv.QUOTE_NONE), lenient=lenient), roles
    except _QuoteError as error:
        advice = "Look for a quotation mark or a carriage return that is not inside a quoted cell."
        raise DamagedError(str(error), where=path, advice=advice) from None
    except UnicodeError as error:
        what = f"the text is not {encoding.upper()} ({error})"
        raise DamagedError(what, where=path, advice="Save the file again as UTF-8.") from None
    except OSError as error:
        raise unreadable(path, error) from None


class _QuoteError(Exception):
    """A quotation mark stands where none may."""


def _records(path: Path, style: TextFormat) -> Iterator[list[str]]:
    """All rows with the header; empty lines are left out."""
    # Strict, else a forgotten quotation mark would take the rest of the file as one cell.
    bars = style.separator == "|"  # Flickr30K's table has spaces around them
    take_long_cells()
    with path.open(encoding=style.encoding, newline="\n") as file:
        reader = csv.reader(file, delimiter=style.separator, quoting=style.quoting, skipinitialspace=bars, strict=True)
        try:
            yield from filter(None, reader)
        except csv.Error as error:
            raise _QuoteError(f"line {reader.line_num:,} cannot be read ({error})") from None


def _all_quoted(path: Path, style: TextFormat) -> bool:
    """Whether all cells of the first two rows have quotation marks around them."""
    quoted = io.StringIO(newline="")
    writer = csv.writer(quoted, delimiter=style.separator, quoting=csv.QUOTE_ALL, lineterminator=style.line_end)
    writer.writerows(islice(_records(path, style), 2))
    with path.open(encoding=style.encoding, newline="") as file:
        return file.read(len(quoted.getvalue())) == quoted.getvalue()


def _converted(path: Path, columns: tuple[str, ...], style: TextFormat, *, lenient: bool) -> TablePart:
    """Copy all rows to an Arrow file, in memory or private and deleted when it is closed."""
    schema = pyarrow.schema([(name, pyarrow.large_string()) for name in columns])
    records = islice(_records(path, style), int(style.header), None)
    rows = _checked(records, path, columns, style.separator, lenient=lenient)
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
    return TablePart(path, schema, np.cumsum([0, *sizes]), reader.get_batch, style)


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
            raise ShapeError(
                f"row {row:,} has {len(cells)} cells",
                where=path,
                expected=f"{width} ({listed(columns)})",
                advice=f"Put quotation marks around cells that hold the separator {separator!r}.",
            )
        yield cells


def _detect(path: Path, style: TextFormat, named: Roles) -> tuple[TextFormat, tuple[str, ...], dict[Role, str]]:
    """The separator with the most known names in the header, then with the most cells; and those cells.

    Only the header is used: captions are full of commas and semicolons. A first line without known names but with an
    image file is not a header.
    """
    headers: dict[str, tuple[str, ...]] = {}
    refusal: _QuoteError | UnicodeError | None = None
    for separator in SEPARATORS:
        try:
            header = next(_records(path, replace(style, separator=separator)), [])
            headers[separator] = tuple(name.strip() for name in header)
        except (_QuoteError, UnicodeError) as error:  # a quoted header is wrong for all separators but its own
            refusal = refusal or error
    if refusal and not headers:
        raise refusal

    def known(separator: str) -> tuple[int, int]:
        columns = headers[separator]
        usual = sum(find_column(columns, role) is not None for role in USUAL_NAMES)
        return usual + sum(name in columns for name in named.values()), len(columns)

    best = max(headers, key=known)
    if not any(headers[best]):
        raise DamagedError("only blank lines", where=path, expected="a header line and rows")
    if not known(best)[0]:
        found = _without_header(path, style)
        if found is not None:
            return found
    _check_distinct(headers[best], path)
    return replace(style, separator=best), headers[best], {}


def _without_header(path: Path, style: TextFormat) -> tuple[TextFormat, tuple[str, ...], dict[Role, str]] | None:
    """The separator, names and roles of the columns of a file without a header.

    None if no separator makes rows of one length with an image file in one column.
    """
    found: list[tuple[int, str, list[int], int]] = []
    for separator in SEPARATORS:
        for quoting in (style.quoting, csv.QUOTE_NONE):
            try:
                rows = list(islice(_records(path, replace(style, separator=separator, quoting=quoting)), _PROBED))
            except (_QuoteError, UnicodeError):
                continue
            if len({len(row) for row in rows}) == 1 and len(rows[0]) > 1:
                cells = list(zip(*rows, strict=True))
                images = [all(_IMAGE_NAME.fullmatch(cell.strip()) for cell in column) for column in cells]
                if any(images):
                    lengths = [sum(map(len, column)) for column in cells]
                    found.append((len(cells), separator, lengths, images.index(True)))
            break
    if not found:
        return None
    # A caption may have the same number of commas in all rows; the true separator makes fewer columns.
    width, separator, lengths, image = min(found, key=lambda one: one[0])
    lengths[image] = -1
    names = tuple(str(place + 1) for place in range(width))
    roles: dict[Role, str] = {"image_path": names[image], "caption": names[lengths.index(max(lengths))]}
    return replace(style, separator=separator, header=False), names, roles
