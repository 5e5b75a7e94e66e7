"""The Triton kernels of SGR's attention against plain torch: on a GPU, or on a CPU with TRITON_INTERPRET=1."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from kernel_marks import CUDA, cases, needs_gpu, on_cpu, on_device, on_gpu_only, slow_on_cpu
from mispair.models.base import safe_norm
from mispair.models.kernels import attention
from mispair.models.kernels.common import MOST_ROWS

NAMES = ["w", "scores", "products"]
SMALL = 2, 36, [1, 15, 16, 17, 33, 64, 5], 3  # all sizes of blocks
FEW = 2, 20, [1, 17, 5], 3  # for what does not depend on the sizes of blocks
SIZES = [  # images, R, words of each caption, rows of words that belong to no caption
    (1, 1, [1], 0),
    (2, 1, [3, 20], 2),
    (3, 8, [1, 15, 2], 0),
    (2, 36, [16, 1, 31, 14], 5),
    (1, 64, [64, 1, 30, 0], 70),
    (2, 100, [17, 33, 12], 1),
    (1, 128, [4, 64], 0),
]
LONG = [  # for half precision
    (2, 36, [64, 65, 1, 128, 33, 17], 3),
    (1, 8, [65], 0),
    (2, 64, [16, 100, 32], 70),
    (1, 128, [127, 4], 0),
]
Sizes = tuple[int, int, list[int], int]
Problem = tuple[Tensor, Tensor, Tensor, Tensor]
Weights = Callable[..., Tensor]


def problem(images: int, R: int, words: list[int], spare: int) -> Problem:
    """Scores, products, gradient of the result, and the lengths. Most scores are small, half are negative."""
    T = sum(words) + spare
    regions = torch.nn.functional.normalize(0.2 + torch.randn(images, R, 40), dim=-1)
    scores = regions @ torch.nn.functional.normalize(0.2 + torch.randn(T, 40), dim=-1).T
    gradient = torch.randn(images, T, R)
    return scores.transpose(1, 2), regions @ regions.transpose(1, 2), gradient, torch.tensor(words)


def plain(
    scores: Tensor, products: Tensor, starts: Tensor, lengths: Tensor, longest: int, dtype: torch.dtype
) -> Tensor:
    """A loop over captions, in the precision of the products."""
    assert longest >= int(lengths.max())
    rows = [torch.zeros_like(row, dtype=products.dtype) for row in scores.unbind(dim=1)]
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        a = leaky_relu(scores[:, start : start + length], 0.1).to(products.dtype)
        p = (9.0 * a / safe_norm(a.square().sum(dim=1, keepdim=True))).softmax(dim=2)
        w = p / safe_norm(((p @ products) * p).sum(dim=2, keepdim=True))
        rows[start : start + length] = w.unbind(dim=1)
    return torch.stack(rows, dim=1).to(dtype)


def outcome(
    weights: Weights,
    parts: Problem,
    device: str | torch.device,
    dtype: torch.dtype = torch.float32,
    **more: int,
) -> list[Tensor]:
    """w and the gradients of scores and products, in float64. Scores are in the precision of the result."""
    scores, products, gradient, lengths = (part.to(device, copy=True) for part in parts)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = [scores.to(dtype).requires_grad_(), products.to(wide).requires_grad_()]
    w = weights(*leaves, lengths.cumsum(0) - lengths, lengths, int(lengths.max()), dtype, **more)
    assert w.dtype == dtype
    R = scores.shape[2]
    found = w, *torch.autograd.grad((w[..., :R].to(wide) * gradient).sum(), leaves)
    assert found[1].dtype == dtype
    assert found[2].dtype == wide
    return [part.detach().double().cpu() for part in found]


def compare(parts: Problem, device: str | torch.device) -> dict[str, float]:
    """Errors of the kernels in float32."""
    return errors(outcome(attention.weights, parts, device), outcome(plain, parts, "cpu", torch.float64))


def errors(found: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    """Length of the error, relative to what is expected."""
    named = zip(NAMES, found, expected, strict=True)
    return {name: float((value - right).norm() / right.norm().clamp(min=1e-3)) for name, value, right in named}


def rounded(parts: Problem, dtype: torch.dtype) -> Problem:
    """With scores that this precision has."""
    return parts[0].to(dtype).float(), *parts[1:]


@cases("sizes", [(sizes,) for sizes in [SMALL, *SIZES]], [(SMALL,), (SIZES[0],), (SIZES[5],)])
def test_result_and_gradients_equal_the_loop(device: str, sizes: Sizes) -> None:
    found = compare(problem(*sizes), device)
    assert max(found.values()) < 1e-5, found


@cases("sizes", [(LONG[1],)], [], slow_on_cpu=[(LONG[0],), (LONG[2],), (LONG[3],)])
def test_long_captions_equal_the_loop(device: str, sizes: Sizes, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, for which a GPU has too few registers: half precision would hide small mistakes."""
    monkeypatch.setitem(MOST_ROWS, torch.float32, 128)
    found = compare(problem(*sizes), device)
    assert max(found.values()) < 1e-5, found


HALVES = [torch.bfloat16, torch.float16]


