"""The SQLite file of a review, and the decisions of people in it: rows are added and never changed.

A decision is on the disk before `add` returns. Undoing adds a row that names the undone one. The last decision on a
pair that was not undone counts.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from mispair.errors import DamagedError, DataError, InvalidValueError, NotFoundError

FILE = "decisions.sqlite"
VERSION = 2  # of all tables
_TABLES = (
    "CREATE TABLE IF NOT EXISTS decisions (number INTEGER PRIMARY KEY AUTOINCREMENT, batch INTEGER NOT NULL, "
    "undoes INTEGER, id TEXT NOT NULL, verdict TEXT NOT NULL, replaced TEXT NOT NULL, partner TEXT NOT NULL, "
    "caption TEXT NOT NULL, reviewer TEXT NOT NULL, accepted TEXT NOT NULL, session TEXT NOT NULL, "
    "mode TEXT NOT NULL, inclusion REAL, draw TEXT NOT NULL, time TEXT NOT NULL)",
    "CREATE INDEX IF NOT EXISTS decided ON decisions (id)",
    "CREATE INDEX IF NOT EXISTS undone ON decisions (undoes) WHERE undoes IS NOT NULL",
    "CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS answers (number INTEGER PRIMARY KEY AUTOINCREMENT, question TEXT NOT NULL, "
    "annotator TEXT NOT NULL, name TEXT NOT NULL, id TEXT NOT NULL, caption TEXT NOT NULL, kind TEXT NOT NULL, "
    "text TEXT NOT NULL, time TEXT NOT NULL)",
    "CREATE INDEX IF NOT EXISTS questions ON answers (question)",
    "CREATE INDEX IF NOT EXISTS answered ON answers (id)",
    "CREATE TABLE IF NOT EXISTS calls (number INTEGER PRIMARY KEY AUTOINCREMENT, annotator TEXT NOT NULL, "
    "price REAL NOT NULL)",
)
COLUMNS = (
    "id", "verdict", "replaced", "partner", "caption", "reviewer", "accepted", "session", "mode", "inclusion", "draw",
    "time",
)  # fmt: skip
_COUNTS = "undoes IS NULL AND number NOT IN (SELECT undoes FROM decisions WHERE undoes IS NOT NULL)"


class Verdict(StrEnum):
    """A person's verdict on a pair."""

    KEEP = "keep"  # it matches
    DROP = "drop"  # it does not match, and there is no better partner
    REPAIR = "re-pair"  # one side belongs to another item
    REWRITE = "rewrite"  # another caption is right
    UNSURE = "unsure"

    @property
    def past(self) -> str:
        """What happened to the pair, such as "kept"."""
        return {"keep": "kept", "drop": "dropped", "rewrite": "rewritten", "unsure": "unsure"}.get(self, "re-paired")

    @property
    def matched(self) -> bool | None:
        """Whether the pair matches as it stands; None if unsure."""
        return {Verdict.KEEP: True, Verdict.UNSURE: None}.get(self, False)


class Mode(StrEnum):
    """The reason why a person saw the pair."""

    BROWSE = "browse"  # chosen by the reviewer
    RATE = "rate"  # drawn at random with a known probability, for the noise rate
    TEACH = "teach"  # chosen because the audit learns most from it
    IMPORT = "import"  # from a file


