"""Scores of pairs of which it is known which are wrong."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mispair.functional.logistic import FloatArray

N, RATE = 3000, 0.3
Bools = npt.NDArray[np.bool_]


def made(seed: int = 0, rate: float = RATE, distance: float = 2.6) -> tuple[FloatArray, Bools, FloatArray]:
    """Scores, which pairs are wrong, and scores of shuffled pairs."""
    rng = np.random.default_rng(seed)
    wrong = rng.random(N) < rate
    return rng.normal(size=N) + distance * ~wrong, wrong, rng.normal(size=N)


def five_levels(score: FloatArray) -> FloatArray:
    return np.clip(np.rint(score + 1.5), 1, 5)


def joint_space(seed: int = 0, rate: float = RATE) -> tuple[FloatArray, FloatArray, FloatArray, Bools]:
    """Vectors of a common space, their cosines, and which pairs are wrong."""
    rng = np.random.default_rng(seed)
    left = rng.normal(size=(N, 24))
    right = left + rng.normal(size=(N, 24))
    wrong = rng.random(N) < rate
    right[wrong] = np.roll(right[wrong], 1, axis=0)
    cosine = (left * right).sum(1) / np.linalg.norm(left, axis=1) / np.linalg.norm(right, axis=1)
    return cosine, left, right, wrong
