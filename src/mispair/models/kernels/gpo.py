"""Generalised pooling on a GPU: ranks are counted, which for small sets is faster than to sort them.

A program takes one item and a block of channels, a few elements at a time, and compares them with all others. Nothing
is added atomically, so every run gives the same bits.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from mispair.models.kernels.common import HAS_TRITON, jit, on, works

if HAS_TRITON:
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

MOST = 128  # elements of a set: their number of comparisons grows with the square
DTYPES = torch.float32, torch.bfloat16, torch.float16

# Elements and channels at a time. With one warp a program nothing has to pass through shared memory, and with 8
# elements no more than 7 are counted in vain.
FORWARD = {"ROWS": 8, "COLUMNS": 64, "num_warps": 1}
BACKWARD = {"ROWS": 8, "COLUMNS": 64, "num_warps": 1}


@functools.cache
def available(device: torch.device) -> bool:
    """Whether the kernels run on this device. Tried out once, at the default size."""

    def trial() -> None:
        x = torch.zeros(2, 36, 1024, device=device, requires_grad=True)
        weights = torch.zeros(2, 36, device=device, requires_grad=True)
        for some, lengths in ((weights[:1], None), (weights, torch.ones(2, device=device, dtype=torch.long))):
            torch.autograd.grad(pool(x, some, lengths).sum(), [x, weights])

    return works(device, trial, "VSE")


def fits(x: Tensor) -> bool:
    """Whether these sizes are for the kernels."""
    return x.shape[1] <= MOST and x.dtype in DTYPES


def pool(x: Tensor, weights: Tensor, lengths: Tensor | None) -> Tensor:
    """Weighted sum of the sorted values of a set, channel by channel, the largest first.

    Equal values are sorted as they stand, which matters to the gradients alone.

    Args:
        x: (B, n, D); what stands behind the lengths does not matter.
        weights: (B, n) of the sorted positions, or (1, n) for all items.
        lengths: (B,) the number of real elements, on the same device; or None if all are.

    Returns:
        (B, D), in float32.
    """
    if not fits(x):
        raise ValueError(f"sets of {x.shape[1]} elements of {x.dtype} are not for these kernels")
    if weights.shape not in ((len(x), x.shape[1]), (1, x.shape[1])):
        raise ValueError(f"weights are {tuple(weights.shape)}, which is not one for each element of {tuple(x.shape)}")
    if lengths is not None:
        lengths = lengths.contiguous()
    Y: Tensor = _Pool.apply(x.contiguous(), weights.float().contiguous(), lengths)  # type: ignore[no-untyped-call]
    return Y


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, lengths: Tensor | None) -> Tensor:
        batch, n, D = x.shape
        settings, blocks = _settings(x, weights, FORWARD)
        Y = x.new_empty(batch, D, dtype=torch.float32)
        with on(x):
            _forward[(batch * blocks,)](x, weights, lengths, Y, n, **settings)
        ctx.save_for_backward(x, weights, lengths)
        return Y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, lengths = ctx.saved_tensors
        batch, n, _ = x.shape
        settings, blocks = _settings(x, weights, BACKWARD)
        for_x, for_weights, _ = ctx.needs_input_grad
        to_x = torch.empty_like(x) if for_x else None
        parts = x.new_empty(batch, blocks, n, dtype=torch.float32) if for_weights else None
        padded = max(16, triton.next_power_of_2(n))
        with on(x):
            _backward[(batch * blocks,)](
                gradients[0].contiguous(), x, weights, lengths, to_x, parts, n, N_PADDED=padded, **settings
            )
        to_weights = None
        if parts is not None:
            to_weights = parts.sum(dim=1) if len(weights) == batch else parts.sum(dim=(0, 1))[None]
        return to_x, to_weights, None


def _settings(x: Tensor, weights: Tensor, blocks: dict[str, int]) -> tuple[dict[str, int], int]:
    """Those of a kernel, and the number of its blocks of channels."""
    D = x.shape[2]
    columns = min(blocks["COLUMNS"], max(16, triton.next_power_of_2(D)))
    return {**blocks, "COLUMNS": columns, "D": D, "SHARED": len(weights) == 1}, triton.cdiv(D, columns)


@jit("n")
def _here(lengths: tl.tensor, n: tl.tensor, D: tl.constexpr, COLUMNS: tl.constexpr) -> tl.tensor:
    """The program's item, block of channels, channels (1, COLUMNS) and number of elements."""
    blocks: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    item, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    d = block * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    length = n
    if lengths is not None:
        length = tl.minimum(tl.load(lengths + item).to(tl.int32), n)
    return item.to(tl.int64), block, d, length  # large batches hold more than 2^31 elements


