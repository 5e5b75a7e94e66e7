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

if HAS_TRITON:
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

MOST_SIMILARITIES = 256

# One launch a row, for graphs whose nodes fill LEAST to MOST rows. Graphs of 32 rows are taken MIDDLE columns at a time
# and larger ones LARGE, so that up to 64 rows need hardly more registers and shared memory than 16, which are the most.
# The few graphs with 128 rows need more, so they have a launch of their own.
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


def fits(width: int, dtype: torch.dtype, longest: int) -> bool:
    """Whether the kernels support this width and this longest graph."""
    return longest <= MOST_ROWS.get(dtype, 0) and width <= MOST_SIMILARITIES


def attend(queries: Tensor, nodes: Tensor, starts: Tensor, lengths: Tensor, longest: int) -> Tensor:
    """softmax(Z X^T) X of every graph, with Z the queries and X the nodes of the graph, (l, r + T, s).

    Rows of `queries` and `nodes` (l, r + T, s) are the whole captions, then the words, caption after caption; rows
    behind the last word belong to no graph and become 0. `starts` (r,) has the first word of each caption, `lengths`
    (r,) its number of words. No graph has more than `longest` nodes. The result has the precision of the nodes, softmax
    and sums are in float32.
    """
    if not fits(nodes.shape[-1], nodes.dtype, longest):
        raise ValueError(f"graphs of {longest} nodes of {nodes.shape[-1]} x {nodes.dtype} are not for these kernels")
    Y: Tensor = _attend(compact(queries, nodes.dtype), nodes.contiguous(), starts, lengths, longest)
    return Y


# torch's operators, so that `torch.compile` takes them as they are.
@torch.library.custom_op(
    "mispair::attend",
    mutates_args=(),
    schema="(Tensor queries, Tensor nodes, Tensor starts, Tensor lengths, SymInt longest) -> Tensor",
)
def _attend(queries: Tensor, nodes: Tensor, starts: Tensor, lengths: Tensor, longest: int) -> Tensor:
    Y = torch.empty_like(nodes)
    starts, lengths = starts.contiguous(), lengths.contiguous()
    with on(Y):
        for launch in _launches(nodes, longest, FORWARD):
            _forward[grid(nodes, starts)](queries, nodes, starts, lengths, Y, *counts(nodes, starts), **launch)
    return Y


@torch.library.custom_op(
    "mispair::attend_back",
    mutates_args=(),
    schema="(Tensor g, Tensor queries, Tensor nodes, Tensor starts, Tensor lengths, SymInt longest) "
    "-> (Tensor, Tensor)",
)
def _attend_back(
    gradient: Tensor, queries: Tensor, nodes: Tensor, starts: Tensor, lengths: Tensor, longest: int
) -> tuple[Tensor, Tensor]:
    to_queries, to_nodes = torch.empty_like(queries), torch.empty_like(nodes)
    parts = gradient.contiguous(), queries, nodes, starts.contiguous(), lengths.contiguous(), to_queries, to_nodes
    with on(nodes):
        for launch in _launches(nodes, longest, BACKWARD):
            _backward[grid(nodes, starts)](*parts, *counts(nodes, starts), **launch)
    return to_queries, to_nodes


_attend.register_fake(lambda *parts: torch.empty_like(parts[1]))
_attend_back.register_fake(lambda *parts: (torch.empty_like(parts[1]), torch.empty_like(parts[2])))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    *parts, ctx.longest = inputs
    ctx.save_for_backward(*parts)


