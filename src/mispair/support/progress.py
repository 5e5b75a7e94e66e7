"""Progress of trainings, audits and encodings: a bar if there is a terminal, else a line every ten seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from mispair.support.formatting import duration

LINE_SECONDS = 10.0  # between lines where there is no terminal
FIRST_SECONDS = 0.7  # until the first line of a command, which may still import torch then
T = TypeVar("T")
Writer = Callable[[], bool]  # prints a line, and returns whether it had one to print
_writers: list[Writer] = []  # of nested heartbeats


@contextmanager
def heartbeat(console: Console, write: Writer, first: float | None = None) -> Iterator[None]:
    """Inside, call `write` every ten seconds in a thread, unless the console is a terminal or quiet.

    The first time it is called after `first` seconds.

    Nested heartbeats share the thread: every ten seconds the innermost one with a line prints it.
    """
    if console.is_terminal or console.quiet:
        yield
        return
    stop = threading.Event()

    def run() -> None:
        wait = LINE_SECONDS if first is None else first
        while not stop.wait(wait):
            any(writer() for writer in reversed(_writers))
            wait = LINE_SECONDS

    thread = None if _writers else threading.Thread(target=run, daemon=True)
    _writers.append(write)
    if thread is not None:
        thread.start()
    try:
        yield
    finally:
        _writers.remove(write)
        stop.set()
        if thread is not None:
            thread.join()


@contextmanager
def at_work(console: Console, what: str, first: float | None = None) -> Iterator[None]:
    """Print the elapsed time of `what` regularly, unless an inner heartbeat prints more; `first` as in `heartbeat`."""
    since = time.monotonic()

    def line() -> bool:
        console.print(f"{what}: {duration(time.monotonic() - since)} so far", highlight=False)
        return True

    with heartbeat(console, line, first):
        yield


class _RateColumn(ProgressColumn):
    """Rows a second."""

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{_rounded(task.speed)}/s")


def _rounded(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


class RowProgress:
    """Progress over rows or steps, in stages: a bar, removed at the end; without a terminal, lines.

    Attributes:
        stages: Seconds of each stage that has ended.
    """

    def __init__(self, console: Console | None, rows: int, stage: str = "") -> None:
        console = console or Console(quiet=True)
        about, note = TextColumn("{task.description}"), TextColumn("{task.fields[note]}")
        columns = about, BarColumn(), MofNCompleteColumn(), _RateColumn(), TimeRemainingColumn(), note
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task(stage, total=rows, note="")
        self._opened = ExitStack()
        self.stages: dict[str, float] = {}
        self._stage, self._since, self._start = stage, time.monotonic(), 0.0  # and rows done when the stage began
        self._done, self._scale = 0.0, 1.0  # share of the stage that is done, and size of the current part
        self._said = False  # whether there was a line about the stage

    def __enter__(self) -> Self:
        self._opened.enter_context(self._bar)
        self._opened.callback(_current.reset, _current.set(self))
        self._opened.enter_context(heartbeat(self._bar.console, self.line))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._opened.close()
        if kind is None:
            self.end()

    def begin(self, stage: str) -> None:
        """Begin a stage and end the one before."""
        self.end()
        self._stage, self._done, self._scale = stage, 0.0, 1.0
        self._start = self._bar.tasks[self._task].completed
        self._bar.update(self._task, description=stage)

    def end(self) -> None:
        """End the current stage."""
        now = time.monotonic()
        if self._stage:
            self.stages[self._stage] = now - self._since
        if self._said:
            self.write(f"{self._stage}: done in {duration(now - self._since)}")
        self._stage, self._since, self._said = "", now, False

    def step(self, rows: float) -> None:
        """Advance by `rows`."""
        self._bar.update(self._task, advance=rows)

    def reach(self, rows: int) -> None:
        """Set the number of finished rows."""
        self._bar.update(self._task, completed=rows)

    def note(self, text: str) -> None:
        """Show a text beside the time left."""
        self._bar.update(self._task, note=text)

    @contextmanager
    def part(self, share: float) -> Iterator[None]:
        """Inside, do this share of the current stage, or of the part around it."""
        before, scale = self._done, self._scale
        self._scale = scale * share
        try:
            yield
        finally:
            self._done, self._scale = before + scale * share, scale

    def line(self) -> bool:
        """Print the current stage and the time it has left; return False without a stage."""
        task, elapsed = self._bar.tasks[self._task], time.monotonic() - self._since
        if not self._stage:
            return False
        done, total = task.completed, task.total or 0.0
        words = f": {duration(elapsed)} so far"
        if (rate := (done - self._start) / max(elapsed, 1e-9)) > 0:
            left = duration(max(0.0, total - done) / rate)
            words = f": {done:,.0f} of {total:,.0f}, {_rounded(rate)} a second, {left} left"
        elif share := self._done:
            words = f": {share:.0%}, {duration(elapsed * max(0.0, 1 - share) / share)} left"
        note = task.fields["note"]
        self._said = True
        self.write(f"{self._stage}{words}" + (note and f"; {note}"))
        return True

    def write(self, text: str) -> None:
        """Print a line above the bar."""
        self._bar.console.print(text, highlight=False, soft_wrap=True)


_current: ContextVar[RowProgress | None] = ContextVar("progress", default=None)  # not in threads started by this one


@contextmanager
def stage_part(share: float) -> Iterator[None]:
    """Inside, do this share of the current stage, or of the part around it; no effect without a progress."""
    show = _current.get()
    if show is None:
        yield
    else:
        with show.part(share):
            yield


def tracked(items: Collection[T]) -> Iterator[T]:
    """Iterate over parts of equal size of the current stage."""
    for item in items:
        with stage_part(1 / len(items)):
            yield item
