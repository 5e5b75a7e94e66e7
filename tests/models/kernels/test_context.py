"""The Triton kernels of SGR against plain torch: on a GPU, or on a CPU with TRITON_INTERPRET=1."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from kernel_marks import CUDA, HALF, needs_gpu, on_device, on_gpu_only, quiet, slow_on_cpu
from mispair.compute.precision import working
from mispair.models.base import l2norm
from mispair.models.kernels import context
from mispair.models.sgraf import context_weights, similarity_vectors

NAMES = ["Y", "weights", "regions", "words", "A", "b"]
SIZES = [  # images, words, regions, D, s: all sides of blocks and of powers of two
    (1, 1, 8, 16, 8),
    (1, 7, 36, 130, 20),
    (2, 33, 64, 48, 16),
    (2, 70, 8, 130, 32),
    (5, 7, 36, 64, 20),
    (5, 33, 36, 48, 8),
    (2, 150, 36, 64, 20),
    (2, 33, 100, 48, 16),
]


def problem(images: int, T: int, R: int, D: int, s: int) -> list[Tensor]:
    """Weights, regions, words, A, b and the gradient of the result."""
    regions, words = l2norm(torch.randn(images, R, D)), l2norm(torch.randn(T, D))
    weights = (2 * torch.randn(images, T, R)).softmax(dim=-1)
    weights = weights / (weights @ regions).norm(dim=-1, keepdim=True)
    A, b = torch.randn(s, D) / D**0.5, 0.1 * torch.randn(s)
    return [weights, regions, words, A, b, torch.randn(images, T, s)]


def plain(weights: Tensor, regions: Tensor, words: Tensor, A: Tensor, b: Tensor) -> Tensor:
    """As `sgraf.similarity_vectors` without the kernels."""
    return nn.functional.linear((working(weights) @ working(regions) - working(words)).square(), A, b)


def outcome(
    op: Callable[..., Tensor],
    parts: list[Tensor],
    device: str | torch.device,
    dtype: torch.dtype = torch.float32,
    half: bool = False,
) -> list[Tensor]:
    """Y and the gradients of all inputs, in float64."""
    *inputs, factors = (part.to(device, dtype, copy=True) for part in parts)
    leaves = [part.requires_grad_() for part in inputs]
    kind = torch.device(device).type
    with torch.autocast(kind, dtype=HALF[kind], enabled=half):
        Y = op(*leaves)
    assert Y.dtype == (HALF[kind] if half else dtype)
    gradients = torch.autograd.grad((Y.to(dtype) * factors).sum(), leaves)  # outside autocast, as training does
    assert all(gradient.dtype == dtype for gradient in gradients)
    return [part.double().cpu() for part in (Y.detach(), *gradients)]


def reference(parts: list[Tensor]) -> list[Tensor]:
    return outcome(plain, parts, "cpu", torch.float64)


def errors(found: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    """Length of the error, relative to what is expected."""
    named = zip(NAMES, found, expected, strict=True)
    return {name: float((ours - right).norm() / right.norm()) for name, ours, right in named}


@on_device
@pytest.mark.parametrize("sizes", SIZES)
def test_result_and_gradients_equal_the_formula(device: str, sizes: tuple[int, int, int, int, int]) -> None:
    parts = problem(*sizes)
    found = errors(outcome(context.attended_difference, parts, device), reference(parts))
    assert all(error < 1e-5 for error in found.values()), found


@quiet
@slow_on_cpu
@pytest.mark.parametrize("sizes", SIZES)
def test_half_precision_is_as_near_as_plain_torch(device: str, sizes: tuple[int, int, int, int, int]) -> None:
    parts = problem(*sizes)
    expected = reference(parts)
    ours = errors(outcome(context.attended_difference, parts, device, half=True), expected)
    usual = errors(outcome(plain, parts, device, half=True), expected)
    assert all(ours[name] < 2 * usual[name] + 1e-3 for name in NAMES), (ours, usual)


@quiet
@on_gpu_only
def test_the_same_bits_every_time(device: str) -> None:
    parts = problem(3, 150, 36, 64, 20)
    first, second = (outcome(context.attended_difference, parts, device, half=True) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@on_device
@pytest.mark.parametrize("images_at_a_time", [1, 2, 3])
def test_any_number_of_images_at_a_time(device: str, images_at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = problem(5, 9, 8, 16, 8)
    monkeypatch.setattr(context, "CHUNK", images_at_a_time * 9 * 16)
    found = errors(outcome(context.attended_difference, parts, device), reference(parts))
    assert all(error < 1e-5 for error in found.values()), found


@on_device
@pytest.mark.parametrize("needed", [[0], [1], [2], [3], [4], [0, 3], [1, 2], [2, 3, 4]])
def test_gradients_of_some_inputs_only(device: str, needed: list[int]) -> None:
    parts = problem(2, 9, 8, 16, 8)
    expected = reference(parts)
    *inputs, factors = (part.to(device) for part in parts)
    leaves = [inputs[place].requires_grad_() for place in needed]
    Y = context.attended_difference(*inputs)
    found = torch.autograd.grad((Y * factors).sum(), leaves)
    for place, gradient in zip(needed, found, strict=True):
        assert (gradient.cpu() - expected[place + 1]).norm() < 1e-5 * expected[place + 1].norm()


@on_device
def test_inputs_need_not_be_contiguous(device: str) -> None:
    parts = problem(2, 33, 8, 48, 16)
    strided = [part.transpose(-1, -2).contiguous().transpose(-1, -2) for part in parts[:4]]
    with torch.no_grad():
        straight, turned = (
            context.attended_difference(*(part.to(device) for part in (*some, parts[4])))
            for some in (parts[:4], strided)
        )
    assert torch.equal(straight, turned)


def test_a_cpu_does_without() -> None:
    assert not context.available(torch.device("cpu"))


def test_what_does_not_fit() -> None:
    def fits(R: int, s: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        return context.fits(torch.empty(1, 1, R, dtype=dtype), torch.empty(s, 16))

    assert fits(128, 256)
    assert not fits(129, 256)
    assert not fits(36, 257)
    assert not fits(36, 256, torch.float64)


# ---------------------------------------------------------------- within SGR


def vectors(project: nn.Linear, parts: list[Tensor], counts: Tensor, half: bool) -> list[Tensor]:
    """The similarity vectors, and the gradients of attention, regions, words and the layer's weight and bias."""
    *inputs, factors = parts
    attention, regions, words = leaves = [part.detach().clone().requires_grad_() for part in inputs]
    kind = words.device.type
    with torch.autocast(kind, dtype=HALF[kind], enabled=half):
        Y = similarity_vectors(context_weights(regions, counts, attention), regions, words, project)
    learnt = [*leaves, project.weight, project.bias]
    return [part.detach().double() for part in (Y, *torch.autograd.grad((Y.float() * factors).sum(), learnt))]


