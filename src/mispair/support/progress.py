"""What a training run shows in the terminal: a bar where there is one, a line an epoch everywhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class TrainingProgress:
    """Loss, spread, steps a second and the time left."""

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
        """Goes on from a step that an earlier process reached."""
        self._bar.update(self._task, completed=done)

    def step(self, phase: str) -> None:
        """One step more."""
        self._steps += 1
        rate = self._steps / max(time.monotonic() - self._since, 1e-9)
        self._bar.update(self._task, advance=1, phase=phase, rate=rate)

    def figures(self, loss: float, spread: float) -> None:
        """The newest figures that were read from the device."""
        self._bar.update(self._task, loss=loss, spread=spread)

    def line(self, text: str) -> None:
        self.console.print(text, highlight=False)


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
