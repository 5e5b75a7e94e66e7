"""The table of an audit for paging, so that a million rows take little memory.

`pairs.parquet` is compressed in groups of rows, which makes single rows slow to read. Its texts and the suggestions are
imported once into `review.sqlite` beside it. That file can be deleted at any time, and is made anew when the audit has
changed or its SHA-256 in `review.json` does not match. Match scores and flags stay in memory: numpy filters and sorts a
million of them ten times as fast as SQLite.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from mispair.auditing.output_files import AUDIT, SUGGESTIONS, TABLE
from mispair.errors import DamagedError, DataError, NotFoundError, ShapeError
from mispair.pairs.pairs import MATCH_THRESHOLD
from mispair.support.files import read_json, replacing, sha256_of, write_atomically
from mispair.support.owned_folder import check_unchanged
from mispair.support.progress import progress

if TYPE_CHECKING:
    import pyarrow
    from rich.console import Console

COPY, STATE = "review.sqlite", "review.json"
VERSION = 1  # of the tables in the copy
TEXTS = ("id", "caption", "image", "status", "reason", "reasons", "source")
NEEDED = {"id", "status", "match_score", "is_mismatch"}
SEPARATOR = "; "  # of several reasons in a cell
BATCH = 1 << 16  # rows that are imported at a time
ASKED = 900  # values of one query; old versions of SQLite take 999
REMEMBERED = 8  # selections
Sort = Literal["score", "doubt", "row", "-score"]  # doubt: the closest to 0.5 first
Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int32]
_TABLES = f"""
    PRAGMA journal_mode = OFF;  -- a copy that is not finished is deleted
    PRAGMA synchronous = OFF;
    PRAGMA page_size = 16384;
    CREATE TABLE pairs (row INTEGER PRIMARY KEY, {" TEXT, ".join(TEXTS)} TEXT);
    CREATE TABLE searched (row INTEGER PRIMARY KEY, text TEXT);  -- apart, as a search reads all of it
    CREATE TABLE suggestions (id TEXT, replaced TEXT, suggested_id TEXT, score REAL);
    CREATE TABLE counts (name TEXT, value TEXT, count INTEGER);
