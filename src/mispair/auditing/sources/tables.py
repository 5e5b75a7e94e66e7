"""Tables of ids, captions and paths: parquet, or text whose separator is detected.

A text table is read once into Arrow record batches, in a temporary file unless it is small. Columns are streamed in
batches and single cells are looked up by row, so that a table of ten million rows takes no memory.

Text is parsed by Python's strict reader: pyarrow's takes all rows after a quotation mark that is never closed as one
cell, without an error.
"""

from __future__ import annotations

import codecs
import csv
import io
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from mispair.data.pairs import IntArray
from mispair.errors import DataError
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
SEPARATORS = (",", "\t", ";", "|")
BATCH = 1 << 16
_UNQUOTED = "\t|"  # many programs write no quotes with these, so that a cell may begin with a quotation mark
_CHUNK = 1 << 14  # rows of a text file that are parsed at a time
_SMALL = 1 << 24  # bytes of a text file whose batches are kept in memory


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
    def records(self, columns: Sequence[str] | None = None) -> Iterator[Any]:
        """Consecutive rows as they are stored (`pyarrow.RecordBatch`); of all columns by default."""

    @abstractmethod
    def _chunk(self, number: int, column: str) -> Any:
        """One column of a chunk as it is stored."""

    def batches(self, columns: Sequence[str]) -> Iterator[list[Any]]:
        """Consecutive rows of some columns, each as a pyarrow array of text without gaps."""
        for batch in self.records(columns):
            yield [_as_text(batch.column(name), name, self.path) for name in columns]

    def cells(self, column: str, rows: IntArray, recent: _Recent) -> list[str]:
        """The texts of one column at ascending rows."""
        import pyarrow

        found: list[str] = []
        for number in np.unique(np.searchsorted(self.starts, rows, side="right") - 1).tolist():
            start, stop = self.starts[number], self.starts[number + 1]
            inside = rows[np.searchsorted(rows, start) : np.searchsorted(rows, stop)] - start
            if recent.key != (self.path, number, column):
                recent.key, recent.cells = None, None  # freed before the next one is read
                recent.cells = _as_text(self._chunk(number, column), column, self.path)
                recent.key = (self.path, number, column)
            found += recent.cells.take(pyarrow.array(inside)).to_pylist()
        return found


@dataclass(frozen=True)
class Parquet(Part):
    """One parquet file; its chunks are its row groups."""

    def records(self, columns: Sequence[str] | None = None) -> Iterator[Any]:
        import pyarrow
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(self.path) as file:
                yield from file.iter_batches(BATCH, columns=None if columns is None else list(columns))
        except (OSError, pyarrow.ArrowException) as error:
            raise _damaged(self.path, error) from None

    def _chunk(self, number: int, column: str) -> Any:
        import pyarrow
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(self.path) as file:
                return file.read_row_group(number, columns=[column]).column(0).combine_chunks()
        except (OSError, pyarrow.ArrowException) as error:
            raise _damaged(self.path, error) from None


