"""SAF and SGR as `torch.compile` makes them: the same as plain torch, from one compilation for all sizes."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
from torch import Tensor

from kernel_marks import CUDA, needs_gpu
from mispair.compute.devices import autocast
from mispair.config import Config
from mispair.models import Encoded, Network, SideSpec, build
from mispair.models.kernels import compiled
from mispair.pairs.batches import Items

SIZES = [(5, [3, 9, 1]), (4, [2, 2, 7, 5, 1]), (6, [30, 4])]  # images, and the words of each caption
known = pytest.mark.skipif(
    "hint_override" not in inspect.signature(torch._dynamo.mark_dynamic).parameters, reason="needs torch 2.9"
)


def network(model: str, device: torch.device, width: int = 16) -> Network:
    config = Config(model=model, embed_size=width, word_size=8, own={"sim_size": width})
    return build(config, SideSpec("regions", 6, 4), SideSpec("tokens", 20), seed=0).to(device).eval()


def outcome(net: Network, images: int, lengths: list[int], device: torch.device, precision: str) -> list[Tensor]:
    """Similarities, and the gradients of a sum of them by random weights."""
    numbers = torch.Generator().manual_seed(images)
    regions = torch.randn(images, 4, 6, generator=numbers).to(device)
    words = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        words[row, :length] = torch.randint(1, 20, (length,), generator=numbers)
    with autocast(device, precision):
        right: Encoded = net.encode_right(Items(words.to(device), torch.tensor(lengths)))
        S = net.similarity(net.encode_left(Items(regions)), right)
    (S * torch.randn(S.shape, generator=numbers).to(device)).sum().backward()  # type: ignore[no-untyped-call]
    found = [S.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]
    net.zero_grad(set_to_none=True)
    return [tensor.float().cpu() for tensor in found]


@known
def test_one_compilation_for_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    net, device = network("saf", torch.device("cpu")), torch.device("cpu")
    plain = [outcome(net, *size, device, "float32") for size in SIZES]
    made: list[object] = []

    @functools.cache
    def traced(function: object) -> object:
        def count(graph: torch.fx.GraphModule, _: object) -> object:
            made.append(graph)
            return graph.forward

        return torch.compile(function, fullgraph=True, backend=count)  # type: ignore[call-overload]

    monkeypatch.setattr(compiled, "available", lambda _: True)
    monkeypatch.setattr(compiled, "_compiled", traced)
    for size, expected in zip(SIZES, plain, strict=True):
        torch.testing.assert_close(outcome(net, *size, device, "float32"), expected, rtol=1e-4, atol=1e-6)
    assert len(made) == 1


def test_a_cpu_does_without() -> None:
    assert not compiled.available(torch.device("cpu"))


def test_what_does_not_fit() -> None:
    assert compiled.fits((2, 5), 1 << 30)
    assert not compiled.fits((1, 5), 1 << 30)  # torch takes 0 and 1 as constants
    assert not compiled.fits((2, 5), 1 << 31)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("model", ["sgr", "saf"])
def test_a_gpu_gives_the_same_from_one_compilation(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    assert compiled.available(CUDA)
    net = network(model, CUDA, width=64)
    found = {kind: [outcome(net, *size, CUDA, kind) for size in SIZES] for kind in ("float32", "bf16")}
    graphs = counters["stats"]["unique_graphs"]
    for size in SIZES[::-1]:
        outcome(net, *size, CUDA, "bf16")
    assert counters["stats"]["unique_graphs"] == graphs
    monkeypatch.setattr(compiled, "available", lambda _: False)
    ours, plain = torch.zeros(1), torch.zeros(1)
    for place, size in enumerate(SIZES):
        exact, rough = (outcome(net, *size, CUDA, kind) for kind in ("float32", "bf16"))
        torch.testing.assert_close(found["float32"][place], exact, rtol=1e-3, atol=1e-5)
        # In single tensors rounding errors are a matter of luck: a leaky ReLU multiplies those that turn a sign.
        for mine, other, true in zip(found["bf16"][place], rough, exact, strict=True):
            ours += ((mine - true).norm() / true.norm().clamp(min=1e-12)).square()
            plain += ((other - true).norm() / true.norm().clamp(min=1e-12)).square()
    assert ours.sqrt() <= 2 * plain.sqrt()
