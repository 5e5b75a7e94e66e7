"""Progress of trainings, audits and encodings: a bar if there is a terminal, else a line every ten seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from mispair.support.formatting import duration

LINE_SECONDS = 10.0  # between lines where there is no terminal
T = TypeVar("T")


Writer = Callable[[], bool]  # prints a line, and returns whether it had one to print
_writers: list[Writer] = []  # of nested heartbeats


@contextmanager
def heartbeat(console: Console, write: Writer) -> Iterator[None]:
    """Inside, call `write` every ten seconds in a thread, unless the console is a terminal or quiet.

    Nested heartbeats share the thread: every ten seconds the innermost one with a line prints it.
    """
    if console.is_terminal or console.quiet:
        yield
        return
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(LINE_SECONDS):
            any(writer() for writer in reversed(_writers))

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
def at_work(console: Console, what: str) -> Iterator[None]:
    """Print the elapsed time of `what` regularly, unless an inner heartbeat prints more."""
    since = time.monotonic()

    def line() -> bool:
        console.print(f"{what} for {duration(time.monotonic() - since)}", highlight=False)
        return True

    with heartbeat(console, line):
        yield


class Pace:
    """Rate of work and time left."""

    def __init__(self) -> None:
        self._since, self._start = time.monotonic(), 0.0

    def begin(self, done: float) -> None:
        """Counts from here on."""
        self._since, self._start = time.monotonic(), done

    def rate(self, done: float) -> float:
        """Steps a second."""
        return (done - self._start) / max(time.monotonic() - self._since, 1e-9)

    def words(self, done: float, total: float) -> str:
        """Speed and remaining time, such as `41 a second, 1 min 50 s left`; empty before the first step."""
        rate = self.rate(done)
        if rate <= 0:
            return ""
        return f"{_rounded(rate)} a second, {duration(max(0.0, total - done) / rate)} left"


def _rounded(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


class _RateColumn(ProgressColumn):
    """Rows a second."""

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{_rounded(task.speed)}/s")


class TrainingProgress:
    """Progress of a training: loss, spread, steps per second and the time left."""

    def __init__(self, total: int, console: Console | None, title: str) -> None:
        self.console = console or Console(quiet=True)
        self._bar = Progress(
            TextColumn(f"{title} {{task.fields[phase]}}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(
                "loss {task.fields[loss]:.4f}  spread {task.fields[spread]:.3f}  {task.fields[rate]:.1f} steps/s"
            ),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=total, phase="", loss=0, spread=0, rate=0)
        self._pace, self._shown = Pace(), ExitStack()

    def __enter__(self) -> TrainingProgress:
        self._shown.enter_context(self._bar)
        self._pace.begin(self._bar.tasks[self._task].completed)
        self._shown.enter_context(heartbeat(self.console, self._line))
        return self

    def __exit__(self, *_: object) -> None:
        self._shown.close()

    def resume(self, done: int) -> None:
        """Continue after `done` steps of an earlier process."""
        self._bar.update(self._task, completed=done)
        self._pace.begin(done)

    def step(self, phase: str) -> None:
        """Advances by one step."""
        rate = self._pace.rate(self._bar.tasks[self._task].completed + 1)
        self._bar.update(self._task, advance=1, phase=phase, rate=rate)

    def metrics(self, loss: float, spread: float) -> None:
        """Show metrics from the device."""
        self._bar.update(self._task, loss=loss, spread=spread)

    def line(self, text: str) -> None:
        """Prints a line above the bar."""
        self.console.print(text, highlight=False)

    def _line(self) -> bool:
        task = self._bar.tasks[self._task]
        if not task.fields["phase"]:
            return False
        total = task.total or 0.0
        pace = self._pace.words(task.completed, total)
        self.line(f"{task.fields['phase']}  step {task.completed:,.0f} of about {total:,.0f}" + (pace and f", {pace}"))
        return True


class RowProgress:
    """Progress over rows, in stages.

    Attributes:
        stages: Seconds of each stage that has ended.
    """

    def __init__(self, bar: Progress, task: TaskID, stage: str = "") -> None:
        self._bar, self._task = bar, task
        self.stages: dict[str, float] = {}
        self._stage, self._since = stage, time.monotonic()
        self._pace = Pace()
        self._done, self._scale = 0.0, 1.0  # share of the stage that is done, and size of the current part
        self._said = False  # whether there was a line about the stage

    def begin(self, stage: str) -> None:
        """Begin a stage and end the one before."""
        self.end()
        self._stage, self._said, self._done, self._scale = stage, False, 0.0, 1.0
        self._pace.begin(self._bar.tasks[self._task].completed)
        self._bar.update(self._task, description=stage)

    def end(self) -> None:
        """End the current stage."""
        now = time.monotonic()
        if self._stage:
            self.stages[self._stage] = now - self._since
        if self._said:
            self._print(f"{self._stage}: done in {duration(now - self._since)}")
        self._stage, self._since, self._said = "", now, False

    def step(self, rows: float) -> None:
        """Advance by `rows`."""
        self._bar.update(self._task, advance=rows)

    def reach(self, rows: int) -> None:
        """Set the number of finished rows."""
        self._bar.update(self._task, completed=rows)

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
        task = self._bar.tasks[self._task]
        if not self._stage:
            return False
        done, total, elapsed = task.completed, task.total or 0.0, time.monotonic() - self._since
        words = f" for {duration(elapsed)}"
        if pace := self._pace.words(done, total):
            words = f": {done:,.0f} of {total:,.0f}, {pace}"
        elif share := self._done:
            words = f": {share:.0%}, {duration(elapsed * max(0.0, 1 - share) / share)} left"
        self._said = True
        self._print(f"{self._stage}{words}")
        return True

    def _print(self, line: str) -> None:
        self._bar.console.print(line, highlight=False)


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


@contextmanager
def progress(console: Console | None, rows: int, stage: str = "") -> Iterator[RowProgress]:
    """Show a bar, removed at the end; without a terminal, lines."""
    console = console or Console(quiet=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _RateColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        show = RowProgress(bar, bar.add_task(stage, total=rows), stage)
        outer = _current.set(show)
        try:
            with heartbeat(console, show.line):
                yield show
        finally:
            _current.reset(outer)
        show.end()
