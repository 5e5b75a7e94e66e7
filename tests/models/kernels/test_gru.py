"""The Triton kernels against the plain recurrence: on a GPU, or on a CPU with TRITON_INTERPRET=1."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernel_marks import CUDA, cases, needs_gpu, on_device, on_gpu_only, quiet, slow_on_cpu
from mispair.models.bigru import BiGRU, _Scan
from mispair.models.kernels import gru


def problem(n: int, batch: int, hidden: int) -> list[Tensor]:
    """Inputs' share, weight, bias and the gradient of the states."""
    shapes = (n, 2, batch, 3 * hidden), (2, 3 * hidden, hidden), (2, 3 * hidden), (n, 2, batch, hidden)
    parts = [torch.randn(shape) for shape in shapes]
    parts[1] /= hidden**0.5
    return parts


def outcome(scan: Callable[..., Tensor], parts: list[Tensor], device: str, dtype: torch.dtype) -> list[Tensor]:
    """The states, and the gradients of the inputs' share, the weight and the bias."""
    inputs, weight, bias, factors = (part.to(device, copy=True) for part in parts)
    leaves = [part.requires_grad_() for part in (inputs, weight, bias)]
    states = scan(inputs.to(dtype), weight, bias)
    assert states.dtype == torch.float32
    return [part.cpu() for part in (states.detach(), *torch.autograd.grad((states * factors).sum(), leaves))]


def plain(parts: list[Tensor]) -> list[Tensor]:
    return outcome(_Scan.apply, parts, "cpu", torch.float32)


def assert_near(found: list[Tensor], expected: list[Tensor], error: float) -> None:
    """Within `error` of the length of what is expected."""
    for ours, reference in zip(found, expected, strict=True):
        assert (ours - reference).norm() <= error * reference.norm()


HIDDEN = [5, 32, 48, 64, 96]  # both sides of the narrow kernels' limit; padded or not
SHORT = [(n, batch, hidden) for n, batch in [(1, 3), (2, 1), (7, 2)] for hidden in HIDDEN]
WIDE = [(3, 17, hidden) for hidden in HIDDEN]


@cases("n, batch, hidden", [*SHORT[:2], *SHORT[7:9], SHORT[-1]], SHORT + WIDE, slow_on_cpu=SHORT + WIDE)
def test_states_and_gradients_equal_the_plain_recurrence(device: str, n: int, batch: int, hidden: int) -> None:
    parts = problem(n, batch, hidden)
    assert_near(outcome(gru.scan, parts, device, torch.float32), plain(parts), 1e-5)


@quiet
@slow_on_cpu
@pytest.mark.parametrize("hidden", [32, 96])
def test_half_precision_is_near(device: str, hidden: int) -> None:
    parts = problem(6, 4, hidden)
    assert_near(outcome(gru.scan, parts, device, torch.bfloat16), plain(parts), 0.02)


@quiet
@on_gpu_only
@pytest.mark.parametrize("hidden", [32, 96])
def test_the_same_bits_every_time(device: str, hidden: int) -> None:
    parts = problem(5, 9 if device == "cuda" else 2, hidden)
    first, second = (outcome(gru.scan, parts, device, torch.bfloat16) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@on_device
@pytest.mark.parametrize("hidden", [32, 96])
def test_without_gradients_the_states_are_the_same(device: str, hidden: int) -> None:
    parts = problem(4, 3, hidden)
    with torch.no_grad():
        states = gru.scan(*(part.to(device) for part in parts[:3]))
    assert torch.equal(states.cpu(), outcome(gru.scan, parts, device, torch.float32)[0])


def test_a_cpu_does_without() -> None:
    assert not gru.available(torch.device("cpu"))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("hidden", [32, 256, 1024])
@pytest.mark.parametrize("half", [False, True])
def test_bigru_on_a_gpu_equals_the_cpu(hidden: int, half: bool) -> None:
    assert gru.available(CUDA)
    rnn, lengths = BiGRU(20, hidden), torch.tensor([25, 1, 9, 16] * 8)
    x = torch.randn(32, 25, 20)
    factors = torch.randn(32, 25, hidden)
    results = []
    for device in (torch.device("cpu"), CUDA):
        rnn, there = rnn.to(device), x.to(device, copy=True).requires_grad_()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=half):
            states = rnn(there, lengths)
        loss = (states * factors.to(device)).sum()
        found = torch.autograd.grad(loss, [there, *rnn.parameters()])  # outside autocast, as training does
        results.append([part.detach().cpu() for part in (states, *found)])
    assert_near(results[1], results[0], 0.03 if half else 1e-4)
