"""Evidence, its Dirichlet distributions and their loss against scipy, numerical integrals and plain loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy import integrate, special, stats
from torch import Tensor

from mispair.errors import InvalidValueError
from mispair.functional.evidence import corresponds, divergence, evidence, evidential_loss, raw_scores, uncertainty
from mispair.settings import DeclSettings
from refusals import refused


@st.composite
def matrices(draw: st.DrawFn, smallest: int = 2) -> Tensor:
    """Square raw scores, with ties and extremes among them."""
    size = draw(st.integers(smallest, 6))
    score = st.one_of(st.sampled_from([0.0, 1.0, -1.0, 30.0, -30.0]), st.floats(-4, 4))
    return torch.from_numpy(draw(arrays.arrays(np.float64, (size, size), elements=score)))


def plain_divergence(alpha: np.ndarray) -> float:
    """KL to the flat Dirichlet, as a cross entropy less an entropy."""
    flat = stats.dirichlet(np.ones(len(alpha)))
    return float(-stats.dirichlet(alpha).entropy() - flat.logpdf(np.full(len(alpha), 1 / len(alpha))))


def plain_loss(alpha: np.ndarray, y: np.ndarray, weight: float) -> float:
    """The row loss by its definition: E |y - p|^2 under Dir(alpha), from scipy's mean and variance."""
    p = stats.dirichlet(alpha)
    error = sum((y[k] - p.mean()[k]) ** 2 for k in range(len(y)))
    other = np.array([1.0 if y[k] else alpha[k] for k in range(len(y))])
    return float(error + p.var().sum() + weight * plain_divergence(other))


@given(matrices(), st.sampled_from([0.05, 0.1, 0.5, 2.0]))
def test_evidence(x: Tensor, tau: float) -> None:
    ours = evidence(x, tau)
    for (i, j), value in np.ndenumerate(x.numpy()):
        assert ours[i, j].item() == pytest.approx(math.exp(math.tanh(value) / tau), rel=1e-9)


def test_scores_behind_sigmoids() -> None:
    x = torch.linspace(-12, 12, 241, dtype=torch.float64)
    assert torch.allclose(raw_scores(torch.from_numpy(special.expit(x.numpy()))), x, atol=1e-9)
    assert np.allclose(raw_scores(torch.tensor([0.1, 0.5, 0.9])), special.logit([0.1, 0.5, 0.9]), atol=1e-6)
    x = torch.linspace(-200, 200, 4001)  # in float32 a sigmoid is 0 or 1 long before the ends
    raw = raw_scores(x.sigmoid())
    assert torch.isfinite(raw).all()
    assert torch.allclose(raw.tanh(), x.tanh(), atol=1e-6)
    assert np.allclose(evidence(raw), np.exp(np.tanh(x.double().numpy()) / 0.1), rtol=1e-4)
    assert (raw.diff() >= 0).all()


def test_the_sigmoid_costs_no_gradient() -> None:
    raw = torch.linspace(-6, 6, 25).requires_grad_()
    evidence(raw_scores(raw.sigmoid())).sum().backward()  # type: ignore[no-untyped-call]
    tanh = np.tanh(raw.detach().double().numpy())
    assert raw.grad is not None
    assert np.allclose(raw.grad, np.exp(tanh / 0.1) * (1 - tanh**2) / 0.1, rtol=1e-2, atol=1e-6)


@given(matrices())
def test_uncertainty(x: Tensor) -> None:
    e = evidence(x)
    expected = [len(row) / sum(value + 1 for value in row) for row in e.tolist()]
    assert uncertainty(e).tolist() == pytest.approx(expected)
    assert ((uncertainty(e) > 0) & (uncertainty(e) <= 1)).all()


@pytest.mark.parametrize("size", [2, 3, 17, 128])
def test_without_evidence_there_is_no_divergence(size: int) -> None:
    assert divergence(torch.ones(3, size)).tolist() == pytest.approx([0, 0, 0], abs=1e-3)
    assert divergence(torch.ones(3, size, dtype=torch.float64)).tolist() == pytest.approx([0, 0, 0], abs=1e-12)


@given(matrices())
def test_divergence_against_scipy(x: Tensor) -> None:
    alpha = evidence(x) + 1
    expected = [plain_divergence(row) for row in alpha.numpy()]
    assert divergence(alpha).tolist() == pytest.approx(expected, rel=1e-8, abs=1e-8)
    assert (divergence(alpha) >= -1e-9).all()


