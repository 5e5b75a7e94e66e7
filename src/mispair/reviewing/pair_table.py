"""The table of an audit for paging: columns mapped from a file, so that a million rows take little memory.

`pairs.parquet` is compressed in groups of rows, which makes single rows slow to read. The columns that a review shows
are therefore written once to `review.arrow` beside it, and mapped from there. Pages that were read are given back to
the system, which keeps them in its cache.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import threading
import unicodedata
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from mispair.auditing.output_files import AUDIT, SUGGESTIONS, TABLE
from mispair.errors import DataError
from mispair.pairs.pairs import MATCH_THRESHOLD, IntArray
from mispair.support.files import replacing
from mispair.support.memory import release_memory, release_pages
from mispair.support.owned_folder import check_unchanged

if TYPE_CHECKING:
    import pyarrow

MAPPED = "review.arrow"
COLUMNS = ("id", "caption", "image", "status", "match_score", "is_mismatch", "reason", "reasons", "source")
HASH = 32  # bytes at the end of a mapped copy
MADE_FROM = b"made from"
SEPARATOR = "; "  # of several reasons in a cell
BATCH = 1 << 16  # rows that are converted at a time
REMEMBERED = 8  # selections
SEARCHERS = 4  # threads of a search
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
        self._opened = _version(folder / TABLE)
        self._table, self._pages = _mapped(folder / TABLE, folder / MAPPED)
        self.score = self._numbers("match_score")
        self._selected: OrderedDict[Filter, Rows] = OrderedDict()
        self._lock, self._selecting = threading.Lock(), threading.Lock()

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __contains__(self, column: str) -> bool:
        return column in self._table.column_names

    @property
    def is_outdated(self) -> bool:
        """Whether another audit has taken the place of this one since, or begun to."""
        return _version(self.folder / TABLE) != self._opened

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
        found = [chunks[int(row) // BATCH][int(row) % BATCH].as_py() for row in rows]
        release_pages(self._pages)
        return ["" if cell is None else str(cell) for cell in found]

    def cell(self, column: str, row: int) -> str:
        return self.cells(column, [row])[0]

    def find(self, ids: Sequence[str]) -> dict[str, int]:
        """The rows of these ids, without those that are not there; of equal ids the first, as in an audit."""
        import pyarrow.compute as compute

        if not ids:
            return {}
        column = self._table.column("id")
        rows = np.flatnonzero(self._truth(compute.is_in(column, _texts(ids).cast(column.type)).chunks))[::-1]
        return dict(zip(self.cells("id", rows), rows.tolist(), strict=True))

    def is_of(self, columns: Mapping[str, pyarrow.Array]) -> bool:
        """Whether the table has these texts, as far as it has such columns."""
        import pyarrow

        text = pyarrow.large_string()
        same = (
            self._table.column(name).cast(text).equals(pyarrow.chunked_array([texts.cast(text)]))
            for name, texts in columns.items()
            if name in self
        )
        found = all(same)
        release_pages(self._pages)
        return found

    @cached_property
    def readable(self) -> Rows:
        """Rows that have a match score."""
        return np.flatnonzero(~np.isnan(self.score)).astype(np.int32)

    @cached_property
    def flagged(self) -> Mask:
        """(N,) whether each pair is flagged."""
        if "is_mismatch" in self:
            return self._truth(self._table.column("is_mismatch").chunks)
        return np.asarray(self.score < MATCH_THRESHOLD)

    def _truth(self, chunks: Iterable[pyarrow.BooleanArray]) -> Mask:
        """The truth values of a column."""
        found = np.concatenate([np.zeros(0, bool), *map(_flags, chunks)])
        release_pages(self._pages)
        return found

    def counts(self, *columns: str, most: int = 50) -> dict[str, int]:
        """The commonest values of columns, and how many pairs have each; a cell may hold several, separated by `; `."""
        import pyarrow.compute as compute

        found: Counter[str] = Counter()
        for column in columns:
            if column in self:
                for entry in compute.value_counts(self._table.column(column)).to_pylist():
                    found.update(dict.fromkeys((entry["values"] or "").split(SEPARATOR), entry["counts"]))
        del found[""]
        release_pages(self._pages)
        return dict(found.most_common(most))

    def select(self, wanted: Filter) -> Rows:
        """The rows that a filter lets through, in its order."""
        rows = self._remembered(wanted)
        if rows is None:
            with self._selecting:  # one at a time: each takes memory
                rows = self._remembered(wanted)  # found by another thread meanwhile
                if rows is None:
                    rows = self._find(wanted)
                    with self._lock:
                        self._selected[wanted] = rows
                        if len(self._selected) > REMEMBERED:
                            self._selected.popitem(last=False)
        return rows

    def _remembered(self, wanted: Filter) -> Rows | None:
        with self._lock:
            if wanted in self._selected:
                self._selected.move_to_end(wanted)
            return self._selected.get(wanted)

    def _find(self, wanted: Filter) -> Rows:
        rows = np.flatnonzero(self._mask(wanted)).astype(np.int32)
        if wanted.sort != "row":
            score = self.score[rows]
            key = {"score": score, "-score": -score, "doubt": np.abs(score - MATCH_THRESHOLD)}[wanted.sort]
            rows = rows[key.argsort(kind="stable")]
        release_memory()
        return rows

    def _mask(self, wanted: Filter) -> Mask:
        mask = np.ones(len(self), dtype=bool)
        if wanted.low > 0 or wanted.high < 1:
            mask &= (self.score >= wanted.low) & (self.score <= wanted.high)
        if wanted.flagged:
            mask &= self.flagged
        if wanted.source:
            mask &= self._equal("source", wanted.source)
        for columns, value in ((("reason", "reasons"), wanted.reason), (("caption", "id"), wanted.text)):
            if value:
                mask[mask] = self._has(columns, value, mask)
        return mask

    def _equal(self, column: str, text: str) -> Mask:
        import pyarrow.compute as compute

        if column not in self:
            return np.zeros(len(self), dtype=bool)
        return self._truth(compute.equal(self._table.column(column), text).chunks)

    def _has(self, columns: Sequence[str], text: str, among: Mask) -> Mask:
        """For each row of a mask whether a cell of one of these columns has the text in it; case does not matter, nor
        whether letters and their accents are one character or two."""
        columns = [column for column in columns if column in self]
        forms = {unicodedata.normalize("NFC", text), unicodedata.normalize("NFD", text)}

        def found(start: int) -> Mask:
            """In one batch; a row of the mask that was found is not looked at again."""
            here = among[start : start + BATCH]
            missing = here.copy()
            for column, form in itertools.product(columns, forms):
                chunk = self._table.column(column).chunk(start // BATCH)
                missing[missing] = ~_flags(_containing(chunk.filter(_truth_values(missing)), form))
            release_pages(self._pages)
            return ~missing[here]

        with ThreadPoolExecutor(min(SEARCHERS, os.cpu_count() or 1)) as pool:
            return np.concatenate([np.zeros(0, bool), *pool.map(found, range(0, len(self), BATCH))])

    def suggestions(self, row: int) -> list[Suggestion]:
        """Better partners of a row, the best first."""
        rows, others, right, scores = self._suggestions
        here = range(*np.searchsorted(rows, [row, row + 1]).tolist())
        return [Suggestion("right" if right[at] else "left", int(others[at]), float(scores[at])) for at in here]

    @cached_property
    def _suggestions(self) -> tuple[Rows, Rows, Mask, npt.NDArray[np.float32]]:
        """Row, row of the partner, whether it replaces the right side, and score; by row, the best first."""
        import pyarrow
        import pyarrow.parquet

        path = self.folder / SUGGESTIONS
        if not path.is_file():
            return np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, bool), np.zeros(0, np.float32)
        try:
            table = pyarrow.parquet.ParquetFile(path).read()
            columns = table.select(["id", "suggested_id", "replaced", "score"]).to_pydict()
        except (OSError, UnicodeError, KeyError, pyarrow.ArrowException) as error:
            raise DataError(f"{path}: the suggestions cannot be read ({error}); audit again.") from None
        known = self.find(list({*columns["id"], *columns["suggested_id"]}))
        rows, others = (
            np.array([known.get(name, -1) for name in columns[side]], np.int32) for side in ("id", "suggested_id")
        )
        right = np.array([side == "right" for side in columns["replaced"]], bool)
        scores = np.array(columns["score"], np.float32)
        order = np.lexsort((-scores, rows))
        order = order[(rows[order] >= 0) & (others[order] >= 0)]
        release_memory()
        return rows[order], others[order], right[order], scores[order]


# `pyarrow.array`, `to_numpy` and `read_table` would import pandas, where it is installed: .3 s and 30 MB.


def _texts(texts: Sequence[str]) -> pyarrow.LargeStringArray:
    import pyarrow

    encoded = [text.encode() for text in texts]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    buffers = [None, pyarrow.py_buffer(ends), pyarrow.py_buffer(b"".join(encoded))]
    return pyarrow.Array.from_buffers(pyarrow.large_string(), len(texts), buffers)


def _values(column: pyarrow.ChunkedArray, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """The numbers of a column without nulls."""
    parts = [
        np.frombuffer(chunk.buffers()[1], dtype)[chunk.offset : chunk.offset + len(chunk)]
        for chunk in column.chunks
        if len(chunk)
    ]
    return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, dtype), *parts])


def _flags(values: pyarrow.BooleanArray) -> Mask:
    """Truth values as an array; null is false."""
    if not len(values):
        return np.zeros(0, dtype=bool)
    values = values.fill_null(False) if values.null_count else values
    bits = np.frombuffer(values.buffers()[1], np.uint8)
    return np.unpackbits(bits, count=values.offset + len(values), bitorder="little")[values.offset :].astype(bool)


def _truth_values(flags: Mask) -> pyarrow.BooleanArray:
    """The inverse of `_flags`."""
    import pyarrow

    bits = pyarrow.py_buffer(np.packbits(flags, bitorder="little"))
    return pyarrow.Array.from_buffers(pyarrow.bool_(), len(flags), [None, bits])


def _containing(texts: pyarrow.Array, text: str) -> pyarrow.BooleanArray:
    import pyarrow.compute as compute

    return compute.match_substring(texts, text, ignore_case=True)


def _version(path: Path) -> bytes:
    """Tells a file from others of its name; empty where there is none."""
    try:
        found = path.stat()
    except OSError:
        return b""
    return f"{found.st_size} {found.st_mtime_ns}".encode()


def _mapped(path: Path, copy: Path) -> tuple[pyarrow.Table, mmap]:
    """The table of a parquet file, mapped from an uncompressed copy of it, and the mapping."""
    import pyarrow

    if not path.is_file():
        raise DataError(
            f"{path.parent}: no {path.name} in here; give the folder that `mispair audit --out` has written."
        )
    version = _version(path)
    try:
        found = _open(copy, version)
        if found is None:
            check_unchanged(path.parent, AUDIT, (TABLE, SUGGESTIONS))
            with _place(copy) as place:
                _write(path, place, version)
                release_memory()
                found = _open(place, version)
    except (OSError, UnicodeError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: the table cannot be read ({error}); audit again with --overwrite.") from None
    if found is None:  # texts that are not UTF-8, for one
        raise DataError(f"{path}: the table cannot be read (it is damaged); audit again with --overwrite.")
    missing = {"id", "status", "match_score"} - set(found[0].column_names)
    if missing:
        raise DataError(f"{path}: no column {sorted(missing)[0]}; this is not the table of an audit.")
    return found


@contextmanager
def _place(copy: Path) -> Iterator[Path]:
    """Where to write the copy; where its folder cannot be written, it lasts for this process only."""
    if os.access(copy.parent, os.W_OK):
        yield copy
    else:
        with TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # Windows deletes no mapped file
            yield Path(folder, copy.name)


def _open(copy: Path, version: bytes) -> tuple[pyarrow.Table, mmap] | None:
    """A copy that was made from this version, and its mapping; None where there is none."""
    import pyarrow

    if not copy.is_file():
        return None
    try:
        with copy.open("rb") as file:
            pages = mmap(file.fileno(), 0, access=ACCESS_READ)
        whole = pyarrow.py_buffer(pages)
        content, written = whole[:-HASH], whole[-HASH:]
        if hashlib.sha256(content).digest() != written.to_pybytes():
            return None
        table = pyarrow.ipc.open_file(content).read_all()
        table.validate(full=True)  # else texts might begin or end outside the file
        release_pages(pages)
    except (OSError, ValueError, pyarrow.ArrowException):  # damaged or empty
        return None
    return (table, pages) if (table.schema.metadata or {}).get(MADE_FROM) == version else None


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

    with replacing(copy, durable=False) as file:
        hashing = _Hashing(file)
        with pyarrow.ipc.new_file(hashing, schema) as writer:
            yield writer
        file.write(hashing.hash.digest())


def _write(path: Path, copy: Path, version: bytes) -> None:
    import pyarrow
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    kept = [field for field in file.schema_arrow if field.name in COLUMNS]
    schema = pyarrow.schema(kept, {MADE_FROM: version})
    with _writing(copy, schema) as writer:
        held: list[pyarrow.RecordBatch] = []
        count = 0
        for batch in _batches(file, schema.names):  # may be shorter at the end of a group of rows
            held.append(batch)
            count += len(batch)
            while count >= BATCH:
                table = pyarrow.Table.from_batches(held)
                writer.write_table(table.slice(0, BATCH).combine_chunks(), BATCH)
                rest = table.slice(BATCH)
                held, count = rest.to_batches(), len(rest)
        if count:
            writer.write_table(pyarrow.Table.from_batches(held).combine_chunks(), BATCH)


def _batches(file: pyarrow.parquet.ParquetFile, columns: list[str]) -> Iterator[pyarrow.RecordBatch]:
    import pyarrow

    try:
        yield from file.iter_batches(BATCH, columns=columns)
    except OSError as error:  # which would be taken for one of writing the copy
        raise pyarrow.ArrowInvalid(str(error)) from None
