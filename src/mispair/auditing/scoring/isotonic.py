"""The best rising or falling sequence through given values (pool adjacent violators)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
ROUNDS = 10


def rising(values: FloatArray, weights: FloatArray | None = None) -> FloatArray:
    """The sequence that never falls and is closest to `values` by weighted squares.

    >>> rising(np.array([1.0, 3.0, 2.0, 4.0]))
    array([1. , 2.5, 2.5, 4. ])
    """
    blocks = values, np.ones(len(values)) if weights is None else weights, np.ones(len(values), dtype=np.int64)
    for _ in range(ROUNDS):
        blocks = _pooled(*blocks)
    means: list[float] = []
    sums: list[float] = []
    counts: list[int] = []
    for value, weight, size in zip(*(part.tolist() for part in blocks), strict=True):
        means.append(value)
        sums.append(weight)
        counts.append(size)
        while len(means) > 1 and means[-2] >= means[-1]:
            mean, total, count = means.pop(), sums.pop(), counts.pop()
            together = sums[-1] + total
            means[-1] = (means[-1] * sums[-1] + mean * total) / together if together else means[-1]
            sums[-1], counts[-1] = together, counts[-1] + count
    return np.repeat(np.array(means), counts)


def _pooled(
    means: FloatArray, sums: FloatArray, counts: npt.NDArray[np.int64]
) -> tuple[FloatArray, FloatArray, npt.NDArray[np.int64]]:
    """Blocks with every run of them that does not rise pooled into one: many at once, so that few are left to do."""
    starts = np.flatnonzero(np.append(True, means[1:] > means[:-1])[: len(means)])
    if len(starts) == len(means):
        return means, sums, counts
    together = np.add.reduceat(sums, starts)
    mean = np.add.reduceat(means * sums, starts) / np.where(together == 0, 1, together)
    return np.where(together == 0, means[starts], mean), together, np.add.reduceat(counts, starts)


def falling(values: FloatArray, weights: FloatArray | None = None) -> FloatArray:
    """The sequence that never rises and is closest to `values`."""
    return -rising(-values, weights)