@dataclass(frozen=True)
class Text(Part):
    """One text file with a header line, read into the batches of an Arrow file."""

    separator: str
    reader: Any  # pyarrow.RecordBatchFileReader

    def records(self, columns: Sequence[str] | None = None) -> Iterator[Any]:
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
class Table:
    """One table in one or several files with the same columns."""

    parts: tuple[Part, ...]
    _recent: _Recent = field(default_factory=_Recent, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def columns(self) -> tuple[str, ...]:
        return self.parts[0].columns

    def find(self, role: Role) -> str | None:
        """The column with a usual name for this role, whatever its case; None where there is none."""
        return _find(self.columns, role)

    def found(self) -> str:
        """The columns that are there, for messages."""
        return f"found the columns {listed(self.columns)}"

    def batches(self, columns: Sequence[str]) -> Iterator[list[Any]]:
        """Consecutive rows of some columns, each as a pyarrow array of text; a missing cell is an empty text."""
        for part in self.parts:
            yield from part.batches(columns)

    def cells(self, column: str, rows: IntArray) -> list[str]:
        """The texts of one column at any rows, in their order, read from the file now."""
        order = np.argsort(rows, kind="stable")
        ascending = np.asarray(rows, dtype=np.int64)[order]
        found: list[str] = []
        start = 0
        for part in self.parts:
            stop = start + len(part)
            inside = ascending[np.searchsorted(ascending, start) : np.searchsorted(ascending, stop)] - start
            found += part.cells(column, inside, self._recent) if len(inside) else []
            start = stop
        back = np.empty(len(order), dtype=np.int64)
        back[order] = np.arange(len(order))
        return [found[place] for place in back]


def open_table(*paths: Path, named: Collection[str] = (), lenient: bool = False) -> Table:
    """Open a table.

    Args:
        paths: The files in their order: parquet, or text (UTF-8, or UTF-16 with a byte order mark) with a header line
            and one of `SEPARATORS`.
        named: Names of columns that the caller knows to be there, which help to detect the separator.
        lenient: Whether rows of a text file may lack cells at the end, and blank rows are left out.

    Raises:
        DataError: A file is missing or damaged, a row has more or fewer cells than the header, or the files differ in
            their columns.
    """
    parts = tuple(
        _open_parquet(path) if _is_parquet(path) else _open_text(path, named, lenient=lenient) for path in paths
    )
    for part in parts[1:]:
        if set(part.columns) != set(parts[0].columns):
            raise DataError(
                f"{part.path}: found the columns {listed(part.columns)}, but {parts[0].path.name} has "
                f"{listed(parts[0].columns)}; all files of one table need the same."
            )
    return Table(parts)


def _find(columns: Sequence[str], role: Role) -> str | None:
    simple = [name.strip().lower().replace(" ", "_").replace("-", "_") for name in columns]
    return next((columns[simple.index(name)] for name in USUAL_NAMES[role] if name in simple), None)


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path}: the table cannot be read ({str(error).splitlines()[0]}); write it again.")


def _is_parquet(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            start = file.read(4096)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; expected a table (.csv, .tsv or .parquet).") from None
    except OSError as error:
        raise DataError(f"{path}: the table cannot be read ({error.strerror}).") from None
    if not start:
        raise DataError(f"{path}: the file is empty; expected a table with a header line.")
    if start.startswith(b"PAR1"):
        return True
    if b"\x00" in start.partition(b"\n")[0] and not is_utf_16(start):
        raise DataError(f"{path}: this is neither parquet nor UTF-8 text; save the table as CSV (UTF-8) or parquet.")
    return False


def is_utf_16(start: bytes) -> bool:
    """Whether a file that starts like this has the byte order mark of UTF-16."""
    return start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))


def _open_parquet(path: Path) -> Parquet:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            content = file.metadata
            sizes = [content.row_group(group).num_rows for group in range(content.num_row_groups)]
            columns = tuple(file.schema_arrow.names)
    except (OSError, pyarrow.ArrowException) as error:
        raise _damaged(path, error) from None
    return Parquet(path, _distinct(columns, path), np.cumsum([0, *sizes]))


def _as_text(column: Any, name: str, path: Path) -> Any:
    import pyarrow

    try:
        return column.cast(pyarrow.large_string()).fill_null("")
    except pyarrow.ArrowException:
        raise DataError(
            f"{path}: the column {name} holds {column.type} or bytes that are not UTF-8; expected texts or numbers."
        ) from None


def _open_text(path: Path, named: Collection[str], *, lenient: bool) -> Text:
    separator, columns = _sniff(path, named)
    try:
        return _read_text(path, columns, separator, csv.QUOTE_MINIMAL, lenient=lenient)
    except _QuoteError:
        if separator not in _UNQUOTED:
            raise
    return _read_text(path, columns, separator, csv.QUOTE_NONE, lenient=lenient)


