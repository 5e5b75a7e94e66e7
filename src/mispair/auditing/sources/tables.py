"""Tables of ids, captions and paths: parquet, or text whose separator is found out.

Columns are streamed in batches and single cells are looked up where they are needed, so that a table of ten million
rows takes no memory.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mispair.data.pairs import IntArray
from mispair.errors import DataError
from mispair.support.formatting import listed

Role = Literal["id", "caption", "image_path", "group", "status"]
USUAL_NAMES: dict[Role, tuple[str, ...]] = {
    "id": ("id", "key", "uid", "pair_id", "sample_id"),
    "caption": ("caption", "text", "title", "sentence", "comment", "description"),
    "image_path": (
        "image_path", "image", "path", "img_path", "filepath", "file_path", "filename", "file_name", "image_name",
        "image_file", "img", "file",
    ),
    "group": ("group", "group_id"),
    "status": ("status",),
}  # fmt: skip
SEPARATORS = (",", "\t", ";", "|")
BATCH = 1 << 16
_STRIDE = 1024  # rows of a text table between two known places in its file
_BOM = b"\xef\xbb\xbf"


@dataclass
class _Recent:
    """What was read last of a table, because neighbouring rows are asked for one after the other."""

    key: tuple[Path, int, str] | None = None
    cells: Any = None


@dataclass(frozen=True)
class Parquet:
    """One parquet file."""

    path: Path
    columns: tuple[str, ...]
    starts: IntArray  # first row of each row group, and the number of rows

    def __len__(self) -> int:
        return int(self.starts[-1])

    def batches(self, columns: Sequence[str]) -> Iterator[list[Any]]:
        """Consecutive rows of some columns, each as a pyarrow array of text without gaps."""
        for batch in self.records(columns):
            yield [_as_text(batch.column(name), name, self.path) for name in columns]

    def records(self, columns: Sequence[str] | None = None) -> Iterator[Any]:
        """Consecutive rows as they are stored (`pyarrow.RecordBatch`)."""
        import pyarrow
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(self.path) as file:
                yield from file.iter_batches(BATCH, columns=None if columns is None else list(columns))
        except (OSError, pyarrow.ArrowException) as error:
            raise _damaged(self.path, error) from None

    def cells(self, column: str, rows: IntArray, recent: _Recent) -> list[str]:
        """The texts of one column at ascending rows."""
        import pyarrow

        found: list[str] = []
        for group, start, stop in zip(range(len(self.starts) - 1), self.starts, self.starts[1:], strict=False):
            inside = rows[np.searchsorted(rows, start) : np.searchsorted(rows, stop)] - start
            if len(inside):
                found += self._group(group, column, recent).take(pyarrow.array(inside)).to_pylist()
        return found

    def _group(self, number: int, column: str, recent: _Recent) -> Any:
        import pyarrow
        import pyarrow.parquet

        if recent.key != (self.path, number, column):
            recent.key, recent.cells = None, None  # given up before the next one is read
            try:
                with pyarrow.parquet.ParquetFile(self.path) as file:
                    stored = file.read_row_group(number, columns=[column]).column(0)
            except (OSError, pyarrow.ArrowException) as error:
                raise _damaged(self.path, error) from None
            recent.cells = _as_text(stored, column, self.path).combine_chunks()
            recent.key = (self.path, number, column)
        return recent.cells


@dataclass(frozen=True)
class Text:
    """One text file with a header line."""

    path: Path
    columns: tuple[str, ...]
    separator: str
    places: IntArray  # byte where row 0, _STRIDE, 2 * _STRIDE, ... starts
    rows: int

    def __len__(self) -> int:
        return self.rows

    def batches(self, columns: Sequence[str]) -> Iterator[list[Any]]:
        """Consecutive rows of some columns, each as a pyarrow array of text without gaps."""
        import pyarrow

        numbers = [self.columns.index(name) for name in columns]
        rows = self.records()
        while batch := list(islice(rows, BATCH)):
            yield [pyarrow.array([row[number] for row in batch], pyarrow.large_string()) for number in numbers]

    def records(self) -> Iterator[list[str]]:
        """All rows after the header."""
        if self.rows:
            yield from (cells for _, cells in _records(self.path, self.separator, int(self.places[0])))

    def cells(self, column: str, rows: IntArray, recent: _Recent) -> list[str]:
        """The texts of one column at ascending rows."""
        number = self.columns.index(column)
        return [self._stretch(int(row) // _STRIDE, recent)[int(row) % _STRIDE][number] for row in rows]

    def _stretch(self, number: int, recent: _Recent) -> list[list[str]]:
        if recent.key != (self.path, number, ""):
            rows = _records(self.path, self.separator, int(self.places[number]))
            recent.cells = [cells for _, cells in islice(rows, _STRIDE)]
            recent.key = (self.path, number, "")
        stretch: list[list[str]] = recent.cells
        return stretch


Part = Parquet | Text


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


def open_table(*paths: Path) -> Table:
    """Open a table without reading its rows (a text table is read once, to find where its rows start).

    Args:
        paths: The files in their order: parquet, or UTF-8 text with a header line and one of `SEPARATORS`.

    Raises:
        DataError: A file is missing or damaged, a row has more or fewer cells than the header, or the files differ in
            their columns.
    """
    parts = tuple(_open_parquet(path) if _is_parquet(path) else _open_text(path) for path in paths)
    for part in parts[1:]:
        if set(part.columns) != set(parts[0].columns):
            raise DataError(
                f"{part.path}: found the columns {listed(part.columns)}, but {parts[0].path.name} has "
                f"{listed(parts[0].columns)}; all files of one table need the same."
            )
    return Table(parts)


def _find(columns: Sequence[str], role: Role) -> str | None:
    lowered = [name.strip().lower() for name in columns]
    return next((columns[lowered.index(name)] for name in USUAL_NAMES[role] if name in lowered), None)


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path}: the table cannot be read ({error}); write it again.")


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
    if b"\x00" in start.partition(b"\n")[0]:
        raise DataError(f"{path}: this is neither parquet nor UTF-8 text; save the table as CSV (UTF-8) or parquet.")
    return False


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


def _open_text(path: Path) -> Text:
    separator, columns = _sniff(path)
    places: list[int] = []
    row = -1
    for row, (place, cells) in enumerate(islice(_records(path, separator), 1, None)):
        if len(cells) != len(columns):
            raise DataError(
                f"{path}: row {row + 1:,} has {len(cells)} cells and the header {len(columns)} ({listed(columns)}); "
                f"put quotation marks around cells that hold the separator {separator!r}."
            )
        if row % _STRIDE == 0:
            places.append(place)
    return Text(path, columns, separator, np.array(places, dtype=np.int64), row + 1)


def _sniff(path: Path) -> tuple[str, tuple[str, ...]]:
    """The separator that cuts the header into the most usual names, then into the most cells; and those cells.

    Only the header is looked at: captions are full of commas and semicolons.
    """
    headers: dict[str, tuple[str, ...]] = {}
    refusal: DataError | None = None
    for separator in SEPARATORS:
        try:
            headers[separator] = tuple(name.strip() for name in next(_records(path, separator), (0, []))[1])
        except DataError as error:  # a quoted header is wrong for all separators but its own
            refusal = refusal or error
    if refusal and not headers:
        raise refusal
    best = max(headers, key=lambda one: (sum(_find(headers[one], role) is not None for role in USUAL_NAMES),
                                         len(headers[one])))  # fmt: skip
    return best, _distinct(headers[best], path)


def _distinct(columns: tuple[str, ...], path: Path) -> tuple[str, ...]:
    for name in columns:
        if columns.count(name) > 1:
            raise DataError(f"{path}: {columns.count(name)} columns are named {name!r}; give each its own name.")
    return columns


def _records(path: Path, separator: str, start: int = 0) -> Iterator[tuple[int, list[str]]]:
    """The rows from byte `start` on, each with the byte where it starts; empty lines are left out."""
    position = start

    def lines() -> Iterator[str]:
        nonlocal position
        for line in file:
            position += len(line)
            try:
                yield line.decode()
            except UnicodeDecodeError as error:
                where = position - len(line) + error.start
                raise DataError(
                    f"{path}: byte {where:,} is not UTF-8; convert the file with `iconv -f latin1 -t utf-8`."
                ) from None

    try:
        with path.open("rb") as file:
            if start == 0 and file.read(len(_BOM)) == _BOM:
                position = len(_BOM)
            file.seek(position)
            # Strict, else a forgotten quotation mark would swallow the rest of the file without a word.
            reader = csv.reader(lines(), delimiter=separator, strict=True)
            while True:
                place = position  # the reader takes no more lines than its row needs
                try:
                    cells = next(reader, None)
                except csv.Error as error:
                    raise DataError(
                        f"{path}: line {reader.line_num:,} cannot be read ({error}); look for a quotation mark or a "
                        "carriage return that is not inside a quoted cell."
                    ) from None
                if cells is None:
                    return
                if cells:
                    yield place, cells
    except OSError as error:
        raise DataError(f"{path}: the table cannot be read ({error.strerror}).") from None
