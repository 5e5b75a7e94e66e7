"""The table of an audit for paging, against what Arrow itself reads."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mispair.errors import DamagedError
from mispair.reviewing.pair_table import Filter, PairTable
from refusals import refused


def write_audit(folder: Path, partner: str, when: int) -> None:
    table = pyarrow.table({
        "id": ["a", "b", "c"], "status": ["ok", "no image", "ok"], "match_score": [0.9, None, 0.1],
        "is_mismatch": [False, None, True],
    })  # fmt: skip
    pyarrow.parquet.write_table(table, folder / "pairs.parquet")
    found = {
        "id": ["c", "gone", "c", "c"], "replaced": ["left", "left", "right", "left"],
        "suggested_id": ["b", "a", partner, "gone"], "score": [0.2, 0.3, 0.4, 0.9],
    }  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.table(found), folder / "suggestions.parquet")
    for name in ("pairs.parquet", "suggestions.parquet"):
        os.utime(folder / name, ns=(when, when))


WORDS = ["", "Red bus", "a red DOG", "dog.", "Straße", "x(y", "Cafe\u0301", "CAF\u00c9", None]
TEXTS = ["", "red", "DOG", "straße", "x(", "cafe\u0301", "caf\u00e9", "row-1", "none of them"]


@st.composite
def audits(draw: st.DrawFn) -> dict[str, list[object]]:
    """A small table of an audit."""
    count = draw(st.integers(0, 20))

    def cells(values: list[object]) -> list[object]:
        return draw(st.lists(st.sampled_from(values), min_size=count, max_size=count))

    return {
        "id": [f"row-{row}" for row in range(count)],
        "status": ["ok"] * count,
        "caption": cells([*WORDS]),
        "match_score": cells([0.0, 0.1, 0.3, 0.5, 0.8, 1.0]),
        "is_mismatch": cells([True, False, None]),
        "reason": cells(["", "mismatched", "copy"]),
        "reasons": cells([None, "image is tiny", "image is tiny; copy"]),
        "source": cells(["", "web", "web-2", None]),
    }


filters = st.builds(
    Filter,
    low=st.sampled_from([0.0, 0.2]),
    high=st.sampled_from([1.0, 0.5]),
    flagged=st.booleans(),
    reason=st.sampled_from(["", "copy", "mismatched", "image is tiny"]),
    source=st.sampled_from(["", "web"]),
    text=st.sampled_from(TEXTS),
    sort=st.sampled_from(["score", "doubt", "row", "-score"]),
)


def by_hand(columns: dict[str, list[Any]], wanted: Filter) -> list[int]:
    """What a filter lets through, row by row."""

    def has(row: int, names: tuple[str, ...], text: str) -> bool:
        cells = (normalize("NFC", columns[name][row] or "").lower() for name in names)
        return any(normalize("NFC", text).lower() in cell for cell in cells)

    score = columns["match_score"]
    rows = [
        row
        for row in range(len(score))
        if wanted.low <= score[row] <= wanted.high
        and (columns["is_mismatch"][row] or not wanted.flagged)
        and has(row, ("reason", "reasons"), wanted.reason)
        and wanted.source in ("", columns["source"][row])
        and has(row, ("caption", "id"), wanted.text)
    ]
    keys = {"score": lambda row: score[row], "-score": lambda row: -score[row], "row": lambda row: row}
    return sorted(rows, key=keys.get(wanted.sort, lambda row: abs(np.float32(score[row]) - np.float32(0.5))))


@given(columns=audits(), wanted=st.lists(filters, min_size=1, max_size=12))
def test_a_filter_lets_through_what_it_says(
    tmp_path_factory: pytest.TempPathFactory, columns: dict[str, list[Any]], wanted: list[Filter]
) -> None:
    folder = tmp_path_factory.mktemp("audit")
    kinds = {"match_score": pyarrow.float32(), "is_mismatch": pyarrow.bool_()}
    table = {name: pyarrow.array(cells, kinds.get(name, pyarrow.string())) for name, cells in columns.items()}
    pyarrow.parquet.write_table(pyarrow.table(table), folder / "pairs.parquet", row_group_size=5)
    found = PairTable(folder)
    with ThreadPoolExecutor(4) as pool:  # more filters than it remembers
        selected = list(pool.map(lambda one: found.select(one).tolist(), wanted * 3))
    assert selected == [by_hand(columns, one) for one in wanted] * 3


@given(counts=st.lists(st.integers(0, 40), min_size=1, max_size=30))
def test_texts_are_found_by_row_and_rows_by_id(tmp_path_factory: pytest.TempPathFactory, counts: list[int]) -> None:
    """Ids that are there several times mean their first row."""
    folder, ids = tmp_path_factory.mktemp("audit"), [f"{count}\0'{count}" for count in counts]
    found = {"id": ids, "status": ["ok"] * len(ids), "match_score": [0.5] * len(ids), "is_mismatch": [True] * len(ids)}
    pyarrow.parquet.write_table(pyarrow.table({**found, "caption": [None, *ids[1:]]}), folder / "pairs.parquet")
    table = PairTable(folder)
    rows = [*range(len(ids))][::-1]
    assert [(pair.row, pair.id, pair.caption, pair.image) for pair in table.read(rows)] == [
        (row, ids[row], ids[row] if row else "", "") for row in rows
    ]
    assert table.find([*dict.fromkeys(ids), "none"]) == {name: ids.index(name) for name in ids}
    assert table.is_of({"id": pyarrow.array(ids), "image": pyarrow.array(ids)})
    assert not table.is_of({"id": pyarrow.array([*ids[:-1], "none"])})
    assert not table.is_of({"id": pyarrow.array([*ids, "none"])})


def test_suggestions_are_found_by_row(tmp_path: Path) -> None:
    write_audit(tmp_path, "a", 10**18)
    table = PairTable(tmp_path)
    assert table.flagged.tolist() == [False, False, True]
    np.testing.assert_array_equal(table.score, np.array([0.9, np.nan, 0.1], np.float32))
    expected = [("right", 0, 0.4), ("left", 1, 0.2)]

    def found(table: PairTable) -> list[tuple[str, int, float]]:
        return [(one.replaced, one.row, round(one.score or 0, 3)) for one in table.suggestions(2)]

    assert found(table) == expected
    assert table.suggestions(0) == []
    write_audit(tmp_path, "b", 2 * 10**18)
    assert found(PairTable(tmp_path)) == [("right", 1, 0.4), ("left", 1, 0.2)]


@pytest.mark.parametrize("damaged", [b"dog 7", b"PAR1"])  # a text, and the head of the first page
def test_a_damaged_table_is_named(tmp_path: Path, damaged: bytes) -> None:
    captions = [f"dog {row}" * 20 for row in range(50)]
    columns = {
        "id": list("abcde") * 10,
        "caption": captions,
        "status": ["ok"] * 50,
        "match_score": [0.5] * 50,
        "is_mismatch": [True] * 50,
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "pairs.parquet", compression="none")
    content = bytearray((tmp_path / "pairs.parquet").read_bytes())
    at = content.index(damaged) + 4
    content[at : at + 8] = b"\xff" * 8
    (tmp_path / "pairs.parquet").write_bytes(content)
    with refused(DamagedError, tmp_path / "pairs.parquet"):
        PairTable(tmp_path)
