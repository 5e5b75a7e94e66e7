"""Recalibration by decisions, against a general-purpose optimiser and on drawn data."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from mispair.auditing.scoring import recalibration
from mispair.auditing.scoring.recalibration import LEAST, Recalibration
from mispair.functional.logistic import FloatArray, probability
from mispair.functional.metrics import auroc


def unit(rows: int, width: int, seed: int) -> FloatArray:
    found = np.random.default_rng(seed).normal(size=(rows, width))
    return np.asarray(found / np.linalg.norm(found, axis=1, keepdims=True))


def draw(rows: int, seed: int, taste: float) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Log odds that say nothing, vectors whose first directions decide, and answers."""
    left, right = unit(rows, 6, seed), unit(rows, 4, seed + 1)
    log_odds = np.random.default_rng(seed + 2).normal(3, 0.2, rows)
    wanted = probability(taste * (left[:, 0] + right[:, 0]))
    return log_odds, left, right, (np.random.default_rng(seed + 3).random(rows) < wanted).astype(float)


@pytest.mark.parametrize(("alike", "by_spread"), [(0.0, 0.0), (1.0, 0.0), (0.0, 0.5)])
def test_the_mode_is_that_of_the_plain_objective(
    monkeypatch: pytest.MonkeyPatch, alike: float, by_spread: float
) -> None:
    for name, value in (("PRIORS", 0.0), ("ALIKE", alike), ("SPREAD", by_spread)):
        monkeypatch.setattr(recalibration, name, np.array([value]))
    log_odds, left, right, matched = draw(60, 0, 4.0)
    # Along some directions nearly all pairs differ; axes are these directions, so that the prior has a diagonal.
    typical = [np.linalg.qr(unit(40, width, 7))[0] * np.geomspace(3, 0.1, width) for width in (6, 4)]
    found = Recalibration.fit(log_odds, left, right, matched, 0.2, typical)
    assert found is not None
    design = np.column_stack([log_odds, np.ones(60), left, right])
    widths = [np.square(side).mean(0) for side in typical]
    variances = [alike + by_spread * width / np.square(width).sum() for width in widths]
    spread = np.sqrt([0.2 + 0.3 / 0.2**2, 4.0, *np.concatenate(variances)])
    middle = np.array([0.8, *[0.0] * 11])

    def loss(moved: FloatArray) -> float:
        """Minus the log posterior; the weights are `moved` standard deviations of the prior from its mean."""
        z = design @ (middle + spread * moved)
        return float((np.logaddexp(0, z) - matched * z).sum() + moved @ moved / 2)

    expected = middle + spread * minimize(loss, np.zeros(12), method="BFGS", options={"gtol": 1e-8}).x
    np.testing.assert_allclose([found.slope, found.offset], expected[:2], atol=2e-3)
    np.testing.assert_allclose([*found.left, *found.right], expected[2:], atol=2e-3)


def test_decisions_teach_what_the_audit_does_not_see() -> None:
    log_odds, left, right, matched = draw(2000, 1, 8.0)
    found = Recalibration.fit(log_odds[:100], left[:100], right[:100], matched[:100], 0.2, (left, right))
    assert found is not None
    score = found.log_odds(log_odds, found.by_vectors(left, right))[100:]
    reached, before = (auroc(values, matched[100:] == 1) or 0.0 for values in (score, log_odds[100:]))
    assert before < 0.6
    assert reached > 0.8
    assert abs(probability(score).mean() - matched[100:].mean()) < 0.1


def test_vectors_hardly_count_where_the_audit_is_right() -> None:
    log_odds = np.random.default_rng(0).normal(0, 4, 3000)
    matched = (np.random.default_rng(1).random(3000) < probability(log_odds)).astype(float)
    left, right = unit(3000, 50, 2), unit(3000, 50, 3)
    found = Recalibration.fit(log_odds[:200], left[:200], right[:200], matched[:200], 4.0, (left, right))
    assert found is not None
    score = found.log_odds(log_odds, found.by_vectors(left, right))
    assert (auroc(score, matched == 1) or 0) > (auroc(log_odds, matched == 1) or 0) - 0.005
    assert found.slope == pytest.approx(1, abs=0.3)


def test_few_decisions_teach_nothing_and_many_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recalibration, "MOST", 100)
    log_odds, left, right, matched = draw(150, 2, 4.0)
    few = slice(LEAST - 1)
    assert Recalibration.fit(log_odds[few], left[few], right[few], matched[few], 1.0, (left, right)) is None
    found = Recalibration.fit(log_odds, left, right, matched, 0.2, (left, right))
    assert found is not None
    sample = np.random.default_rng(0).permutation(150)[:100]
    expected = Recalibration.fit(log_odds[sample], left[sample], right[sample], matched[sample], 0.2, (left, right))
    assert expected is not None
    np.testing.assert_allclose([found.slope, *found.left], [expected.slope, *expected.left], rtol=1e-5)


@given(st.integers(0, 1000), st.floats(-60, 60), st.floats(0, 40), st.sampled_from([0.0, 1.0, None]))
def test_any_decisions_give_finite_scores_in_the_order_of_the_audit(
    seed: int, middle: float, spread: float, answer: float | None
) -> None:
    rng = np.random.default_rng(seed)
    log_odds, left, right = rng.normal(middle, spread, 40), unit(40, 3, seed), unit(40, 5, seed + 1)
    matched = rng.integers(0, 2, 40).astype(float) if answer is None else np.full(40, answer)
    found = Recalibration.fit(log_odds, left, right, matched, float(log_odds.std()), (left, right))
    assert found is not None
    score = found.log_odds(np.sort(log_odds), np.zeros(40))
    assert np.isfinite(score).all()
    assert (np.diff(score) >= 0).all()


def test_vectors_of_a_wide_spread_count_more() -> None:
    log_odds = np.zeros(200)
    rng = np.random.default_rng(0)
    left, right = unit(200, 40, 1), unit(200, 40, 2)
    typical = [side * np.where(np.arange(40) < 2, 10, 1) for side in (left, right)]
    matched = (rng.random(200) < probability(20 * left[:, 0])).astype(float)
    alike, wide = (Recalibration.fit(log_odds, left, right, matched, 1.0, sides) for sides in ((left, right), typical))
    assert alike is not None
    assert wide is not None
    assert wide.left[0] / np.abs(wide.left).sum() > alike.left[0] / np.abs(alike.left).sum()


def test_vectors_of_single_precision_that_are_alike() -> None:
    rng = np.random.default_rng(0)
    left, right = (unit(4, 300, seed)[rng.integers(0, 4, 400)].astype(np.float32) for seed in (0, 1))
    matched = (rng.random(400) < 0.1).astype(np.float64)
    found = Recalibration.fit(rng.standard_normal(400), left, right, matched, 1.0, (left, right))
    assert found is not None
    assert np.isfinite(found.by_vectors(left, right)).all()
