"""Handling of SIGTERM and Ctrl-C: stop after the current step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stop_signals(stop: Callable[[int], None]) -> Iterator[None]:
    """Inside, SIGTERM and Ctrl-C call `stop` with their number; a second Ctrl-C ends the process at once.

    Does nothing outside the main thread, which is the only one that can handle signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, _frame: object) -> None:
        stop(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    old = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
