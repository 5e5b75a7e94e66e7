"""Plain torch code, fused by `torch.compile` on a GPU: compiled once for all batch sizes, the same in every run.

A process that resumes a run meets other batches first. So nothing that is compiled depends on the first batch: changing
sizes are marked before the first call, each with a fixed typical size, and no kernel is chosen by timing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mispair.models.kernels.common import works

OPTIONS: dict[str, Any] = {"deterministic": True}
MOST_ELEMENTS = 1 << 31  # of a tensor: more take 64-bit indices, and so other code
VARIANTS = 64  # of a function: by precision, by which inputs get gradients, by fixed sizes. torch's own limit is 8.
Changing = tuple[Tensor | None, dict[int, int]]  # a tensor's changing dimensions, each with its typical size


@functools.cache
def available(device: torch.device) -> bool:
    """Whether torch compiles for this device. Tried out once."""

    def trial() -> None:
        x = torch.ones(3, 4, device=device)
        run(_trial, [(x, {0: 128})], x)

    return works(device, trial, "SGR")


def _trial(x: Tensor) -> Tensor:
    return x.sin().sum(dim=1)


def fits(sizes: Sequence[int], elements: int) -> bool:
    """Whether the code is for these sizes of the changing dimensions: torch takes 0 and 1 as constants."""
    return min(sizes) >= 2 and elements < MOST_ELEMENTS


def run(function: Callable[..., Tensor], changing: Sequence[Changing], *arguments: object) -> Tensor:
    """Return function(*arguments), compiled. The function must use nothing but its arguments.

    In `changing`, sizes that are always equal need the same typical size, others a different one.
    """
    for tensor, sizes in changing:
        if tensor is not None:
            for dim, typical in sizes.items():
                torch._dynamo.mark_dynamic(tensor, dim, hint_override=typical)
    with torch._dynamo.config.patch(recompile_limit=VARIANTS):
        return _compiled(function)(*arguments)


@functools.cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, fullgraph=True, options=OPTIONS)
