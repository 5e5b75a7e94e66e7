"""The common space against canonical correlation written with numpy's singular value decomposition."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from sklearn.isotonic import isotonic_regression

from made_pairs import fitted_spaces, made_pairs
from mispair.auditing.scoring import common_space
from mispair.auditing.scoring.common_space import (
    LEAST_CORRELATED,
    MOST_CORRELATED,
    CommonSpace,
    CommonSpaceFitter,
    product,
)
from mispair.auditing.scoring.folds import FOLDS, ONE_OUT
from mispair.functional.logistic import FloatArray
from mispair.support.arrays import IntArray


@dataclass(frozen=True)
class Case:
    """Pairs, their folds, and how much each is believed."""

    left: FloatArray
    right: FloatArray
    fold: IntArray
    trust: FloatArray

    def fitter(self) -> CommonSpaceFitter:
        return CommonSpaceFitter(torch.from_numpy(self.left), torch.from_numpy(self.right), self.fold)

    def fit(self, regularisation: float, dtype: torch.dtype = torch.float64) -> list[CommonSpace]:
        left, right, trust = (torch.from_numpy(part).to(dtype) for part in (self.left, self.right, self.trust))
        return fitted_spaces(left, right, self.fold, trust, regularisation)


def case(n: int = 300, widths: tuple[int, int] = (12, 9), *, hidden: int = 6, zeros: int = 0, seed: int = 0) -> Case:
    pairs = made_pairs(n, 0.2, widths=widths, hidden=hidden, seed=seed)
    sides = [(side - side.mean(0)).astype(np.float64) for side in (pairs.left, pairs.right)]
    sides = [np.hstack([side, np.zeros((n, zeros))]) for side in sides]
    rng = np.random.default_rng(seed)
    return Case(sides[0], sides[1], np.arange(n) % FOLDS, rng.uniform(0.1, 1, n))


def root_of_inverse(moment: FloatArray) -> FloatArray:
    values, vectors = np.linalg.eigh(moment)
    return np.asarray(vectors @ np.diag(values**-0.5) @ vectors.T)


def plain_cca(pairs: Case, number: int, regularisation: float) -> tuple[FloatArray, FloatArray]:
    """Directions (D, k) and (E, k): the textbook's, with a ridge in units of the mean spread; as many as the rank.

    The spread is that of all items, what ties the two sides is that of the pairs outside a fold.
    """
    others = pairs.fold != number
    x, y, trust = pairs.left[others], pairs.right[others], pairs.trust[others]
    roots = []
    for side in (pairs.left, pairs.right):
        moment = side.T @ side / len(side)
        ridge = regularisation * np.trace(moment) / len(moment)
        roots.append(root_of_inverse(moment + ridge * np.eye(len(moment))))
    tie = (x * trust[:, None]).T @ y / trust.sum()
    u, strengths, vt = np.linalg.svd(roots[0] @ tie @ roots[1], full_matrices=False)
    rank = int((strengths > 1e-8 * strengths[0]).sum())
    return (roots[0] @ u)[:, :rank], (roots[1] @ vt.T)[:, :rank]


def unit(columns: FloatArray) -> FloatArray:
    return np.asarray(columns / np.linalg.norm(columns, axis=0))


def assert_same_directions(found: CommonSpace, left: FloatArray, right: FloatArray, tolerance: float) -> None:
    """Up to length, and up to turning both sides round."""
    k = found.left.shape[1]
    a, b, left, right = (unit(side[:, :k]) for side in (found.left.numpy(), found.right.numpy(), left, right))
    sign = np.sign((a * left).sum(0))
    assert np.abs(a - sign * left).max() < tolerance
    assert np.abs(b - sign * right).max() < tolerance


CASES = {
    "square": (case(widths=(8, 8)), 0.0),
    "wider left": (case(widths=(12, 9)), 0.0),
    "wider right": (case(widths=(7, 15)), 0.0),
    "regularised": (case(widths=(12, 9)), 1.0),
    "regularised, wider right": (case(widths=(7, 15)), 3.0),
    "more dimensions than pairs": (case(60, (80, 70)), 1.0),
    "columns without spread": (case(zeros=3), 0.3),
    "one number a side": (case(widths=(1, 1), hidden=1), 0.0),
    "one number on the left": (case(widths=(1, 6), hidden=1), 1.0),
    "one number on the right": (case(widths=(6, 1), hidden=1), 1.0),
}


@pytest.mark.parametrize("name", CASES)
def test_it_fits_canonical_directions_to_the_other_folds(name: str) -> None:
    pairs, regularisation = CASES[name]
    spaces = pairs.fit(regularisation)
    assert len(spaces) == FOLDS
    for number, found in enumerate(spaces):
        left, right = plain_cca(pairs, number, regularisation)
        assert 1 <= found.left.shape[1] <= left.shape[1]
        assert_same_directions(found, left, right, 1e-4)


@pytest.mark.parametrize("name", CASES)
def test_directions_are_worth_what_partners_correlate_in_the_fold_left_out(name: str) -> None:
    pairs, regularisation = CASES[name]
    fitted = [plain_cca(pairs, number, regularisation) for number in range(FOLDS)]
    common = min(a.shape[1] for a, _ in fitted)
    both, left, right = np.zeros((3, common))
    for x, y, number, trust in zip(pairs.left, pairs.right, pairs.fold, pairs.trust, strict=True):
        u, v = x @ fitted[number][0][:, :common], y @ fitted[number][1][:, :common]
        both, left, right = both + trust * u * v, left + u * u, right + v * v
    left, right = np.sqrt(left / len(pairs.fold)), np.sqrt(right / len(pairs.fold))
    correlation = both / pairs.trust.sum() / (left * right)
    r = np.clip(isotonic_regression(correlation, increasing=False), 0, MOST_CORRELATED)
    kept = int((r >= LEAST_CORRELATED).sum())
    assert kept
    r, left, right = r[:kept], left[:kept], right[:kept]
    for found, (a, b) in zip(pairs.fit(regularisation), fitted, strict=True):
        assert found.correlation.numpy() == pytest.approx(r, rel=1e-4)
        worth = np.sqrt(r / (1 - r * r))
        for side, directions, spread in ((found.left, a, left), (found.right, b, right)):
            expected = np.abs(directions[:, :kept]) * worth / spread
            assert np.abs(side.numpy()) == pytest.approx(expected, rel=1e-3, abs=1e-4 * expected.max())


def test_float32_spans_what_float64_does() -> None:
    pairs = case(400, (20, 14))
    for single, double in zip(pairs.fit(1.0, torch.float32), pairs.fit(1.0), strict=True):
        assert single.correlation.numpy() == pytest.approx(double.correlation.numpy(), abs=1e-4)
        a, b = (np.linalg.qr(found.left.numpy()[:, :4])[0] for found in (single, double))
        assert np.linalg.svd(a.T @ b)[1].min() > 1 - 1e-4


def test_true_partners_correlate_as_they_were_made_to() -> None:
    rng = np.random.default_rng(0)
    r = np.array([0.9, 0.7, 0.5])
    x = rng.standard_normal((20_000, 3))
    y = r * x + np.sqrt(1 - r * r) * rng.standard_normal((20_000, 3))
    mixed = y @ np.linalg.qr(rng.standard_normal((3, 3)))[0] * 5
    found = Case(x, mixed, np.arange(len(x)) % FOLDS, np.ones(len(x))).fit(0.0)[0]
    assert found.correlation.numpy() == pytest.approx(r, abs=0.02)


def test_strangers_are_worth_next_to_nothing() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((300, 30)), rng.standard_normal((300, 30))
    found = Case(x, y, np.arange(300) % FOLDS, np.ones(300)).fit(0.3)[0]
    assert found.correlation.max() < 0.15  # fitted and measured on the same pairs it would be above 0.5


@pytest.mark.parametrize("number", [0, 7])
def test_who_is_whose_partner_in_a_fold_turns_no_direction_of_it(number: int) -> None:
    before = case()
    right, trust = before.right.copy(), before.trust.copy()
    own = np.flatnonzero(before.fold == number)
    right[own], trust[own] = right[np.roll(own, 1)], 0.3
    after = Case(before.left, right, before.fold, trust)
    for fold, (one, other) in enumerate(zip(before.fit(1.0), after.fit(1.0), strict=True)):
        k = min(one.left.shape[1], other.left.shape[1])
        apart = max(
            np.abs(np.abs(unit(a[:, :k].numpy())) - np.abs(unit(b[:, :k].numpy()))).max()
            for a, b in ((one.left, other.left), (one.right, other.right))
        )
        assert (apart < 1e-6) == (fold == number)


def test_several_regularisations_and_some_folds_are_as_one_by_one() -> None:
    pairs = case()
    trust = torch.from_numpy(pairs.trust)
    fitter = pairs.fitter()
    several = fitter.fit_several(trust, (0.3, 3.0), ONE_OUT)
    for regularisation, found in zip((0.3, 3.0), several, strict=True):
        for one, other in zip(found, pairs.fit(regularisation), strict=True):
            assert torch.equal(fitter.turned_back(one).left, other.left)
    (some,) = pairs.fitter().fit_several(trust, (3.0,), [(2,), (5,)])
    for one, other in zip(some, (several[1][2], several[1][5]), strict=True):
        k = min(one.left.shape[1], other.left.shape[1])
        assert unit(one.left.numpy()[:, :k]) == pytest.approx(unit(other.left.numpy()[:, :k]), abs=1e-5)


@pytest.mark.parametrize("least", [5, 256])
def test_items_along_the_main_directions_are_compared_as_the_given_ones(
    least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common_space, "LEAST_DIRECTIONS", least)
    monkeypatch.setattr(common_space, "PAIRS_A_DIRECTION", 50)
    pairs = case(100, (12, 9))
    fitter = pairs.fitter()
    for space in fitter.fit_several(torch.from_numpy(pairs.trust), [1.0])[0]:
        whole, (left, right) = fitter.turned_back(space), fitter.items
        assert left.shape == (100, min(least, 12))
        given = torch.from_numpy(pairs.left).float(), torch.from_numpy(pairs.right).float()
        torch.testing.assert_close(space.compared_left(left).float(), whole.compared_left(given[0]), atol=1e-5, rtol=0)
        torch.testing.assert_close(
            space.compared_right(right).float(), whole.compared_right(given[1]), atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("width", [3, common_space.COLUMNS, common_space.COLUMNS + 5])
def test_second_moments(width: int) -> None:
    items = np.random.default_rng(0).standard_normal((50, width))
    found = common_space.moments(torch.from_numpy(items)).numpy()
    np.testing.assert_allclose(found, items.T @ items, atol=1e-9)


def test_few_pairs_use_the_main_directions_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = case(100, (12, 9))
    _, vectors = np.linalg.eigh(pairs.left.T @ pairs.left)
    monkeypatch.setattr(common_space, "LEAST_DIRECTIONS", 5)
    monkeypatch.setattr(common_space, "PAIRS_A_DIRECTION", 50)
    for found in pairs.fit(1.0):
        minor = vectors[:, :-5]
        assert np.abs(minor.T @ unit(found.left.numpy())).max() < 1e-5
        assert found.left.shape[1] <= 5


def test_a_distrusted_pair_ties_nothing_together() -> None:
    pairs = case()
    wrong = np.arange(0, 300, 3)
    right = pairs.right.copy()
    right[wrong] = right[np.roll(wrong, 1)]
    trust = np.ones(300)
    blind = Case(pairs.left, right, pairs.fold, trust).fit(1.0)[0]
    trust = np.where(np.isin(np.arange(300), wrong), 1e-3, 1.0)
    told = Case(pairs.left, right, pairs.fold, trust).fit(1.0)[0]
    assert (told.correlation[:3] > blind.correlation[:3] + 0.05).all()


def test_without_any_spread_there_is_still_a_space() -> None:
    x, y = np.zeros((60, 4)), np.random.default_rng(0).standard_normal((60, 3))
    for found in Case(x, y, np.arange(60) % FOLDS, np.ones(60)).fit(1.0):
        assert found.left.shape == (4, 1)
        assert torch.isfinite(torch.from_numpy(x).float() @ found.left).all()
        assert torch.isfinite(torch.from_numpy(y).float() @ found.right).all()


def test_empty_folds_and_a_single_pair_a_fold_do_no_harm() -> None:
    pairs = case(40)
    for fold in (np.arange(40) % 3, np.where(np.arange(40) == 0, 9, np.arange(40) % 4)):
        for found in Case(pairs.left, pairs.right, fold, pairs.trust).fit(1.0):
            assert torch.isfinite(found.left).all()
            assert torch.isfinite(found.right).all()


def test_no_more_directions_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common_space, "MOST_DIRECTIONS", 2)
    assert case().fit(1.0)[0].left.shape[1] == 2


def test_products_add_up_over_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common_space, "PIECE", 7)
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((30, 4)), rng.standard_normal((30, 5))
    assert product(torch.from_numpy(a), torch.from_numpy(b)).numpy() == pytest.approx(a.T @ b)
    assert product(torch.zeros(0, 4), torch.zeros(0, 5)).tolist() == np.zeros((4, 5)).tolist()


def test_the_regression_is_that_of_the_other_folds_and_favours_no_pair() -> None:
    rng = np.random.default_rng(0)
    x, y, fold = rng.standard_normal((60, 4)), rng.standard_normal((60, 3)), np.arange(60) % FOLDS
    fitter = CommonSpaceFitter(torch.from_numpy(x), torch.from_numpy(y), fold)
    rows = rng.permutation(60)
    found = fitter.regression(np.arange(60), rows, 0.5)
    sides = [side.T @ side / len(side) for side in (x, y)]
    inverse = [np.linalg.inv(c + 0.5 * np.trace(c) / len(c) * np.eye(len(c))) for c in sides]
    for row in range(60):
        a, b = x[fold != fold[row]], y[fold != fold[row]]
        assert found[row] == pytest.approx(x[row] @ inverse[0] @ (a.T @ b) @ inverse[1] @ y[rows[row]], rel=1e-4)
