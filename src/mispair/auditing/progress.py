"""A bar over rows, where there is a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class RowProgress:
    """How far the work is, and what it is."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar, self._task = bar, task

    def say(self, what: str) -> None:
        """What is done now."""
        self._bar.update(self._task, description=what)

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
