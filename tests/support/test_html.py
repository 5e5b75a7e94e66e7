"""Tables for notebooks: nothing of a user's data becomes markup."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mispair.support.html import LONGEST_CELL, html_table, image_cell


def jpeg() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (300, 200), "red").save(file, "JPEG")
    return file.getvalue()


@pytest.mark.parametrize("text", ["<script>alert(1)</script>", '"><img src=x onerror=y>', "a & b", "&lt;b&gt;"])
def test_texts_are_escaped_everywhere(text: str) -> None:
    page = html_table([[text, 1]], [text, "n"], text)
    assert text not in page
    assert page.count("<td>") == 2
    assert page.count("<th>") == 2
    assert "<script" not in page
    assert "<img" not in page


def test_what_a_browser_would_obey_is_taken_out() -> None:
    assert "\u202e" not in html_table([["a\u202eb\x00"]], ["\u202e"], "\x07")


def test_values_are_short() -> None:
    page = html_table([["word " * 1000, np.float32(1 / 3), None, 12, float("nan")]], ["a", "b", "c", "d", "e"])
    assert len(page) < 2 * LONGEST_CELL + 200
    for cell in ("0.333", "", "12", "nan"):
        assert f"<td>{cell}</td>" in page


def test_no_rows_give_the_headings() -> None:
    assert "<th>id</th>" in html_table([], ["id"])


def test_an_image_stands_in_its_cell() -> None:
    cell = image_cell(jpeg(), 32)
    assert cell.startswith('<img src="data:image/jpeg;base64,')
    assert len(cell) < 4000
    assert str(cell) in html_table([[cell]], ["image"])


@pytest.mark.parametrize("source", [None, b"", b"no image", Path("missing.jpg")])
def test_what_is_no_image_leaves_the_cell_empty(source: Path | bytes | None) -> None:
    assert image_cell(source) == ""
    assert "<td></td>" in html_table([[image_cell(source)]], ["image"])
