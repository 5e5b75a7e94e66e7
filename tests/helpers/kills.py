"""Processes that are killed at each of their changes to files, one after the other."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

KILLED = 9
_CHANGES = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir"}


def killed_runs(work: Callable[[], object], folder: Path) -> Iterator[int]:
    """Runs `work` in a child process that ends without any cleanup before its k-th change below `folder`, k = 0, 1, ...

    Yields k after each killed child; ends when a child has done all of its work.
    """
    for count in range(1000):
        child = os.fork()
        if child == 0:
            _run_and_exit(work, str(folder), count)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:
            return
        assert code == KILLED, f"the child ended with {code}"
        yield count
    raise AssertionError("the work does not end")


def _run_and_exit(work: Callable[[], object], folder: str, kill_at: int) -> None:
    seen = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event not in _CHANGES or not str(os.fsdecode(_name(arguments[0]))).startswith(folder):
            return
        if event == "open" and not is_writing(arguments):
            return
        if seen == kill_at:
            os._exit(KILLED)
        seen += 1

    try:
        sys.addaudithook(hook)
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _name(argument: object) -> str | bytes:
    return argument if isinstance(argument, str | bytes) else str(argument)


def is_writing(arguments: tuple[object, ...]) -> bool:
    """Whether an audit event "open" opens a file to change it."""
    mode, flags = arguments[1], arguments[2]
    return bool(isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)) or (
        isinstance(mode, str) and any(letter in mode for letter in "wax+")
    )