"""
_INDEXES = "CREATE INDEX ids ON pairs (id); CREATE INDEX suggested ON suggestions (id);"


@dataclass(frozen=True)
class Filter:
    """Which pairs to show, and in which order."""

    low: float = 0.0  # match score
    high: float = 1.0
    flagged: bool = True  # only flagged pairs
    reason: str = ""
    source: str = ""
    text: str = ""  # in the caption or the id; case does not matter, nor whether an accent is a character of its own
    sort: Sort = "score"


class Pair(NamedTuple):
    """The texts of a pair; empty where the audit has no such column."""

    row: int
    id: str
    caption: str
    image: str
    status: str
    reason: str
    reasons: str
    source: str


class Suggestion(NamedTuple):
    """A better partner for one side of a pair."""

    replaced: str  # the side that it replaces, "left" or "right"
    row: int  # of the pair that it is taken from
    score: float  # probability that the new pair matches


class PairTable:
    """The rows of an audit.

    Attributes:
        columns: Names of the columns of the audit's table.
        score: (N,) match scores; NaN where a pair could not be read.
        flagged: (N,) whether each pair is flagged.

    Raises:
        DataError: The folder holds no output of an audit, or a damaged one.
    """

    def __init__(self, folder: Path, console: Console | None = None) -> None:
        self.folder, self._opened = folder, _version(folder)
        self.columns = audit_schema(folder)
        numbers = audit_columns(folder, "match_score", "is_mismatch")
        self.score, self.flagged = np.array(numbers["match_score"], np.float32), np.array(numbers["is_mismatch"], bool)
        self._copy, self._lock = _imported(folder, self._opened, console), threading.Lock()
        self.select = lru_cache(REMEMBERED)(self._select)

    def __len__(self) -> int:
        return len(self.score)

    def close(self) -> None:
        self._copy.close()

    @property
    def is_outdated(self) -> bool:
        """Whether another audit has taken the place of this one since, or begun to."""
        return _version(self.folder) != self._opened

    @cached_property
    def readable(self) -> Rows:
        """Rows that have a match score."""
        return np.flatnonzero(~np.isnan(self.score)).astype(np.int32)

    def _ask(self, query: str, values: Sequence[str | int] = ()) -> list[Any]:
        with self._lock, _using(self.folder / COPY):
            return self._copy.execute(query, values).fetchall()

    def _ask_of(self, query: str, given: Collection[str | int]) -> Iterator[Any]:
        """Answers of a query with `IN (?)` for any number of values."""
        values = list(given)
        for start in range(0, len(values), ASKED):
            part = values[start : start + ASKED]
            yield from self._ask(query.replace("(?)", f"({', '.join('?' * len(part))})"), part)

    def read(self, rows: Sequence[int] | Rows) -> list[Pair]:
        """The texts of these rows, in their order."""
        wanted = [int(row) for row in rows]
        query = f"SELECT row, {', '.join(TEXTS)} FROM pairs WHERE row IN (?)"
        found = {pair[0]: Pair(*pair) for pair in self._ask_of(query, set(wanted))}
        return [found[row] for row in wanted]

    def find(self, ids: Collection[str]) -> dict[str, int]:
        """The rows of these ids, without those that are not there; of equal ids the first, as in an audit."""
        return dict(self._ask_of("SELECT id, min(row) FROM pairs WHERE id IN (?) GROUP BY id", ids))

    def suggestions(self, row: int) -> list[Suggestion]:
        """Better partners of a row, the best first; none for a row that has the id of one before it."""
        first = "(SELECT min(row) FROM pairs WHERE id = {})"
        query = f"""
            SELECT replaced, {first.format("suggested_id")} AS other, score FROM suggestions
            WHERE id = (SELECT id FROM pairs WHERE row = ?1) AND ?1 = {first.format("suggestions.id")}
                AND other IS NOT NULL ORDER BY score DESC, suggestions.rowid"""
        return [Suggestion(*one) for one in self._ask(query, [row])]

    def counts(self, *names: str, most: int = 50) -> dict[str, int]:
        """The commonest values of columns, and how many pairs have each; a cell may hold several, separated by `; `."""
        found: Counter[str] = Counter()
        for cell, count in self._ask_of("SELECT value, count FROM counts WHERE name IN (?)", names):
            found.update(dict.fromkeys(cell.split(SEPARATOR), count))
        return dict(found.most_common(most))

    def is_of(self, columns: Mapping[str, pyarrow.Array]) -> bool:
        """Whether the table has these texts, as far as it has such columns."""
        names, start = [name for name in columns if name in self.columns], 0
        for batch in _batches(self.folder / TABLE, names):
            size = len(batch[0])
            if batch != [columns[name].slice(start, size).to_pylist() for name in names]:
                return False
            start += size
        return start == len(columns[names[0]])

    def _select(self, wanted: Filter) -> Rows:
        """The rows that a filter lets through, in its order."""
        mask = self.flagged.copy() if wanted.flagged else np.ones(len(self), dtype=bool)
        if wanted.low > 0 or wanted.high < 1:
            mask &= (self.score >= wanted.low) & (self.score <= wanted.high)
        if wanted.reason or wanted.source or wanted.text:
            mask &= self._has(wanted)
        rows = np.flatnonzero(mask).astype(np.int32)
        if wanted.sort == "row":
            return rows
        score = self.score[rows]
        key = {"score": score, "-score": -score, "doubt": np.abs(score - MATCH_THRESHOLD)}[wanted.sort]
        return np.asarray(rows[key.argsort(kind="stable")])

    def _has(self, wanted: Filter) -> Mask:
        """(N,) whether each row has the texts that a filter asks for."""
        conditions = {
            "pairs WHERE instr(reason, ?1) OR instr(reasons, ?1)": wanted.reason,
            "pairs WHERE source = ?1": wanted.source,
            "searched WHERE instr(text, ?1)": _searched(wanted.text),
        }
        counts = np.zeros(len(self), dtype=np.int8)
        given = {condition: value for condition, value in conditions.items() if value}
        for condition, value in given.items():
            with self._lock, _using(self.folder / COPY):
                rows = self._copy.execute(f"SELECT row FROM {condition}", [value])
                counts[np.fromiter((row for (row,) in rows), np.int32)] += 1
        return np.asarray(counts == len(given))


def audit_schema(folder: Path) -> frozenset[str]:
    """Names of the columns of an audit's table; raises DataError where there is none, or a damaged one."""
    import pyarrow.parquet

    if not (path := folder / TABLE).is_file():
        raise NotFoundError(f"no {TABLE} in here", where=folder, advice="Give the folder that an audit has written")
    with _reading(path):
        names = frozenset(pyarrow.parquet.read_schema(path).names)
    if missing := sorted(NEEDED - names):
        raise ShapeError(f"no column {missing[0]}", where=path, expected="the table of an audit")
    return names


