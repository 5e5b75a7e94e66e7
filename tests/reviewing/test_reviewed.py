"""What a review leaves: every pair once, and what is left unmatched."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mispair.pairs.edits import Edits
from mispair.support.arrays import IntArray

COUNT = 8
rows = st.lists(st.integers(0, COUNT - 1), min_size=COUNT, max_size=COUNT).map(np.array)
masks = st.lists(st.booleans(), min_size=COUNT, max_size=COUNT).map(np.array)


@given(keep=masks, image_from=rows, caption_from=rows, groups=rows, rewritten=st.sets(st.integers(0, COUNT - 1)))
def test_unmatched_rows_have_what_no_pair_has(
    keep: np.ndarray, image_from: IntArray, caption_from: IntArray, groups: IntArray, rewritten: set[int]
) -> None:
    edits = Edits(keep, image_from, caption_from, {row: "new" for row in rewritten if keep[row]})
    found = edits.with_unmatched(groups)
    assert found.keep.all()
    assert found.rewritten == edits.rewritten
    using = {"image": keep, "caption": keep & ~np.isin(np.arange(COUNT), list(rewritten))}
    for name, item in (("image", groups), ("caption", np.arange(COUNT))):
        before, after = getattr(edits, f"{name}_from"), getattr(found, f"{name}_from")
        np.testing.assert_array_equal(before[keep], after[keep])
        used, halves = set(item[before[using[name]]]), item[after[~keep]]
        unused = set(item) - used
        if used & set(halves):  # only where there is nothing else left
            assert unused <= set(halves)
        for row in np.flatnonzero(~keep):
            assert item[after[row]] == item[row] or item[row] in used


@given(keep=masks, image_from=rows, caption_from=rows, groups=rows)
def test_each_pair_is_there_once(
    keep: np.ndarray, image_from: IntArray, caption_from: IntArray, groups: IntArray
) -> None:
    found = Edits(keep, image_from, caption_from).repeats(groups)
    pairs = list(zip(groups[image_from].tolist(), caption_from.tolist(), strict=True))
    seen = set()
    for row in range(COUNT):
        assert found[row] == (keep[row] and pairs[row] in seen)
        if keep[row]:
            seen.add(pairs[row])


def test_new_captions_are_no_repeats() -> None:
    same = np.zeros(COUNT, dtype=np.int64)
    edits = Edits(np.ones(COUNT, dtype=bool), same, same, {3: "one", 4: "another"})
    assert not edits.repeats(None)[[3, 4]].any()
