"""One fault in a forked process, before one of its operations on files."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kills import is_writing

Work = Callable[[], int]
_CHANGES = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "sqlite3.connect"}
_NEEDS_ROOM = {"open", "os.mkdir", "fsync"}
LONGEST = 120.0  # seconds; a process that takes longer is stuck
STUCK = -999
JUMP = 10 * 86_400.0


@dataclass(frozen=True)
class Fault:
    """What happens before which operation.

    Attributes:
        kind: One of `KINDS`.
        at: The number of the operation, from 0.
    """

    kind: str
    at: int


class _Injector:
    """Counts the operations below a folder, those of threads as they come, and lets the fault happen."""

    def __init__(self, folder: str, fault: Fault | None) -> None:
        self.folder, self.fault, self.seen = folder, fault, 0

    def hook(self, event: str, arguments: tuple[object, ...]) -> None:
        """For `sys.addaudithook`; what it raises is raised by the operation."""
        if event not in _CHANGES or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        if event == "open" and not is_writing(arguments):
            return
        if os.path.abspath(os.fsdecode(arguments[0])).startswith(self.folder):
            self.before(event)

    def before(self, event: str) -> None:
        number, self.seen = self.seen, self.seen + 1
        if self.fault is not None and number >= self.fault.at:
            KINDS[self.fault.kind](event, number == self.fault.at)


def _kill(_event: str, _first: bool) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _signalled(number: signal.Signals) -> Callable[[str, bool], None]:
    def stop(_event: str, first: bool) -> None:
        if first:
            os.kill(os.getpid(), number)

    return stop


def _full(event: str, _first: bool) -> None:
    if event in _NEEDS_ROOM:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _once(code: int) -> Callable[[str, bool], None]:
    def fail(_event: str, first: bool) -> None:
        if first:
            raise OSError(code, os.strerror(code))

    return fail


def _read_only(_event: str, _first: bool) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def _jumping(seconds: float) -> Callable[[str, bool], None]:
    def jump(_event: str, first: bool) -> None:
        if first:
            for name in ("time", "monotonic", "perf_counter"):
                clock = getattr(time, name)
                setattr(time, name, lambda clock=clock: clock() + seconds)

    return jump


# By name: called before every operation from the fault's on, and told whether it is the first one.
KINDS: dict[str, Callable[[str, bool], None]] = {
    "SIGKILL": _kill,
    "SIGTERM": _signalled(signal.SIGTERM),
    "SIGINT": _signalled(signal.SIGINT),
    "disk full": _full,
    "input/output error": _once(errno.EIO),
    "read-only": _read_only,
    "too many open files": _once(errno.EMFILE),
    "clock forwards": _jumping(JUMP),
    "clock backwards": _jumping(-JUMP),
}


def run(work: Work, folder: Path, log: Path, fault: Fault | None) -> tuple[int, int]:
    """Runs `work` in a forked process in `folder`, with the fault, and its output in `log`.

    Returns:
        The exit code (negative for a signal, `STUCK` after `LONGEST` seconds), and the operations that were counted.
    """
    return start(work, folder, log, fault)()


def start(work: Work, folder: Path, log: Path, fault: Fault | None) -> Callable[[], tuple[int, int]]:
    """The same, and returns at once what waits for its end."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _work_and_exit(work, folder, log, fault, writer)
    os.close(writer)
    deadline = time.monotonic() + LONGEST

    def wait() -> tuple[int, int]:
        ended = 0
        while not ended:
            ended, status = os.waitpid(child, os.WNOHANG)
            if not ended and time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                os.close(reader)
                return STUCK, 0
            time.sleep(0.002)
        counted = os.read(reader, 20)
        os.close(reader)
        return os.waitstatus_to_exitcode(status), int(counted or b"0")

    return wait


def _work_and_exit(work: Work, folder: Path, log: Path, fault: Fault | None, writer: int) -> None:
    code = 70
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(folder)
        injector = _Injector(f"{folder}{os.sep}", fault)
        synced = os.fsync

        def fsync(fd: Any) -> None:
            injector.before("fsync")
            synced(fd)

        os.fsync = fsync
        sys.addaudithook(injector.hook)
        try:
            code = work()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 70
        os.write(writer, str(injector.seen).encode())
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
