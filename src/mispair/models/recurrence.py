"""A bidirectional GRU over ragged sequences."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from mispair.data.loader import send
from mispair.models.base import inside


class BiGRU(nn.Module):
    """One bidirectional layer, the two directions averaged: (B, n, D) to (B, n, H), zero where padded.

    The directions are two plain GRUs, the second over sequences turned round within their lengths. That equals packed
    sequences, but a GPU computes each direction in one go, where packing costs hundreds of small copies.
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.ahead = nn.GRU(inputs, hidden, batch_first=True)
        self.back = nn.GRU(inputs, hidden, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        turn = send(turned(lengths, x.shape[1]), x.device)[..., None]
        ahead, _ = self.ahead(x)
        back, _ = self.back(x.take_along_dim(turn, dim=1))
        mean: Tensor = (ahead.float() + back.take_along_dim(turn, dim=1).float()) / 2
        return mean * inside(lengths, x.shape[1], x.device)[..., None]


def turned(lengths: Tensor, width: int) -> Tensor:
    """(B, width) positions that turn each sequence round within its length and leave padding where it is.

    >>> turned(torch.tensor([3]), 4)
    tensor([[2, 1, 0, 3]])
    """
    position, last = np.arange(width), lengths.numpy()[:, None] - 1
    return torch.from_numpy(np.where(position <= last, last - position, position))
