"""SGR's similarity vectors of words on a GPU: the (image, word, D) differences stay in the registers of one kernel.

The backward pass writes them, and their gradient, once and for a few images at a time: what follows are plain matrix
products, which cuBLAS does near the chip's peak, while a kernel that computes everything anew for each of four sums
would do twice the arithmetic. Nothing is added atomically, so every run gives the same bits.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from mispair.compute.precision import full_precision, working_dtype
from mispair.models.kernels.common import DTYPES, HAS_TRITON, compact, jit, on, works

if HAS_TRITON:
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

MOST_REGIONS, MOST_SIMILARITIES = 128, 256  # a block of words against all of them must fit into one program
CHUNK = 1 << 27  # elements of the (images, words, D) tensors that the backward pass writes at a time


@functools.cache
def available(device: torch.device) -> bool:
    """Whether the kernels run on this device. Tried out once at SGR's default sizes, so that nothing is compiled twice.

    GPUs with less shared memory than a Hopper fail here.
    """

    def trial() -> None:
        shapes = (1, 1, 36), (1, 36, 1024), (1, 1024), (256, 1024), (256,)
        parts = [torch.zeros(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
        torch.autograd.grad(attended_difference(*parts).sum(), parts)

    return works(device, trial, "SGR")


def fits(weights: Tensor, A: Tensor) -> bool:
    """Whether these sizes are for the kernels."""
    return weights.shape[2] <= MOST_REGIONS and A.shape[0] <= MOST_SIMILARITIES and working_dtype(weights) in DTYPES


def attended_difference(weights: Tensor, regions: Tensor, words: Tensor, A: Tensor, b: Tensor) -> Tensor:
    """((weights @ regions - words)^2) @ A^T + b, every word with every image.

    Args:
        weights: (l, T, R) of the sums of regions; or with more columns of zeros, up to the next power of two.
        regions: (l, R, D).
        words: (T, D), the same for all images.
        A: (s, D).
        b: (s,).

    Returns:
        (l, T, s), in the precision of the matrix products. Sums and squares are in float32 all the same.
    """
    Y: Tensor = _AttendedDifference.apply(weights, regions, words, A, b)  # type: ignore[no-untyped-call]
    return Y


class _AttendedDifference(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        dtype = working_dtype(inputs[0])
        regions, words, A = (compact(part, dtype) for part in inputs[1:4])
        (images, T, columns), R, (S, D) = inputs[0].shape, regions.shape[1], A.shape
        settings = _settings(R, D, S, dtype, back=False)
        weights = _padded(inputs[0], settings["R_PADDED"], dtype)
        Y = words.new_empty(images, T, S)
        with on(Y):
            grid = (triton.cdiv(T, settings["ROWS"]), images)
            _forward[grid](weights, regions, words, A, compact(inputs[4], torch.float32), Y, T, R, **settings)
        ctx.save_for_backward(weights, regions, words, A)
        ctx.columns, ctx.dtypes = columns, [part.dtype for part in inputs]
        return Y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weights, regions, words, A = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        *wide, to_b = ctx.needs_input_grad
        with on(gradient), full_precision(gradient):
            found: list[Tensor | None] = [None] * 4
            if any(wide):
                to_weights = None
                if wide[0]:
                    to_weights = weights.new_empty(*weights.shape[:2], ctx.columns, dtype=ctx.dtypes[0])
                found = _gradients(gradient, weights, regions, words, A, to_weights, wide)
            found.append(gradient.sum(dim=(0, 1), dtype=torch.float32) if to_b else None)
        return tuple(None if part is None else part.to(dtype) for part, dtype in zip(found, ctx.dtypes, strict=True))


def _gradients(
    gradient: Tensor,
    weights: Tensor,
    regions: Tensor,
    words: Tensor,
    A: Tensor,
    to_weights: Tensor | None,
    needed: list[bool],
) -> list[Tensor | None]:
    """Of weights, regions, words and A, as far as `needed`, from that of the result. The weights are padded.

    Those of the weights are written to `to_weights`, which may have fewer columns.
    """
    (images, T, width), R, (S, D) = weights.shape, regions.shape[1], A.shape
    settings = _settings(R, D, S, weights.dtype, back=True)
    columns = R if to_weights is None else to_weights.shape[2]
    _, for_regions, for_words, for_A = needed
    to_regions = words.new_empty(images, width, D) if for_regions else None
    to_words = torch.zeros_like(words, dtype=torch.float32) if for_words else None
    to_A = torch.zeros_like(A, dtype=torch.float32) if for_A else None
    size = _chunk(images, T * D)
    slopes = words.new_empty(size, T, D) if for_regions or for_words else None
    squares = words.new_empty(size, T, D) if for_A else None
    for start in range(0, images, size):
        here = slice(start, min(start + size, images))
        n = here.stop - start
        _backward[triton.cdiv(T, settings["ROWS"]), n](
            gradient[here], weights[here], regions[here], words, A, slopes, squares,
            None if to_weights is None else to_weights[here], T, R, columns, **settings,
        )  # fmt: skip
        if slopes is not None and to_regions is not None:
            torch.bmm(weights[here].transpose(1, 2), slopes[:n], out=to_regions[here])
        if slopes is not None and to_words is not None:
            to_words -= slopes[:n].sum(dim=0, dtype=torch.float32)
        if squares is not None and to_A is not None:
            # A product for each image rather than one for all: (s, D) alone has too few tiles to fill the GPU.
            to_A += torch.bmm(gradient[here].transpose(1, 2), squares[:n]).sum(dim=0, dtype=torch.float32)
    return [to_weights, None if to_regions is None else to_regions[:, :R], to_words, to_A]


def _padded(weights: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """With so many columns, the last of them 0: rows of 36 are aligned neither for the kernels nor for cuBLAS."""
    if weights.shape[2] == width:
        return compact(weights, dtype)
    padded = weights.new_zeros(*weights.shape[:2], width, dtype=dtype)
    padded[..., : weights.shape[2]] = weights
    return padded


def _chunk(images: int, elements: int) -> int:
    """How many images to take at a time if one has so many elements: chunks of like size."""
    chunks = math.ceil(images * elements / CHUNK)
    return max(1, math.ceil(images / max(1, chunks)))


def _settings(R: int, D: int, S: int, dtype: torch.dtype, back: bool) -> dict[str, int]:
    """Blocks of the kernels, chosen for shared memory and registers of a Hopper GPU."""
    width = max(16, triton.next_power_of_2(R))
    sizes = {"D": D, "S": S, "R_PADDED": width, "S_PADDED": max(16, triton.next_power_of_2(S))}
    if dtype == torch.float32:  # without tensor cores, so that it is float32
        rows, columns, stages = 64, 16, 2
    elif width <= 64:
        rows, columns, stages = 128, 32 if back else 64, 3
    else:
        rows, columns, stages = 128, 32, 2
    columns = min(columns, max(16, triton.next_power_of_2(D)))
    return {**sizes, "ROWS": rows, "COLUMNS": columns, "num_warps": 8, "num_stages": stages}


@jit()
def _tile(matrix: tl.tensor, row: tl.tensor, column: tl.tensor, rows: tl.tensor, columns: tl.tensor) -> tl.tensor:
    """Part of a (rows, columns) matrix, 0 outside."""
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    return tl.load(matrix + row[:, None] * columns + column[None, :], mask=mask, other=0.0)


@jit()
def _put(
    matrix: tl.tensor, tile: tl.tensor, row: tl.tensor, column: tl.tensor, rows: tl.tensor, columns: tl.tensor
) -> None:
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(matrix + row[:, None] * columns + column[None, :], tile, mask=mask)


@jit("T", "R")
def _forward(
    weights: tl.tensor,  # (images, T, R_PADDED)
    regions: tl.tensor,
    words: tl.tensor,
    A: tl.tensor,
    b: tl.tensor,
    Y: tl.tensor,
    T: tl.tensor,
    R: tl.tensor,
    D: tl.constexpr,
    S: tl.constexpr,
    R_PADDED: tl.constexpr,
    S_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One image and a block of words. Programs that run at once share the words, A and few images: all in the L2."""
    image = tl.program_id(1).to(tl.int64)  # large batches hold more than 2^31 elements
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    r, s = tl.arange(0, R_PADDED), tl.arange(0, S_PADDED)
    P = _tile(weights + image * T * R_PADDED, t, r, T, R_PADDED)
    regions += image * R * D
    total = tl.zeros((ROWS, S_PADDED), tl.float32)
    for start in range(0, D, COLUMNS):
        d = start + tl.arange(0, COLUMNS)
        context = tl.dot(P, _tile(regions, r, d, R, D), input_precision="ieee")
        difference = context - _tile(words, t, d, T, D).to(tl.float32)
        A_part = _tile(A, s, d, S, D)
        total = tl.dot((difference * difference).to(P.dtype), tl.trans(A_part), total, input_precision="ieee")
    total += tl.load(b + s, mask=s < S, other=0.0)[None, :]
    _put(Y + image * T * S, total.to(P.dtype), t, s, T, S)