@pytest.mark.parametrize("alpha", [(1.0, 1.0), (2.5, 1.2), (1.5, 9.0), (40.0, 30.0)])
def test_divergence_against_an_integral(alpha: tuple[float, float]) -> None:
    beta = stats.beta(*alpha)  # a Dirichlet of two; the flat one has density 1
    expected, _ = integrate.quad(lambda p: beta.pdf(p) * beta.logpdf(p), 0, 1)
    assert divergence(torch.tensor([alpha], dtype=torch.float64)).item() == pytest.approx(expected, abs=1e-8)


@given(matrices(), st.lists(st.booleans(), min_size=6, max_size=6), st.sampled_from([0.0, 0.1, 1.0]))
def test_the_loss_of_each_row(x: Tensor, clean: list[bool], weight: float) -> None:
    e, Y = evidence(x), torch.diag(torch.tensor(clean[: len(x)], dtype=torch.float64))
    ours = evidential_loss(e, Y, weight)
    expected = [plain_loss(row + 1, y, weight) for row, y in zip(e.numpy(), Y.numpy(), strict=True)]
    assert ours.tolist() == pytest.approx(expected, rel=1e-7, abs=1e-8)


def test_the_loss_written_out() -> None:
    """A = (1 - 4/6)^2 + (2/6)^2, Bv = 2 (4 * 2) / (6^2 * 7), and the divergence of Dir(1, 2)."""
    loss = evidential_loss(torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0, 0.0]]), 0.1)
    assert loss.item() == pytest.approx(2 / 9 + 16 / 252 + 0.1 * (math.log(2) - 0.5), rel=1e-6)
    nothing = evidential_loss(torch.tensor([[3.0, 1.0]]), torch.zeros(1, 2), 0.0)
    assert nothing.item() == pytest.approx(16 / 36 + 4 / 36 + 16 / 252, rel=1e-6)


def test_single_precision_is_enough() -> None:
    """Batches of 128, from no evidence to 22,026 everywhere: values by a percent, slopes against double precision."""
    for scale in (0.1, 1.0, 3.0):
        x = scale * torch.randn(128, 128)
        slopes, values = [], []
        for precise in (x.double(), x):
            scores = precise.clone().requires_grad_()
            values.append(evidential_loss(evidence(scores), torch.eye(128).to(precise)))
            values[-1].sum().backward()  # type: ignore[no-untyped-call]
            assert scores.grad is not None
            slopes.append(scores.grad)
        assert torch.allclose(values[0].float(), values[1], rtol=1e-2)
        assert (slopes[0] - slopes[1]).norm() < 1e-2 * slopes[0].norm()


@pytest.mark.parametrize("fill", [-1e4, -20.0, 0.0, 20.0, 1e4])
@pytest.mark.parametrize("own", [-1e4, 0.0, 1e4])
def test_extreme_scores_have_finite_slopes(fill: float, own: float) -> None:
    for squash in (False, True):
        scores = torch.full((128, 128), fill).fill_diagonal_(own).requires_grad_()
        x = raw_scores(scores.sigmoid()) if squash else scores
        loss = evidential_loss(evidence(x), torch.diag(torch.arange(128.0) % 2)).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        assert torch.isfinite(loss)
        assert scores.grad is not None
        assert torch.isfinite(scores.grad).all()


@given(matrices())
def test_correspondence_by_a_loop(x: Tensor) -> None:
    e, expected = evidence(x), []
    rows: list[list[Any]] = e.tolist()
    for i in range(len(rows)):
        row = [rows[i][j] + rows[j][i] for j in range(len(rows))]
        best = max(row)
        expected.append([j for j in range(len(row)) if row[j] == best] == [i])
    assert corresponds(e).tolist() == expected


def test_correspondence_asks_both_sides() -> None:
    e = torch.tensor([[5.0, 6.0, 0.0], [1.0, 5.0, 0.0], [12.0, 0.0, 5.0]])
    # Pair 0: M = (10, 7, 12); pair 1: (7, 10, 0); pair 2: (12, 0, 10).
    assert corresponds(e).tolist() == [False, True, False]
    assert corresponds(torch.ones(4, 4)).tolist() == [False] * 4


def test_float32_holds_the_loss_at_the_least_scale_that_the_settings_allow() -> None:
    with refused(InvalidValueError, where="evidence_scale", names="0.0799"):
        DeclSettings(evidence_scale=0.0799)
    scale, slopes = DeclSettings(evidence_scale=0.08).evidence_scale, []
    x = 3 * torch.randn(128, 128, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.float64):
        scores = x.to(dtype, copy=True).requires_grad_()
        evidential_loss(evidence(scores, scale), torch.eye(128, dtype=dtype)).sum().backward()  # type: ignore[no-untyped-call]
        assert scores.grad is not None
        slopes.append(scores.grad.double())
    assert (slopes[0] - slopes[1]).norm() < 0.05 * slopes[1].norm()
