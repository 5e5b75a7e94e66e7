"""The memory bank: the newest M clean pairs as encoded by one network, first in, first out.

Local vectors of both sides lie without padding in a circular store, in half precision: a bank of 4,096 Flickr30K pairs
takes about a quarter of one that pads texts to the longest caption in float32. Nothing in it has a gradient.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mispair.compute.devices import send
from mispair.compute.precision import working_dtype
from mispair.models.base import Encoded
from mispair.models.ragged import inside, packing
from mispair.pairs.pairs import IntArray

SLACK = 1.02  # how much more a store takes when it has to grow, so that it does not grow at every push


class Bank:
    """A ring of `size` pairs. Slot numbers are stable until their pair is overwritten by one `size` pushes later.

    Attributes:
        left: The left items.
        right: The right items.
        ids: (len(bank),) number of each pair in the data set, by slot.
        pushed: How many pairs have been pushed in all.
    """

    def __init__(self, size: int, dtype: torch.dtype = torch.float16) -> None:
        self.size = size
        self.pushed = 0
        self._ids = np.full(size, -1, dtype=np.int64)
        self.left, self.right = SideBank(size, dtype), SideBank(size, dtype)

    def __len__(self) -> int:
        return min(self.pushed, self.size)

    @property
    def ids(self) -> IntArray:
        return self._ids[: len(self)]

    @property
    def nbytes(self) -> int:
        """Bytes of all stored features."""
        return self.left.nbytes + self.right.nbytes

    def push(self, left: Encoded, right: Encoded, pairs: IntArray) -> None:
        """Adds pairs, in the place of the oldest; of more than `size` the last ones stay."""
        skip = max(0, len(pairs) - self.size)
        slots = (self.pushed + np.arange(skip, len(pairs))) % self.size
        self._ids[slots] = pairs[skip:]
        self.left.push(slots, left, skip)
        self.right.push(slots, right, skip)
        self.pushed += len(pairs)

    def pooled(self) -> tuple[Tensor, Tensor]:
        """(len(bank), D) pooled vectors of the left and the right items, by slot."""
        return self.left.pooled(len(self)), self.right.pooled(len(self))

    def state_dict(self) -> dict[str, Any]:
        """Everything, as tensors and plain values."""
        sides = {"left": self.left.state_dict(), "right": self.right.state_dict()}
        return {"size": self.size, "pushed": self.pushed, "ids": torch.from_numpy(self._ids.copy()), **sides}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Takes back what `state_dict` gave."""
        self.size, self.pushed, self._ids = state["size"], state["pushed"], state["ids"].numpy().copy()
        self.left.load_state_dict(state["left"], device)
        self.right.load_state_dict(state["right"], device)


class SideBank:
    """One side of a bank.

    The local vectors of the live items follow each other in a circular `store`. Positions count on without end and are
    taken modulo its length.
    """

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._pooled: Tensor | None = None  # (size, D)
        self._store: Tensor | None = None  # (capacity, D)
        self._start, self._length = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
        self._end = 0  # position behind the newest local vector

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self._pooled, self._store) if tensor is not None)

    @torch.no_grad()
    def push(self, slots: IntArray, items: Encoded, skip: int) -> None:
        """Writes items[skip:] to `slots`."""
        pooled = items.pooled[skip:].detach()
        if self._pooled is None:
            self._pooled = pooled.new_zeros(len(self._start), pooled.shape[1], dtype=self.dtype)
        where = send(torch.from_numpy(slots), pooled.device)
        self._pooled[where] = pooled.to(self.dtype)
        if items.local is None:
            return
        local = items.local[skip:].detach()
        lengths = torch.full((len(local),), local.shape[1]) if items.lengths is None else items.lengths[skip:]
        packed = packing(lengths, local.shape[1], local.device).pack(local).to(self.dtype)
        self._length[slots] = 0  # before the store is made larger for what is overwritten here
        store = self._store_for(packed)
        store[send(torch.from_numpy((self._end + np.arange(len(packed))) % len(store)), packed.device)] = packed
        counts = lengths.numpy()
        self._start[slots], self._length[slots] = self._end + np.cumsum(counts) - counts, counts
        self._end += len(packed)

    def pooled(self, count: int) -> Tensor:
        """Pooled vectors of the first `count` slots."""
        if self._pooled is None:
            raise IndexError("The bank is empty.")
        return self._pooled[:count]

    def lengths(self, slots: IntArray) -> IntArray:
        """How many local vectors the items in `slots` have."""
        return self._length[slots]

    def take(self, slots: IntArray) -> Encoded:
        """The items in `slots`, padded to the longest of them.

        Pooled vectors are in float32, local ones in the precision of the matrix products.
        """
        pooled = self.pooled(len(self._start))
        device = pooled.device
        chosen = pooled[send(torch.from_numpy(slots), device)].float()
        if self._store is None:
            return Encoded(None, None, chosen)
        lengths = torch.from_numpy(self._length[slots])
        width = int(lengths.max())
        starts = send(torch.from_numpy(self._start[slots] % len(self._store)), device)
        positions = (starts[:, None] + torch.arange(width, device=device)) % len(self._store)
        local = self._store[positions].to(working_dtype(chosen))
        if bool((lengths == width).all()):
            return Encoded(local, None, chosen)
        padded = ~inside(lengths, width, device)[..., None]
        return Encoded(local.masked_fill(padded, 0), lengths, chosen)  # not times 0: unused space may hold a NaN

    def _store_for(self, packed: Tensor) -> Tensor:
        """The store, made larger if the live vectors and these do not fit."""
        live = np.flatnonzero(self._length)
        needed = int(self._length[live].sum()) + len(packed)
        if self._store is None:
            self._store = packed.new_empty(needed, packed.shape[1])
        elif needed > len(self._store):
            order = live[np.argsort(self._start[live])]
            counts = self._length[order]
            starts = np.cumsum(counts) - counts
            old = np.repeat(self._start[order] - starts, counts) + np.arange(counts.sum())
            kept = self._store[send(torch.from_numpy(old % len(self._store)), packed.device)]
            self._store = packed.new_empty(int(SLACK * needed), packed.shape[1])
            self._store[: len(kept)] = kept
            self._start[order], self._end = starts, len(kept)
        return self._store

    def state_dict(self) -> dict[str, Any]:
        arrays = {name: torch.from_numpy(getattr(self, f"_{name}").copy()) for name in ("start", "length")}
        return {"pooled": self._pooled, "store": self._store, "end": self._end, **arrays}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        self._pooled, self._store = (
            None if tensor is None else tensor.to(device) for tensor in (state["pooled"], state["store"])
        )
        self._start, self._length = (state[name].numpy().copy() for name in ("start", "length"))
        self._end = state["end"]
