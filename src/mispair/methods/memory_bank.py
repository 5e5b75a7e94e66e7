"""The memory bank: the newest M clean pairs as encoded by one network, first in, first out.

Local vectors are stored without padding, in half precision: a quarter of the memory of padded float32 for 4,096 pairs
of Flickr30K. Nothing in it has a gradient.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mispair.compute.devices import send, working_dtype
from mispair.models.base import Encoded
from mispair.models.ragged import inside, packing
from mispair.support.arrays import IntArray


class Bank:
    """The pairs, at most `size`, the oldest first."""

    def __init__(self, size: int, dtype: torch.dtype = torch.float16) -> None:
        self.size = size
        self.ids: IntArray = np.empty(0, dtype=np.int64)  # (len(bank),) number of each pair in the data set
        self.left, self.right = SideBank(size, dtype), SideBank(size, dtype)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """Bytes of all stored features."""
        return self.left.nbytes + self.right.nbytes

    def push(self, left: Encoded, right: Encoded, pairs: IntArray) -> None:
        """Add pairs and drop the oldest."""
        self.ids = np.concatenate([self.ids, pairs])[-self.size :]
        self.left.push(left)
        self.right.push(right)

    def pooled(self) -> tuple[Tensor, Tensor]:
        """Pooled vectors of the left and the right items, (len(bank), D)."""
        return self.left.pooled, self.right.pooled

    def state_dict(self) -> dict[str, Any]:
        """Return all state as tensors and plain values."""
        sides = {"left": self.left.state_dict(), "right": self.right.state_dict()}
        return {"size": self.size, "ids": torch.from_numpy(self.ids.copy()), **sides}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore the state returned by `state_dict`."""
        self.size, self.ids = state["size"], state["ids"].numpy().copy()
        self.left.load_state_dict(state["left"], device)
        self.right.load_state_dict(state["right"], device)


class SideBank:
    """One side of a bank: pooled vectors (n, D), and local ones (total, D) item after item."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.size, self.dtype = size, dtype
        self._pooled: Tensor | None = None
        self._local: Tensor | None = None
        self._lengths: IntArray = np.empty(0, dtype=np.int64)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self._pooled, self._local) if tensor is not None)

    @torch.no_grad()
    def push(self, items: Encoded) -> None:
        """Add items and keep the last `size`."""
        self._pooled = _joined(self._pooled, items.pooled.to(self.dtype))[-self.size :]
        if items.local is None:
            return
        local = items.local
        lengths = torch.full((len(local),), local.shape[1]) if items.lengths is None else items.lengths
        packed = _joined(self._local, packing(lengths, local.shape[1], local.device).pack(local).to(self.dtype))
        self._lengths = np.concatenate([self._lengths, lengths.numpy()])[-self.size :]
        self._local = packed[len(packed) - int(self._lengths.sum()) :]

    @property
    def pooled(self) -> Tensor:
        """(n, D) pooled vectors of a bank that is not empty."""
        assert self._pooled is not None
        return self._pooled

    def lengths(self, slots: IntArray) -> IntArray:
        """Number of local vectors of the items in `slots`."""
        return self._lengths[slots] if len(self._lengths) else np.zeros(len(slots), dtype=np.int64)

    def take(self, slots: IntArray) -> Encoded:
        """Return the items in `slots`, padded to the longest of them.

        Pooled vectors are in float32, local ones in the precision of the matrix products.
        """
        device = self.pooled.device
        chosen = self.pooled[send(torch.from_numpy(slots), device)].float()
        if self._local is None:
            return Encoded(None, None, chosen)
        lengths = torch.from_numpy(self._lengths[slots])
        width = int(lengths.max())
        starts = send(torch.from_numpy((np.cumsum(self._lengths) - self._lengths)[slots]), device)
        positions = starts[:, None] + torch.arange(width, device=device)
        local = self._local[positions.clamp(max=len(self._local) - 1)].to(working_dtype(chosen))
        if bool((lengths == width).all()):
            return Encoded(local, None, chosen)
        padded = ~inside(lengths, width, device)[..., None]
        return Encoded(local.masked_fill(padded, 0), lengths, chosen)

    def state_dict(self) -> dict[str, Any]:
        tensors = {"pooled": self._pooled, "local": self._local}  # copies: parts of tensors are saved whole
        copies = {name: None if tensor is None else tensor.clone() for name, tensor in tensors.items()}
        return {**copies, "lengths": torch.from_numpy(self._lengths.copy())}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        self._pooled, self._local = (
            None if tensor is None else tensor.to(device) for tensor in (state["pooled"], state["local"])
        )
        self._lengths = state["lengths"].numpy().copy()


def _joined(before: Tensor | None, new: Tensor) -> Tensor:
    return new if before is None else torch.cat([before, new])