@jit("T", "R", "W")
def _backward(
    gradient: tl.tensor,
    weights: tl.tensor,  # (images, T, R_PADDED)
    regions: tl.tensor,
    words: tl.tensor,
    A: tl.tensor,
    slopes: tl.tensor,  # (images, T, D) gradient of the differences; or None
    squares: tl.tensor,  # (images, T, D) of the differences; or None
    to_weights: tl.tensor,  # (images, T, W); or None
    T: tl.tensor,
    R: tl.tensor,
    W: tl.tensor,
    D: tl.constexpr,
    S: tl.constexpr,
    R_PADDED: tl.constexpr,
    S_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One image and a block of words, as forward."""
    image = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    r, s = tl.arange(0, R_PADDED), tl.arange(0, S_PADDED)
    P = _tile(weights + image * T * R_PADDED, t, r, T, R_PADDED)
    G = _tile(gradient + image * T * S, t, s, T, S)
    regions += image * R * D
    total = tl.zeros((ROWS, R_PADDED), tl.float32)
    for start in range(0, D, COLUMNS):
        d = start + tl.arange(0, COLUMNS)
        regions_part = _tile(regions, r, d, R, D)
        context = tl.dot(P, regions_part, input_precision="ieee")
        difference = context - _tile(words, t, d, T, D).to(tl.float32)
        if squares is not None:
            _put(squares + image * T * D, (difference * difference).to(P.dtype), t, d, T, D)
        if slopes is not None or to_weights is not None:
            slope = (2 * difference * tl.dot(G, _tile(A, s, d, S, D), input_precision="ieee")).to(P.dtype)
            if slopes is not None:
                _put(slopes + image * T * D, slope, t, d, T, D)
            if to_weights is not None:
                total = tl.dot(slope, tl.trans(regions_part), total, input_precision="ieee")
    if to_weights is not None:
        _put(to_weights + image * T * W, total, t, r, T, W)
