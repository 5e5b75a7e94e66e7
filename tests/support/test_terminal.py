"""The table of metrics in the terminal."""

from __future__ import annotations

import io

from rich.console import Console

from mispair.support.terminal import COLUMNS, retrieval_table


def test_a_narrow_terminal_loses_no_digits() -> None:
    out = io.StringIO()
    table = retrieval_table("test", {"averaged": dict.fromkeys(COLUMNS, 98.7) | {"rsum": 123.4}})
    Console(file=out, width=40).print(table)
    assert "…" not in out.getvalue()
    assert "".join(line.split("│")[-2].strip() for line in out.getvalue().splitlines() if "│" in line) == "123.4"
