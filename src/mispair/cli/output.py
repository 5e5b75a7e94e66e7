"""Printing of all commands, and flags of all. Heavy imports wait until they are needed."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection
from typing import IO, TYPE_CHECKING, Any

from mispair.support.formatting import clean

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


WIDEST = 1000  # columns of a table if stdout is no terminal


def console(file: IO[str] | None = None) -> Console:
    """Console for messages, on stderr by default."""
    from rich.console import Console

    return Console(file=file or sys.stderr, markup=False, highlight=False)  # captions may hold [brackets]


def say(text: object = "", *, file: IO[str] | None = None, flush: bool = False) -> None:
    """Print a line, by default on stdout, without control characters of captions, names and paths."""
    print(clean(str(text).replace("\r", "\ufffd")), file=file, flush=flush)


def with_flags(text: str, settings: Collection[str]) -> str:
    """Spell the settings of a message as flags.

    >>> with_flags("leave out `keep_best`, or give `noise_ratio=0.2` with `a_file`", {"keep_best", "noise_ratio"})
    'leave out --keep-best, or give --noise-ratio 0.2 with `a_file`'
    """

    def flag(found: re.Match[str]) -> str:
        name, value = found.groups()
        if name not in settings:
            return found.group()
        return f"--{name.replace('_', '-')}" + ("" if value is None else f" {value}")

    return re.sub(r"`([a-z][a-z0-9_]*)(?:=([^`]*))?`", flag, text)


def print_json(content: Any) -> None:
    """JSON on stdout."""
    print(json.dumps(content, indent=2))


def print_table(table: Table) -> None:
    """Print a table on stdout; outside a terminal as wide as needed, to cut no number."""
    out = console(sys.stdout)
    if not out.is_terminal:
        needed = out.measure(table, options=out.options.update(width=WIDEST)).maximum
        out.width = max(out.width, needed)
    out.print(table)


def taken(argv: list[str], flag: str) -> str | None:
    """Take a flag of every command out of the words, and return its value."""
    value = None
    for place in reversed(range(len(argv))):
        if argv[place] == flag and place + 1 < len(argv):
            value = argv.pop(place + 1)
            del argv[place]
        elif argv[place].startswith(f"{flag}="):
            value = argv.pop(place).partition("=")[2]
    return value
