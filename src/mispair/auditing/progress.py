"""A bar over rows, where there is a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class RowProgress:
    """How far the work is, and what it is.

    Attributes:
        stages: Seconds of everything that was done.
    """

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar, self._task = bar, task
        self.stages: dict[str, float] = {}
        self._now, self._since = "", time.monotonic()

    def say(self, what: str) -> None:
        """What is done now."""
        self.end()
        self._now = what
        self._bar.update(self._task, description=what)

    def end(self) -> None:
        """What was done last has come to its end."""
        now = time.monotonic()
        if self._now:
            self.stages[self._now] = now - self._since
        self._now, self._since = "", now

    def step(self, rows: float) -> None:
        """So many rows more."""
        self._bar.update(self._task, advance=rows)

    def reach(self, rows: int) -> None:
        """All rows up to here are done."""
        self._bar.update(self._task, completed=rows)


@contextmanager
def progress(console: Console | None, rows: int, what: str = "") -> Iterator[RowProgress]:
    """A bar that goes away when the work is done."""
    console = console or Console(quiet=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield RowProgress(bar, bar.add_task(what, total=rows))
