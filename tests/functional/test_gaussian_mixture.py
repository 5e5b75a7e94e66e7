"""Mixtures against scikit-learn, and what they do where there is nothing to see."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn.mixture import GaussianMixture

from mispair.functional.gaussian_mixture import above, best_cut, clean_probability, fit_gaussians, is_clean

LOSSES = hnp.arrays(np.float64, st.integers(2, 60), elements=st.floats(0, 1, width=32))


def two_modes(n: int, noisy: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    wrong = rng.random(n) < noisy
    losses = np.where(wrong, rng.normal(0.5, 0.15, n), np.abs(rng.normal(0.05, 0.05, n)))
    return np.clip(losses, 0, None), wrong


@pytest.mark.parametrize("noisy", [0.2, 0.4, 0.6])
def test_it_fits_like_scikit_learn(noisy: float) -> None:
    losses, _ = two_modes(4000, noisy)
    scaled = (losses - losses.min()) / np.ptp(losses)
    reference = GaussianMixture(2, max_iter=10, tol=1e-2, reg_covar=5e-4, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference.fit(scaled[:, None])
    order = reference.means_[:, 0].argsort()
    found = fit_gaussians(scaled)
    assert found.means == pytest.approx(reference.means_[order, 0], abs=1e-3)
    assert found.variances == pytest.approx(reference.covariances_[order, 0, 0], abs=1e-3)
    assert found.weights == pytest.approx(reference.weights_[order], abs=1e-3)
    middle = np.linspace(found.means[0], found.means[1], 50)  # where nothing is clipped
    expected = reference.predict_proba(middle[:, None])[:, order[0]]
    assert found.lower_posterior(middle) == pytest.approx(expected, abs=1e-2)


def test_it_tells_two_modes_apart() -> None:
    losses, wrong = two_modes(4000, 0.4)
    clean = is_clean(clean_probability(losses))
    assert (clean == ~wrong).mean() > 0.97


@given(LOSSES)
def test_the_probability_never_rises_with_the_loss(losses: np.ndarray) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        w = clean_probability(losses)
    assert np.isfinite(w).all()
    assert ((w >= 0) & (w <= 1)).all()
    assert (np.diff(w[losses.argsort(kind="stable")]) <= 1e-12).all()


@given(LOSSES)
def test_the_cut_is_the_best_of_all(losses: np.ndarray) -> None:
    def inside(cut: float) -> float:
        groups = (losses[losses <= cut], losses[losses > cut])
        return sum(float(((group - group.mean()) ** 2).sum()) for group in groups if len(group))

    best = min(inside(cut) for cut in losses)
    assert inside(best_cut(losses)) == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("losses", [[], [0.3], [0.2] * 50, [0.1, np.nan]])
def test_losses_that_say_nothing_make_all_pairs_clean(losses: list[float]) -> None:
    with pytest.warns(UserWarning, match="all of them are taken for clean"):
        w = clean_probability(np.array(losses))
    assert w.tolist() == [1.0] * len(losses)


def test_one_per_cent_is_noisy_when_none_is_found() -> None:
    w = np.linspace(0.6, 1, 200)
    assert np.flatnonzero(~is_clean(w)).tolist() == [0, 1]
    assert is_clean(np.array([0.2, 0.5, 0.7])).tolist() == [False, False, True]
    assert is_clean(np.ones(10)).all()  # too few for one per cent
    assert (~is_clean(np.ones(300))).sum() == 3
    assert is_clean(np.empty(0)).tolist() == []


def test_hardly_any_clean_pair_means_those_above_the_median() -> None:
    w = np.linspace(0, 0.4, 301)
    assert np.flatnonzero(is_clean(w)).tolist() == list(range(150, 301))
    assert is_clean(w, threshold=0.1).sum() == (w > 0.1).sum()  # many: nothing to mend
    w[0], w[7], w[9] = 0.9, 0.8, 0.7  # 3 of 301 are less than 1 %
    assert is_clean(w).sum() == 151
    assert is_clean(w)[[0, 7, 9]].all()
    w[11] = 0.6
    assert np.flatnonzero(is_clean(w)).tolist() == [0, 7, 9, 11]
    assert is_clean(np.zeros(50)).all()
    assert is_clean(np.array([0.2])).tolist() == [True]


def test_above_takes_the_better_half_too_but_calls_nothing_noisy_that_is_above() -> None:
    assert above(np.linspace(0, 0.4, 10), 0.5).tolist() == [False] * 5 + [True] * 5
    assert above(np.linspace(0, 0.6, 10), 0.5).tolist() == [False] * 8 + [True] * 2
    assert above(np.ones(300), 0.5).all()


@given(LOSSES, st.floats(0, 0.99), st.booleans())
def test_a_split_is_never_without_clean_pairs(w: np.ndarray, threshold: float, large: bool) -> None:
    w = np.repeat(w, 100) if large else w
    clean = is_clean(w, threshold)
    assert clean.any()
    assert clean.shape == w.shape
    assert not large or (~clean).any() or (w == np.median(w)).all() or w.min() >= np.median(w)
    if len(w) * 0.01 <= (w > threshold).sum() < len(w):
        assert clean.tolist() == (w > threshold).tolist()
    assert w[clean].max() == w.max()  # the surest pair is clean, whatever happens


@pytest.mark.parametrize("noisy", [0.2, 0.5, 0.8])
def test_a_converged_fit_is_scikit_learns_with_the_same_end(noisy: float) -> None:
    rng = np.random.default_rng(1)
    wrong = rng.random(3000) < noisy
    losses = np.where(wrong, rng.normal(0.7, 0.1, 3000), rng.normal(0.4, 0.12, 3000))  # they overlap
    scaled = (losses - losses.min()) / np.ptp(losses)
    reference = GaussianMixture(2, max_iter=200, tol=1e-6, reg_covar=5e-4, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference.fit(scaled[:, None])
    low, high = reference.means_[:, 0].argsort()
    w = clean_probability(losses, converged=True)
    middle = (scaled > reference.means_[low, 0]) & (scaled < reference.means_[high, 0])
    assert w[middle] == pytest.approx(reference.predict_proba(scaled[middle, None])[:, low], abs=0.01)
    early = clean_probability(losses)
    assert not np.allclose(w, early, atol=0.01)


@given(LOSSES)
def test_a_converged_probability_never_rises_with_the_loss(losses: np.ndarray) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        w = clean_probability(losses, converged=True)
    assert ((w >= 0) & (w <= 1)).all()
    assert (np.diff(w[losses.argsort(kind="stable")]) <= 1e-12).all()
