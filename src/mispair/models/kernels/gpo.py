"""Generalised pooling on a GPU: ranks are counted, faster than sorting for small sets.

A program takes one item and a block of channels, a few elements at a time, and compares them with all others. Nothing
is added atomically, so every run gives the same bits.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from mispair.models.kernels.common import DTYPES, HAS_TRITON, jit, on, works

if HAS_TRITON:
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

MOST = 128  # elements of a set: their number of comparisons grows with the square

# Elements and channels at a time. All elements of a channel are with one thread, so that nothing has to pass through
# shared memory, and with 4 at a time at most 3 are counted in vain.
FORWARD = {"ROWS": 4, "COLUMNS": 64, "num_warps": 1}
BACKWARD = {"ROWS": 4, "COLUMNS": 128, "num_warps": 1}


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

    Pool x (B, n, D) with `lengths` (B,) real elements to (B, D), in float32. The sorted positions have weights (B, n),
    or (1, n) for all items. Equal values keep their order, which matters to the gradients alone.
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
        gradient = gradients[0].contiguous()
        with on(x):
            _backward[(batch * blocks,)](gradient, x, weights, lengths, to_x, parts, n, **settings)
        to_weights = None
        if parts is not None:
            to_weights = parts.sum(dim=1) if len(weights) == batch else parts.sum(dim=(0, 1))[None]
        return to_x, to_weights, None


def _settings(x: Tensor, weights: Tensor, block: dict[str, int]) -> tuple[dict[str, int], int]:
    """Those of a kernel, and the number of its blocks of channels."""
    _, n, D = x.shape
    columns = min(block["COLUMNS"], max(16, triton.next_power_of_2(D)))
    sizes = {"D": D, "SHARED": len(weights) == 1, "N_PADDED": max(16, block["ROWS"], triton.next_power_of_2(n))}
    return {**block, **sizes, "COLUMNS": columns}, triton.cdiv(D, columns)


@jit("n")
def _here(lengths: tl.tensor, n: tl.tensor, D: tl.constexpr, COLUMNS: tl.constexpr) -> tl.tensor:
    """The program's item, its number of elements, block of channels, channels (1, COLUMNS) and their mask."""
    blocks: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    item, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    d = block * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    exists = d < D if D % COLUMNS > 0 else d >= 0
    length = n
    if lengths is not None:
        length = tl.minimum(tl.load(lengths + item).to(tl.int32), n)
    return item.to(tl.int64), length, block, d, exists  # large batches hold more than 2^31 elements


@jit()
def _row(x: tl.tensor, r: tl.constexpr, mask: tl.tensor, D: tl.constexpr) -> tl.tensor:
    """The r-th row from here, below everything outside."""
    return tl.load(x + r * D, mask=mask, other=-float("inf")).to(tl.float32)


@jit()
def _ranks(
    x: tl.tensor,  # (1, COLUMNS) places of the channels in the first row
    tile: tl.tensor,  # (ROWS, COLUMNS)
    start: tl.tensor, length: tl.tensor, exists: tl.tensor, D: tl.constexpr, ROWS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Places of the tile's rows, from `start`, among all: the number of others before them, by channel.

    They are counted in float32, which leaves the integer units to the comparisons. With NaN, too, the place of a real
    row is below `length` and the place of any other at most its own: N_PADDED has a weight for each.
    """
    rank = tl.zeros(tile.shape, tl.float32)
    for first in range(0, start, ROWS):
        for r in tl.static_range(ROWS):
            rank += tl.where(_row(x + first * D, r, exists, D) >= tile, 1.0, 0.0)
    for r in tl.static_range(ROWS):
        other = _row(x + start * D, r, exists & (start + r < length), D)
        later = tl.arange(0, ROWS)[:, None] > r
        rank += tl.where((other > tile) | ((other == tile) & later), 1.0, 0.0)
    for first in range(start + ROWS, length, ROWS):
        for r in tl.static_range(ROWS):
            rank += tl.where(_row(x + first * D, r, exists & (first + r < length), D) > tile, 1.0, 0.0)
    return rank


@jit()
def _at(weights: tl.tensor, rank: tl.tensor) -> tl.tensor:
    """(N_PADDED,) weights at these places: from registers, where an indexed load would first change the layout."""
    places: tl.constexpr = rank.shape[0] * rank.shape[1]
    return tl.reshape(tl.gather(weights, tl.reshape(rank.to(tl.int32), (places,)), 0), rank.shape)


@jit("n")
def _forward(
    x: tl.tensor, weights: tl.tensor,
    lengths: tl.tensor,  # or None
    Y: tl.tensor, n: tl.tensor, D: tl.constexpr, SHARED: tl.constexpr, N_PADDED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    item, length, _, d, exists = _here(lengths, n, D, COLUMNS)
    x += item * n * D + d
    place = tl.arange(0, N_PADDED)
    weight = tl.load(weights + (0 if SHARED else item * n) + place, mask=place < length, other=0.0)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, length, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        real = (row < length) & exists
        tile = _row(x + row * D, 0, real, D)
        rank = _ranks(x, tile, start, length, exists, D, ROWS)
        total += tl.where(real, tile, 0.0) * _at(weight, rank)
    tl.store(Y + item * D + d, tl.sum(total, axis=0)[None, :], mask=exists)


@jit("n")
def _backward(
    gradient: tl.tensor, x: tl.tensor, weights: tl.tensor,
    lengths: tl.tensor,  # or None
    to_x: tl.tensor,  # or None
    parts: tl.tensor,  # (B, blocks of channels, n) of the weights' gradient; or None
    n: tl.tensor, D: tl.constexpr, SHARED: tl.constexpr, N_PADDED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    item, length, block, d, exists = _here(lengths, n, D, COLUMNS)
    blocks: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    x += item * n * D + d
    place = tl.arange(0, N_PADDED)
    weight = tl.load(weights + (0 if SHARED else item * n) + place, mask=place < length, other=0.0)
    slope = tl.load(gradient + item * D + d, mask=exists, other=0.0)
    total = tl.zeros((N_PADDED,), tl.float32)
    for start in range(0, length, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        real = (row < length) & exists
        tile = _row(x + row * D, 0, real, D)
        rank = _ranks(x, tile, start, length, exists, D, ROWS)
        if to_x is not None:
            product = tl.where(real, slope * _at(weight, rank), 0.0)
            tl.store(to_x + item * n * D + row * D + d, product, mask=(row < n) & exists)
        if parts is not None:
            product = slope * tl.where(real, tile, 0.0)
            for first in range(0, length, 4):
                for k in tl.static_range(4):  # several at once, for each sum over the warp waits long for its parts
                    part = tl.sum(tl.where(rank == first + k, 1.0, 0.0) * product, axis=0)
                    total += tl.where(place == first + k, tl.sum(part, axis=0), 0.0)
    if to_x is not None:
        for start in range(tl.cdiv(length, ROWS) * ROWS, n, ROWS):
            row = start + tl.arange(0, ROWS)[:, None]
            nothing = tl.zeros((ROWS, COLUMNS), tl.float32)
            tl.store(to_x + item * n * D + row * D + d, nothing, mask=(row < n) & exists)
    if parts is not None:
        tl.store(parts + (item * blocks + block) * n + place, total, mask=place < n)
