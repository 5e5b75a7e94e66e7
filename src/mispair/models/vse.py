"""VSE-inf (Chen et al., CVPR 2021): one vector a side, pooled by the generalised pooling operator (GPO)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from mispair.config import Config
from mispair.data.loader import Items, send
from mispair.models.base import (
    CosineNetwork,
    Encoded,
    SideSpec,
    full_precision,
    inside,
    l2norm,
    packing,
    xavier_linear,
)
from mispair.models.encoders import WordRecurrence, as_set
from mispair.models.recurrence import BiGRU


class GPO(nn.Module):
    """Pools a set by a weighted sum of its sorted values, channel by channel; the weights are learned for each length.

    Equal weights make it mean pooling, all weight on the first position max pooling.
    """

    def __init__(self, size: int = 32, temperature: float = 0.1) -> None:
        super().__init__()
        self.size, self.temperature = size, temperature
        self.rnn = BiGRU(size, size)
        self.score = nn.Linear(size, 1, bias=False)

    def weights(self, lengths: Tensor, width: int) -> Tensor:
        """Weights of the sorted positions, (B, width), 0 behind each length."""
        device = self.score.weight.device
        distinct, which = map(torch.from_numpy, np.unique(lengths.numpy(), return_inverse=True))
        codes = send(position_codes(width, self.size), device).expand(len(distinct), -1, -1)
        scores: Tensor = self.score(self.rnn(codes, distinct)).squeeze(-1)  # depend on the length alone
        scores = scores.masked_fill(~inside(distinct, width, device), -torch.inf)
        return (scores / self.temperature).softmax(dim=-1)[send(which, device)]

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """(B, n, D) with these lengths to (B, D)."""
        with full_precision(x):
            real = inside(lengths, x.shape[1], x.device)[..., None]
            ordered = x.float().masked_fill(~real, -torch.inf).sort(dim=1, descending=True).values.masked_fill(~real, 0)
            return torch.einsum("bn,bnd->bd", self.weights(lengths, x.shape[1]), ordered)


def position_codes(count: int, size: int) -> Tensor:
    """Sine on even, cosine on odd channels, base 10000: (count, size)."""
    rates = 10000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.arange(count)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


class PooledRegions(nn.Module):
    """A linear map plus a small MLP of each region, then GPO."""

    def __init__(self, spec: SideSpec, embed_size: int) -> None:
        super().__init__()
        hidden = max(1, embed_size // 2)
        self.fc = xavier_linear(spec.size, embed_size)
        self.mlp = nn.Sequential(
            nn.Linear(spec.size, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, embed_size)
        )
        self.pool = GPO()

    def forward(self, items: Items) -> Encoded:
        values, lengths = as_set(items, self.fc.weight)
        real = packing(lengths, values.shape[1], values.device)
        regions = real.pack(values)  # the batch statistics must not see padding
        local = real.pad((self.fc(regions) + self.mlp(regions)).float())
        return Encoded(None, None, l2norm(self.pool(local, lengths)))


class PooledWords(nn.Module):
    """A bidirectional GRU over the words, then GPO. One embedding more than words: the augmentation's <mask>."""

    def __init__(self, spec: SideSpec, embed_size: int, word_size: int) -> None:
        super().__init__()
        self.words = WordRecurrence(spec.size + 1, word_size, embed_size)
        self.pool = GPO()

    def forward(self, items: Items) -> Encoded:
        return Encoded(None, None, l2norm(self.pool(*self.words(items))))


class VSE(CosineNetwork):
    """VSE-inf for any two sides."""

    def __init__(self, left: SideSpec, right: SideSpec, config: Config) -> None:
        super().__init__()
        self.augments = config.augment
        self.left = self._encoder(left, config)
        self.right = self._encoder(right, config)

    @staticmethod
    def _encoder(spec: SideSpec, config: Config) -> nn.Module:
        if spec.kind == "tokens":
            return PooledWords(spec, config.embed_size, config.word_size)
        return PooledRegions(spec, config.embed_size)
