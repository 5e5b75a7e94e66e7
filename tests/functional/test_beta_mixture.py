"""Mixtures of Beta distributions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from mispair.functional.beta_mixture import EDGE, LOW_FIRST, BetaMixture, by_moments, fit_betas, inner


def mixed(low: tuple[float, float], high: tuple[float, float], share: float, count: int = 4000) -> np.ndarray:
    rng = np.random.default_rng(0)
    few = int(share * count)
    return np.concatenate([rng.beta(*low, few), rng.beta(*high, count - few)])


def test_it_finds_two_groups() -> None:
    x = mixed((2, 20), (12, 6), 0.6)
    mixture = fit_betas(x, rounds=100)
    assert mixture.means == pytest.approx([2 / 22, 12 / 18], abs=0.02)
    assert mixture.weights == pytest.approx([0.6, 0.4], abs=0.02)
    right = np.arange(len(x)) < 2400
    assert ((mixture.posterior(x, 0) > 0.5) == right).mean() > 0.97


def test_the_posterior_is_bayes_rule_between_the_means() -> None:
    mixture = BetaMixture(np.array([2.0, 6.0]), np.array([8.0, 3.0]), np.array([0.7, 0.3]))
    x = np.linspace(0.21, 0.66, 20)
    low, high = 0.7 * stats.beta.pdf(x, 2, 8), 0.3 * stats.beta.pdf(x, 6, 3)
    assert mixture.posterior(x, 0) == pytest.approx(low / (low + high), rel=1e-9)
    assert mixture.posterior(x, 1) == pytest.approx(high / (low + high), abs=1e-9)
    assert mixture.raw_posterior(x, 0) == pytest.approx(low / (low + high), rel=1e-9)


@given(st.tuples(*[st.floats(0.05, 50)] * 4), st.floats(0.01, 0.99))
def test_the_posterior_is_finite_and_monotone_from_0_to_1(parameters: tuple[float, ...], weight: float) -> None:
    a, b, c, d = parameters
    mixture = BetaMixture(np.array([a, c]), np.array([b, d]), np.array([weight, 1 - weight]))
    x = np.concatenate([[0.0], np.linspace(0, 1, 101), [1.0]])
    w = mixture.posterior(x, 0)
    assert np.isfinite(w).all()
    assert (w >= 0).all()
    assert (w <= 1).all()
    assert np.allclose(w + mixture.posterior(x, 1), 1)
    toward_own_side = w if mixture.means[0] <= mixture.means[1] else w[::-1]
    assert (np.diff(toward_own_side) <= 1e-12).all()


@given(st.integers(0, 999), st.floats(0.1, 0.9))
def test_the_posterior_of_losses_falls_from_0_to_1(seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    few = int(share * 400)
    x = np.concatenate([rng.beta(2, 15, few), rng.beta(9, 5, 400 - few), [0.0, 1.0]])
    w = fit_betas(x).posterior(np.linspace(0, 1, 201), 0)
    assert np.isfinite(w).all()
    assert (np.diff(w) <= 1e-9).all()
    assert w[0] > 0.5 > w[-1]


def test_at_the_ends_the_raw_posterior_is_0_or_not_a_number() -> None:
    """Why values are kept away from the ends: at 0 the density of the lower component is 0 if its alpha is above 1."""
    mixture = BetaMixture(np.array([2.0, 0.5]), np.array([8.0, 1.0]), np.array([0.5, 0.5]))
    assert mixture.raw_posterior(np.array([0.0]), 0)[0] == 0
    assert mixture.posterior(np.array([0.0]), 0)[0] > 0.5
    both = BetaMixture(np.array([0.5, 0.5]), np.array([8.0, 1.0]), np.array([0.5, 0.5]))
    assert np.isnan(both.raw_posterior(np.array([0.0]), 0)[0])


def test_one_round_by_hand() -> None:
    x = np.array([0.1, 0.2, 0.7, 0.9])
    low = 0.5 * stats.beta.pdf(x, 1, 2)
    shares = np.stack([low, 0.5 * stats.beta.pdf(x, 2, 1)])
    shares /= shares.sum(axis=0)
    found = fit_betas(x, rounds=1)
    for k in range(2):
        mean = np.average(x, weights=shares[k])
        variance = np.average((x - mean) ** 2, weights=shares[k])
        alpha = mean * (mean * (1 - mean) / variance - 1)
        assert found.alphas[k] == pytest.approx(alpha)
        assert found.betas[k] == pytest.approx(alpha * (1 - mean) / mean)
        assert found.weights[k] == pytest.approx(shares[k].mean())


@pytest.mark.parametrize("x", [np.full(5, 0.3), np.zeros(4), np.ones(4), np.array([0.0, 1.0]), np.array([0.5])])
def test_degenerate_values_give_finite_numbers(x: np.ndarray) -> None:
    mixture = fit_betas(x)
    assert np.isfinite([mixture.alphas, mixture.betas, mixture.weights]).all()
    assert np.isfinite(mixture.posterior(x, 0)).all()


def test_moments_of_a_sample() -> None:
    x = np.random.default_rng(1).beta(3, 5, 100_000)
    shares = np.stack([np.ones_like(x), np.full_like(x, 1e-12)])
    assert by_moments(x, shares).alphas[0] == pytest.approx(3, rel=0.02)
    assert by_moments(x, shares).betas[0] == pytest.approx(5, rel=0.02)


def test_the_ends_are_kept_away() -> None:
    assert inner(np.array([-1.0, 0.0, 0.5, 1.0])).tolist() == [EDGE, EDGE, 0.5, 1 - EDGE]
    assert LOW_FIRST.means[0] < LOW_FIRST.means[1]
