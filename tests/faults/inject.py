"""One fault in a forked process: before one of its operations on files, or a NaN in its training."""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import resource
import signal
import sqlite3
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kills import is_writing
from mispair.methods.memory_bank import Bank
from mispair.training.trainer import Trainer

Work = Callable[[], int]
_CHANGES = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "sqlite3.connect"}
_NEEDS_ROOM = {"open", "os.mkdir", "fsync", "sqlite"}
LONGEST = 120.0  # seconds; a process that takes longer is stuck
STUCK = -999
COUNTERS = 3  # of operations, steps and pushes
ENVIRONMENT = "MISPAIR_FAULT"  # the arguments of the injector, and the process group of the command, for `join`
JUMP = 10 * 86_400.0
SHORT = 4096  # bytes that still fit into a file of a disk that gets full within a write
LITTLE = 4 << 20  # bytes of memory that are left


_group = 0  # of the command; 0 is that of this process


@dataclass(frozen=True)
class Fault:
    """What happens where.

    Attributes:
        kind: One of `KINDS` or `PLANTED`.
        at: The number of the operation, of the training step or of the push into a bank, from 0.
    """

    kind: str
    at: int


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        code: Its exit code; negative for a signal, `STUCK` after `LONGEST` seconds.
        operations: On files, where it was not killed.
        steps: Of its training, likewise.
        pushes: Into its memory banks, likewise.
    """

    code: int
    operations: int = 0
    steps: int = 0
    pushes: int = 0

    def places(self, kind: str) -> int:
        """At how many places a fault of this kind can happen."""
        return self.operations if kind in KINDS else self.pushes if kind == IN_BANK else self.steps


class _Counter:
    """Counts what several processes do, as it comes; in the first bytes of a file, or in those that follow."""

    def __init__(self, file: Path, place: int) -> None:
        with file.open("r+b") as opened:
            self._memory = mmap.mmap(opened.fileno(), 8 * COUNTERS)
        self._bytes = slice(8 * place, 8 * place + 8)

    @property
    def value(self) -> int:
        return int.from_bytes(self._memory[self._bytes], "little")

    def next(self) -> int:
        """The number before, and counts on."""
        number = self.value
        self._memory[self._bytes] = (number + 1).to_bytes(8, "little")
        return number


class _Injector:
    """Counts the operations below a folder, those of threads and other processes too, and lets the fault happen.

    Forked processes have it; others get it by `join`.
    """

    def __init__(self, folder: str, fault: Fault | None, counters: Path) -> None:
        self.folder, self.fault = folder, fault
        self.operations, self.steps, self.pushes = (_Counter(counters, place) for place in range(COUNTERS))

    def install(self) -> None:
        """In this process, for good."""
        sync, connect, step, push = os.fsync, sqlite3.connect, Trainer._step, Bank.push
        injector, fault = self, self.fault

        def fsync(fd: Any) -> None:
            injector.before("fsync")
            sync(fd)

        class Connection(sqlite3.Connection):
            def execute(self, *arguments: Any) -> sqlite3.Cursor:
                injector.before("sqlite")
                return super().execute(*arguments)

        def counted_step(trainer: Trainer, *arguments: Any) -> None:
            number = injector.steps.next()
            if fault is not None and fault.kind in PLANTED and fault.at == number:
                PLANTED[fault.kind](trainer)
            step(trainer, *arguments)

        def counted_push(bank: Bank, *arguments: Any) -> None:
            push(bank, *arguments)
            number = injector.pushes.next()
            if fault == Fault(IN_BANK, number):
                bank.pooled()[number % 2].view(-1)[0] = torch.nan

        os.fsync = fsync
        sqlite3.connect = lambda *given, **options: connect(*given, factory=Connection, **options)  # type: ignore[assignment]
        Trainer._step, Bank.push = counted_step, counted_push  # type: ignore[method-assign,assignment]
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple[object, ...]) -> None:
        """For `sys.addaudithook`; what it raises is raised by the operation."""
        if event not in _CHANGES or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        if event == "open" and not is_writing(arguments):
            return
        if os.path.abspath(os.fsdecode(arguments[0])).startswith(self.folder):
            self.before(event)

    def before(self, event: str) -> None:
        number = self.operations.next()
        if self.fault is not None and self.fault.kind in KINDS and number >= self.fault.at:
            KINDS[self.fault.kind](event, number == self.fault.at)


def join() -> None:
    """In a process that was not forked by one with an injector, but has its environment: a worker of Ray."""
    global _group
    folder, fault, counters, _group = json.loads(os.environ[ENVIRONMENT])
    _Injector(folder, fault and Fault(*fault), Path(counters)).install()


def _signalled(number: signal.Signals) -> Callable[[str, bool], None]:
    def stop(_event: str, first: bool) -> None:
        if first:
            os.kill(os.getpid(), number)

    return stop


def _stop(_event: str, first: bool) -> None:
    """All processes of the command, because `start` looks at the first of them; a worker of Ray is of another group."""
    if first:
        os.killpg(_group, signal.SIGSTOP)


def _full(event: str, _first: bool) -> None:
    if event in _NEEDS_ROOM:
        _raise(event, errno.ENOSPC)


def _full_within(_event: str, first: bool) -> None:  # Python ignores the signal that comes with it
    if first:
        resource.setrlimit(resource.RLIMIT_FSIZE, (SHORT, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _once(code: int) -> Callable[[str, bool], None]:
    def fail(event: str, first: bool) -> None:
        if first:
            _raise(event, code)

    return fail


def _read_only(event: str, _first: bool) -> None:
    _raise(event, errno.EROFS)


def _raise(event: str, code: int) -> None:
    if event.startswith("sqlite"):
        raise sqlite3.OperationalError({errno.ENOSPC: "database or disk is full"}.get(code, "disk I/O error"))
    raise OSError(code, os.strerror(code))


def _slow(_event: str, _first: bool) -> None:
    time.sleep(0.005)


def _short_of_memory(_event: str, first: bool) -> None:
    if first:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + LITTLE
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _jumping(seconds: float, *names: str) -> Callable[[str, bool], None]:
    def jump(_event: str, first: bool) -> None:
        if first:
            for name in names:
                clock = getattr(time, name)
                setattr(time, name, lambda clock=clock: clock() + seconds)

    return jump


SECOND = "second process"  # the first one is stopped while the same command runs in another
# Each is called before every operation after the fault begins; its second argument: whether this is the first one.
KINDS: dict[str, Callable[[str, bool], None]] = {
    "SIGKILL": _signalled(signal.SIGKILL),
    "SIGTERM": _signalled(signal.SIGTERM),
    "SIGINT": _signalled(signal.SIGINT),
    "disk full": _full,
    "disk full within a write": _full_within,
    "input/output error": _once(errno.EIO),
    "read-only": _read_only,
    "slow disk": _slow,
    "too many open files": _once(errno.EMFILE),
    "no memory": _short_of_memory,
    "clock forwards": _jumping(JUMP, "time", "monotonic", "perf_counter"),
    "clock backwards": _jumping(-JUMP, "time"),  # the others cannot
    SECOND: _stop,
}


def _in_gradients(trainer: Trainer) -> None:
    parameter = next(trainer.nets[trainer.cursor.network].parameters())
    once = iter([torch.nan])
    parameter.register_hook(lambda gradient: gradient * next(once, 1.0))  # type: ignore[no-untyped-call]


@torch.no_grad()
def _in_weights(trainer: Trainer) -> None:
    next(trainer.nets[trainer.cursor.network].parameters()).view(-1)[0] = torch.nan


IN_BANK, IN_INPUT = "NaN in a bank", "NaN in features"
# By name: called before the step; a bank gets its own when it is filled.
PLANTED: dict[str, Callable[[Trainer], None]] = {
    "NaN in gradients": _in_gradients,
    "NaN in weights": _in_weights,
    IN_BANK: lambda _: None,
    IN_INPUT: lambda _: None,
}


def spoil(folder: Path, at: int) -> None:
    """Writes a NaN into a feature file below the folder."""
    files = sorted(folder.glob("*/*_ims.npy"))
    features = np.load(files[at % len(files)], mmap_mode="r+")
    features.reshape(-1)[97 * at % features.size] = np.nan
    features.flush()


def run(work: Work, folder: Path, log: Path, fault: Fault | None) -> Ended:
    """Runs `work` in a forked process in `folder`, with the fault, and its output in `log`."""
    return start(work, folder, log, fault)()


def start(work: Work, folder: Path, log: Path, fault: Fault | None) -> Callable[[], Ended]:
    """The same, and returns at once what waits for its end.

    Processes that stop themselves go on when another one has done the same work; its output is in `second`.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _work_and_exit(work, folder, log, fault, writer)
    os.close(writer)

    def wait() -> Ended:
        deadline = time.monotonic() + LONGEST
        while True:
            ended, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED)
            if ended and not os.WIFSTOPPED(status):
                break
            if ended:
                other = run(work, folder, log.with_name("second"), None)
                with log.with_name("second").open("a") as file:
                    file.write(f"exit code {other.code}\n")
                os.killpg(child, signal.SIGCONT)
                deadline = time.monotonic() + LONGEST
            elif time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                os.close(reader)
                return Ended(STUCK)
            time.sleep(0.002)
        with contextlib.suppress(ProcessLookupError):  # as a service manager does, or torchrun
            os.killpg(child, signal.SIGKILL)
        counted = os.read(reader, 50)
        os.close(reader)
        return Ended(os.waitstatus_to_exitcode(status), *json.loads(counted or b"[]"))

    return wait


def _work_and_exit(work: Work, folder: Path, log: Path, fault: Fault | None, writer: int) -> None:
    code = 70
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(folder)
        counters = log.with_name(f"{log.name}.counters")
        counters.write_bytes(bytes(8 * COUNTERS))
        inside = f"{folder}{os.sep}"
        os.environ[ENVIRONMENT] = json.dumps((inside, fault and astuple(fault), str(counters), os.getpid()))
        injector = _Injector(inside, fault, counters)
        injector.install()
        try:
            code = work()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 70
        counted = (injector.operations, injector.steps, injector.pushes)
        os.write(writer, json.dumps([counter.value for counter in counted]).encode())
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
