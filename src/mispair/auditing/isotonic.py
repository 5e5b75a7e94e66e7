"""The best rising or falling sequence through given values (pool adjacent violators)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def rising(values: FloatArray, weights: FloatArray | None = None) -> FloatArray:
    """The sequence that never falls and is closest to `values` by weighted squares.

    >>> rising(np.array([1.0, 3.0, 2.0, 4.0]))
    array([1. , 2.5, 2.5, 4. ])
    """
    means: list[float] = []
    sums: list[float] = []
    counts: list[int] = []
    for value, weight in zip(values.tolist(), np.ones(len(values)) if weights is None else weights, strict=True):
        means.append(value)
        sums.append(float(weight))
        counts.append(1)
        while len(means) > 1 and means[-2] >= means[-1]:
            mean, total, count = means.pop(), sums.pop(), counts.pop()
            together = sums[-1] + total
            means[-1] = (means[-1] * sums[-1] + mean * total) / together if together else means[-1]
            sums[-1], counts[-1] = together, counts[-1] + count
    return np.repeat(np.array(means), counts)


def falling(values: FloatArray, weights: FloatArray | None = None) -> FloatArray:
    """The sequence that never rises and is closest to `values`."""
    return -rising(-values, weights)
