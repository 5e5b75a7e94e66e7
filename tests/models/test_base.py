import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mispair.models.base import CosineNetwork, Encoded, SideSpec, l2norm, safe_norm, xavier_linear
from small_data import regions, tokens, vectors

ragged = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def test_l2norm_of_zero_is_zero_with_a_finite_gradient() -> None:
    x = torch.zeros(3, 4, requires_grad=True)
    l2norm(x).sum().backward()  # type: ignore[no-untyped-call]
    assert (l2norm(x) == 0).all()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_l2norm_of_zero_has_a_small_gradient() -> None:
    x = torch.zeros(3, 4, requires_grad=True)
    l2norm(x).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    # Not the 1e8 of a division by 1e-8: that would drown all other gradients of the batch.
    assert x.grad.abs().max() <= 1


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=6), st.integers(0, 1))
def test_l2norm_adds_epsilon_after_the_root(values: list[float], dim: int) -> None:
    x = torch.tensor([values, values])
    expected = np.array([values, values], dtype=np.float64)
    expected = expected / (np.sqrt((expected**2).sum(axis=dim, keepdims=True)) + 1e-8)
    assert l2norm(x, dim=dim).numpy() == pytest.approx(expected, abs=1e-4, rel=1e-4)


def test_l2norm_has_the_gradient_of_its_formula() -> None:
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(l2norm, (x,))


def test_safe_norm_has_no_slope_at_zero() -> None:
    square = torch.tensor([0.0, 4.0], requires_grad=True)
    norm = safe_norm(square)
    norm.sum().backward()  # type: ignore[no-untyped-call]
    assert norm[0] > 0
    assert norm[1].item() == pytest.approx(2)
    assert square.grad is not None
    assert square.grad.tolist() == [0.0, 0.25]


def test_side_specs() -> None:
    assert SideSpec.of(regions(2, 5, 7)) == SideSpec("regions", 7, 5)
    assert SideSpec.of(vectors(2, 9)) == SideSpec("vectors", 9)
    assert SideSpec.of(tokens([1, 2], words=30)) == SideSpec("tokens", 30)
    assert str(SideSpec("regions", 2048, 36)) == "36 regions of width 2048"
    assert str(SideSpec("vectors", 512)) == "vectors of width 512"
    assert str(SideSpec("tokens", 8481)) == "texts of 8,481 words"


def test_encoded_without_parts_says_so() -> None:
    encoded = Encoded(None, None, torch.zeros(3, 2))
    assert len(encoded) == 3
    with pytest.raises(TypeError, match="one vector only"):
        encoded.parts()


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_cosines_are_float32_under_autocast() -> None:
    left, right = (Encoded(None, None, l2norm(torch.randn(n, 8))) for n in (3, 5))
    network = CosineNetwork.__new__(CosineNetwork)
    expected = [[float(torch.dot(a, b)) for b in right.pooled] for a in left.pooled]

    def scores() -> tuple[Tensor, Tensor]:
        pairs = CosineNetwork.pair_similarity(network, left, Encoded(None, None, right.pooled[:3]))
        return CosineNetwork.similarity(network, left, right), pairs

    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            S, pairs = scores()
        assert S.dtype == pairs.dtype == torch.float32
        torch.testing.assert_close(S, torch.tensor(expected), rtol=0, atol=1e-6)
        torch.testing.assert_close(pairs, S.diagonal(), rtol=0, atol=1e-6)


def test_xavier_linear() -> None:
    layer = xavier_linear(30, 50)
    assert layer.weight.shape == (50, 30)
    assert (layer.bias == 0).all()
    bound = (6 / 80) ** 0.5
    assert 0.9 * bound < layer.weight.abs().max() <= bound
