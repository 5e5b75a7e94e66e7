"""Logistic regression."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def probability(score: FloatArray) -> FloatArray:
    """Convert log odds to a probability."""
    return np.asarray(1 / (1 + np.exp(-np.clip(score, -60, 60))))


def logistic(
    x: FloatArray, target: FloatArray, worth: FloatArray, ridge: float, *, intercept: bool = True
) -> tuple[FloatArray, float]:
    """Weights (m,) and offset of a logistic regression of x (n, m) on soft targets (n,), by Newton's method.

    `worth` (n,) weights the rows, and `ridge` penalises the squared weights. Without `intercept` the offset is 0.
    """
    design = np.hstack([x, np.full((len(x), 1), float(intercept))])
    penalty = np.diag([*np.full(x.shape[1], ridge), 1e-9])
    beta = np.zeros(design.shape[1])

    def loss(beta: FloatArray) -> float:
        z = design @ beta
        return float((worth * (np.logaddexp(0, z) - target * z)).sum() + 0.5 * beta @ penalty @ beta)

    def derivatives(beta: FloatArray) -> tuple[FloatArray, FloatArray]:
        p = probability(design @ beta)
        gradient = design.T @ (worth * (p - target)) + penalty @ beta
        return gradient, (design * (worth * np.maximum(p * (1 - p), 1e-6))[:, None]).T @ design + penalty

    beta = newton(beta, loss, derivatives)
    return beta[:-1], float(beta[-1])


def newton(
    start: FloatArray,
    loss: Callable[[FloatArray], float],
    derivatives: Callable[[FloatArray], tuple[FloatArray, FloatArray]],
    steps: int = 50,
) -> FloatArray:
    """Minimise a convex function from `start` by Newton's method; halve each step until it helps.

    `derivatives` returns the gradient and the matrix of second derivatives.
    """
    beta, best = start, loss(start)
    for _ in range(steps):
        gradient, curvature = derivatives(beta)
        step, length = np.linalg.solve(curvature, gradient), 1.0
        while (now := loss(beta - length * step)) > best and length > 1e-4:
            length /= 2
        if now > best or best - now < 1e-9 * abs(best):
            break
        beta, best = beta - length * step, now
    return beta
