"""Attention of the whole captions alone, as SGR's last step needs it: one query a graph, too few for tensor cores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mispair.models.kernels.common import HAS_TRITON, compact, jit, on
from mispair.models.kernels.graph_parts import clear, counts, grid, place, put, room, sized, tile

if HAS_TRITON:
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

FIRST = {"ROWS": 16, "num_warps": 4}  # nodes that a program takes at a time
FIRST_BACK = {"ROWS": 16, "num_warps": 4, "maxnreg": 80}


def attend_first(
    queries: Tensor,
    nodes: Tensor,
    starts: Tensor,
    lengths: Tensor,
    longest: int,  # noqa: ARG001 (both are called alike)
) -> Tensor:
    """As `attend`, but only the whole captions ask: queries and result are (l, r, s)."""
    parts = compact(queries, nodes.dtype), nodes.contiguous(), starts.contiguous(), lengths.contiguous()
    Y: Tensor = _AttendFirst.apply(*parts)  # type: ignore[no-untyped-call]
    return Y


class _AttendFirst(torch.autograd.Function):
    """Saves the result in float32: its product with its gradient is what the backward pass subtracts from the gradients
    of all weights. Where nodes are alike, as they are after a ReLU, little remains, and that must not be rounding.
    """

    @staticmethod
    def forward(ctx: Any, queries: Tensor, nodes: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
        Y = torch.empty_like(queries)
        logsumexp, exact = None, None
        if any(ctx.needs_input_grad):
            logsumexp = Y.new_empty(Y.shape[:2], dtype=torch.float32)
            exact = None if Y.dtype == torch.float32 else torch.empty_like(Y, dtype=torch.float32)
        with on(Y):
            _first[grid(nodes, starts)](
                queries, nodes, starts, lengths, Y, exact, logsumexp, *counts(nodes, starts), **sized(nodes, FIRST)
            )
        ctx.save_for_backward(queries, nodes, starts, lengths, Y if exact is None else exact, logsumexp)
        return Y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        queries, nodes, starts, lengths, exact, logsumexp = ctx.saved_tensors
        to_queries, to_nodes = room(ctx, queries, nodes)
        with on(nodes):
            _first_back[grid(nodes, starts)](
                gradients[0].contiguous(), queries, nodes, starts, lengths, exact, logsumexp, to_queries, to_nodes,
                *counts(nodes, starts), **sized(nodes, FIRST_BACK),
            )  # fmt: skip
        return to_queries, to_nodes, None, None


@jit()
def _some(
    first: tl.tensor, start: tl.tensor, count: tl.tensor, caption: tl.tensor, r: tl.tensor, ROWS: tl.constexpr
) -> tl.tensor:
    """Rows of ROWS nodes from the `first` on, and which are real; the others are the caption's node 0 again."""
    j = first + tl.arange(0, ROWS)
    real = j < count
    return tl.where(real & (j > 0), r + start + j - 1, caption), real


@jit("r", "T")
def _first(
    queries: tl.tensor,
    nodes: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    Y: tl.tensor,
    exact: tl.tensor,  # Y in float32; or None
    logsumexp: tl.tensor,  # or None
    r: tl.tensor,
    T: tl.tensor,
    S: tl.constexpr,
    S_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """One caption and image. Each of the ROWS has a maximum and sums of its own, which meet only at the end."""
    caption = tl.program_id(0)
    start, count, _ = place(starts, lengths, caption, r)
    image = tl.program_id(1).to(tl.int64)
    nodes += image * (r + T) * S
    own = image * r + caption
    d = tl.arange(0, S_PADDED)
    q = tl.load(queries + own * S + d, mask=d < S, other=0.0).to(tl.float32)
    most, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    H = tl.zeros((ROWS, S_PADDED), tl.float32)
    for first in range(0, count, ROWS):
        row, real = _some(first, start, count, caption, r, ROWS)
        X = tile(nodes, row, d, row >= 0, S).to(tl.float32)
        scores = tl.sum(X * q[None, :], axis=1)
        before, most = most, tl.maximum(most, scores)
        weights, shrink = tl.where(real, tl.exp(scores - most), 0.0), tl.exp(before - most)
        total = total * shrink + weights
        H = H * shrink[:, None] + weights[:, None] * X
    highest = tl.max(most, axis=0)
    shrink = tl.exp(most - highest)
    whole = tl.sum(total * shrink, axis=0)
    h = tl.sum(H * shrink[:, None], axis=0) / whole
    tl.store(Y + own * S + d, h.to(Y.dtype.element_ty), mask=d < S)
    if exact is not None:
        tl.store(exact + own * S + d, h, mask=d < S)
    if logsumexp is not None:
        tl.store(logsumexp + own, highest + tl.log(whole))


@jit("r", "T")
def _first_back(
    gradient: tl.tensor,
    queries: tl.tensor,
    nodes: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    exact: tl.tensor,  # the result in float32
    logsumexp: tl.tensor,
    to_queries: tl.tensor,  # or None
    to_nodes: tl.tensor,  # or None
    r: tl.tensor,
    T: tl.tensor,
    S: tl.constexpr,
    S_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """One caption and image."""
    caption = tl.program_id(0)
    start, count, end = place(starts, lengths, caption, r)
    image = tl.program_id(1).to(tl.int64)
    nodes += image * (r + T) * S
    own = image * r + caption
    d = tl.arange(0, S_PADDED)
    g = tl.load(gradient + own * S + d, mask=d < S, other=0.0).to(tl.float32)
    q = tl.load(queries + own * S + d, mask=d < S, other=0.0).to(tl.float32)
    mean = tl.sum(g * tl.load(exact + own * S + d, mask=d < S, other=0.0), axis=0)
    level = tl.load(logsumexp + own)
    to_q = tl.zeros((ROWS, S_PADDED), tl.float32)
    for first in range(0, count, ROWS):
        row, real = _some(first, start, count, caption, r, ROWS)
        X = tile(nodes, row, d, row >= 0, S).to(tl.float32)
        P = tl.where(real, tl.exp(tl.sum(X * q[None, :], axis=1) - level), 0.0)
        to_scores = P * (tl.sum(X * g[None, :], axis=1) - mean)
        to_q += to_scores[:, None] * X
        if to_nodes is not None:
            to_X = to_scores[:, None] * q[None, :] + P[:, None] * g[None, :]
            put(to_nodes + image * (r + T) * S, to_X, row, d, real, S)
    if to_queries is not None:
        to_q_sum = tl.sum(to_q, axis=0).to(to_queries.dtype.element_ty)
        tl.store(to_queries + own * S + d, to_q_sum, mask=d < S)
    if to_nodes is not None:
        clear(to_nodes + image * (r + T) * S, end, caption, r, T, S, S_PADDED)
