"""What the kernels of SGR's graphs share: how nodes lie in memory, and how a program reads and writes its graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mispair.models.kernels.common import HAS_TRITON, jit

if HAS_TRITON:
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

Settings = dict[str, int]


def room(ctx: Any, queries: Tensor, nodes: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """For the gradients of queries and nodes, as far as they are needed."""
    for_queries, for_nodes, *_ = ctx.needs_input_grad
    return torch.empty_like(queries) if for_queries else None, torch.empty_like(nodes) if for_nodes else None


def grid(nodes: Tensor, starts: Tensor) -> tuple[int, int]:
    """Programs that run at once take neighbouring captions of one image."""
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
