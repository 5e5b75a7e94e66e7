"""Tables for people: nothing that a spreadsheet computes or a terminal obeys."""

from __future__ import annotations

import csv
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mispair.pairs.result_tables import defused, original, write_table


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("=cmd()", "'=cmd()"),
        ("+1+cmd", "'+1+cmd"),
        ("-2+3", "'-2+3"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\t=1", "'\t=1"),
        ("-3.5e4", "-3.5e4"),
        ("a = b", "a = b"),
        ("\x1b[2Jgone", "\ufffd[2Jgone"),
        ("a\u202eb", "a\ufffdb"),
        ("two\r\nlines", "two\nlines"),
        ("café \u200d", "café \u200d"),
        ("", ""),
    ],
)
def test_texts(text: str, shown: str, tmp_path: Path) -> None:
    table = defused(pyarrow.table({"id": [text], "n": [1]}))
    assert table.column("id").to_pylist() == [shown]
    write_table(tmp_path / "t.csv", [table])
    with (tmp_path / "t.csv").open(newline="", encoding="utf-8") as file:
        assert next(csv.DictReader(file)) == {"id": shown, "n": "1"}


@given(st.text())
def test_nothing_is_left_to_compute_or_obey(text: str) -> None:
    shown = defused(pyarrow.table({"id": pyarrow.array([text])})).column("id")[0].as_py()
    assert not any((ord(sign) < 32 and sign not in "\t\n") or 0x7F <= ord(sign) < 0xA0 for sign in shown)
    if shown[:1] in tuple("=+-@\t\r"):
        float(shown)
    if not text.startswith("'") and shown.removeprefix("'") == text:
        assert original(shown) == text
