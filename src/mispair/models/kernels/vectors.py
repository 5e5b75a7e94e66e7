"""Similarity vectors of every word with every image on a GPU, in one pass.

The wide tensors (image, word, D), of contexts, differences and squares, never leave the chip in the forward pass. The
backward pass makes them again, and writes the squares and the gradients of the differences once.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from mispair.compute.devices import EPSILON
from mispair.models.kernels.common import HAS_TRITON, compact, jit, on, works

if HAS_TRITON:
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

MOST_SIMILARITIES, MOST_REGIONS = 256, 64
FORWARD = {"WORDS": 128, "COLUMNS": 64, "num_warps": 8, "num_stages": 3}
BACKWARD = {"WORDS": 64, "COLUMNS": 32, "num_warps": 4, "num_stages": 3}


@functools.cache
def available(device: torch.device) -> bool:
    """Whether the kernels run on this device. Tried out once, at SGR's largest sizes."""

    def trial() -> None:
        shapes = (1, MOST_REGIONS, 2), (1, MOST_REGIONS, 1024), (2, 1024), (256, 1024), (256,), (1, 1, 256)
        parts = [torch.zeros(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
        torch.autograd.grad(vectors(*parts).sum(), parts)

    return works(device, trial, "SGR")


def fits(dtype: torch.dtype, regions: int, width: int) -> bool:
    """Whether the kernels support this number of regions and this width of similarity vectors."""
    return dtype != torch.float32 and regions <= MOST_REGIONS and width <= MOST_SIMILARITIES


def vectors(weights: Tensor, regions: Tensor, words: Tensor, weight: Tensor, bias: Tensor, first: Tensor) -> Tensor:
    """Append to the `first` nodes (l, r, s) of each image its similarity vectors with all words, (l, r + T, s).

    The vectors have unit length and the precision of the words (T, D). A context is a sum of regions (l, R, D) by
    `weights` (l, R, T).
    """
    dtype = words.dtype
    parts = (compact(part, dtype) for part in (weights, regions, words, weight, bias, first))
    nodes: Tensor = _vectors(*parts)[0]
    return nodes


# torch's operators, so that `torch.compile` takes them as they are.
@torch.library.custom_op(
    "mispair::vectors",
    mutates_args=(),
    schema="(Tensor weights, Tensor regions, Tensor words, Tensor weight, Tensor bias, Tensor first) "
    "-> (Tensor, Tensor)",
)
def _vectors(
    weights: Tensor, regions: Tensor, words: Tensor, weight: Tensor, bias: Tensor, first: Tensor
) -> tuple[Tensor, Tensor]:
    """And the norms of the vectors before they were divided by them, (l, T)."""
    nodes, norms = _results(weights, words, first)
    nodes[:, : first.shape[1]] = first
    with on(nodes):
        _forward[_grid(weights, FORWARD)](
            weights, regions, words, weight, bias, nodes, norms, *_sizes(nodes, weights),
            **_sized(regions, weight, FORWARD),
        )  # fmt: skip
    return nodes, norms


@torch.library.custom_op(
    "mispair::vectors_back",
    mutates_args=(),
    schema="(Tensor g, Tensor weights, Tensor regions, Tensor words, Tensor weight, Tensor nodes, Tensor norms) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _vectors_back(
    gradient: Tensor, weights: Tensor, regions: Tensor, words: Tensor, weight: Tensor, nodes: Tensor, norms: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of weights, words, vectors (l, T, s) and differences (l, T, D), and the squares of the differences."""
    to_weights, to_words, to_vectors, to_differences, squares = _results_back(weights, words, weight)
    with on(nodes):
        _backward[_grid(weights, BACKWARD)](
            gradient.contiguous(), weights, regions, words, weight, nodes, norms, to_weights, to_vectors,
            to_differences, squares, *_sizes(nodes, weights),
            **_sized(regions, weight, BACKWARD),
        )  # fmt: skip
    torch.sum(to_differences, dim=0, out=to_words).neg_()  # torch's own sum: the compiled one takes twice as long
    return to_weights, to_words, to_vectors, to_differences, squares


def _results(weights: Tensor, words: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    (images, rows, width), count = first.shape, words.shape[0]  # `len` would make sizes constants
    norms = weights.new_empty(images, count, dtype=torch.float32)
    return words.new_empty(images, rows + count, width), norms


def _results_back(weights: Tensor, words: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    images, (count, width) = weights.shape[0], words.shape
    wide, to_vectors = words.new_empty(images, count, width), words.new_empty(images, count, weight.shape[0])
    return torch.empty_like(weights), torch.empty_like(words), to_vectors, wide, torch.empty_like(wide)


_vectors.register_fake(lambda *parts: _results(parts[0], parts[2], parts[5]))
_vectors_back.register_fake(lambda *parts: _results_back(parts[1], parts[3], parts[4]))


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    weights, regions, words, weight, _, first = inputs
    ctx.first = first.shape[1]
    ctx.save_for_backward(weights, regions, words, weight, *output)


def _back(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    weights, *_ = saved = ctx.saved_tensors
    to_weights, to_words, to_vectors, to_differences, squares = _vectors_back(gradient, *saved)
    to_regions = weights @ to_differences
    to_weight = to_vectors.flatten(0, 1).T @ squares.flatten(0, 1)
    return to_weights, to_regions, to_words, to_weight, to_vectors.sum(dim=(0, 1)), gradient[:, : ctx.first]


_vectors.register_autograd(_back, setup_context=_keep)


def _grid(weights: Tensor, settings: dict[str, int]) -> tuple[int, int]:
    """Concurrent programs share the regions of an image."""
    return triton.cdiv(weights.shape[2], settings["WORDS"]), len(weights)


def _sizes(nodes: Tensor, weights: Tensor) -> tuple[int, int]:
    """r and T."""
    return nodes.shape[1] - weights.shape[2], weights.shape[2]


def _sized(regions: Tensor, weight: Tensor, settings: dict[str, int]) -> dict[str, int]:
    (_, R, D), S = regions.shape, len(weight)
    padded = {"R_PADDED": max(16, triton.next_power_of_2(R)), "S_PADDED": max(16, triton.next_power_of_2(S))}
    return {**settings, **padded, "R": R, "D": D, "S": S}


@jit()
def _differences(
    W: tl.tensor, X: tl.tensor, words: tl.tensor, t: tl.tensor, d: tl.tensor, T: tl.tensor, D: tl.constexpr
) -> tl.tensor:
    """Contexts minus words, of these words and columns, in float32."""
    here = (t < T)[:, None] & (d < D)[None, :]
    V = tl.load(words + t[:, None] * D + d[None, :], mask=here, other=0.0).to(tl.float32)
    return tl.dot(W, X, input_precision="ieee") - V


@jit("r", "T")
def _forward(
    weights: tl.tensor, regions: tl.tensor, words: tl.tensor, weight: tl.tensor, bias: tl.tensor, nodes: tl.tensor,
    norms: tl.tensor, r: tl.tensor, T: tl.tensor, R: tl.constexpr, D: tl.constexpr, S: tl.constexpr,
    R_PADDED: tl.constexpr, S_PADDED: tl.constexpr, WORDS: tl.constexpr, COLUMNS: tl.constexpr,
    EPS: tl.constexpr = EPSILON,
) -> None:  # fmt: skip
    """Some words with one image."""
    t, image = tl.program_id(0) * WORDS + tl.arange(0, WORDS), tl.program_id(1).to(tl.int64)
    j, k = tl.arange(0, R_PADDED), tl.arange(0, S_PADDED)
    inside = (t < T)[:, None]
    W = tl.load(weights + image * R * T + j[None, :] * T + t[:, None], mask=inside & (j < R)[None, :], other=0.0)
    total = tl.zeros((WORDS, S_PADDED), tl.float32)
    for begin in range(0, D, COLUMNS):
        d = begin + tl.arange(0, COLUMNS)
        X = tl.load(
            regions + image * R * D + j[:, None] * D + d[None, :], mask=(j < R)[:, None] & (d < D)[None, :], other=0.0
        )
        difference = _differences(W, X, words, t, d, T, D)
        M = tl.load(weight + k[None, :] * D + d[:, None], mask=(k < S)[None, :] & (d < D)[:, None], other=0.0)
        total = tl.dot((difference * difference).to(M.dtype), M, total, input_precision="ieee")
    total += tl.load(bias + k, mask=k < S, other=0.0).to(tl.float32)[None, :]
    square = tl.sum(total * total, axis=1)
    norm = tl.sqrt(tl.where(square > 0, square, 1.0)) + EPS
    tl.store(norms + image * T + t, norm, mask=t < T)
    place = nodes + (image * (r + T) + r + t[:, None]) * S + k[None, :]
    tl.store(place, (total / norm[:, None]).to(nodes.dtype.element_ty), mask=inside & (k < S)[None, :])


@jit("r", "T")
def _backward(
    gradient: tl.tensor, weights: tl.tensor, regions: tl.tensor, words: tl.tensor, weight: tl.tensor, nodes: tl.tensor,
    norms: tl.tensor, to_weights: tl.tensor, to_vectors: tl.tensor, to_differences: tl.tensor, squares: tl.tensor,
    r: tl.tensor, T: tl.tensor, R: tl.constexpr, D: tl.constexpr, S: tl.constexpr, R_PADDED: tl.constexpr,
    S_PADDED: tl.constexpr, WORDS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """Some words with one image."""
    t, image = tl.program_id(0) * WORDS + tl.arange(0, WORDS), tl.program_id(1).to(tl.int64)
    j, k = tl.arange(0, R_PADDED), tl.arange(0, S_PADDED)
    inside = (t < T)[:, None]
    of_weights = image * R * T + j[None, :] * T + t[:, None]
    W = tl.load(weights + of_weights, mask=inside & (j < R)[None, :], other=0.0)
    of_nodes, narrow = (image * (r + T) + r + t[:, None]) * S + k[None, :], inside & (k < S)[None, :]
    G = tl.load(gradient + of_nodes, mask=narrow, other=0.0).to(tl.float32)
    Y = tl.load(nodes + of_nodes, mask=narrow, other=0.0).to(tl.float32)
    norm = tl.load(norms + image * T + t, mask=t < T, other=1.0)
    G = ((G - Y * tl.sum(G * Y, axis=1)[:, None]) / norm[:, None]).to(W.dtype)
    tl.store(to_vectors + (image * T + t[:, None]) * S + k[None, :], G, mask=narrow)
    to_W = tl.zeros((WORDS, R_PADDED), tl.float32)
    for begin in range(0, D, COLUMNS):
        d = begin + tl.arange(0, COLUMNS)
        X = tl.load(
            regions + image * R * D + j[:, None] * D + d[None, :], mask=(j < R)[:, None] & (d < D)[None, :], other=0.0
        )
        M = tl.load(weight + k[:, None] * D + d[None, :], mask=(k < S)[:, None] & (d < D)[None, :], other=0.0)
        difference = _differences(W, X, words, t, d, T, D)
        to_difference = (2 * difference * tl.dot(G, M, input_precision="ieee")).to(W.dtype)
        wide, here = (image * T + t[:, None]) * D + d[None, :], inside & (d < D)[None, :]
        tl.store(squares + wide, (difference * difference).to(W.dtype), mask=here)
        tl.store(to_differences + wide, to_difference, mask=here)
        to_W = tl.dot(to_difference, tl.trans(X), to_W, input_precision="ieee")
    tl.store(to_weights + of_weights, to_W.to(W.dtype), mask=inside & (j < R)[None, :])