@quiet
@on_device
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("real", ["all", "fewer"])
def test_sgr_gets_the_same_vectors(device: str, half: bool, real: str, monkeypatch: pytest.MonkeyPatch) -> None:
    images, T, R, D, s = (3, 40, 9, 48, 20) if device == "cpu" else (32, 700, 36, 1024, 256)
    project = nn.Linear(D, s, device=device)
    weights, regions, words, _, _, factors = problem(images, T, R, D, s)
    attention = l2norm(weights.transpose(1, 2))
    parts = [part.to(device) for part in (attention, regions, words, factors)]
    counts = torch.full((images,), R)
    if real == "fewer":
        counts[::2] = R - 3

    monkeypatch.setattr(context, "available", lambda _: False)
    exact, usual = (vectors(project, parts, counts, at) for at in (False, half))
    monkeypatch.setattr(context, "available", lambda _: True)
    found, allowed = errors(vectors(project, parts, counts, half), exact), errors(usual, exact)
    assert all(found[name] < (2 * allowed[name] + 1e-3 if half else 1e-4) for name in NAMES), (found, allowed)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("T", [1800, 129])
@pytest.mark.parametrize("half", [False, True])
def test_the_real_size_on_a_gpu(T: int, half: bool) -> None:
    assert context.available(CUDA)
    parts = problem(40, T, 36, 1024, 256)
    expected = outcome(plain, parts, CUDA, torch.float64)
    ours = errors(outcome(context.attended_difference, parts, CUDA, half=half), expected)
    usual = errors(outcome(plain, parts, CUDA, half=half), expected)
    assert all(ours[name] < 2 * usual[name] + (1e-3 if half else 1e-5) for name in NAMES), (ours, usual)
