"""The SQLite file of a review, with the decisions of people and the answers of annotators.

What is written is on the disk before the call that writes it returns.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

from mispair.errors import DamagedError, DataError

VERSION = 2  # of all tables


class ReviewFile:
    """Some tables of the file, which is made if needed. Threads and processes see what each other writes.

    Attributes:
        path: The file.
        tables: What makes the tables where there are none.

    Raises:
        DamagedError: The file is something else.
        DataError: It cannot be written.
    """

    tables: ClassVar[tuple[str, ...]]

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        with self._safely():
            self._file = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
            try:
                self._file.execute("PRAGMA journal_mode = WAL")
                self._file.execute("PRAGMA synchronous = FULL")  # on the disk before a transaction ends
                self._create()
                self._follow()
            except BaseException:
                self._file.close()
                raise

    @contextmanager
    def _safely(self) -> Iterator[None]:
        """Let one thread in at a time; errors of SQLite become ours."""
        with self._lock:
            try:
                yield
            except sqlite3.Error as error:
                code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the rest of it tells more than we say
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
        """Write all that is inside to the disk, or nothing."""
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
            for table in self.tables:
                self._file.execute(table)
            self._file.execute(f"PRAGMA user_version = {VERSION}")

    def _follow(self) -> None:
        """Read what another process has added."""

    def close(self) -> None:
        with self._lock:
            self._file.close()