@jit()
def _load(x: tl.tensor, row: tl.tensor, d: tl.tensor, length: tl.tensor, D: tl.constexpr) -> tl.tensor:
    """These rows and channels of an item, 0 outside."""
    return tl.load(x + row * D + d, mask=(row < length) & (d < D), other=0.0).to(tl.float32)


@jit()
def _ranks(
    x: tl.tensor,
    tile: tl.tensor,
    row: tl.tensor,
    d: tl.tensor,
    start: tl.tensor,
    length: tl.tensor,
    D: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """Places that the tile's rows, from `start`, have among all `length` rows: how many stand before each, a channel.

    They are counted in float32, which leaves the GPU's integer units to the comparisons. Never above length - 1, NaN
    or not.
    """
    rank = tl.zeros(tile.shape, tl.float32)
    for j in range(start):
        rank += tl.where(_load(x, j, d, length, D) >= tile, 1.0, 0.0)
    for j in range(start, tl.minimum(start + ROWS, length)):
        other = _load(x, j, d, length, D)
        rank += tl.where((other > tile) | ((other == tile) & (row > j)), 1.0, 0.0)
    for j in range(start + ROWS, length):
        rank += tl.where(_load(x, j, d, length, D) > tile, 1.0, 0.0)
    return rank.to(tl.int32)


@jit("n")
def _forward(
    x: tl.tensor,
    weights: tl.tensor,
    lengths: tl.tensor,  # or None
    Y: tl.tensor,
    n: tl.tensor,
    D: tl.constexpr,
    SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    item, _, d, length = _here(lengths, n, D, COLUMNS)
    x += item * n * D
    if not SHARED:
        weights += item * n
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, length, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        tile = _load(x, row, d, length, D)
        rank = _ranks(x, tile, row, d, start, length, D, ROWS)
        total += tile * tl.load(weights + rank, mask=row < length, other=0.0)
    tl.store(Y + item * D + d, tl.sum(total, axis=0)[None, :], mask=d < D)


@jit("n")
def _backward(
    gradient: tl.tensor,
    x: tl.tensor,
    weights: tl.tensor,
    lengths: tl.tensor,  # or None
    to_x: tl.tensor,  # or None
    parts: tl.tensor,  # (B, blocks of channels, n) of the weights' gradient; or None
    n: tl.tensor,
    D: tl.constexpr,
    SHARED: tl.constexpr,
    N_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    item, block, d, length = _here(lengths, n, D, COLUMNS)
    x += item * n * D
    if not SHARED:
        weights += item * n
    if to_x is not None:
        to_x += item * n * D
    slope = tl.load(gradient + item * D + d, mask=d < D, other=0.0)
    place = tl.arange(0, N_PADDED)
    total = tl.zeros((N_PADDED,), tl.float32)
    for start in range(0, length, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        tile = _load(x, row, d, length, D)
        rank = _ranks(x, tile, row, d, start, length, D, ROWS)
        if to_x is not None:
            product = slope * tl.load(weights + rank, mask=row < length, other=0.0)
            tl.store(to_x + row * D + d, product, mask=(row < n) & (d < D))
        if parts is not None:
            product = tile * slope
            for k in range(length):
                part = tl.sum(tl.where(rank == k, product, 0.0))
                total += tl.where(place == k, part, 0.0)
    if to_x is not None:
        for start in range(tl.cdiv(length, ROWS) * ROWS, n, ROWS):
            row = start + tl.arange(0, ROWS)[:, None]
            tl.store(to_x + row * D + d, tl.zeros((ROWS, COLUMNS), tl.float32), mask=(row < n) & (d < D))
    if parts is not None:
        blocks: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
        tl.store(parts + (item * blocks + block) * n + place, total, mask=place < n)
