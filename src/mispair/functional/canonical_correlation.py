"""Regularised canonical correlation: a common space of two kinds of vectors, from trusted pairs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def canonical_directions(x: Array, y: Array, ridge: float = 0.1, width: int = 64) -> tuple[Array, Array]:
    """Directions (D, k) and (E, k), k <= `width`, of the highest correlation of centred x (n, D) and y (n, E).

    Each pair of directions is scaled by its correlation. `ridge` times their mean is added to all variances.
    """
    left, right = _whitening(x, ridge), _whitening(y, ridge)
    u, correlation, v = np.linalg.svd(left @ (x.T @ y / len(x)) @ right, full_matrices=False)
    return left @ u[:, :width] * correlation[:width], right @ v[:width].T * correlation[:width]


def _whitening(x: Array, ridge: float) -> Array:
    """(D, D) the inverse square root of the regularised covariance."""
    covariance = x.T @ x / len(x)
    floor = max(ridge * float(np.trace(covariance)) / len(covariance), np.finfo(np.float64).tiny)
    values, vectors = np.linalg.eigh(covariance)
    scaled: Array = vectors / np.sqrt(values.clip(min=0) + floor) @ vectors.T
    return scaled
