"""Attention among the nodes of SGR's graphs on a GPU: every caption with every image, nodes packed without padding.

A program takes one graph with the block of rows that it needs, so that each tensor passes through the memory once.
Nothing is added atomically, so every run gives the same bits.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from mispair.models.kernels.common import HAS_TRITON, MOST_ROWS, compact, jit, on, works
from mispair.models.kernels.graph_first import attend_first as attend_first
from mispair.models.kernels.graph_parts import Settings, clear, counts, grid, place, put, room, sized, tile

if HAS_TRITON:
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

MOST_SIMILARITIES = 256

# One launch a row, for graphs whose nodes fill LEAST to MOST rows. Graphs of 32 rows are taken MIDDLE columns at a time
# and larger ones LARGE, so that up to 64 rows need hardly more registers and shared memory than 16, which are the most.
# The few with 128 rows have a launch of their own, for they do need more.
FORWARD: list[Settings] = [
    {"LEAST": 16, "MOST": 64, "MIDDLE": 128, "LARGE": 32, "num_warps": 4, "num_stages": 2, "maxnreg": 72},
    {"LEAST": 128, "MOST": 128, "MIDDLE": 128, "LARGE": 32, "num_warps": 8, "num_stages": 2},
]
BACKWARD: list[Settings] = [
    {"LEAST": 16, "MOST": 64, "MIDDLE": 128, "LARGE": 32, "num_warps": 4, "num_stages": 2, "maxnreg": 128},
    {"LEAST": 128, "MOST": 128, "MIDDLE": 128, "LARGE": 32, "num_warps": 8, "num_stages": 2},
]


@functools.cache
def available(device: torch.device) -> bool:
    """Whether the kernels run on this device. Tried out once, at SGR's default size and with the largest graphs."""

    def trial() -> None:
        nodes = torch.zeros(1, 2, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
        starts, lengths = torch.tensor([[0], [1]], device=device)
        most = MOST_ROWS[nodes.dtype]
        Y = attend(nodes, nodes, starts, lengths, most)
        Y = attend_first(Y[:, :1], Y, starts, lengths, most)
        torch.autograd.grad(Y.sum(), nodes)

    return works(device, trial, "SGR")


def fits(nodes: Tensor, longest: int) -> bool:
    """Whether these sizes are for the kernels."""
    return longest <= MOST_ROWS.get(nodes.dtype, 0) and nodes.shape[-1] <= MOST_SIMILARITIES


def attend(queries: Tensor, nodes: Tensor, starts: Tensor, lengths: Tensor, longest: int) -> Tensor:
    """softmax(Z X^T) X of every graph, with Z the queries and X the nodes of the graph.

    Args:
        queries: (l, r + T, s).
        nodes: (l, r + T, s). Those of the whole captions, then the words, caption after caption. There may be more
            rows of words than words: they belong to no graph.
        starts: (r,) the first word of each caption, on the same device.
        lengths: (r,) its number of words, on the same device.
        longest: No graph has more nodes, that is words and the whole.

    Returns:
        (l, r + T, s), in the precision of the nodes and 0 where a row belongs to no graph. Softmax and sums are in
        float32 all the same.
    """
    if not fits(nodes, longest):
        raise ValueError(f"graphs of {longest} nodes of {nodes.shape[-1]} x {nodes.dtype} are not for these kernels")
    parts = compact(queries, nodes.dtype), nodes.contiguous(), starts.contiguous(), lengths.contiguous()
    Y: Tensor = _Attend.apply(*parts, longest)  # type: ignore[no-untyped-call]
    return Y


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, nodes: Tensor, starts: Tensor, lengths: Tensor, longest: int) -> Tensor:
        Y = torch.empty_like(nodes)
        with on(Y):
            for launch in _launches(nodes, longest, FORWARD):
                _forward[grid(nodes, starts)](queries, nodes, starts, lengths, Y, *counts(nodes, starts), **launch)
        ctx.save_for_backward(queries, nodes, starts, lengths)
        ctx.longest = longest
        return Y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        queries, nodes, starts, lengths = ctx.saved_tensors
        to_queries, to_nodes = room(ctx, queries, nodes)
        gradient = gradients[0].contiguous()
        with on(nodes):
            for launch in _launches(nodes, ctx.longest, BACKWARD):
                _backward[grid(nodes, starts)](
                    gradient, queries, nodes, starts, lengths, to_queries, to_nodes, *counts(nodes, starts), **launch
                )
        return to_queries, to_nodes, None, None, None


def _launches(nodes: Tensor, longest: int, launches: list[Settings]) -> list[Settings]:
    """Those for graphs of up to so many nodes."""
    rows = max(16, triton.next_power_of_2(longest))
    needed = [{**launch, "MOST": min(launch["MOST"], rows)} for launch in launches if launch["LEAST"] <= rows]
    return [sized(nodes, launch) for launch in needed]


@jit()
def _softmax(scores: tl.tensor, real: tl.tensor) -> tl.tensor:
    """Over the real nodes, of which each graph has one at least."""
    scores = tl.where(real[None, :], scores, float("-inf"))
    weights = tl.exp(scores - tl.max(scores, axis=1)[:, None])
    return weights / tl.sum(weights, axis=1)[:, None]


