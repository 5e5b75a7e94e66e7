"""Items of different lengths in one padded array, or one after the other without padding.

Lengths are on the host or on the device, see `Items`. With lengths on the device nothing here waits for it, and all
shapes are known beforehand, so a GPU can record a training step once and repeat it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mispair.compute.devices import send


def inside(lengths: Tensor, width: int, device: torch.device) -> Tensor:
    """(B, width) true where real."""
    return to(torch.arange(width, device=lengths.device) < lengths[:, None], device)


def to(tensor: Tensor, device: torch.device) -> Tensor:
    """Move from the host to the device, if needed."""
    return tensor if tensor.device == device else send(tensor, device)


def masked_mean(local: Tensor, lengths: Tensor | None) -> Tensor:
    """Mean over the real elements of zero-padded (B, n, D), in float32 at least."""
    dtype = torch.promote_types(local.dtype, torch.float32)
    if lengths is None:
        return local.mean(dim=1, dtype=dtype)
    return local.sum(dim=1, dtype=dtype) / to(lengths, local.device).to(dtype)[:, None]


class Packing(NamedTuple):
    """Positions of the real elements of padded (B, n) items in a row of T, item after item."""

    starts: Tensor  # (B,) place in the row of each item's first element
    lengths: Tensor  # (B,)
    flat: Tensor  # (T,) position in the flattened (B * n) array of each element of the row; 0 behind the last one
    taken: Tensor  # (T,) false behind the last one
    owner: Tensor  # (T,) item that each element belongs to; B behind the last one
    slots: Tensor  # (B, n) place in the row of each element; 0 where padded
    inside: Tensor  # (B, n) false where padded

    @property
    def longest(self) -> int:
        """No item has more elements."""
        return self.inside.shape[1]

    def pack(self, padded: Tensor, dim: int = 0) -> Tensor:
        """(..., B, n, D) to (..., T, D), with zeros behind the last element; B is dimension `dim`."""
        packed: Tensor = _Move.apply(  # type: ignore[no-untyped-call]
            padded.flatten(dim, dim + 1), dim, self.flat, self.taken, self.slots.flatten(), self.inside.flatten()
        )
        return packed

    def pad(self, packed: Tensor, dim: int = 0) -> Tensor:
        """(..., T, D) to (..., B, n, D), with zeros; T is dimension `dim`."""
        padded: Tensor = _Move.apply(  # type: ignore[no-untyped-call]
            packed, dim, self.slots.flatten(), self.inside.flatten(), self.flat, self.taken
        )
        return padded.view(*packed.shape[:dim], *self.slots.shape, *packed.shape[dim + 1 :])


def packing(lengths: Tensor, width: int, device: torch.device, capacity: int | None = None) -> Packing:
    """Puts (B, width) items with these lengths in a row of `capacity` elements, by default just as long as needed."""
    total = int(lengths.sum()) if capacity is None else capacity
    lengths = to(lengths, device)  # only now: the sum of lengths on the host makes nobody wait
    place, starts = torch.arange(total, device=device), lengths.cumsum(0) - lengths
    owner = torch.searchsorted(lengths.cumsum(0), place, right=True)
    taken, item = owner < len(lengths), owner.clamp(max=len(lengths) - 1)
    flat = torch.where(taken, item * width + place - starts[item], 0)
    real = torch.arange(width, device=device) < lengths[:, None]
    slots = torch.where(real, starts[:, None] + torch.arange(width, device=device), 0)
    return Packing(starts, lengths, flat, taken, owner, slots, real)


class _Move(torch.autograd.Function):
    """Takes the elements at `there` along `dim`, zeros where not `real`, if it is given.

    No element is taken twice, so the gradient only has to be moved back: a copy, where an index would add.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, there: Tensor, real: Tensor | None, back: Tensor, real_back: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(back, real_back)
        ctx.dim = dim
        return _take(x, dim, there, real)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _take(gradients[0], ctx.dim, *ctx.saved_tensors), None, None, None, None, None


def _take(x: Tensor, dim: int, there: Tensor, real: Tensor | None) -> Tensor:
    taken = x.index_select(dim, there)
    return taken if real is None else taken.masked_fill_(~real.view(-1, *(1,) * (x.dim() - 1 - dim)), 0)


def turn(x: Tensor, order: Tensor) -> Tensor:
    """Put the elements of (B, n, D) in an `order` (B * n,) that restores itself when it is applied twice."""
    turned: Tensor = _Move.apply(x.flatten(0, 1), 0, order, None, order, None)  # type: ignore[no-untyped-call]
    return turned.view(x.shape)
