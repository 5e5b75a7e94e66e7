"""The logistic regression against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from mispair.functional.logistic import FloatArray, logistic, probability


def some_rows(n: int = 200, m: int = 3, seed: int = 0) -> tuple[FloatArray, FloatArray]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, m)) * [1, 2, 0.5][:m] + [0, 1, -1][:m]
    return x, (rng.random(n) < probability(x @ np.array([1, -0.5, 2])[:m] + 0.3)).astype(np.float64)


def sklearn_logistic(x: FloatArray, y: FloatArray, worth: FloatArray, ridge: float) -> tuple[FloatArray, float]:
    model = LogisticRegression(C=1 / ridge, tol=1e-10, max_iter=10_000).fit(x, y, sample_weight=worth)
    return model.coef_[0], float(model.intercept_[0])


def assert_same(found: tuple[FloatArray, float], expected: tuple[FloatArray, float]) -> None:
    assert found[0] == pytest.approx(expected[0], abs=1e-3)
    assert found[1] == pytest.approx(expected[1], abs=1e-3)


@pytest.mark.parametrize("ridge", [1e-3, 1.0, 10.0])
@pytest.mark.parametrize("m", [1, 3])
def test_the_regression_is_scikit_learns(ridge: float, m: int) -> None:
    x, y = some_rows(m=m)
    worth = np.random.default_rng(1).uniform(0.1, 3, len(x))
    assert_same(logistic(x, y, worth, ridge), sklearn_logistic(x, y, worth, ridge))


def test_a_worth_counts_as_so_many_rows() -> None:
    x, y = some_rows()
    times = np.random.default_rng(1).integers(0, 4, len(x))
    rows = np.repeat(np.arange(len(x)), times)
    assert_same(logistic(x, y, times.astype(float), 1.0), logistic(x[rows], y[rows], np.ones(len(rows)), 1.0))


def test_a_soft_target_is_a_share_of_a_row_of_either_kind() -> None:
    x, _ = some_rows()
    target = np.random.default_rng(2).random(len(x))
    twice, worth = np.concatenate([x, x]), np.concatenate([target, 1 - target])
    expected = sklearn_logistic(twice, np.repeat([1.0, 0.0], len(x)), worth, 2.0)
    assert_same(logistic(x, target, np.ones(len(x)), 2.0), expected)


@pytest.mark.parametrize("target", [0.0, 1.0])
def test_targets_of_one_kind_end_in_something_finite(target: float) -> None:
    x, _ = some_rows()
    weights, offset = logistic(x, np.full(len(x), target), np.ones(len(x)), 1e-3)
    found = probability(x @ weights + offset)
    assert np.isfinite(weights).all()
    assert np.abs(found - target).max() < 0.01


def test_separable_rows_and_columns_without_spread_end_in_something_finite() -> None:
    x = np.column_stack([np.linspace(-1, 1, 100), np.zeros(100), np.ones(100)])
    y = (x[:, 0] > 0).astype(np.float64)
    weights, offset = logistic(x, y, np.ones(100), 1e-3)
    assert np.isfinite([*weights, offset]).all()
    assert weights[1] == 0
    assert ((x @ weights + offset > 0) == (y > 0)).all()
