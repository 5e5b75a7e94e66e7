"""Vectors of unit length on a GPU: forward and backward pass each read and write a tensor once, in one kernel."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from mispair.compute.precision import EPSILON
from mispair.models.kernels.common import DTYPES, HAS_TRITON, jit, on, works

if HAS_TRITON:
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]


TILE = 4096  # elements a program, which takes whole vectors: none may have more


@functools.cache
def available(device: torch.device) -> bool:
    """Whether the kernels run on this device. Tried out once, at the default size of the embeddings."""

    def trial() -> None:
        x = torch.zeros(1, 1024, device=device, dtype=torch.bfloat16, requires_grad=True)
        torch.autograd.grad(unit(x, torch.bfloat16).sum(), x)

    return works(device, trial, "vectors of unit length")


def fits(x: Tensor) -> bool:
    """Whether this size is for the kernels."""
    return 0 < x.shape[-1] <= TILE and x.dtype in DTYPES


def unit(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x / (|x| + 1e-8) along the last dimension, as `mispair.models.base.l2norm`, computed in float32.

    Squares of float32 leave its range, so rows outside 2^-50 to 2^50 are scaled before: the result is right for all.

    Args:
        x: (..., D).
        dtype: Of the result, one of `DTYPES`.

    Returns:
        (..., D). A zero vector stays zero, and its gradient passes unchanged.
    """
    y: Tensor = _Unit.apply(x, dtype)  # type: ignore[no-untyped-call]
    return y


class _Unit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x, dtype=dtype)
        lengths = x.new_empty(x.shape[:-1], dtype=torch.float32) if ctx.needs_input_grad[0] else None
        grid, sizes = _launch(x)
        with on(x):
            _forward[grid](x, y, lengths, **sizes)
        if lengths is not None:
            ctx.save_for_backward(x, lengths)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        x, lengths = ctx.saved_tensors
        to_x = torch.empty_like(x)
        grid, sizes = _launch(x)
        with on(x):
            _backward[grid](gradients[0].contiguous(), x, lengths, to_x, **sizes)
        return to_x, None


def _launch(x: Tensor) -> tuple[tuple[int], dict[str, float]]:
    """How many programs, and the sizes for each."""
    *leading, D = x.shape
    rows, width = math.prod(leading), triton.next_power_of_2(D)
    sizes = {"rows": rows, "D": D, "WIDTH": width, "ROWS": TILE // width, "EPSILON": EPSILON, "num_warps": 4}
    return (triton.cdiv(rows, TILE // width),), sizes


@jit()
def _scale(size: tl.tensor) -> tl.tensor:
    """A power of two that brings vectors of this size near 1 where they are so far from it that squares are lost."""
    return tl.where(size > 2.0**50, 2.0**-80, tl.where(size < 2.0**-50, 2.0**100, 1.0))


@jit("rows")
def _forward(
    x: tl.tensor,
    y: tl.tensor,
    lengths: tl.tensor,  # or None
    rows: tl.tensor,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    EPSILON: tl.constexpr,
) -> None:
    """ROWS vectors."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # large batches hold more than 2^31 elements
    d = tl.arange(0, WIDTH)
    place, mask = row[:, None] * D + d[None, :], (row < rows)[:, None] & (d < D)[None, :]
    X = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    scale = _scale(tl.max(tl.abs(X), axis=1))
    X *= scale[:, None]
    s = tl.sqrt(tl.sum(X * X, axis=1))
    inverse = 1 / (s + EPSILON * scale)
    tl.store(y + place, (X * inverse[:, None]).to(y.dtype.element_ty), mask=mask)
    if lengths is not None:
        tl.store(lengths + row, s / scale, mask=row < rows)


@jit("rows")
def _backward(
    gradient: tl.tensor,
    x: tl.tensor,
    lengths: tl.tensor,
    to_x: tl.tensor,
    rows: tl.tensor,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    EPSILON: tl.constexpr,
) -> None:
    """ROWS vectors: with n = |x| + 1e-8 and the direction u = x / |x|, the gradient is (g - u (g.u) |x| / n) / n."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    place, mask = row[:, None] * D + d[None, :], (row < rows)[:, None] & (d < D)[None, :]
    G = tl.load(gradient + place, mask=mask, other=0.0).to(tl.float32)
    X = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(lengths + row, mask=row < rows, other=0.0)
    scale = _scale(s)
    n = tl.where(s > 0, s, 1.0) + EPSILON
    U = X * scale[:, None] * (1 / tl.where(s > 0, s * scale, 1.0))[:, None]
    along = tl.sum(G * U, axis=1) * (s / n)
    tl.store(to_x + place, ((G - U * along[:, None]) * (1 / n)[:, None]).to(to_x.dtype.element_ty), mask=mask)
