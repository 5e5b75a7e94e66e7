"""Run the remaining trainings of a suite, and show their progress.

The progress is read from the results folder, so all processes that work in one folder show the same.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from statistics import median
from typing import Literal

import torch
from rich.console import Console
from rich.text import Text

from mispair.bench.suite.record import RECORD, RUN, Record, read_record, run_cell
from mispair.bench.suite.results_folder import cell_folder, claimed, is_claimed
from mispair.bench.suite.suite import Cell
from mispair.errors import MispairError, StoppedError
from mispair.support.cores import OWN
from mispair.support.formatting import duration
from mispair.support.progress import heartbeat
from mispair.training.run_folder import count_validations

CONTEXT = multiprocessing.get_context("spawn")  # a forked process cannot use its parent's GPU
POLL_SECONDS = 0.5
STOPPED = 75  # exit code of a worker that was stopped
SAVED = "Stopped; everything is saved. Run the command again to resume."


@dataclass(frozen=True)
class CellState:
    """Progress of a cell."""

    cell: Cell
    status: Literal["waiting", "running", "done", "failed"]
    record: Record | None = None
    epochs: int = 0  # that have ended

    @property
    def fraction(self) -> float:
        return 1.0 if self.record else self.epochs / self.cell.config.total_epochs

    def __str__(self) -> str:
        if self.record is None:
            return f"epoch {self.epochs + 1} of {self.cell.config.total_epochs}" if self.status == "running" else ""
        if self.status == "failed":
            return f"failed: {self.record.error}"
        return f"rSum {self.record.averaged()['rsum']:.1f} in {self.record.seconds:,.0f} s"


def state(results: Path, cell: Cell) -> CellState:
    """The progress of a cell, by the files in its folder."""
    folder = cell_folder(results, cell)
    if record := read_record(folder):
        return CellState(cell, record.status, record)
    return CellState(cell, "running" if is_claimed(folder) else "waiting", epochs=count_validations(folder / RUN))


def run_cells(
    cells: Sequence[Cell], results: Path, *, jobs: int = 1, retry: bool = False, console: Console
) -> list[CellState]:
    """Train the remaining cells, in this order and in `jobs` processes; `retry` repeats failed trainings."""
    if retry:
        for cell in cells:
            if state(results, cell).status == "failed":
                (cell_folder(results, cell) / RECORD).unlink(missing_ok=True)
    jobs = min(jobs, sum(state(results, cell).record is None for cell in cells))
    threads = max(1, torch.get_num_threads() // max(1, jobs))
    errors: SimpleQueue[str] = CONTEXT.SimpleQueue()
    workers = [CONTEXT.Process(target=_work, args=(list(cells), results, threads, errors)) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    try:
        with _termination():
            _show_progress(workers, cells, results, errors, console)
    except KeyboardInterrupt:
        _stop(workers)
        raise StoppedError(SAVED, 130) from None
    except BaseException:
        _stop(workers)
        raise
    if any(worker.exitcode == STOPPED for worker in workers):
        raise StoppedError(SAVED)
    if killed := [worker.exitcode for worker in workers if worker.exitcode]:
        console.print(
            f"{len(killed)} of {jobs} processes ended before their work was done (exit code {killed[0]}); if nothing "
            "else says why, memory may have run out. Run the command again to resume, with fewer jobs if needed.",
            soft_wrap=True,
        )
    return [state(results, cell) for cell in cells]


@contextmanager
def _termination() -> Iterator[None]:
    """Inside, SIGTERM raises an error as Ctrl-C does, to stop the workers."""

    def stop(number: int, _frame: object) -> None:
        raise StoppedError(SAVED, 128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


def _work(cells: list[Cell], results: Path, threads: int, errors: SimpleQueue[str]) -> None:
    """Train every cell without result and lock; send unexpected errors to `errors`."""
    os.environ[OWN] = str(threads)
    torch.set_num_threads(threads)
    parent, trained, broken = multiprocessing.parent_process(), True, set[str]()
    try:
        while trained:  # again from the start: another process may have died while it trained a cell
            trained = False
            for cell in cells:
                folder = cell_folder(results, cell)
                if cell.name in broken or read_record(folder) is not None:
                    continue
                if parent is not None and not parent.is_alive():
                    continue
                try:
                    with claimed(folder) as ours:
                        if ours and read_record(folder) is None:
                            run_cell(cell, folder)
                            trained = True
                except Exception as error:
                    if isinstance(error, StoppedError):
                        raise
                    broken.add(cell.name)  # another process may succeed
                    known = isinstance(error, MispairError | OSError)  # such as a full disk
                    errors.put(f"{cell.name}: {error if known else traceback.format_exc()}")
    except (StoppedError, KeyboardInterrupt):
        raise SystemExit(STOPPED) from None
    if broken:
        raise SystemExit(1)


def _stop(workers: Iterable[BaseProcess]) -> None:
    """Let all workers save their state, and wait for them."""
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.join()


def _show_progress(
    workers: Sequence[BaseProcess], cells: Sequence[Cell], results: Path, errors: SimpleQueue[str], console: Console
) -> None:
    """Show the progress and the errors of the workers until all have ended."""
    printed = {cell.name for cell in cells if read_record(cell_folder(results, cell))}

    def line() -> bool:
        console.print(_summary([state(results, cell) for cell in cells]), soft_wrap=True, markup=False)
        return True

    with heartbeat(console, line), console.status("") as status:
        working = bool(workers)
        while working:
            working = any(worker.is_alive() for worker in workers)  # before the errors, so that none is lost
            time.sleep(POLL_SECONDS if working else 0)
            while not errors.empty():
                console.print(errors.get().rstrip(), soft_wrap=True, markup=False)
            states = [state(results, cell) for cell in cells]
            for new in (one for one in states if one.record and one.cell.name not in printed):
                printed.add(new.cell.name)
                ended = sum(one.record is not None for one in states)
                console.print(f"{ended} of {len(states)}  {new.cell.name}: {new}", soft_wrap=True, markup=False)
            status.update(Text(_summary(states)))


def _summary(states: Sequence[CellState]) -> str:
    """Number of trainings by status, the time left, and the running trainings."""
    counts = {name: sum(one.status == name for one in states) for name in ("done", "running", "waiting", "failed")}
    line = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    left = seconds_left(states)
    running = [f"{one.cell.name}: {one}" for one in states if one.status == "running"]
    return "; ".join([line, *([] if left is None else [f"about {duration(left)} left"]), *running])


def seconds_left(states: Sequence[CellState]) -> float | None:
    """Seconds of the remaining trainings, by the median of the same method and model; None before the first end."""
    seconds: dict[tuple[str, str], list[float]] = {}
    for one in states:
        if one.record and one.record.status == "done":
            seconds.setdefault((one.cell.config.method, one.cell.config.model), []).append(one.record.seconds)
    if not seconds:
        return None
    overall = median(value for group in seconds.values() for value in group)
    left = 0.0
    for one in states:
        group = seconds.get((one.cell.config.method, one.cell.config.model), [overall])
        left += (1 - one.fraction) * median(group)
    return left / max(1, sum(one.status == "running" for one in states))