@cases(
    "sizes, half",
    [(SIZES[2], half) for half in HALVES],
    [(SMALL, HALVES[0]), (SMALL, HALVES[1]), (SIZES[5], HALVES[0]), *((LONG[0], half) for half in HALVES),
     (LONG[3], HALVES[0])],
    slow_on_cpu=[(sizes, half) for sizes in [SMALL, *SIZES, *LONG] for half in HALVES],
)  # fmt: skip
def test_half_precision_is_as_near_as_plain_torch(device: str, sizes: Sizes, half: torch.dtype) -> None:
    parts = rounded(problem(*sizes), half)
    expected = outcome(plain, parts, "cpu", torch.float64)
    found = errors(outcome(attention.weights, parts, device, half), expected)
    usual = errors(outcome(plain, parts, device, half), expected)
    cut = 2 if device == "cpu" and half == torch.bfloat16 else 1  # Triton's interpreter cuts bf16 off, a GPU rounds
    assert all(found[name] < cut * (1.5 * usual[name] + 3e-3) for name in NAMES), (found, usual)
    assert found["w"] < cut * 2**-9, found


@pytest.mark.parametrize("device", [on_cpu])
def test_a_full_precision_result_of_half_precision_scores(device: str) -> None:
    scores, products, gradient, lengths = rounded(problem(*FEW), torch.bfloat16)
    expected = outcome(plain, (scores, products, gradient, lengths), "cpu", torch.float64)
    starts = lengths.cumsum(0) - lengths
    leaf = scores.to(device, torch.bfloat16).requires_grad_()
    w = attention.weights(leaf, products.to(device), starts.to(device), lengths.to(device), 64, torch.float32)
    (to_scores,) = torch.autograd.grad((w * gradient.to(device)).sum(), leaf)
    assert to_scores.dtype == torch.bfloat16
    assert (w.double().cpu() - expected[0]).norm() < 1e-6 * expected[0].norm()
    assert (to_scores.double().cpu() - expected[1]).norm() < 2**-8 * expected[1].norm()


@on_device
@pytest.mark.parametrize("scale", [1e-18, 1e-9, 1e4, 1e15])
def test_small_and_large_scores(device: str, scale: float) -> None:
    scores, *rest = problem(*FEW)
    found = compare((scale * scores, rest[0], rest[1], rest[2]), device)
    assert max(found.values()) < 2e-5, found


@on_device
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_scores_of_one_sign(device: str, sign: float) -> None:
    scores, *rest = problem(*FEW)
    found = compare((sign * scores.abs(), rest[0], rest[1], rest[2]), device)
    assert max(found.values()) < 1e-5, found


@on_device
def test_scores_that_are_zero(device: str) -> None:
    scores, products, gradient, lengths = problem(*SMALL)
    scores[0, 1:16, 3] = 0  # one region for all words of a caption
    scores[1, 1:16] = 0  # all regions
    scores[0, 16] = 0  # all regions for one word
    found = compare((scores, products, gradient, lengths), device)
    assert max(found.values()) < 1e-5, found


@on_device
def test_regions_that_are_zero(device: str) -> None:
    scores, products, gradient, lengths = problem(*FEW)
    found = compare((scores, products * torch.tensor([0.0, 1.0])[:, None, None], gradient, lengths), device)
    assert max(found.values()) < 1e-5, found


