"""The Triton kernels of unit length against plain torch: on a GPU, or on a CPU with TRITON_INTERPRET=1."""

import pytest
import torch
from torch import Tensor

from kernel_marks import CUDA, cases, needs_gpu, on_device
from mispair.models.base import l2norm
from mispair.models.kernels import normalize
from mispair.models.kernels.common import DTYPES

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}  # the interpreter truncates to bf16


def ours(x: Tensor, g: Tensor, dtype: torch.dtype, device: str) -> list[Tensor]:
    """The result in `dtype` and the gradient of x, in float64."""
    there = x.detach().to(device).requires_grad_()
    y = normalize.unit(there, dtype)
    assert y.dtype == dtype
    assert y.shape == x.shape
    (to_x,) = torch.autograd.grad(y, there, g.to(device, dtype))
    assert to_x.dtype == x.dtype
    return [part.detach().double().cpu() for part in (y, to_x)]


def reference(x: Tensor, g: Tensor) -> list[Tensor]:
    """As `ours`, by the formula in float64."""
    x = x.detach().double().requires_grad_()
    y = l2norm(x)
    return [y.detach(), *torch.autograd.grad(y, x, g.double())]


def assert_near(found: list[Tensor], expected: list[Tensor], *errors: float) -> None:
    """Each row within `error` of the length of what is expected: rows may differ by many orders of magnitude."""
    for part, right, error in zip(found, expected, errors, strict=True):
        assert ((part - right).norm(dim=-1) <= error * right.norm(dim=-1)).all()


WIDTHS = [1, 3, 16, 100, 256, 1024]
FEW, MANY = [(rows, D) for rows in (1, 5) for D in WIDTHS], [(1000, D) for D in WIDTHS]


@cases("rows, D", [*FEW, *MANY[:3], (70, 100), (70, 256), (30, 1024)], FEW + MANY, slow_on_cpu=MANY[3:])
def test_values_and_gradients_equal_the_formula(device: str, rows: int, D: int) -> None:
    x, g = torch.randn(rows, D), torch.randn(rows, D)
    (y, to_x), (right_y, right_to_x) = ours(x, g, torch.float32, device), reference(x, g)
    assert_near([y], [right_y], 1e-6)
    # Relative to g / |x|, for its part along the vector cancels: if D is 1, all of it.
    size = (g.double() / x.double().norm(dim=-1, keepdim=True)).norm(dim=-1)
    assert ((to_x - right_to_x).norm(dim=-1) <= 2e-6 * size).all()


@on_device
@pytest.mark.parametrize("D", [1, 100])
def test_zero_vectors_stay_zero_and_pass_their_gradient(device: str, D: int) -> None:
    x, g = torch.randn(7, D), torch.randn(7, D)
    x[[0, 3, 6]] = 0
    y, to_x = ours(x, g, torch.float32, device)
    assert (y[[0, 3, 6]] == 0).all()
    assert torch.equal(to_x[[0, 3, 6]], g[[0, 3, 6]].double())
    if D > 1:
        assert_near([y, to_x], reference(x, g), 1e-6, 1e-5)


@on_device
@pytest.mark.parametrize("size", [1e-36, 1e-30, 1e-20, 1e-8, 1e-4, 1e4, 1e18, 1e30, 1e36])
def test_tiny_and_huge_vectors(device: str, size: float) -> None:
    """Where squares in float32 are 0 or infinite, too."""
    x, g = size * torch.randn(5, 100), torch.randn(5, 100)
    assert_near(ours(x, g, torch.float32, device), reference(x, g), 1e-6, 1e-5)


@on_device
def test_vectors_of_very_different_size_do_not_touch(device: str) -> None:
    x, g = torch.randn(9, 100), torch.randn(9, 100)
    x *= torch.tensor([0, 1e-30, 1e-20, 1e-8, 1, 1e4, 1e18, 1e30, 0])[:, None]
    assert_near(ours(x, g, torch.float32, device), reference(x, g), 1e-6, 1e-5)


@on_device
def test_one_large_entry(device: str) -> None:
    x, g = torch.randn(6, 100), torch.randn(6, 100)
    x[:, 7] = torch.tensor([1e3, 1e10, 1e15, 2e15, 1e20, 1e30])
    assert_near(ours(x, g, torch.float32, device), reference(x, g), 1e-6, 1e-5)


@on_device
@pytest.mark.parametrize("into", DTYPES)
@pytest.mark.parametrize("of", DTYPES)
def test_any_precision_in_and_out(device: str, of: torch.dtype, into: torch.dtype) -> None:
    x, g = torch.randn(33, 100).to(of), torch.randn(33, 100).to(into)
    assert_near(ours(x, g, into, device), reference(x, g), ROUNDING[into], ROUNDING[of])


@on_device
def test_shapes_and_strides(device: str) -> None:
    x, g = torch.randn(100, 4, 3), torch.randn(100, 3, 4)
    turned, gradient = x.permute(1, 2, 0), g.permute(2, 1, 0)
    straight = ours(turned.contiguous(), gradient.contiguous(), torch.float32, device)
    assert all(map(torch.equal, ours(turned, gradient, torch.float32, device), straight))
    assert_near(straight, reference(turned, gradient), 1e-6, 1e-5)
    spread = g[0, 0, 0].expand(4, 3, 100)  # the gradient of a sum
    assert_near(ours(turned, spread, torch.float32, device), reference(turned, spread), 1e-6, 1e-5)
    assert_near(ours(x[:, 0, 0], g[:, 0, 0], torch.float32, device), reference(x[:, 0, 0], g[:, 0, 0]), 1e-6, 1e-5)


@on_device
def test_no_vectors(device: str) -> None:
    y, to_x = ours(torch.zeros(2, 0, 16), torch.zeros(2, 0, 16), torch.bfloat16, device)
    assert y.shape == to_x.shape == (2, 0, 16)


@on_device
def test_without_gradients_the_vectors_are_the_same(device: str) -> None:
    x = torch.randn(33, 100, device=device)
    again = normalize.unit(x.clone().requires_grad_(), torch.float32)
    assert torch.equal(normalize.unit(x, torch.float32), again)


def test_a_cpu_does_without() -> None:
    assert not normalize.available(torch.device("cpu"))


def test_what_does_not_fit() -> None:
    assert normalize.fits(torch.empty(2, 4096))
    assert normalize.fits(torch.empty(0, 1, dtype=torch.float16))
    assert not normalize.fits(torch.empty(2, 4097))
    assert not normalize.fits(torch.empty(2, 0))
    assert not normalize.fits(torch.empty(2, 16, dtype=torch.float64))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_real_size_on_a_gpu(dtype: torch.dtype) -> None:
    assert normalize.available(CUDA)
    x, g = torch.randn(128, 36, 1024).to(dtype), torch.randn(128, 36, 1024).to(dtype)
    first, second = (ours(x, g, dtype, "cuda") for _ in range(2))
    assert all(map(torch.equal, first, second))
    assert_near(first, reference(x, g), ROUNDING[dtype], ROUNDING[dtype])


@pytest.mark.gpu
@needs_gpu
def test_more_elements_than_int32_counts() -> None:
    x = torch.zeros((1 << 22) + 1, 512, dtype=torch.float16, device=CUDA)
    x[-1, 3] = 5
    y = normalize.unit(x, torch.float16)
    assert y[-1, 3] == 1
    assert y.sum(dtype=torch.float32) == 1
