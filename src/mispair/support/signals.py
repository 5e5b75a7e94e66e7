"""Stopping from outside: a signal is noted, and heard after the step in hand."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stop_signals(note: Callable[[int], None]) -> Iterator[None]:
    """Inside, the number of SIGTERM or Ctrl-C goes to `note`; a second Ctrl-C ends the process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask_to_stop(number: int, _frame: object) -> None:
        note(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    old = {number: signal.signal(number, ask_to_stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
