"""Progress of trainings and audits: a bar if there is a terminal, and a line per epoch of a training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

LINE_SECONDS = 15.0  # between lines where there is no terminal


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
        self._since, self._steps = time.monotonic(), 0

    def __enter__(self) -> TrainingProgress:
        self._bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, error, trace)

    def resume(self, done: int) -> None:
        """Continues after `done` steps of an earlier process."""
        self._bar.update(self._task, completed=done)

    def step(self, phase: str) -> None:
        """Advances by one step."""
        self._steps += 1
        rate = self._steps / max(time.monotonic() - self._since, 1e-9)
        self._bar.update(self._task, advance=1, phase=phase, rate=rate)

    def metrics(self, loss: float, spread: float) -> None:
        """Shows metrics that were read from the device."""
        self._bar.update(self._task, loss=loss, spread=spread)

    def line(self, text: str) -> None:
        """Prints a line above the bar."""
        self.console.print(text, highlight=False)


class RowProgress:
    """Progress over rows, in stages.

    Attributes:
        stages: Seconds of each stage that has ended.
    """

    def __init__(self, bar: Progress, task: TaskID, stage: str = "") -> None:
        self._bar, self._task = bar, task
        self.stages: dict[str, float] = {}
        self._stage, self._since = stage, time.monotonic()
        self._last_line = self._since

    def begin(self, stage: str) -> None:
        """Begins a stage and ends the one before."""
        self.end()
        self._stage = stage
        self._bar.update(self._task, description=stage)
        self._line()

    def end(self) -> None:
        """Ends the current stage."""
        now = time.monotonic()
        if self._stage:
            self.stages[self._stage] = now - self._since
        self._stage, self._since = "", now

    def step(self, rows: float) -> None:
        """Advances by `rows`."""
        self._bar.update(self._task, advance=rows)
        self._line()

    def reach(self, rows: int) -> None:
        """Sets the number of rows that are done."""
        self._bar.update(self._task, completed=rows)
        self._line()

    def _line(self) -> None:
        """Without a terminal, a line now and then, so that hours are not silent."""
        now = time.monotonic()
        if self._bar.disable and now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            task = self._bar.tasks[self._task]
            done = f": {task.completed:,.0f} of {task.total:,.0f}" if task.completed else ""
            self._bar.console.print(f"{self._stage}{done}", highlight=False)


@contextmanager
def progress(console: Console | None, rows: int, stage: str = "") -> Iterator[RowProgress]:
    """A bar that disappears at the end."""
    console = console or Console(quiet=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield RowProgress(bar, bar.add_task(stage, total=rows), stage)
