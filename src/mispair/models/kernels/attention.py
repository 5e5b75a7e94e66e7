"""SGR's attention of words over regions on a GPU: every caption with every image, words packed without padding.

A program takes one caption and one image with the block of rows that the words need, so that each tensor passes through
the memory once. Nothing is added atomically, so every run gives the same bits.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from mispair.compute.precision import EPSILON, full_precision
from mispair.models.kernels.common import HAS_TRITON, MOST_ROWS, jit, on, works

if HAS_TRITON:
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

SMOOTH, SLOPE = 9.0, 0.1  # sharpness of the attention; slope of the leaky ReLU below 0
MOST_REGIONS = 128  # of one image
Settings = dict[str, Any]

# One launch a row, for captions whose words fill LEAST to MOST rows. The usual captions, of up to 16 words, fit into
# few registers, so that many programs run at once; those of more than 32 words spill. The few of more than 64 words
# have a launch of their own, with all registers.
FORWARD: list[Settings] = [
    {"LEAST": 16, "MOST": 64, "num_warps": 4, "maxnreg": 64},
    {"LEAST": 128, "MOST": 128, "num_warps": 8},
]
BACKWARD: list[Settings] = [
    {"LEAST": 16, "MOST": 64, "num_warps": 4, "maxnreg": 96},
    {"LEAST": 128, "MOST": 128, "num_warps": 8},
]


@functools.cache
def available(device: torch.device) -> bool:
    """Whether the kernels run on this device. Tried out once, at SGR's default size and with the longest captions."""

    def trial() -> None:
        scores = torch.zeros(1, 1, 36, device=device, dtype=torch.bfloat16, requires_grad=True)
        products = torch.zeros(1, 36, 36, device=device, requires_grad=True)
        starts, lengths = torch.tensor([[0], [1]], device=device)
        w = weights(scores, products, starts, lengths, MOST_ROWS[scores.dtype], torch.bfloat16, padded_to=64)
        torch.autograd.grad(w.sum(), [scores, products])

    return works(device, trial, "SGR")


def fits(scores: Tensor, longest: int) -> bool:
    """Whether these sizes are for the kernels."""
    return longest <= MOST_ROWS.get(scores.dtype, 0) and 1 <= scores.shape[2] <= MOST_REGIONS


def weights(
    scores: Tensor,
    products: Tensor,
    starts: Tensor,
    lengths: Tensor,
    longest: int,
    dtype: torch.dtype,
    padded_to: int | None = None,
) -> Tensor:
    """Weights of the sums of regions that words attend to, such that each sum has unit length.

    The scores' leaky ReLU is divided by its norm over the words of the caption, then a softmax over the regions is
    divided by the length of its sum, which follows from the products. All that is in float32, but for the products of
    a half-precision result: fp16 has all their digits that bf16 shows.

    Args:
        scores: (l, T, R) products of words and regions. Caption after caption; rows behind the last word belong to no
            caption and are not read.
        products: (l, R, R) of the regions with each other, symmetric; regions have about unit length.
        starts: (r,) the first word of each caption, on the same device.
        lengths: (r,) its number of words, on the same device.
        longest: No caption has more words.
        dtype: Of the result.
        padded_to: Columns of the result, those behind R are 0: from R to the next power of two (16 at least).

    Returns:
        (l, T, R or padded_to), 0 where a row belongs to no caption.
    """
    if not fits(scores, longest):
        raise ValueError(f"{longest} words x {scores.shape[2]} regions, {scores.dtype}, are not for these kernels")
    R = scores.shape[2]
    width = R if padded_to is None else padded_to
    if not R <= width <= columns(R):
        raise ValueError(f"{R} columns cannot be padded to {padded_to}, only to {R} to {columns(R)}")
    parts = scores.contiguous(), products.float().contiguous(), starts.contiguous(), lengths.contiguous()
    w: Tensor = _Weights.apply(*parts, longest, dtype, width)  # type: ignore[no-untyped-call]
    return w