def _back(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return *_attend_back(gradient, *ctx.saved_tensors, ctx.longest), None, None, None


_attend.register_autograd(_back, setup_context=_keep)


def _launches(nodes: Tensor, longest: int, launches: list[Settings]) -> list[Settings]:
    """Tile sizes for graphs with at most this number of nodes."""
    rows = max(16, triton.next_power_of_2(longest))
    needed = [{**launch, "MOST": min(launch["MOST"], rows)} for launch in launches if launch["LEAST"] <= rows]
    return [sized(nodes, launch) for launch in needed]


@jit()
def _softmax(scores: tl.tensor, real: tl.tensor) -> tl.tensor:
    """Over the real nodes, at least one for each graph."""
    scores = tl.where(real[None, :], scores, float("-inf"))
    weights = tl.exp(scores - tl.max(scores, axis=1)[:, None])
    return weights / tl.sum(weights, axis=1)[:, None]


@jit()
def _graph(
    queries: tl.tensor, nodes: tl.tensor, Y: tl.tensor, start: tl.tensor, count: tl.tensor, caption: tl.tensor,
    r: tl.tensor, S: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
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
    queries: tl.tensor, nodes: tl.tensor, starts: tl.tensor, lengths: tl.tensor, Y: tl.tensor, r: tl.tensor,
    T: tl.tensor, S: tl.constexpr, S_PADDED: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
    MIDDLE: tl.constexpr, LARGE: tl.constexpr,
) -> None:  # fmt: skip
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
    gradient: tl.tensor, queries: tl.tensor, nodes: tl.tensor, to_queries: tl.tensor, to_nodes: tl.tensor,
    start: tl.tensor, count: tl.tensor, caption: tl.tensor, r: tl.tensor, S: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:  # fmt: skip
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
        # Rows that are not real have gradient and query 0.
        as_value = tl.dot(tl.trans(P), G, input_precision="ieee")
        put(to_nodes, tl.dot(tl.trans(to_scores), Z, as_value, input_precision="ieee"), row, d, real, S)
        put(to_queries, tl.dot(to_scores, X, input_precision="ieee"), row, d, real, S)


@jit("r", "T")
def _backward(
    gradient: tl.tensor, queries: tl.tensor, nodes: tl.tensor, starts: tl.tensor, lengths: tl.tensor,
    to_queries: tl.tensor, to_nodes: tl.tensor, r: tl.tensor, T: tl.tensor, S: tl.constexpr, S_PADDED: tl.constexpr,
    LEAST: tl.constexpr, MOST: tl.constexpr, MIDDLE: tl.constexpr, LARGE: tl.constexpr,
) -> None:  # fmt: skip
    """One caption and image."""
    caption = tl.program_id(0)
    start, count, end = place(starts, lengths, caption, r)
    image = tl.program_id(1).to(tl.int64) * (r + T) * S
    gradient += image
    queries += image
    nodes += image
    to_queries += image
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
    if LEAST <= 16:
        clear(to_queries, end, caption, r, T, S, S_PADDED)
        clear(to_nodes, end, caption, r, T, S, S_PADDED)


FIRST = {"ROWS": 8, "num_warps": 1, "maxnreg": 128}  # nodes that a program takes at a time
FIRST_BACK = {"ROWS": 8, "num_warps": 1}


def attend_first(
    queries: Tensor, nodes: Tensor, starts: Tensor, lengths: Tensor,
    longest: int,  # noqa: ARG001 (both are called alike)
) -> Tensor:  # fmt: skip
    """Like `attend`, with queries of the whole captions only: queries and result are (l, r, s)."""
    exact: Tensor = _attend_first(compact(queries, nodes.dtype), nodes.contiguous(), starts, lengths)[0]
    return exact.to(nodes.dtype)


# The result is in float32: its product with its gradient is what the backward pass subtracts from the gradients of all
# weights. Where nodes are alike, as they are after a ReLU, little remains, and that must not be rounding.
@torch.library.custom_op(
    "mispair::attend_first",
    mutates_args=(),
    schema="(Tensor queries, Tensor nodes, Tensor starts, Tensor lengths) -> (Tensor, Tensor)",
)
def _attend_first(queries: Tensor, nodes: Tensor, starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Also return the log-sum-exp of the softmax."""
    Y, logsumexp = _first_results(queries)
    starts, lengths = starts.contiguous(), lengths.contiguous()
    with on(Y):
        _first[grid(nodes, starts)](
            queries, nodes, starts, lengths, Y, logsumexp, *counts(nodes, starts), **sized(nodes, FIRST)
        )
    return Y, logsumexp


def _first_results(queries: Tensor) -> tuple[Tensor, Tensor]:
    Y = torch.empty_like(queries, dtype=torch.float32)
    return Y, Y.new_empty(Y.shape[:2])


@torch.library.custom_op(
    "mispair::attend_first_back",
    mutates_args=(),
    schema="(Tensor g, Tensor queries, Tensor nodes, Tensor starts, Tensor lengths, Tensor Y, Tensor logsumexp) "
    "-> (Tensor, Tensor)",
)
def _attend_first_back(
    gradient: Tensor, queries: Tensor, nodes: Tensor, starts: Tensor, lengths: Tensor, Y: Tensor, logsumexp: Tensor
) -> tuple[Tensor, Tensor]:
    to_queries, to_nodes = torch.empty_like(queries), torch.empty_like(nodes)
    starts, lengths = starts.contiguous(), lengths.contiguous()
    with on(nodes):
        _first_back[grid(nodes, starts)](
            gradient.contiguous(), queries, nodes, starts, lengths, Y, logsumexp, to_queries, to_nodes,
            *counts(nodes, starts), **sized(nodes, FIRST_BACK),
        )  # fmt: skip
    return to_queries, to_nodes


_attend_first.register_fake(lambda queries, *_: _first_results(queries))
_attend_first_back.register_fake(lambda *parts: (torch.empty_like(parts[1]), torch.empty_like(parts[2])))


def _keep_first(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _back_first(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return *_attend_first_back(gradient, *ctx.saved_tensors), None, None


_attend_first.register_autograd(_back_first, setup_context=_keep_first)


@jit()
def _some(
    first: tl.tensor, start: tl.tensor, count: tl.tensor, caption: tl.tensor, r: tl.tensor, ROWS: tl.constexpr
) -> tl.tensor:
    """Rows of ROWS nodes from the `first` on, and their mask; the others are the caption's node 0 again."""
    j = first + tl.arange(0, ROWS)
    real = j < count
    return tl.where(real & (j > 0), r + start + j - 1, caption), real


@jit("r", "T")
def _first(
    queries: tl.tensor, nodes: tl.tensor, starts: tl.tensor, lengths: tl.tensor,
    Y: tl.tensor,  # in float32
    logsumexp: tl.tensor, r: tl.tensor, T: tl.tensor, S: tl.constexpr, S_PADDED: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
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
    tl.store(Y + own * S + d, h, mask=d < S)
    tl.store(logsumexp + own, highest + tl.log(whole))


@jit("r", "T")
def _first_back(
    gradient: tl.tensor, queries: tl.tensor, nodes: tl.tensor, starts: tl.tensor, lengths: tl.tensor, Y: tl.tensor,
    logsumexp: tl.tensor, to_queries: tl.tensor, to_nodes: tl.tensor, r: tl.tensor, T: tl.tensor, S: tl.constexpr,
    S_PADDED: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """One caption and image."""
    caption = tl.program_id(0)
    start, count, end = place(starts, lengths, caption, r)
    image = tl.program_id(1).to(tl.int64)
    nodes += image * (r + T) * S
    own = image * r + caption
    d = tl.arange(0, S_PADDED)
    g = tl.load(gradient + own * S + d, mask=d < S, other=0.0).to(tl.float32)
    q = tl.load(queries + own * S + d, mask=d < S, other=0.0).to(tl.float32)
    mean = tl.sum(g * tl.load(Y + own * S + d, mask=d < S, other=0.0), axis=0)
    level = tl.load(logsumexp + own)
    to_q = tl.zeros((ROWS, S_PADDED), tl.float32)
    for first in range(0, count, ROWS):
        row, real = _some(first, start, count, caption, r, ROWS)
        X = tile(nodes, row, d, row >= 0, S).to(tl.float32)
        P = tl.where(real, tl.exp(tl.sum(X * q[None, :], axis=1) - level), 0.0)
        to_scores = P * (tl.sum(X * g[None, :], axis=1) - mean)
        to_q += to_scores[:, None] * X
        to_X = to_scores[:, None] * q[None, :] + P[:, None] * g[None, :]
        put(to_nodes + image * (r + T) * S, to_X, row, d, real, S)
    tl.store(to_queries + own * S + d, tl.sum(to_q, axis=0).to(to_queries.dtype.element_ty), mask=d < S)
    clear(to_nodes + image * (r + T) * S, end, caption, r, T, S, S_PADDED)


Settings = dict[str, int]


def grid(nodes: Tensor, starts: Tensor) -> tuple[int, int]:
    """Concurrent programs take neighbouring captions of one image."""
    return starts.shape[0], nodes.shape[0]


def counts(nodes: Tensor, starts: Tensor) -> tuple[int, int]:
    """r and T."""
    return starts.shape[0], nodes.shape[1] - starts.shape[0]


def sized(nodes: Tensor, settings: Settings) -> Settings:
    """With the sizes of the nodes. Products in true float32 are without tensor cores and may take all registers."""
    S = nodes.shape[2]
    full = {**settings, "S": S, "S_PADDED": max(16, triton.next_power_of_2(S))}
    if nodes.dtype == torch.float32:
        full.pop("maxnreg", None)
    return full


@jit()
def tile(matrix: tl.tensor, row: tl.tensor, column: tl.tensor, real: tl.tensor, S: tl.constexpr) -> tl.tensor:
    """These rows and columns, 0 where a row is not real and where there is no column."""
    mask = real[:, None] & (column < S)[None, :]
    return tl.load(matrix + row[:, None] * S + column[None, :], mask=mask, other=0.0)


@jit()
def put(
    matrix: tl.tensor, values: tl.tensor, row: tl.tensor, column: tl.tensor, real: tl.tensor, S: tl.constexpr
) -> None:
    mask = real[:, None] & (column < S)[None, :]
    tl.store(matrix + row[:, None] * S + column[None, :], values.to(matrix.dtype.element_ty), mask=mask)


@jit()
def place(starts: tl.tensor, lengths: tl.tensor, caption: tl.tensor, r: tl.tensor) -> tl.tensor:
    """First word and number of nodes of a caption's graph, and the end of the last caption."""
    start, length = tl.load(starts + caption).to(tl.int32), tl.load(lengths + caption).to(tl.int32)
    end = tl.load(starts + r - 1).to(tl.int32) + tl.load(lengths + r - 1).to(tl.int32)
    return start, 1 + length, end


@jit()
def clear(
    matrix: tl.tensor, end: tl.tensor, caption: tl.tensor, r: tl.tensor, T: tl.tensor, S: tl.constexpr,
    S_PADDED: tl.constexpr,
) -> None:  # fmt: skip
    """Zeros where a row belongs to no graph, from word `end` on. The programs of one image share these rows."""
    j, column = tl.arange(0, 16), tl.arange(0, S_PADDED)
    for first in range(end + caption * 16, T, r * 16):
        put(matrix, tl.zeros((16, S_PADDED), tl.float32), r + first + j, column, first + j < T, S)
