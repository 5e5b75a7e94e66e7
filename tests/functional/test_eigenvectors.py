"""Eigenvectors of symmetric matrices."""

from __future__ import annotations

from typing import NoReturn

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mispair.functional.eigenvectors import eigh


def no_convergence(_: Tensor) -> NoReturn:
    raise torch.linalg.LinAlgError("no convergence")  # type: ignore[attr-defined]


@pytest.mark.parametrize("converges", [True, False])
@given(size=st.integers(1, 40), rank=st.integers(0, 40), power=st.integers(-100, 100), seed=st.integers(0, 99))
def test_they_take_the_matrix_apart(converges: bool, size: int, rank: int, power: int, seed: int) -> None:
    x = torch.randn(size, rank, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    matrix = x @ x.T
    with pytest.MonkeyPatch.context() as patch:
        if not converges:
            patch.setattr(torch.linalg, "eigh", no_convergence)
        values, vectors = eigh(matrix * 10.0**power)
    assert (values.diff() >= 0).all()
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(size, dtype=torch.float64))
    torch.testing.assert_close(vectors @ (values * 10.0**-power).diag() @ vectors.T, matrix, atol=1e-9, rtol=1e-9)


def test_numbers_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="infs or NaNs"):
        eigh(torch.full((3, 3), torch.nan, dtype=torch.float64))
