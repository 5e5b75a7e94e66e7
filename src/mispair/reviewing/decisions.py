"""Decisions of people on pairs, in an SQLite file: rows are added and never changed, so that nothing is lost.

A decision is on the disk before `add` returns. Undoing adds a row that names the undone one. The last decision on a
pair that was not undone counts.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from mispair.errors import InvalidValueError, NotFoundError
from mispair.reviewing.review_file import ReviewFile

FILE = "decisions.sqlite"
NOT_UNDONE = "number NOT IN (SELECT undoes FROM decisions WHERE undoes IS NOT NULL)"
COLUMNS = (
    "id", "verdict", "replaced", "partner", "caption", "reviewer", "accepted", "session", "mode", "inclusion", "draw",
    "time",
)  # fmt: skip
_TYPED = ", ".join(f"{name} {'REAL' if name == 'inclusion' else 'TEXT NOT NULL'}" for name in COLUMNS)


class Verdict(StrEnum):
    """What a person decides on a pair."""

    KEEP = "keep"  # it matches
    DROP = "drop"  # it does not match, and there is no better partner
    REPAIR = "re-pair"  # one side belongs to another item
    REWRITE = "rewrite"  # another caption is right
    UNSURE = "unsure"

    @property
    def matched(self) -> bool | None:
        """Whether the pair matches as it stands; None if that was left open."""
        return {Verdict.KEEP: True, Verdict.UNSURE: None}.get(self, False)


class Mode(StrEnum):
    """How a pair came to be decided."""

    BROWSE = "browse"  # chosen by the reviewer
    RATE = "rate"  # drawn at random with a known probability, for the noise rate
    TEACH = "teach"  # chosen because the audit learns most from it
    IMPORT = "import"  # from a file


@dataclass(frozen=True)
class Decision:
    """A person's decision on one pair.

    Attributes:
        id: The pair.
        verdict: What was decided.
        replaced: The side that a new partner replaces, "left" or "right"; empty unless re-paired.
        partner: The pair that the new partner is taken from; empty unless re-paired.
        caption: The new caption; empty unless rewritten.
        reviewer: Who decided.
        accepted: The annotator whose suggestion the reviewer has accepted; empty for a decision of one's own.
        session: In which browser; undoing concerns one's own.
        mode: How the pair was chosen.
        inclusion: Probability with which it was drawn; None unless the mode is `rate`.
        draw: Which draw; empty unless the mode is `rate`.
        time: When, in UTC.
        number: Its place in the file, from 1; 0 before it is written.
        batch: Number of the first decision of the same action.
    """

    id: str
    verdict: Verdict
    replaced: str = ""
    partner: str = ""
    caption: str = ""
    reviewer: str = ""
    accepted: str = ""
    session: str = ""
    mode: Mode = Mode.BROWSE
    inclusion: float | None = None
    draw: str = ""
    time: datetime = field(default_factory=lambda: datetime.now(UTC))
    number: int = 0
    batch: int = 0

    def __post_init__(self) -> None:
        repaired = self.verdict is Verdict.REPAIR
        if bool(self.partner) != repaired:
            self._refuse("partner", "an id exactly where the verdict is re-pair")
        if self.replaced not in (("left", "right") if repaired else ("",)):
            self._refuse("replaced", "left or right exactly where the verdict is re-pair")
        if (self.verdict is Verdict.REWRITE) != bool(self.caption):
            self._refuse("caption", "a text exactly where the verdict is rewrite")

    def _refuse(self, name: str, expected: str) -> None:
        found = f"{getattr(self, name)!r} in the decision on {self.id!r}, {self.verdict}"
        raise InvalidValueError(found, where=name, expected=expected)


class Decisions(ReviewFile):
    """The decisions on the pairs of an audit."""

    tables = (
        "CREATE TABLE IF NOT EXISTS decisions (number INTEGER PRIMARY KEY AUTOINCREMENT, batch INTEGER NOT NULL, "
        f"undoes INTEGER, {_TYPED})",
        "CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    )

    def __init__(self, path: Path) -> None:
        self._current: dict[str, Decision] = {}
        self._newest = 0  # number of the last row that was read; rows are only ever added
        self._version = -1  # of the file, as SQLite counts what others write
        super().__init__(path)

    def _read_new(self) -> None:
        """Read what counts now for the pairs on which rows were added: decisions and undone ones."""
        since = (self._newest,)
        new = self._file.execute("SELECT number, id FROM decisions WHERE number > ? ORDER BY number", since).fetchall()
        if not new:
            return
        current = self._select(NOT_UNDONE, "id IN (SELECT id FROM decisions WHERE number > ?)", values=since)
        self._replace(dict.fromkeys(name for _, name in new) | {decision.id: decision for decision in current})
        self._newest = new[-1][0]

    def _replace(self, changed: Mapping[str, Decision | None]) -> None:
        for name, decision in changed.items():
            self._current.pop(name, None)
            if decision is not None:
                self._current[name] = decision

    def _follow(self) -> None:
        """Read what another process has added."""
        (version,) = self._file.execute("PRAGMA data_version").fetchone()
        if version != self._version:
            self._version = version
            self._read_new()

    @property
    def current(self) -> dict[str, Decision]:
        """The decision that counts, by the id of the pair: a copy."""
        with self._safely():
            self._follow()
            return dict(self._current)

    def since(self, number: int) -> tuple[int, dict[str, Decision | None]]:
        """What counts now for the pairs on which rows were added after row `number`; and the number of the last row."""
        with self._safely():
            self._follow()
            between = number, self._newest
            names = self._file.execute("SELECT DISTINCT id FROM decisions WHERE number > ? AND number <= ?", between)
            return self._newest, {name: self._current.get(name) for (name,) in names}

    def get(self, name: str) -> Decision | None:
        with self._safely():
            self._follow()
            return self._current.get(name)

    def history(self, *, undone: bool = True, mode: Mode | None = None) -> list[Decision]:
        """All decisions in their order, with or without those that were undone."""
        conditions = ([] if undone else [NOT_UNDONE]) + ([] if mode is None else [f"mode = '{mode}'"])
        with self._safely():
            return self._select(*conditions)

    def _select(self, *conditions: str, values: Sequence[str | int] = ()) -> list[Decision]:
        """The decisions, undone ones too, for which all of these hold, in their order."""
        rows = self._file.execute(
            f"SELECT number, batch, {', '.join(COLUMNS)} FROM decisions WHERE "
            f"{' AND '.join(['undoes IS NULL', *conditions])} ORDER BY number",
            values,
        ).fetchall()
        return [_decision(*row) for row in rows]

    def add(self, decisions: Iterable[Decision]) -> list[Decision]:
        """Write the decisions of one action. When this returns all are on the disk; when it raises, none."""
        with self._lock:
            added: list[Decision] = []
            with self._transaction():
                for decision in decisions:
                    added.append(self._insert(decision, added[0].number if added else 0))
            if added and added[0].number == self._newest + 1:
                self._replace({decision.id: decision for decision in added})
                self._newest = added[-1].number
            elif added:  # another process has written before
                with self._safely():
                    self._read_new()
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
        """Undo the last action of a session that was not undone; returns its decisions."""
        with self._lock:
            with self._transaction():
                last = "SELECT max(number) FROM decisions WHERE undoes IS NULL AND session = ? AND " + NOT_UNDONE
                same_action = f"batch = (SELECT batch FROM decisions WHERE number = ({last}))"
                undone = self._select(NOT_UNDONE, "session = ?", same_action, values=(session, session))
                now = datetime.now(UTC)
                for decision in undone:
                    self._insert(replace(decision, time=now), decision.batch, undoes=decision.number)
            with self._safely():
                self._read_new()
        return undone

    def setting(self, name: str, default: str) -> str:
        """A value that is kept beside the decisions; the first `default` that is given."""
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
    """Whether pairs of a reviewed audit match as they stand, by their ids.

    Raises:
        NotFoundError: There are no decisions.
    """
    verdicts = {name: one.verdict.matched for name, one in _current(folder).items()}
    return {name: matched for name, matched in verdicts.items() if matched is not None}


def read_partnered(folder: Path) -> tuple[list[str], list[str]]:
    """Ids of pairs of a reviewed audit whose left item, and of those whose right item, got another partner.

    Raises:
        NotFoundError: There are no decisions.
    """
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
    """The decisions of a file that count, by the ids of the pairs; its folder need not be writable."""
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
