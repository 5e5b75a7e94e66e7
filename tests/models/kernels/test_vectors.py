"""The Triton kernels of similarity vectors against plain torch: on a GPU, or on a CPU with TRITON_INTERPRET=1."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, normalize

from kernel_marks import HALF, cases, on_device
from mispair.models.kernels import vectors

SIZES = [  # images, regions, words, D, s, nodes before the vectors
    (1, 1, 1, 16, 16, 1),
    (2, 5, 7, 40, 24, 3),
    (1, 36, 130, 64, 256, 2),
    (3, 64, 33, 72, 20, 0),
]
NAMES = ["nodes", "weights", "regions", "words", "weight", "bias", "first"]
Sizes = tuple[int, int, int, int, int, int]


def problem(images: int, R: int, T: int, D: int, s: int, r: int) -> tuple[list[Tensor], Tensor]:
    """The arguments and the gradient of the result."""
    torch.manual_seed(0)
    shapes = (images, R, T), (images, R, D), (T, D), (s, D), (s,), (images, r, s)
    return [torch.randn(*shape) / shape[-1] ** 0.5 for shape in shapes], torch.randn(images, r + T, s)


def plain(weights: Tensor, regions: Tensor, words: Tensor, weight: Tensor, bias: Tensor, first: Tensor) -> Tensor:
    """The definition, an image at a time."""
    contexts = [w.T @ x for w, x in zip(weights, regions, strict=True)]
    made = [normalize(linear((context - words) ** 2, weight, bias), dim=-1) for context in contexts]
    return torch.cat([first, torch.stack(made)], dim=1)


def outcome(function: object, parts: list[Tensor], factors: Tensor, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Nodes and gradients, in float64."""
    leaves = [part.to(device, dtype, copy=True).requires_grad_() for part in parts]
    nodes = function(*leaves)  # type: ignore[operator]
    found = nodes, *torch.autograd.grad((nodes * factors.to(device, dtype)).sum(), leaves)
    return [part.detach().double().cpu() for part in found]


def errors(found: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    """Length of the error, relative to what is expected."""
    named = zip(NAMES, found, expected, strict=True)
    return {name: float((value - right).norm() / right.norm().clamp(min=1e-9)) for name, value, right in named}


@cases("sizes", [(sizes,) for sizes in SIZES], [])
def test_result_and_gradients_equal_the_definition(device: str, sizes: Sizes) -> None:
    parts, factors = problem(*sizes)
    expected = outcome(plain, parts, factors, "cpu", torch.float64)
    found = errors(outcome(vectors.vectors, parts, factors, device, torch.float32), expected)
    assert all(value < 1e-5 for value in found.values()), found


@cases("sizes", [(SIZES[1],)], [(sizes,) for sizes in SIZES] + [((8, 36, 300, 1024, 256, 16),)])
def test_half_precision_is_as_exact_as_torch(device: str, sizes: Sizes) -> None:
    parts, factors = problem(*sizes)
    parts = [part.to(HALF[device]).float() for part in parts]
    expected = outcome(plain, parts, factors, "cpu", torch.float64)
    torch_errors = errors(outcome(plain, parts, factors, device, HALF[device]), expected)
    found = errors(outcome(vectors.vectors, parts, factors, device, HALF[device]), expected)
    assert all(value < 1.2 * torch_errors[name] + 1e-3 for name, value in found.items()), (found, torch_errors)


@on_device
def test_vectors_of_nothing_have_finite_gradients(device: str) -> None:
    parts, factors = problem(2, 3, 4, 16, 16, 1)
    parts = [torch.zeros_like(part) for part in parts]
    assert all(part.isfinite().all() for part in outcome(vectors.vectors, parts, factors, device, torch.float32))


@pytest.mark.parametrize(
    ("dtype", "regions", "width", "expected"),
    [
        (torch.bfloat16, 64, 256, True),
        (torch.float32, 64, 256, False),
        (torch.bfloat16, 65, 256, False),
        (torch.float16, 64, 257, False),
    ],
)
def test_fits(dtype: torch.dtype, regions: int, width: int, expected: bool) -> None:
    assert vectors.fits(dtype, regions, width) == expected
