"""What all commands print with. Heavy imports wait until it is needed."""

from __future__ import annotations

import json
import sys
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


WIDEST = 1000  # columns of a table where there is no terminal


def console(file: IO[str] | None = None) -> Console:
    """For what is said to people; on stderr, unless told otherwise."""
    from rich.console import Console

    return Console(file=file or sys.stderr, markup=False, highlight=False)  # captions may hold [brackets]


def print_json(figures: Any) -> None:
    """For machines, on stdout."""
    print(json.dumps(figures, indent=2))


def print_table(table: Table) -> None:
    """On stdout; as wide as it needs to be where that is no terminal, because a number that is cut is lost."""
    out = console(sys.stdout)
    if not out.is_terminal:
        needed = out.measure(table, options=out.options.update(width=WIDEST)).maximum
        out.width = max(out.width, needed)
    out.print(table)