@dataclass(frozen=True)
class Decision:
    """A person's decision on one pair."""

    id: str  # of the pair
    verdict: Verdict
    replaced: str = ""  # if re-paired: the side with a new partner, "left" or "right"
    partner: str = ""  # if re-paired: the pair that the new partner is taken from
    caption: str = ""  # if rewritten
    reviewer: str = ""
    accepted: str = ""  # annotator whose suggestion the reviewer has accepted
    session: str = ""  # in which browser; undoing concerns one's own
    mode: Mode = Mode.BROWSE
    inclusion: float | None = None  # if drawn: probability of it
    draw: str = ""  # if drawn: which draw
    time: datetime = field(default_factory=lambda: datetime.now(UTC))
    number: int = 0  # place in the file, from 1; 0 before it is written
    batch: int = 0  # number of the first decision of the same action

    def __post_init__(self) -> None:
        repaired = self.verdict is Verdict.REPAIR
        if bool(self.partner) != repaired:
            self._refuse("partner", "an id exactly where the verdict is re-pair")
        if self.replaced not in (("left", "right") if repaired else ("",)):
            self._refuse("replaced", "left or right exactly where the verdict is re-pair")
        if (self.verdict is Verdict.REWRITE) != bool(self.caption):
            self._refuse("caption", "a text exactly where the verdict is rewrite")

    @property
    def by(self) -> str:
        """The reviewer, and the annotator whose suggestion was accepted."""
        return (self.reviewer or "a person") + (f", as {self.accepted} suggests" if self.accepted else "")

    def _refuse(self, name: str, expected: str) -> None:
        found = f"{getattr(self, name)!r} in the decision on {self.id!r}, {self.verdict}"
        raise InvalidValueError(found, where=name, expected=expected)


class ReviewFile:
    """A connection to the file, for any thread. Creates the file if needed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        with self._safely():
            self._file = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
            try:
                self._file.execute("PRAGMA journal_mode = WAL")
                self._file.execute("PRAGMA synchronous = FULL")  # on the disk before a transaction ends
                self._create()
            except BaseException:
                self._file.close()
                raise

    @contextmanager
    def _safely(self) -> Iterator[None]:
        """Let one thread in at a time; turn errors of SQLite into ours."""
        with self._lock:
            try:
                yield
            except sqlite3.Error as error:
                code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # without the extended code
                damaged = code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
                advice = (
                    "Copy the audit to a folder that can be written"
                    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
                    else "Check the disk and the rights, or move the file away to begin anew"
                )
                what = f"the decisions cannot be read or written ({error})"
                raise (DamagedError if damaged else DataError)(what, where=self.path, advice=advice) from None

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Write everything inside to the disk, or nothing."""
        with self._safely():
            self._file.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._file.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):  # SQLite may have done it by itself
                    self._file.execute("ROLLBACK")
                raise

    def _create(self) -> None:
        (version,) = self._file.execute("PRAGMA user_version").fetchone()
        if version not in (0, VERSION):
            what, expected = f"these decisions are of version {version}", f"version {VERSION}"
            raise DamagedError(what, where=self.path, expected=expected, advice="Update mispair")
        with self._transaction():
            for table in _TABLES:
                self._file.execute(table)
            self._file.execute(f"PRAGMA user_version = {VERSION}")

    def close(self) -> None:
        with self._lock:
            self._file.close()