def _read_text(path: Path, columns: tuple[str, ...], separator: str, quoting: Literal[0, 3], *, lenient: bool) -> Text:
    """Copies all rows to an Arrow file that nobody else sees and that is deleted when it is closed."""
    import pyarrow

    schema = pyarrow.schema([(name, pyarrow.large_string()) for name in columns])
    rows = _checked(islice(_records(path, separator, quoting), 1, None), path, columns, separator, lenient=lenient)
    try:
        copy: IO[bytes] = io.BytesIO() if path.stat().st_size <= _SMALL else tempfile.TemporaryFile()  # noqa: SIM115
        sizes = []
        with pyarrow.ipc.new_file(copy, schema) as writer:
            while batch := list(islice(rows, _CHUNK)):
                arrays = [pyarrow.array(cells, pyarrow.large_string()) for cells in zip(*batch, strict=True)]
                writer.write_batch(pyarrow.record_batch(arrays, schema))
                sizes.append(len(batch))
        copy.seek(0)
        reader = pyarrow.ipc.open_file(copy)
    except OSError as error:
        raise DataError(f"{path}: the table cannot be read ({error.strerror or error}).") from None
    return Text(path, columns, np.cumsum([0, *sizes]), separator, reader)


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


def _sniff(path: Path, named: Collection[str]) -> tuple[str, tuple[str, ...]]:
    """The separator that cuts the header into the most known names, then into the most cells; and those cells.

    Only the header is used: captions are full of commas and semicolons.
    """
    headers: dict[str, tuple[str, ...]] = {}
    refusal: DataError | None = None
    for separator in SEPARATORS:
        try:
            header = next(_records(path, separator, csv.QUOTE_MINIMAL), [])
            headers[separator] = tuple(name.strip() for name in header)
        except DataError as error:  # a quoted header is wrong for all separators but its own
            refusal = refusal or error
    if refusal and not headers:
        raise refusal

    def known(separator: str) -> tuple[int, int]:
        columns = headers[separator]
        usual = sum(_find(columns, role) is not None for role in USUAL_NAMES)
        return usual + sum(name in columns for name in named), len(columns)

    best = max(headers, key=known)
    if not any(headers[best]):
        raise DataError(f"{path}: the file holds blank lines only; expected a header line and rows.")
    return best, _distinct(headers[best], path)


def _distinct(columns: tuple[str, ...], path: Path) -> tuple[str, ...]:
    for name in columns:
        if columns.count(name) > 1:
            raise DataError(f"{path}: {columns.count(name)} columns are named {name!r}; give each its own name.")
    return columns


class _QuoteError(DataError):
    """A quotation mark stands where none may."""


def _records(path: Path, separator: str, quoting: Literal[0, 3]) -> Iterator[list[str]]:
    """All rows with the header; empty lines are left out."""
    # Strict, else a forgotten quotation mark would take the rest of the file as one cell.
    bars = separator == "|"  # Flickr30K's table has spaces around them
    reader = csv.reader(_lines(path), delimiter=separator, quoting=quoting, skipinitialspace=bars, strict=True)
    try:
        yield from filter(None, reader)
    except csv.Error as error:
        raise _QuoteError(
            f"{path}: line {reader.line_num:,} cannot be read ({error}); look for a quotation mark or a carriage "
            "return that is not inside a quoted cell."
        ) from None
    except OSError as error:
        raise DataError(f"{path}: the table cannot be read ({error.strerror}).") from None


def _lines(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        if is_utf_16(file.read(2)):
            file.seek(0)
            try:
                yield from io.TextIOWrapper(file, "utf-16", newline="")
            except UnicodeError as error:
                raise DataError(f"{path}: the text is not UTF-16 ({error}); save the file again as UTF-8.") from None
            return
        file.seek(0)
        for number, line in enumerate(file, 1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise DataError(
                    f"{path}: line {number:,} is not UTF-8; convert the file with `iconv -f latin1 -t utf-8`."
                ) from None