class _Weights(torch.autograd.Function):
    """Computes all anew in the backward pass, but for the gradient of the products, which is a product with the result:
    its user keeps that anyway.
    """

    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        products: Tensor,
        starts: Tensor,
        lengths: Tensor,
        longest: int,
        dtype: torch.dtype,
        width: int,
    ) -> Tensor:
        w = scores.new_empty(*scores.shape[:2], width, dtype=dtype)
        if dtype != torch.float32:
            products = products.half()
        with on(w):
            for launch in _launches(scores, w, longest, FORWARD):
                _forward[_grid(scores, starts)](
                    scores, products, starts, lengths, w, len(starts), scores.shape[1], **launch
                )
        ctx.save_for_backward(scores, products, starts, lengths, w if ctx.needs_input_grad[1] else None)
        ctx.longest = longest
        return w

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scores, products, starts, lengths, w = ctx.saved_tensors
        gradient, R = gradients[0].contiguous(), scores.shape[2]
        to_scores = scores.new_empty(scores.shape) if ctx.needs_input_grad[0] else None
        bent = None
        if ctx.needs_input_grad[1]:  # fp16 has not the range of gradients
            bent = w.new_empty(w.shape, dtype=torch.bfloat16 if w.dtype == torch.bfloat16 else torch.float32)
        with on(scores), full_precision(scores):
            for launch in _launches(scores, gradient, ctx.longest, BACKWARD):
                _backward[_grid(scores, starts)](
                    gradient, scores, products, starts, lengths, to_scores, bent, len(starts), scores.shape[1], **launch
                )
            to_products = None
            if bent is not None:
                to_products = (bent.transpose(1, 2) @ w.to(bent.dtype))[:, :R, :R].float()
        return to_scores, to_products, None, None, None, None, None


def _grid(scores: Tensor, starts: Tensor) -> tuple[int, int]:
    """Programs that run at once take neighbouring captions of one image."""
    return len(starts), len(scores)


def columns(R: int) -> int:
    """Of the blocks that hold so many regions."""
    return max(16, 1 << (R - 1).bit_length())


def _launches(scores: Tensor, w: Tensor, longest: int, launches: list[Settings]) -> list[Settings]:
    """Those for captions of up to so many words, with all sizes. R is a constant: rows of 36 are then read as vectors.

    Products in true float32 are without tensor cores and may take all registers, as may those of more regions.
    """
    R, rows = scores.shape[2], max(16, 1 << max(longest - 1, 0).bit_length())
    sizes = {
        "SMOOTH": SMOOTH,
        "SLOPE": SLOPE,
        "EPSILON": EPSILON,
        "R": R,
        "R_PADDED": columns(R),
        "WIDTH": w.shape[2],
    }
    needed = [{**launch, **sizes, "MOST": min(launch["MOST"], rows)} for launch in launches if launch["LEAST"] <= rows]
    for launch in needed:
        if R > 64 or w.dtype == torch.float32:
            launch.pop("maxnreg", None)
        if R > 64:
            launch["num_warps"] = 8
    return needed


@jit()
def _tile(
    matrix: tl.tensor, row: tl.tensor, column: tl.tensor, real: tl.tensor, STRIDE: tl.constexpr, COLUMNS: tl.constexpr
) -> tl.tensor:
    """These rows and columns, 0 where a row is not real and where there is no column."""
    mask = real[:, None] & (column < COLUMNS)[None, :]
    return tl.load(matrix + row[:, None] * STRIDE + column[None, :], mask=mask, other=0.0)


@jit()
def _put(
    matrix: tl.tensor, tile: tl.tensor, row: tl.tensor, column: tl.tensor, real: tl.tensor, COLUMNS: tl.constexpr
) -> None:
    mask = real[:, None] & (column < COLUMNS)[None, :]
    tl.store(matrix + row[:, None] * COLUMNS + column[None, :], tile.to(matrix.dtype.element_ty), mask=mask)


@jit()
def _place(starts: tl.tensor, lengths: tl.tensor, caption: tl.tensor, r: tl.tensor) -> tl.tensor:
    """First word and number of words of a caption, and the end of the last caption."""
    start, count = tl.load(starts + caption).to(tl.int32), tl.load(lengths + caption).to(tl.int32)
    end = tl.load(starts + r - 1).to(tl.int32) + tl.load(lengths + r - 1).to(tl.int32)
    return start, count, end


