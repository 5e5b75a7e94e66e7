"""Folds, samples and shuffled pairs: fixed by row numbers and groups, and never mixing what belongs together."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.stats import chisquare

from mispair.auditing.scoring import folds
from mispair.auditing.scoring.folds import (
    FOLD,
    FOLDS,
    NEAR,
    PARTNER,
    SAMPLE,
    fold_numbers,
    random_keys,
    sample,
    shuffled,
)
from mispair.support.arrays import IntArray

MASK = (1 << 64) - 1
GROUPS = hnp.arrays(np.int64, st.integers(1, 200), elements=st.integers(0, 60))


def splitmix64(number: int, stream: int) -> int:
    """The published generator, in whole numbers without bounds."""
    z = (number * 8 + stream + 1) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


@given(hnp.arrays(np.int64, st.integers(0, 20), elements=st.integers(0, 2**40)), st.integers(0, 3))
def test_keys_are_those_of_splitmix64(numbers: IntArray, stream: int) -> None:
    assert random_keys(numbers, stream).tolist() == [splitmix64(int(number), stream) for number in numbers]


def test_streams_share_no_key() -> None:
    keys = np.concatenate([random_keys(np.arange(1000), stream) for stream in (FOLD, SAMPLE, PARTNER, NEAR)])
    assert len(np.unique(keys)) == len(keys)


def test_folds_of_consecutive_rows_are_equally_large() -> None:
    counts = np.bincount(fold_numbers(np.arange(20_000)), minlength=FOLDS)
    assert len(counts) == FOLDS
    assert chisquare(counts).pvalue > 1e-3


@given(GROUPS)
def test_a_group_is_in_one_fold_whatever_is_around_it(groups: IntArray) -> None:
    fold = fold_numbers(groups)
    assert all(fold_numbers(np.array([group]))[0] == number for group, number in zip(groups, fold, strict=True))


def test_a_small_set_is_its_own_sample() -> None:
    rows = np.array([2, 3, 5, 8])
    assert sample(rows, 4).tolist() == [2, 3, 5, 8]
    assert sample(rows, 0).tolist() == []


@given(st.integers(1, 300), st.integers(0, 300), st.integers(0, 100))
def test_rows_added_at_the_end_push_rows_out_of_a_sample_but_never_in(rows: int, more: int, most: int) -> None:
    before, after = sample(np.arange(rows), most), sample(np.arange(rows + more), most)
    for found, total in ((before, rows), (after, rows + more)):
        assert len(found) == min(total, most)
        assert (np.diff(found) > 0).all()
        assert ((found >= 0) & (found < total)).all()
    assert set(after[after < rows]) <= set(before)


def test_a_sample_is_taken_from_everywhere() -> None:
    counts = np.histogram(sample(np.arange(100_000), 5000), bins=10, range=(0, 100_000))[0]
    assert chisquare(counts).pvalue > 1e-3


@given(GROUPS)
def test_shuffled_pairs_stay_in_their_fold_and_out_of_their_group(groups: IntArray) -> None:
    fold = fold_numbers(groups)
    partner = shuffled(fold, groups)
    made = np.flatnonzero(partner >= 0)
    assert (partner[partner < 0] == -1).all()
    assert (fold[partner[made]] == fold[made]).all()
    assert (groups[partner[made]] != groups[made]).all()
    assert len(np.unique(partner[made])) == len(made)  # nobody is lent twice
    for number in range(FOLDS):  # a circle through several groups leaves each of them at least once
        inside = fold == number
        several = len(np.unique(groups[inside]))
        assert (partner[inside] >= 0).sum() >= (several if several > 1 else 0)


def test_separate_rows_nearly_all_get_a_stranger() -> None:
    rows = np.arange(500)
    assert (shuffled(fold_numbers(rows), rows) >= 0).all()


@pytest.mark.parametrize("rows", [1, 5])
def test_one_group_has_no_shuffled_pair(rows: int) -> None:
    groups = np.full(rows, 7)
    assert shuffled(fold_numbers(groups), groups).tolist() == [-1] * rows


@given(st.integers(1, 300), st.integers(0, 100), st.integers(1, 50))
def test_a_sample_has_the_lowest_keys_however_many_rows_are_read_at_a_time(rows: int, most: int, part: int) -> None:
    lowest = sorted(range(rows), key=lambda row: splitmix64(row, SAMPLE))[:most]
    with patch.object(folds, "PART", part):
        assert sample(np.arange(rows), most).tolist() == sorted(lowest)
