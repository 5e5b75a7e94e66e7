"""The Triton kernels of generalised pooling against sorting: on a GPU, or on a CPU with TRITON_INTERPRET=1."""

import pytest
import torch
from torch import Tensor

from kernel_marks import CUDA, cases, needs_gpu, on_device, on_gpu_only, slow_on_cpu
from mispair.models.kernels import gpo
from mispair.models.vse import GPO

SIZES = [  # n, D, lengths; None if all have n
    (1, 1, [1, 1]),
    (5, 3, [5, 1, 4]),
    (5, 300, [3, 5]),
    (16, 20, [16, 1, 9]),
    (17, 100, [17, 16, 1]),
    (36, 20, None),
    (80, 3, [80, 33]),
    (128, 1, [128, 1, 65]),
]
NAMES = ["Y", "x", "weights"]


def problem(batch: int, n: int, D: int, shared: bool = False) -> list[Tensor]:
    """x, weights and the gradient of the result."""
    return [torch.randn(batch, n, D), torch.randn(1 if shared else batch, n), torch.randn(batch, D)]


def by_hand(parts: list[Tensor], lengths: list[int] | None) -> list[Tensor]:
    """Y and the gradients of x and weights: a loop over channels, with Python's sort."""
    x, weights, factors = (part.double() for part in parts)
    Y, to_x, to_weights = torch.zeros_like(factors), torch.zeros_like(x), torch.zeros_like(weights)
    for b, values in enumerate(x):
        length = x.shape[1] if lengths is None else lengths[b]
        own = b if len(weights) > 1 else 0
        for d in range(x.shape[2]):
            channel = values[:length, d]
            numbers = channel.tolist()
            order = sorted(range(length), key=lambda i: -numbers[i])
            Y[b, d] = weights[own, :length] @ channel[order]
            to_x[b, order, d] = factors[b, d] * weights[own, :length]
            to_weights[own, :length] += factors[b, d] * channel[order]
    return [Y, to_x, to_weights]


def by_sort(x: Tensor, weights: Tensor, lengths: Tensor | None) -> Tensor:
    """As `GPO.forward`."""
    real = torch.full((len(x),), x.shape[1]) if lengths is None else lengths
    padded = (torch.arange(x.shape[1], device=x.device) >= real.to(x.device)[:, None])[..., None]
    ordered = x.masked_fill(padded, -torch.inf).sort(dim=1, descending=True, stable=True).values
    return (weights[:, None] @ ordered.masked_fill(padded, 0)).squeeze(1)


