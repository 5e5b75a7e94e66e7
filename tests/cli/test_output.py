"""What all commands print with."""

from __future__ import annotations

import pytest
from rich.table import Table

from mispair.cli.output import console, print_table


def test_no_number_of_a_table_is_cut_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table()
    numbers = [f"{number:,}" for number in range(10**9, 10**9 + 20)]
    for number in numbers:
        table.add_column(f"[{number}]", no_wrap=True)
    table.add_row(*numbers)
    print_table(table)
    said = capsys.readouterr().out
    assert all(f"│ {number} " in said for number in numbers)
    assert "[1,000,000,000]" in said


def test_people_are_spoken_to_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    console().print("a [bold] word")
    out, err = capsys.readouterr()
    assert (out, err) == ("", "a [bold] word\n")
