"""The table of an audit for paging: columns mapped from a file, so that a million rows take little memory.

`pairs.parquet` is compressed in groups of rows, which makes single rows slow to read. Its columns are therefore written
once to `review.arrow` beside it, and mapped from there; likewise the rows of the suggestions, to
`review_suggestions.arrow`.
"""

from __future__ import annotations

import hashlib
import io
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from mispair.auditing.output_files import AUDIT, SUGGESTIONS, TABLE
from mispair.data.pairs import MATCH_THRESHOLD, IntArray
from mispair.errors import DataError
from mispair.support.files import replacing
from mispair.support.owned_folder import check_unchanged

if TYPE_CHECKING:
    import pyarrow

MAPPED, MAPPED_SUGGESTIONS = "review.arrow", "review_suggestions.arrow"
HASH = 32  # bytes at the end of a mapped copy
MADE_FROM = b"made from"
SEPARATOR = "; "  # of several reasons in a cell
BATCH = 1 << 16  # rows that are converted at a time
REMEMBERED = 8  # selections
Sort = Literal["score", "doubt", "row", "-score"]
Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Filter:
    """Which pairs to show, and in which order.

    Attributes:
        low: Least match score.
        high: Greatest match score.
        flagged: Only flagged pairs.
        reason: Only pairs with this reason.
        source: Only pairs of this source.
        text: Only pairs whose caption or id has this in it; case does not matter.
        sort: By match score, by closeness to 0.5, in the order of the data, or the highest match score first.
    """

    low: float = 0.0
    high: float = 1.0
    flagged: bool = True
    reason: str = ""
    source: str = ""
    text: str = ""
    sort: Sort = "score"


class Suggestion(NamedTuple):
    """A better partner for one side of a pair."""

    replaced: str  # the side that it replaces, "left" or "right"
    row: int  # of the pair that it is taken from
    score: float  # probability that the new pair matches