def outcome(
    parts: list[Tensor], lengths: list[int] | None, device: str | torch.device, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Y and the gradients of x and weights from the kernels."""
    x = parts[0].to(device, dtype, copy=True).requires_grad_()
    weights, factors = parts[1].to(device, copy=True).requires_grad_(), parts[2].to(device)
    Y = gpo.pool(x, weights, None if lengths is None else torch.tensor(lengths, device=device))
    found = [Y.detach(), *torch.autograd.grad((Y * factors).sum(), [x, weights])]
    assert [part.dtype for part in found] == [torch.float32, dtype, torch.float32]
    assert [part.shape for part in found] == [factors.shape, x.shape, weights.shape]
    return [part.double().cpu() for part in found]


def errors(found: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    """Length of the error, relative to what is expected."""
    named = zip(NAMES, found, expected, strict=True)
    return {name: float((value - right).norm() / right.norm().clamp(min=1e-9)) for name, value, right in named}


@cases("size", [(size,) for size in SIZES[:5]], [(size,) for size in SIZES], [(size,) for size in SIZES[5:]])
def test_result_and_gradients_equal_the_loop(
    device: str, size: tuple[int, int, list[int] | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu" and size[0] > 17:  # the interpreter takes milliseconds a comparison, however many rows it has
        monkeypatch.setattr(gpo, "FORWARD", {**gpo.FORWARD, "ROWS": 32})
        monkeypatch.setattr(gpo, "BACKWARD", {**gpo.BACKWARD, "ROWS": 32})
    n, D, lengths = size
    parts = problem(2 if lengths is None else len(lengths), n, D)
    expected, found = by_hand(parts, lengths), outcome(parts, lengths, device)
    assert max(errors(found, expected).values()) < 1e-5, errors(found, expected)
    if lengths is not None:
        for b, length in enumerate(lengths):
            assert (found[1][b, length:] == 0).all()
            assert (found[2][b, length:] == 0).all()


@on_device
@pytest.mark.parametrize("lengths", [None, [6, 1, 4]])
def test_one_row_of_weights_for_all(device: str, lengths: list[int] | None) -> None:
    parts = problem(3, 6, 20, shared=True)
    found = errors(outcome(parts, lengths, device), by_hand(parts, lengths))
    assert max(found.values()) < 1e-5, found


@on_device
def test_all_negative(device: str) -> None:
    x, weights, factors = problem(2, 7, 5)
    parts = [-x.abs() - 1, weights, factors]
    found = errors(outcome(parts, [3, 7], device), by_hand(parts, [3, 7]))
    assert max(found.values()) < 1e-5, found


@on_device
def test_equal_values_are_sorted_as_they_stand(device: str) -> None:
    lengths = [9, 1, 6]
    parts = problem(3, 9, 40)
    parts[0] = torch.randint(-2, 3, parts[0].shape) * torch.tensor([1.0, -1.0]).repeat(20)  # zeros of both signs
    x, weights, factors = (part.requires_grad_() for part in parts)
    Y = by_sort(x, weights, torch.tensor(lengths))
    expected = [Y.detach(), *torch.autograd.grad((Y * factors).sum(), [x, weights])]
    found = outcome([part.detach() for part in parts], lengths, device)
    torch.testing.assert_close(found[1], expected[1].double(), rtol=1e-6, atol=0)
    assert max(errors(found, [part.double() for part in expected]).values()) < 1e-5


@on_device
def test_what_stands_behind_the_lengths_does_not_matter(device: str) -> None:
    lengths, junk = [1, 6, 9, 3], torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, torch.nan])
    parts = problem(4, 9, 5)
    expected = outcome(parts, lengths, device)
    for b, length in enumerate(lengths):
        parts[0][b, length:] = junk
        parts[1][b, length:] = junk[b]
    found = outcome(parts, lengths, device)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@on_device
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_bad_values_stay_with_their_item(device: str) -> None:
    lengths = [6, 3, 7]
    parts = problem(3, 7, 5)
    expected = outcome(parts, lengths, device)
    parts[0][1, 1, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    parts[0][1, :, 3] = torch.nan
    found = outcome(parts, lengths, device)
    assert not found[0][1, :4].isfinite().any()
    assert torch.equal(found[0][1, 4], expected[0][1, 4])
    for value, right in zip(found, expected, strict=True):
        assert torch.equal(value[[0, 2]], right[[0, 2]])


@slow_on_cpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(device: str, dtype: torch.dtype) -> None:
    lengths = [17, 5]
    parts = problem(2, 17, 100)
    parts[0] = parts[0].to(dtype).float()
    found = errors(outcome(parts, lengths, device, dtype), by_hand(parts, lengths))
    assert found["Y"] < 1e-5, found
    assert found["weights"] < 1e-5, found
    assert found["x"] < 1e-2, found  # rounded to half precision


@on_device
def test_inputs_need_not_be_contiguous(device: str) -> None:
    x, weights, factors = problem(4, 9, 6)
    lengths = torch.tensor([9, 2, 5, 1])
    strided = (
        x.transpose(0, 2).contiguous().transpose(0, 2),
        weights.T.contiguous().T,
        lengths.repeat_interleave(2)[::2],
    )
    results = []
    for inputs in ((x, weights, lengths), strided):
        values, wanted = (part.to(device).requires_grad_() for part in inputs[:2])
        Y = gpo.pool(values, wanted, inputs[2].to(device))
        gradient = factors.T.contiguous().T.to(device)
        results.append([Y, *torch.autograd.grad(Y, [values, wanted], gradient)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@on_device
def test_gradients_of_some_inputs_only(device: str) -> None:
    parts = problem(2, 6, 5)
    expected = outcome(parts, [6, 2], device)
    lengths = torch.tensor([6, 2], device=device, dtype=torch.int32)
    x, weights, factors = (part.to(device) for part in parts)
    Y = gpo.pool(x.requires_grad_(), weights, lengths)
    (to_x,) = torch.autograd.grad(Y, x, factors)
    Y = gpo.pool(x.detach(), weights.requires_grad_(), lengths)
    (to_weights,) = torch.autograd.grad(Y, weights, factors)
    Y = gpo.pool(x.detach(), weights.detach(), lengths)
    assert not Y.requires_grad
    for found, right in zip((Y, to_x, to_weights), expected, strict=True):
        assert torch.equal(found.double().cpu(), right)


@on_gpu_only
def test_the_same_bits_every_time(device: str) -> None:
    parts = problem(3, 10, 150, shared=True)
    first, second = (outcome(parts, [10, 3, 7], device) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@on_device
@pytest.mark.parametrize("ragged", [False, True])
def test_the_same_as_gpo(device: str, ragged: bool) -> None:
    torch.manual_seed(0)
    pool = GPO(size=8).to(device)
    x = torch.randn(3, 9, 20, device=device, requires_grad=True)
    lengths = torch.tensor([4, 9, 1], device=device) if ragged else None
    leaves = [x, *pool.parameters()]
    results = []
    for Y in (by_sort(x, pool.weights(lengths, 9), lengths), gpo.pool(x, pool.weights(lengths, 9), lengths)):
        results.append(
            [Y.detach().double(), *(part.double() for part in torch.autograd.grad(Y.square().sum(), leaves))]
        )
    torch.testing.assert_close(results[1][0], pool(x, lengths).double(), rtol=1e-5, atol=1e-6)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_cpu_does_without() -> None:
    assert not gpo.available(torch.device("cpu"))


def test_what_does_not_fit() -> None:
    assert gpo.fits(torch.empty(1, 128, 3, dtype=torch.bfloat16))
    assert not gpo.fits(torch.empty(1, 129, 3))
    assert not gpo.fits(torch.empty(1, 8, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="129 elements"):
        gpo.pool(torch.empty(1, 129, 3), torch.empty(1, 129), None)
    with pytest.raises(ValueError, match=r"\(3, 8\)"):
        gpo.pool(torch.empty(2, 8, 3), torch.empty(3, 8), None)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kind", ["regions", "words"])
def test_the_real_size_on_a_gpu(kind: str) -> None:
    assert gpo.available(CUDA)
    n, shared = (36, True) if kind == "regions" else (80, False)
    lengths = None if shared else torch.randint(1, n + 1, (128,), device=CUDA)
    x, weights, factors = (part.to(CUDA) for part in problem(128, n, 1024, shared))
    x, weights = x.requires_grad_(), weights.requires_grad_()
    Y = gpo.pool(x, weights, lengths)
    found = [Y.detach(), *torch.autograd.grad(Y, [x, weights], factors)]
    x, weights = (leaf.detach().double().requires_grad_() for leaf in (x, weights))
    Y = by_sort(x, weights, lengths)
    expected = [Y.detach(), *torch.autograd.grad(Y, [x, weights], factors.double())]
    assert max(errors(found, expected).values()) < 1e-5, errors(found, expected)


@pytest.mark.gpu
@needs_gpu
def test_recorded_as_a_graph() -> None:
    x, weights, factors = (part.to(CUDA) for part in problem(8, 24, 64))
    lengths = torch.randint(1, 25, (8,), device=CUDA)
    x, weights = x.requires_grad_(), weights.requires_grad_()

    def step() -> list[Tensor]:
        Y = gpo.pool(x, weights, lengths)
        return [Y.detach(), *torch.autograd.grad(Y, [x, weights], factors)]

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    with torch.no_grad():
        x.normal_()
    lengths.copy_(torch.randint(1, 25, (8,)))
    graph.replay()
    assert all(torch.equal(one, other) for one, other in zip(recorded, step(), strict=True))
