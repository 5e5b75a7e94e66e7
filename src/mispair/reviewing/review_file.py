"""The SQLite file of a review, with the decisions of people and the answers of annotators.

A call that writes returns when the rows are on the disk.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mispair.errors import DamagedError, DataError

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
