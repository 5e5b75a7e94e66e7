"""Eigenvectors of symmetric matrices, also where LAPACK's fast algorithm gives up."""

from __future__ import annotations

import scipy.linalg
import torch
from torch import Tensor


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (n,), the smallest first, and eigenvectors (n, n), as columns, of a symmetric matrix.

    Divide and conquer, which `torch.linalg.eigh` uses, does not converge for some singular matrices, depending on the
    processor. The QR algorithm, which is slower, then takes its place.
    """
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        found = scipy.linalg.eigh(matrix.cpu().numpy(), driver="ev")
        values, vectors = (torch.from_numpy(part).to(matrix) for part in found)
    return values, vectors
