"""The table of an audit for paging, against what Arrow itself reads."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
from hypothesis import given
from hypothesis import strategies as st

from mispair.review.pair_table import MAPPED_SUGGESTIONS, PairTable, _flags, _values


@given(
    chunks=st.lists(st.lists(st.sampled_from([True, False, None]), max_size=20), max_size=4),
    start=st.integers(0, 30),
    length=st.integers(0, 60),
)
def test_truth_values_of_cut_and_joined_columns(chunks: list[list[bool | None]], start: int, length: int) -> None:
    column = pyarrow.chunked_array(chunks, pyarrow.bool_()).slice(start, length)
    assert _flags(column).tolist() == [value is True for value in column.to_pylist()]


@given(
    chunks=st.lists(st.lists(st.integers(-9, 9), max_size=20), max_size=4),
    start=st.integers(0, 30),
    length=st.integers(0, 60),
)
def test_numbers_of_cut_and_joined_columns(chunks: list[list[int]], start: int, length: int) -> None:
    column = pyarrow.chunked_array(chunks, pyarrow.int32()).slice(start, length)
    assert _values(column, np.int32).tolist() == column.to_pylist()


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


def test_suggestions_by_row_are_kept_until_the_audit_changes(tmp_path: Path) -> None:
    write_audit(tmp_path, "a", 10**18)
    table = PairTable(tmp_path)
    assert table.flagged.tolist() == [False, False, True]
    np.testing.assert_array_equal(table.score, np.array([0.9, np.nan, 0.1], np.float32))
    expected = [("right", 0, 0.4), ("left", 1, 0.2)]

    def found(table: PairTable) -> list[tuple[str, int, float]]:
        return [(one.replaced, one.row, round(one.score, 3)) for one in table.suggestions(2)]

    assert found(table) == expected
    assert table.suggestions(0) == []
    written = (tmp_path / MAPPED_SUGGESTIONS).stat().st_mtime_ns
    assert found(PairTable(tmp_path)) == expected
    assert (tmp_path / MAPPED_SUGGESTIONS).stat().st_mtime_ns == written  # read, not made again
    write_audit(tmp_path, "b", 2 * 10**18)
    assert found(PairTable(tmp_path)) == [("right", 1, 0.4), ("left", 1, 0.2)]
    (tmp_path / MAPPED_SUGGESTIONS).write_bytes(b"damaged")
    assert found(PairTable(tmp_path)) == [("right", 1, 0.4), ("left", 1, 0.2)]
