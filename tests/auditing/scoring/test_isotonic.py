"""Rising and falling sequences against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn.isotonic import isotonic_regression

from mispair.auditing.scoring.isotonic import FloatArray, falling, rising

VALUES = st.floats(-100, 100, width=32) | st.sampled_from([0.0, 1.0])  # with many equal ones
WEIGHTS = st.floats(0.125, 100, width=32)
BOTH = st.integers(1, 60).flatmap(
    lambda n: st.tuples(hnp.arrays(np.float64, n, elements=VALUES), hnp.arrays(np.float64, n, elements=WEIGHTS))
)


@given(BOTH)
def test_it_is_scikit_learns_regression(given: tuple[FloatArray, FloatArray]) -> None:
    values, weights = given
    assert rising(values, weights) == pytest.approx(isotonic_regression(values, sample_weight=weights), abs=1e-9)
    assert rising(values) == pytest.approx(isotonic_regression(values), abs=1e-9)
    expected = isotonic_regression(values, sample_weight=weights, increasing=False)
    assert falling(values, weights) == pytest.approx(expected, abs=1e-9)


@given(BOTH)
def test_it_never_falls_and_keeps_the_mean(given: tuple[FloatArray, FloatArray]) -> None:
    values, weights = given
    found = rising(values, weights)
    assert (np.diff(found) >= 0).all()
    assert np.average(found, weights=weights) == pytest.approx(np.average(values, weights=weights), abs=1e-9)
    assert rising(found, weights).tolist() == pytest.approx(found.tolist(), abs=1e-12)


def test_a_weight_counts_as_so_many_copies() -> None:
    values, weights = np.array([2.0, 1.0, 5.0, 3.0]), np.array([3.0, 1.0, 1.0, 2.0])
    copies = np.repeat(values, weights.astype(int))
    assert np.repeat(rising(values, weights), weights.astype(int)) == pytest.approx(rising(copies))


def test_what_has_no_weight_moves_nothing() -> None:
    values, weights = np.array([9.0, 1.0, 3.0, -9.0, 2.0]), np.array([0.0, 1.0, 1.0, 0.0, 1.0])
    assert rising(values, weights)[[1, 2, 4]] == pytest.approx([1.0, 2.5, 2.5])
    assert (np.diff(rising(values, np.zeros(5))) >= 0).all()


def test_nothing_gives_nothing() -> None:
    assert len(rising(np.array([]))) == 0
    assert rising(np.array([4.0])).tolist() == [4.0]