@jit()
def _clear(
    matrix: tl.tensor, end: tl.tensor, caption: tl.tensor, r: tl.tensor, T: tl.tensor, COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:  # fmt: skip
    """Zeros where a row belongs to no caption, from word `end` on. The programs of one image share these rows."""
    j, column = tl.arange(0, 16), tl.arange(0, PADDED)
    for first in range(end + caption * 16, T, r * 16):
        _put(matrix, tl.zeros((16, PADDED), tl.float32), first + j, column, first + j < T, COLUMNS)


@jit()
def _root(square: tl.tensor) -> tl.tensor:
    """As `safe_norm` has it, without the epsilon. Not Triton's fast root, for which tiny squares are 0."""
    return tl.sqrt_rn(tl.where(square > 0, square, 1.0))


@jit()
def _attention(
    x: tl.tensor,
    products: tl.tensor,
    SMOOTH: tl.constexpr,
    SLOPE: tl.constexpr,
    EPSILON: tl.constexpr,
    R: tl.constexpr,
    R_PADDED: tl.constexpr,
) -> tl.tensor:
    """Of one caption with scores x: y = a / n, n, p, p G and p G p^T, as they are called below."""
    k = tl.arange(0, R_PADDED)
    G = _tile(products, k, k, k < R, R, R)
    a = tl.where(x > 0, x, SLOPE * x)
    root = _root(tl.sum(a * a, axis=0))
    y = a * (1.0 / (root + EPSILON))[None, :]
    # No y is above 1, so the softmax need not subtract the largest. 1.4427 is log2(e).
    e = tl.where((k < R)[None, :], tl.exp2((SMOOTH * 1.4426950408889634) * y), 0.0)
    p = e * (1.0 / tl.sum(e, axis=1))[:, None]
    pG = tl.dot(p.to(G.dtype), G, input_precision="ieee")
    return y, root, p, pG, tl.sum(pG * p, axis=1)


@jit()
def _caption(
    scores: tl.tensor,
    products: tl.tensor,
    w: tl.tensor,
    start: tl.tensor,
    count: tl.tensor,
    SMOOTH: tl.constexpr,
    SLOPE: tl.constexpr,
    EPSILON: tl.constexpr,
    R: tl.constexpr,
    R_PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """One caption of up to ROWS words; the pointers stand on its image."""
    j, k = tl.arange(0, ROWS), tl.arange(0, R_PADDED)
    x = _tile(scores, start + j, k, j < count, R, R).to(tl.float32)
    _, _, p, _, q = _attention(x, products, SMOOTH, SLOPE, EPSILON, R, R_PADDED)
    _put(w, p * (1.0 / (_root(q) + EPSILON))[:, None], start + j, k, j < count, WIDTH)


@jit("r", "T")
def _forward(
    scores: tl.tensor,
    products: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    w: tl.tensor,  # (l, T, WIDTH)
    r: tl.tensor,
    T: tl.tensor,
    SMOOTH: tl.constexpr,
    SLOPE: tl.constexpr,
    EPSILON: tl.constexpr,
    R: tl.constexpr,
    R_PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
) -> None:
    """One caption and image."""
    caption = tl.program_id(0)
    start, count, end = _place(starts, lengths, caption, r)
    image = tl.program_id(1).to(tl.int64)  # large batches hold more than 2^31 elements
    scores += image * T * R
    products += image * R * R
    w += image * T * WIDTH
    if LEAST <= 16 and count <= 16:
        _caption(scores, products, w, start, count, SMOOTH, SLOPE, EPSILON, R, R_PADDED, WIDTH, 16)
    if LEAST <= 32 and MOST >= 32 and count > 16 and count <= 32:
        _caption(scores, products, w, start, count, SMOOTH, SLOPE, EPSILON, R, R_PADDED, WIDTH, 32)
    if LEAST <= 64 and MOST >= 64 and count > 32 and count <= 64:
        _caption(scores, products, w, start, count, SMOOTH, SLOPE, EPSILON, R, R_PADDED, WIDTH, 64)
    if MOST >= 128 and count > 64:
        _caption(scores, products, w, start, count, SMOOTH, SLOPE, EPSILON, R, R_PADDED, WIDTH, 128)
    if LEAST <= 16:
        _clear(w, end, caption, r, T, WIDTH, R_PADDED)


@jit()
def _caption_back(
    gradient: tl.tensor,
    scores: tl.tensor,
    products: tl.tensor,
    to_scores: tl.tensor,
    bent: tl.tensor,
    start: tl.tensor,
    count: tl.tensor,
    SMOOTH: tl.constexpr,
    SLOPE: tl.constexpr,
    EPSILON: tl.constexpr,
    R: tl.constexpr,
    R_PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """One caption of up to ROWS words; the pointers stand on its image.

    With the scores' leaky ReLU a, n = |a| + epsilon over the words, y = a / n, p = softmax(SMOOTH y), q = p G p^T,
    N = sqrt(q) + epsilon and w = p / N. Rows that are not real have y = 0 and gradient 0 and add nothing to sums.
    """
    j, k = tl.arange(0, ROWS), tl.arange(0, R_PADDED)
    x = _tile(scores, start + j, k, j < count, R, R).to(tl.float32)
    to_w = _tile(gradient, start + j, k, j < count, WIDTH, R).to(tl.float32)
    y, root, p, pG, q = _attention(x, products, SMOOTH, SLOPE, EPSILON, R, R_PADDED)
    N = _root(q) + EPSILON
    pull = tl.where(q > 0, tl.sum(to_w * p, axis=1) / (N * _root(q)), 0.0)
    if bent is not None:  # the gradient of G is the sum over words of -pull / (2 N) p p^T, that is -pull / 2 p w^T
        _put(bent, (-0.5 * pull)[:, None] * p, start + j, k, j < count, WIDTH)
    if to_scores is not None:
        to_p = (to_w - pull[:, None] * pG) * (1.0 / N)[:, None]
        to_y = SMOOTH * p * (to_p - tl.sum(to_p * p, axis=1)[:, None])
        along = tl.sum(to_y * y, axis=0) * ((root + EPSILON) / root)
        to_a = (to_y - y * along[None, :]) * (1.0 / (root + EPSILON))[None, :]
        _put(to_scores, tl.where(x > 0, to_a, SLOPE * to_a), start + j, k, j < count, R)


@jit("r", "T")
def _backward(
    gradient: tl.tensor,  # (l, T, WIDTH)
    scores: tl.tensor,
    products: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    to_scores: tl.tensor,  # or None
    bent: tl.tensor,  # (l, T, WIDTH), its product with w is the gradient of the products; or None
    r: tl.tensor,
    T: tl.tensor,
    SMOOTH: tl.constexpr,
    SLOPE: tl.constexpr,
    EPSILON: tl.constexpr,
    R: tl.constexpr,
    R_PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
) -> None:
    """One caption and image."""
    caption = tl.program_id(0)
    start, count, end = _place(starts, lengths, caption, r)
    image = tl.program_id(1).to(tl.int64)
    gradient += image * T * WIDTH
    scores += image * T * R
    products += image * R * R
    if to_scores is not None:
        to_scores += image * T * R
    if bent is not None:
        bent += image * T * WIDTH
    if LEAST <= 16 and count <= 16:
        _caption_back(
            gradient, scores, products, to_scores, bent, start, count,
            SMOOTH, SLOPE, EPSILON, R, R_PADDED, WIDTH, 16,
        )  # fmt: skip
    if LEAST <= 32 and MOST >= 32 and count > 16 and count <= 32:
        _caption_back(
            gradient, scores, products, to_scores, bent, start, count,
            SMOOTH, SLOPE, EPSILON, R, R_PADDED, WIDTH, 32,
        )  # fmt: skip
    if LEAST <= 64 and MOST >= 64 and count > 32 and count <= 64:
        _caption_back(
            gradient, scores, products, to_scores, bent, start, count,
            SMOOTH, SLOPE, EPSILON, R, R_PADDED, WIDTH, 64,
        )  # fmt: skip
    if MOST >= 128 and count > 64:
        _caption_back(
            gradient, scores, products, to_scores, bent, start, count,
            SMOOTH, SLOPE, EPSILON, R, R_PADDED, WIDTH, 128,
        )  # fmt: skip
    if LEAST <= 16:
        if to_scores is not None:
            _clear(to_scores, end, caption, r, T, R, R_PADDED)
        if bent is not None:
            _clear(bent, end, caption, r, T, WIDTH, R_PADDED)
