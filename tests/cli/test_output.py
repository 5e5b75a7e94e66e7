"""What all commands print with."""

from __future__ import annotations

import pytest
from rich.table import Table

from mispair.cli.output import console, print_table, say


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


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a dog\n\ta cat", "a dog\n\ta cat"),
        ("\x1b]0;title\x07 \x1b[2J", "\ufffd]0;title\ufffd \ufffd[2J"),
        ("\rmispair: fine", "\ufffdmispair: fine"),
        ("gpj.\u202egod\u2066", "gpj.\ufffdgod\ufffd"),
        ("كلب في الثلج, 雪の中の犬, 🐕", "كلب في الثلج, 雪の中の犬, 🐕"),
        ("caf\udce9", "caf\ufffd"),
    ],
)
def test_no_terminal_obeys_what_a_caption_says(text: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    say(text)
    assert capsys.readouterr().out == shown + "\n"