class Decisions(ReviewFile):
    """The decisions on the pairs of an audit."""

    @property
    def current(self) -> dict[str, Decision]:
        """The current decisions by the ids of the pairs, in their order."""
        last = f"number IN (SELECT max(number) FROM decisions WHERE {_COUNTS} GROUP BY id)"
        return {decision.id: decision for decision in self._select(last)}

    def since(self, number: int) -> tuple[int, dict[str, Decision | None]]:
        """The last row, and the current decisions on pairs with rows after row `number`."""
        with self._safely():
            new = self._file.execute("SELECT number, id FROM decisions WHERE number > ?", (number,)).fetchall()
            found = self._select(_COUNTS, "id IN (SELECT id FROM decisions WHERE number > ?)", values=(number,))
        changed: dict[str, Decision | None] = dict.fromkeys(name for _, name in new)
        return max((row for row, _ in new), default=number), changed | {decision.id: decision for decision in found}

    def get(self, name: str) -> Decision | None:
        found = self._select(_COUNTS, "id = ?", values=(name,))
        return found[-1] if found else None

    def history(self, *, undone: bool = True, mode: Mode | None = None) -> list[Decision]:
        """All decisions in their order, with or without undone ones."""
        conditions = ["undoes IS NULL" if undone else _COUNTS] + ([] if mode is None else [f"mode = '{mode}'"])
        return self._select(*conditions)

    def _select(self, *conditions: str, values: Sequence[str | int] = ()) -> list[Decision]:
        """The decisions under all of these conditions, in their order."""
        query = f"SELECT number, batch, {', '.join(COLUMNS)} FROM decisions WHERE {' AND '.join(conditions)}"
        with self._safely():
            return [_decision(*row) for row in self._file.execute(f"{query} ORDER BY number", values).fetchall()]

    def add(self, decisions: Iterable[Decision]) -> list[Decision]:
        """Write the decisions of one action, all or none."""
        added: list[Decision] = []
        with self._transaction():
            for decision in decisions:
                added.append(self._insert(decision, added[0].number if added else 0))
        return added

    def _insert(self, decision: Decision, batch: int, undoes: int | None = None) -> Decision:
        time = decision.time.replace(microsecond=decision.time.microsecond // 1000 * 1000)  # as the file has it
        values = {name: getattr(decision, name) for name in COLUMNS}
        values["time"] = time.isoformat(timespec="milliseconds")
        number = self._file.execute(
            f"INSERT INTO decisions (batch, undoes, {', '.join(COLUMNS)}) VALUES (?, ?{', ?' * len(COLUMNS)})",
            (batch, undoes, *values.values()),
        ).lastrowid
        assert number is not None
        if not batch:
            self._file.execute("UPDATE decisions SET batch = number WHERE number = ?", (number,))
        return replace(decision, time=time, number=number, batch=batch or number)

    def undo(self, session: str) -> Sequence[Decision]:
        """Undo the last action of a session, and return its decisions."""
        with self._transaction():
            last = f"SELECT max(number) FROM decisions WHERE session = ? AND {_COUNTS}"
            same_action = f"batch = (SELECT batch FROM decisions WHERE number = ({last}))"
            undone = self._select(_COUNTS, "session = ?", same_action, values=(session, session))
            now = datetime.now(UTC)
            for decision in undone:
                self._insert(replace(decision, time=now), decision.batch, undoes=decision.number)
        return undone

    def setting(self, name: str, default: str) -> str:
        """A value kept beside the decisions; the first `default` is written."""
        with self._safely():
            self._file.execute("INSERT OR IGNORE INTO settings VALUES (?, ?)", (name, default))
            (value,) = self._file.execute("SELECT value FROM settings WHERE name = ?", (name,)).fetchone()
        return str(value)


def _decision(number: int, batch: int, *values: Any) -> Decision:
    given = dict(zip(COLUMNS, values, strict=True))
    given |= {
        "verdict": Verdict(given["verdict"]),
        "mode": Mode(given["mode"]),
        "time": datetime.fromisoformat(given["time"]),
    }
    return Decision(**given, number=number, batch=batch)


def read_answers(folder: Path) -> dict[str, bool]:
    """Whether pairs of a reviewed audit match as they stand, by their ids."""
    verdicts = {name: one.verdict.matched for name, one in _current(folder).items()}
    return {name: matched for name, matched in verdicts.items() if matched is not None}


def read_partnered(folder: Path) -> tuple[list[str], list[str]]:
    """Ids of pairs of a reviewed audit with a new partner for the left item, and for the right item."""
    lefts, rights = [], []
    for name, one in sorted(_current(folder).items()):
        if one.verdict is Verdict.REPAIR:
            lefts.append(one.partner if one.replaced == "left" else name)
            rights.append(name if one.replaced == "left" else one.partner)
        elif one.verdict is Verdict.REWRITE:
            lefts.append(name)
    return lefts, rights


def _current(folder: Path) -> dict[str, Decision]:
    path = folder / FILE
    if not path.is_file():
        raise NotFoundError(
            f"no {FILE} in here", where=folder, advice=f"Review this audit first: mispair review {folder}"
        )
    return read_current(path)


def read_current(path: Path) -> dict[str, Decision]:
    """The current decisions of a file, by the ids of the pairs; its folder may be read-only."""
    with ExitStack() as stack:
        if not all(os.access(place, os.W_OK) for place in (path, path.parent)):  # SQLite writes beside what it reads
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            for name in (path.name, f"{path.name}-wal"):  # the second: what a running or killed server has added
                with suppress(FileNotFoundError):
                    shutil.copyfile(path.with_name(name), Path(folder, name))
            path = Path(folder, path.name)
        decisions = Decisions(path)
        stack.callback(decisions.close)
        return decisions.current