@jit()
def _graph(
    queries: tl.tensor,
    nodes: tl.tensor,
    Y: tl.tensor,
    start: tl.tensor,
    count: tl.tensor,
    caption: tl.tensor,
    r: tl.tensor,
    S: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """One graph of up to ROWS nodes; the pointers stand on its image."""
    j = tl.arange(0, ROWS)
    row, real = tl.where(j == 0, caption, r + start + j - 1), j < count
    scores = tl.zeros((ROWS, ROWS), tl.float32)
    for first in range(0, S, COLUMNS):
        d = first + tl.arange(0, COLUMNS)
        Z, X = tile(queries, row, d, real, S), tile(nodes, row, d, real, S)
        scores = tl.dot(Z, tl.trans(X), scores, input_precision="ieee")
    P = _softmax(scores, real).to(nodes.dtype.element_ty)
    for first in range(0, S, COLUMNS):
        d = first + tl.arange(0, COLUMNS)
        put(Y, tl.dot(P, tile(nodes, row, d, real, S), input_precision="ieee"), row, d, real, S)


@jit("r", "T")
def _forward(
    queries: tl.tensor,
    nodes: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    Y: tl.tensor,
    r: tl.tensor,
    T: tl.tensor,
    S: tl.constexpr,
    S_PADDED: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    MIDDLE: tl.constexpr,
    LARGE: tl.constexpr,
) -> None:
    """One caption and image."""
    caption = tl.program_id(0)
    start, count, end = place(starts, lengths, caption, r)
    image = tl.program_id(1).to(tl.int64) * (r + T) * S  # large batches hold more than 2^31 elements
    queries += image
    nodes += image
    Y += image
    if LEAST <= 16 and count <= 16:
        _graph(queries, nodes, Y, start, count, caption, r, S, S_PADDED, 16)
    if LEAST <= 32 and MOST >= 32 and count > 16 and count <= 32:
        _graph(queries, nodes, Y, start, count, caption, r, S, min(S_PADDED, MIDDLE), 32)
    if LEAST <= 64 and MOST >= 64 and count > 32 and count <= 64:
        _graph(queries, nodes, Y, start, count, caption, r, S, min(S_PADDED, LARGE), 64)
    if MOST >= 128 and count > 64:
        _graph(queries, nodes, Y, start, count, caption, r, S, min(S_PADDED, LARGE), 128)
    if LEAST <= 16:
        clear(Y, end, caption, r, T, S, S_PADDED)


@jit()
def _graph_back(
    gradient: tl.tensor,
    queries: tl.tensor,
    nodes: tl.tensor,
    to_queries: tl.tensor,
    to_nodes: tl.tensor,
    start: tl.tensor,
    count: tl.tensor,
    caption: tl.tensor,
    r: tl.tensor,
    S: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """One graph of up to ROWS nodes; the pointers stand on its image."""
    j = tl.arange(0, ROWS)
    row, real = tl.where(j == 0, caption, r + start + j - 1), j < count
    scores, to_P = tl.zeros((ROWS, ROWS), tl.float32), tl.zeros((ROWS, ROWS), tl.float32)
    for first in range(0, S, COLUMNS):
        d = first + tl.arange(0, COLUMNS)
        X = tl.trans(tile(nodes, row, d, real, S))
        scores = tl.dot(tile(queries, row, d, real, S), X, scores, input_precision="ieee")
        to_P = tl.dot(tile(gradient, row, d, real, S), X, to_P, input_precision="ieee")
    P = _softmax(scores, real)
    to_scores = (P * (to_P - tl.sum(P * to_P, axis=1)[:, None])).to(nodes.dtype.element_ty)
    P = P.to(nodes.dtype.element_ty)
    for first in range(0, S, COLUMNS):
        d = first + tl.arange(0, COLUMNS)
        # All are read before anything is written, so that what the first loop read alone is not read again.
        G, Z, X = tile(gradient, row, d, real, S), tile(queries, row, d, real, S), tile(nodes, row, d, real, S)
        if to_nodes is not None:  # rows that are not real have gradient and query 0 and add nothing
            as_value = tl.dot(tl.trans(P), G, input_precision="ieee")
            put(to_nodes, tl.dot(tl.trans(to_scores), Z, as_value, input_precision="ieee"), row, d, real, S)
        if to_queries is not None:
            put(to_queries, tl.dot(to_scores, X, input_precision="ieee"), row, d, real, S)


@jit("r", "T")
def _backward(
    gradient: tl.tensor,
    queries: tl.tensor,
    nodes: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    to_queries: tl.tensor,  # or None
    to_nodes: tl.tensor,  # or None
    r: tl.tensor,
    T: tl.tensor,
    S: tl.constexpr,
    S_PADDED: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    MIDDLE: tl.constexpr,
    LARGE: tl.constexpr,
) -> None:
    """One caption and image."""
    caption = tl.program_id(0)
    start, count, end = place(starts, lengths, caption, r)
    image = tl.program_id(1).to(tl.int64) * (r + T) * S
    gradient += image
    queries += image
    nodes += image
    if to_queries is not None:
        to_queries += image
    if to_nodes is not None:
        to_nodes += image
    if LEAST <= 16 and count <= 16:
        _graph_back(gradient, queries, nodes, to_queries, to_nodes, start, count, caption, r, S, S_PADDED, 16)
    if LEAST <= 32 and MOST >= 32 and count > 16 and count <= 32:
        middle: tl.constexpr = min(S_PADDED, MIDDLE)
        _graph_back(gradient, queries, nodes, to_queries, to_nodes, start, count, caption, r, S, middle, 32)
    large: tl.constexpr = min(S_PADDED, LARGE)
    if LEAST <= 64 and MOST >= 64 and count > 32 and count <= 64:
        _graph_back(gradient, queries, nodes, to_queries, to_nodes, start, count, caption, r, S, large, 64)
    if MOST >= 128 and count > 64:
        _graph_back(gradient, queries, nodes, to_queries, to_nodes, start, count, caption, r, S, large, 128)
    if LEAST <= 16 and to_queries is not None:
        clear(to_queries, end, caption, r, T, S, S_PADDED)
    if LEAST <= 16 and to_nodes is not None:
        clear(to_nodes, end, caption, r, T, S, S_PADDED)