def audit_columns(folder: Path, *names: str) -> dict[str, list[Any]]:
    """The values of those of these columns that an audit's table has."""
    found: dict[str, list[Any]] = {name: [] for name in names if name in audit_schema(folder)}
    for batch in _batches(folder / TABLE, list(found)):
        for values, more in zip(found.values(), batch, strict=True):
            values += more
    return found


def _searched(text: str) -> str:
    """A text without differences that a search ignores."""
    return unicodedata.normalize("NFC", text).lower()


def _version(folder: Path) -> list[int]:
    """Tells the files of an audit from others of their names."""
    found = [VERSION]
    for path in (folder / TABLE, folder / SUGGESTIONS):
        with suppress(OSError):
            found += [path.stat().st_size, path.stat().st_mtime_ns]
    return found


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (OSError, UnicodeError, KeyError, pyarrow.ArrowException) as error:
        raise DamagedError(f"the table cannot be read ({error})", where=path, advice="Audit again") from None


def _batches(path: Path, columns: Sequence[str]) -> Iterator[list[list[Any]]]:
    """The values of some columns of a parquet file, some rows at a time."""
    import pyarrow.parquet

    with _reading(path), pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(BATCH, columns=list(columns)):
            yield [batch.column(name).to_pylist() for name in columns]


def _imported(folder: Path, version: list[int], console: Console | None) -> sqlite3.Connection:
    """The copy of the texts, which is made where there is none; in a folder that cannot be written for this process."""
    copy, state = folder / COPY, folder / STATE
    with suppress(OSError):
        if read_json(state) == {"made_from": version, "sha256": sha256_of(copy)}:
            return _open(copy)
    check_unchanged(folder, AUDIT, (TABLE, SUGGESTIONS))
    if not os.access(folder, os.W_OK):
        with TemporaryDirectory(ignore_cleanup_errors=True) as place:  # Windows deletes no open file
            _import(folder, Path(place, COPY), console)
            return _open(Path(place, COPY))
    with replacing(copy, durable=False) as file:
        _import(folder, Path(file.name), console)
    with _reading(copy):
        write_atomically(state, json.dumps({"made_from": version, "sha256": sha256_of(copy)}).encode())
    return _open(copy)


def _open(copy: Path) -> sqlite3.Connection:
    # No locks and no files beside it: another audit replaces the file, and this process goes on to read the old one.
    with _using(copy):
        return sqlite3.connect(f"{copy.resolve().as_uri()}?immutable=1", uri=True, check_same_thread=False)


@contextmanager
def _using(copy: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        what, advice = f"the file cannot be read or written ({error})", "Check the disk and the rights"
        raise DataError(what, where=copy, advice=advice) from None


def _import(folder: Path, copy: Path, console: Console | None) -> None:
    import pyarrow.parquet

    with _reading(folder / TABLE), pyarrow.parquet.ParquetFile(folder / TABLE) as file:
        names, count = [name for name in TEXTS if name in file.schema_arrow.names], file.metadata.num_rows
    counts = {name: Counter[str]() for name in ("reason", "reasons", "source")}
    texts = ", ".join("ifnull(?, '')" for _ in TEXTS)
    with _using(copy), closing(sqlite3.connect(copy)) as db, progress(console, count, "Import") as bar:
        db.executescript(_TABLES)
        start = 0
        for batch in _batches(folder / TABLE, names):
            size = len(batch[0])
            cells = {name: [""] * size for name in TEXTS} | dict(zip(names, batch, strict=True))
            rows = range(start, start + size)
            db.executemany(f"INSERT INTO pairs VALUES (?, {texts})", zip(rows, *cells.values(), strict=True))
            searched = (f"{caption or ''}\n{name}" for caption, name in zip(cells["caption"], cells["id"], strict=True))
            db.executemany("INSERT INTO searched VALUES (?, ?)", zip(rows, map(_searched, searched), strict=True))
            for name, found in counts.items():
                found.update(cell for cell in cells[name] if cell)
            bar.step(size)
            start += size
        for name, found in counts.items():
            db.executemany("INSERT INTO counts VALUES (?, ?, ?)", ((name, *one) for one in found.items()))
        if (path := folder / SUGGESTIONS).is_file():
            for batch in _batches(path, ["id", "replaced", "suggested_id", "score"]):
                db.executemany("INSERT INTO suggestions VALUES (?, ?, ?, ?)", zip(*batch, strict=True))
        db.executescript(_INDEXES)
