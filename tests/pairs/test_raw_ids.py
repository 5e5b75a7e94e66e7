"""Ids of rows, by the quick way and by the other."""

from __future__ import annotations

import pyarrow
from hypothesis import given
from hypothesis import strategies as st

from mispair.pairs.row_ids import id_column, unique_ids

NAMES = st.sampled_from(["", "a", "b", "a#1", "c.jpg#0", "d", "e"])


@given(st.lists(st.tuples(NAMES, st.sampled_from(["", "c.jpg", "d.jpg"])), min_size=1, max_size=9))
def test_both_ways_give_the_same(rows: list[tuple[str, str]]) -> None:
    names, images = (list(column) for column in zip(*rows, strict=True))
    columns = (pyarrow.array(column, pyarrow.large_string()) for column in (names, images))
    found = id_column(*columns).to_pylist()
    assert found == list(unique_ids(names, images))
    assert len(set(found)) == len(rows)
