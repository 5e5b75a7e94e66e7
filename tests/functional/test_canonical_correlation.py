"""Canonical correlation against the generalised eigenvalue problem that defines it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import eigh

from mispair.functional.canonical_correlation import canonical_directions


def centred(seed: int, n: int, d: int, e: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(n, 2))
    x = hidden @ rng.normal(size=(2, d)) + 0.5 * rng.normal(size=(n, d))
    y = hidden @ rng.normal(size=(2, e)) + 0.5 * rng.normal(size=(n, e))
    return x - x.mean(0), y - y.mean(0)


@given(st.integers(0, 99), st.integers(12, 60), st.integers(1, 6), st.integers(1, 6), st.sampled_from([0.01, 0.1, 1.0]))
def test_it_solves_the_eigenvalue_problem(seed: int, n: int, d: int, e: int, ridge: float) -> None:
    x, y = centred(seed, n, d, e)
    a, b = canonical_directions(x, y, ridge)
    cxx, cyy, cxy = x.T @ x / n, y.T @ y / n, x.T @ y / n
    cxx = cxx + ridge * np.trace(cxx) / d * np.eye(d)
    cyy = cyy + ridge * np.trace(cyy) / e * np.eye(e)
    left = np.block([[np.zeros((d, d)), cxy], [cxy.T, np.zeros((e, e))]])
    right = np.block([[cxx, np.zeros((d, e))], [np.zeros((e, d)), cyy]])
    expected = np.sort(eigh(left, right, eigvals_only=True))[::-1][: min(d, e)]
    # A direction times its correlation r has the variance r squared, and r cubed with its partner.
    assert np.diag(a.T @ cxx @ a) == pytest.approx(expected**2, abs=1e-8)
    assert np.diag(b.T @ cyy @ b) == pytest.approx(expected**2, abs=1e-8)
    assert a.T @ cxy @ b == pytest.approx(np.diag(expected**3), abs=1e-8)


def test_no_more_directions_than_asked_for() -> None:
    a, b = canonical_directions(*centred(0, 30, 5, 4), width=2)
    assert (a.shape, b.shape) == ((5, 2), (4, 2))


@pytest.mark.parametrize("n", [1, 2])
def test_constant_or_few_vectors_give_finite_directions(n: int) -> None:
    for x in (np.zeros((n, 3)), np.ones((n, 3)) * np.arange(n)[:, None] - (n - 1) / 2):
        a, b = canonical_directions(x, np.zeros((n, 2)))
        assert np.isfinite(a).all()
        assert np.isfinite(b).all()