@on_device
@pytest.mark.parametrize("half", [False, True])
def test_rows_of_no_caption_are_zero(device: str, half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.Tensor.new_empty

    def junk(*shape: Any, **as_: Any) -> Tensor:
        memory = empty(*shape, **as_)
        return memory.fill_(torch.nan) if memory.is_floating_point() else memory

    monkeypatch.setattr(torch.Tensor, "new_empty", junk)
    dtype = torch.bfloat16 if half else torch.float32
    parts = problem(2, 36, [3, 20, 40], 60)  # more than all programs clear at once
    clean = outcome(attention.weights, parts, device, dtype)
    parts[0][:, -60:] = torch.inf
    parts[2][:, -60:] = torch.nan
    for part in (found := outcome(attention.weights, parts, device, dtype))[:2]:
        assert (part[:, -60:] == 0).all()
    assert all(torch.equal(one, other) for one, other in zip(clean, found, strict=True))


@slow_on_cpu
@pytest.mark.parametrize("width", [48, 64])
def test_padding(device: str, width: int) -> None:
    parts = rounded(problem(*SMALL), torch.bfloat16)
    w, *gradients = outcome(attention.weights, parts, device, torch.bfloat16)
    wide, *same = outcome(attention.weights, parts, device, torch.bfloat16, padded_to=width)
    assert wide.shape[2] == width
    assert torch.equal(wide[..., :36], w)
    assert (wide[..., 36:] == 0).all()
    assert all(torch.allclose(a, b, rtol=1e-2, atol=1e-2) for a, b in zip(gradients, same, strict=True))


@on_gpu_only
def test_the_same_bits_every_time(device: str) -> None:
    parts = problem(*LONG[0])
    one, two = (outcome(attention.weights, parts, device, torch.bfloat16, padded_to=64) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("device", [on_cpu])
def test_longest_is_a_bound_only(device: str) -> None:
    scores, products, _, lengths = (part.to(device) for part in problem(2, 8, [3, 10, 14], 2))
    scores, starts = scores.half(), lengths.cumsum(0) - lengths
    tight, *loose = (attention.weights(scores, products, starts, lengths, n, torch.float16) for n in (14, 17, 64, 128))
    assert all(torch.equal(tight, other) for other in loose)


@pytest.mark.parametrize("device", [on_cpu])
def test_strides_and_kinds_of_integers(device: str) -> None:
    scores, products, _, lengths = (part.to(device) for part in problem(2, 8, [3, 20], 0))
    starts = lengths.cumsum(0) - lengths
    assert not scores.is_contiguous()
    straight = attention.weights(scores.contiguous(), products, starts, lengths, 20, torch.float32)
    other = attention.weights(scores, products.double(), starts.int(), lengths.int(), 20, torch.float32)
    assert torch.equal(straight, other)


@pytest.mark.parametrize("device", [on_cpu])
@pytest.mark.parametrize("needed", [0, 1])
def test_gradient_of_one_input_only(device: str, needed: int) -> None:
    parts = problem(*FEW)
    expected = outcome(attention.weights, parts, device)
    scores, products, gradient, lengths = (part.to(device) for part in parts)
    leaf = (scores, products)[needed].requires_grad_()
    w = attention.weights(scores, products, lengths.cumsum(0) - lengths, lengths, 64, torch.float32)
    (found,) = torch.autograd.grad((w * gradient).sum(), leaf)
    assert torch.equal(found.double().cpu(), expected[1 + needed])


@pytest.mark.slow
@pytest.mark.parametrize("device", [on_cpu])
def test_one_launch_for_each_size(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORWARD", "BACKWARD"):
        launch, _ = getattr(attention, name)
        monkeypatch.setattr(attention, name, [{**launch, "LEAST": rows, "MOST": rows} for rows in (16, 32, 64, 128)])
    monkeypatch.setitem(MOST_ROWS, torch.float32, 128)
    for sizes in (SMALL, SIZES[-1], LONG[0]):
        found = compare(problem(*sizes), device)
        assert max(found.values()) < 1e-5, found


def test_what_does_not_fit_is_refused() -> None:
    def fits(R: int, longest: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        return attention.fits(torch.empty(1, 1, R, dtype=dtype), longest)

    assert fits(128, 128)
    assert fits(128, 128, torch.float16)
    assert fits(128, 64, torch.float32)
    assert fits(1, 1, torch.float32)
    assert not fits(129, 64)
    assert not fits(128, 129)
    assert not fits(128, 65, torch.float32)
    assert not fits(128, 64, torch.float64)
    scores, products, _, lengths = problem(1, 36, [65], 0)
    with pytest.raises(ValueError, match="65 words"):
        attention.weights(scores, products, lengths - 65, lengths, 65, torch.float32)
    for width in (35, 65):
        with pytest.raises(ValueError, match="36 to 64"):
            attention.weights(scores, products, lengths - 65, lengths, 64, torch.float32, padded_to=width)


def test_a_cpu_does_without() -> None:
    assert not attention.available(torch.device("cpu"))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_real_size_on_a_gpu(dtype: torch.dtype) -> None:
    assert attention.available(CUDA)
    words = (3 + 12 * torch.rand(40) ** 2 * 4).int().tolist()
    long = [] if dtype == torch.float32 else [128, 65, 80]
    parts = rounded(problem(16, 36, [*words, 60, *long], 48), dtype)
    expected = outcome(plain, parts, CUDA, torch.float64)
    found = errors(outcome(attention.weights, parts, CUDA, dtype, padded_to=64), [pad(expected[0]), *expected[1:]])
    usual = errors(outcome(plain, parts, CUDA, dtype), expected)
    assert all(found[name] < 1.5 * usual[name] + (1e-5 if dtype == torch.float32 else 3e-3) for name in NAMES), found


def pad(w: Tensor) -> Tensor:
    return torch.nn.functional.pad(w, (0, 64 - w.shape[2]))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("longest", "other"), [(64, 50), (128, 80)])
def test_a_cuda_graph_takes_other_captions(longest: int, other: int) -> None:
    def inputs(words: list[int]) -> list[Tensor]:
        scores, products, _, lengths = problem(4, 36, words, 100 - sum(words))
        parts = scores.bfloat16().contiguous(), products, lengths.cumsum(0) - lengths, lengths
        return [part.to(CUDA, copy=True) for part in parts]

    def result(parts: list[Tensor]) -> list[Tensor]:
        scores, products = (part.detach().requires_grad_() for part in parts[:2])
        w = attention.weights(scores, products, parts[2], parts[3], longest, torch.bfloat16, padded_to=64)
        return [w.detach(), *torch.autograd.grad((w.float() ** 3).sum(), [scores, products])]

    first, second = inputs([3, 20, 40]), inputs([other, 1, 16])
    result(first)  # compiles
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        found = result(first)
    for old, new in zip(first, second, strict=True):
        old.copy_(new)
    captured.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, result(second), strict=True))