class PairTable:
    """The rows of an audit.

    Args:
        folder: The output of the audit.

    Raises:
        DataError: It is no output of an audit, or a damaged one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._table = _mapped(folder / TABLE, folder / MAPPED)
        self.score = self._numbers("match_score")
        self._selected: OrderedDict[Filter, Rows] = OrderedDict()

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __contains__(self, column: str) -> bool:
        return column in self._table.column_names

    def _numbers(self, column: str) -> npt.NDArray[np.float32]:
        import pyarrow

        values = self._table.column(column)
        values = values if values.type == pyarrow.float32() else values.cast(pyarrow.float32())
        return _values(values.fill_null(np.nan) if values.null_count else values, np.float32)

    def cells(self, column: str, rows: Sequence[int] | IntArray | Rows) -> list[str]:
        """The texts of a column; empty ones where there is no such column."""
        if column not in self:
            return [""] * len(rows)
        chunks = self._table.column(column).chunks
        found = (chunks[int(row) // BATCH][int(row) % BATCH].as_py() for row in rows)
        return ["" if cell is None else str(cell) for cell in found]

    def cell(self, column: str, row: int) -> str:
        return self.cells(column, [row])[0]

    def find(self, ids: Sequence[str]) -> dict[str, int]:
        """The rows of these ids, without those that are not there."""
        import pyarrow
        import pyarrow.compute as compute

        if not ids:
            return {}
        column = self._table.column("id")
        rows = np.flatnonzero(_flags(compute.is_in(column, pyarrow.array(ids, column.type))))
        return dict(zip(self.cells("id", rows), rows.tolist(), strict=True))

    @cached_property
    def readable(self) -> IntArray:
        """Rows that have a match score."""
        return np.flatnonzero(~np.isnan(self.score))

    @cached_property
    def flagged(self) -> Mask:
        """(N,) whether each pair is flagged."""
        if "is_mismatch" in self:
            return _flags(self._table.column("is_mismatch"))
        return np.asarray(self.score < MATCH_THRESHOLD)

    def counts(self, *columns: str, most: int = 50) -> dict[str, int]:
        """The commonest values of columns, and how many pairs have each; a cell may hold several, separated by `; `."""
        import pyarrow.compute as compute

        found: Counter[str] = Counter()
        for column in columns:
            if column in self:
                for entry in compute.value_counts(self._table.column(column)).to_pylist():
                    found.update(dict.fromkeys((entry["values"] or "").split(SEPARATOR), entry["counts"]))
        del found[""]
        return dict(found.most_common(most))

    def select(self, wanted: Filter) -> Rows:
        """The rows that a filter lets through, in its order."""
        if wanted in self._selected:
            self._selected.move_to_end(wanted)
            return self._selected[wanted]
        plain = Filter(sort=wanted.sort, flagged=False)
        if wanted == plain:
            rows = self._order(wanted.sort)
        else:
            everything = self.select(plain)
            rows = everything[self._mask(wanted)[everything]]
        self._selected[wanted] = rows
        if len(self._selected) > REMEMBERED:
            self._selected.popitem(last=False)
        return rows

    def _order(self, sort: Sort) -> Rows:
        if sort == "row":
            return np.arange(len(self), dtype=np.int32)
        key = {"score": self.score, "-score": -self.score, "doubt": np.abs(self.score - MATCH_THRESHOLD)}[sort]
        return np.asarray(key.argsort(kind="stable"), dtype=np.int32)  # half the memory

    def _mask(self, wanted: Filter) -> Mask:
        mask = np.ones(len(self), dtype=bool)
        if wanted.low > 0 or wanted.high < 1:
            mask &= (self.score >= wanted.low) & (self.score <= wanted.high)
        if wanted.flagged:
            mask &= self.flagged
        for columns, value in ((("reason", "reasons"), wanted.reason), (("source",), wanted.source)):
            if value:
                mask &= self._has(columns, value)
        if wanted.text:
            mask &= self._has(("caption", "id"), wanted.text)
        return mask

    def _has(self, columns: Sequence[str], text: str) -> Mask:
        """(N,) whether a cell of one of these columns has the text in it; case does not matter."""
        import pyarrow.compute as compute

        found = np.zeros(len(self), dtype=bool)
        for column in columns:
            if column in self:
                hits = compute.match_substring(self._table.column(column), text, ignore_case=True)
                found |= _flags(hits)
        return found

    def suggestions(self, row: int) -> list[Suggestion]:
        """Better partners of a row, the best first."""
        rows, others, right, scores = self._suggestions
        here = range(*np.searchsorted(rows, [row, row + 1]).tolist())
        return [Suggestion("right" if right[at] else "left", int(others[at]), float(scores[at])) for at in here]

    @cached_property
    def _suggestions(self) -> tuple[Rows, Rows, npt.NDArray[np.int8], npt.NDArray[np.float32]]:
        """Row, row of the partner, whether it replaces the right side, and score; by row, the best first."""
        import pyarrow

        path, copy = self.folder / SUGGESTIONS, self.folder / MAPPED_SUGGESTIONS
        if not path.is_file():
            return np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int8), np.zeros(0, np.float32)
        version = b"; ".join(map(_version, (self.folder / TABLE, path)))
        try:
            table = _open(copy, version)
            if table is None:
                table = self._sorted_suggestions(path).replace_schema_metadata({MADE_FROM: version})
                with _writing(copy, table.schema) as writer:
                    writer.write_table(table)
        except (OSError, UnicodeError, KeyError, pyarrow.ArrowException) as error:
            raise DataError(f"{path}: the suggestions cannot be read ({error}); audit again.") from None
        rows, others = (_values(table.column(name), np.int32) for name in ("row", "partner"))
        return rows, others, _values(table.column("right"), np.int8), _values(table.column("score"), np.float32)

    def _sorted_suggestions(self, path: Path) -> pyarrow.Table:
        """The suggestions with the rows of their ids."""
        import pyarrow
        import pyarrow.compute as compute
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(path)
        ids = self._table.column("id")
        rows, others = (
            compute.index_in(table.column(name).cast(ids.type), ids).fill_null(-1).to_numpy().astype(np.int32)
            for name in ("id", "suggested_id")
        )
        right = compute.equal(table.column("replaced"), "right").to_numpy().astype(np.int8)
        scores = table.column("score").to_numpy().astype(np.float32)
        order = np.lexsort((-scores, rows))
        order = order[(rows[order] >= 0) & (others[order] >= 0)]
        columns = {"row": rows, "partner": others, "right": right, "score": scores}
        return pyarrow.table({name: values[order] for name, values in columns.items()})


def _values(column: pyarrow.ChunkedArray, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """The numbers of a column without nulls. `to_numpy` would import pandas, where it is installed."""
    parts = [
        np.frombuffer(chunk.buffers()[1], dtype)[chunk.offset : chunk.offset + len(chunk)]
        for chunk in column.chunks
        if len(chunk)
    ]
    return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, dtype), *parts])


def _flags(column: pyarrow.ChunkedArray) -> Mask:
    """The truth values of a column; null is false."""
    found = np.zeros(len(column), dtype=bool)
    start = 0
    for chunk in (column.fill_null(False) if column.null_count else column).chunks:
        end = chunk.offset + len(chunk)
        if len(chunk):
            bits = np.unpackbits(np.frombuffer(chunk.buffers()[1], np.uint8), count=end, bitorder="little")
            found[start : start + len(chunk)] = bits[chunk.offset :]
        start += len(chunk)
    return found


def _version(path: Path) -> bytes:
    found = path.stat()
    return f"{found.st_size} {found.st_mtime_ns}".encode()


def _mapped(path: Path, copy: Path) -> pyarrow.Table:
    """The table of a parquet file, mapped from an uncompressed copy of it."""
    import pyarrow

    if not path.is_file():
        raise DataError(
            f"{path.parent}: no {path.name} in here; give the folder that `mispair audit --out` has written."
        )
    version = _version(path)
    try:
        table = _open(copy, version)
        if table is None:
            check_unchanged(path.parent, AUDIT, (TABLE, SUGGESTIONS))
            _write(path, copy, version)
            table = _open(copy, version)
    except (OSError, UnicodeError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: the table cannot be read ({error}); audit again with --overwrite.") from None
    assert table is not None
    missing = {"id", "status", "match_score"} - set(table.column_names)
    if missing:
        raise DataError(f"{path}: no column {sorted(missing)[0]}; this is not the table of an audit.")
    return table


def _open(copy: Path, version: bytes) -> pyarrow.Table | None:
    """A copy that was made from this version; None where there is none."""
    import pyarrow

    if not copy.is_file():
        return None
    try:
        with pyarrow.memory_map(str(copy)) as file:
            whole = file.read_buffer()
        content, written = whole[:-HASH], whole[-HASH:]
        if hashlib.sha256(content).digest() != written.to_pybytes():
            return None
        table = pyarrow.ipc.open_file(content).read_all()
        table.validate(full=True)  # else texts might begin or end outside the file
    except (OSError, UnicodeError, pyarrow.ArrowException):  # damaged
        return None
    return table if (table.schema.metadata or {}).get(MADE_FROM) == version else None


class _Hashing(io.RawIOBase):
    """Hashes what is written to a file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.hash = file, hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self.hash.update(content)
        return self._file.write(content)

    def tell(self) -> int:
        return self._file.tell()


@contextmanager
def _writing(copy: Path, schema: pyarrow.Schema) -> Iterator[pyarrow.ipc.RecordBatchFileWriter]:
    """Writes a table to be mapped, with its SHA-256 at the end."""
    import pyarrow

    with replacing(copy) as file:
        hashing = _Hashing(file)
        with pyarrow.ipc.new_file(hashing, schema) as writer:
            yield writer
        file.write(hashing.hash.digest())


def _write(path: Path, copy: Path, version: bytes) -> None:
    import pyarrow
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    schema = file.schema_arrow.with_metadata({MADE_FROM: version})
    with _writing(copy, schema) as writer:
        held: list[pyarrow.RecordBatch] = []
        count = 0
        for batch in file.iter_batches(BATCH):  # may be shorter at the end of a group of rows
            held.append(batch)
            count += len(batch)
            while count >= BATCH:
                table = pyarrow.Table.from_batches(held)
                writer.write_table(table.slice(0, BATCH).combine_chunks(), BATCH)
                rest = table.slice(BATCH)
                held, count = rest.to_batches(), len(rest)
        if count:
            writer.write_table(pyarrow.Table.from_batches(held).combine_chunks(), BATCH)
    pyarrow.default_memory_pool().release_unused()
