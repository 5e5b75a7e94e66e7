"""Encoders of the SCAN family: from regions or tokens to one vector a region or word."""

from __future__ import annotations

from torch import Tensor, nn

from mispair.compute.devices import working_dtype
from mispair.config import Config
from mispair.models.base import Encoded, SideSpec, l2norm, xavier_linear
from mispair.models.bigru import BiGRU
from mispair.models.layers import Dropout
from mispair.models.ragged import inside, masked_mean
from mispair.pairs.batches import Items


class RegionEncoder(nn.Module):
    """A linear map of each region to unit length. Vectors count as sets of one region."""

    def __init__(self, spec: SideSpec, embed_size: int) -> None:
        super().__init__()
        self.fc = xavier_linear(spec.size, embed_size)

    def forward(self, items: Items) -> Encoded:
        values, lengths = as_set(items, self.fc.weight)
        mapped = self.fc(values)
        local = l2norm(mapped, dtype=working_dtype(mapped))
        if lengths is not None:
            local = local * inside(lengths, local.shape[1], local.device)[..., None]
        return Encoded(local, lengths, l2norm(masked_mean(local, lengths)), items.capacity)


class WordRecurrence(nn.Module):
    """Word embeddings and a bidirectional GRU, its two directions averaged: (B, n, D), zero where padded."""

    def __init__(self, words: int, word_size: int, embed_size: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, word_size)
        nn.init.uniform_(self.embed.weight, -0.1, 0.1)
        self.dropout = Dropout(dropout)
        self.rnn = BiGRU(word_size, embed_size)

    def forward(self, items: Items) -> tuple[Tensor, Tensor]:
        assert items.lengths is not None
        return self.rnn(self.dropout(self.embed(items.values)), items.lengths), items.lengths


class WordEncoder(nn.Module):
    """A unit vector for each word in its sentence."""

    def __init__(self, spec: SideSpec, embed_size: int, word_size: int, dropout: float) -> None:
        super().__init__()
        self.words = WordRecurrence(spec.size, word_size, embed_size, dropout)

    def forward(self, items: Items) -> Encoded:
        hidden, lengths = self.words(items)
        local = l2norm(hidden, dtype=working_dtype(hidden))
        return Encoded(local, lengths, l2norm(masked_mean(local, lengths)), items.capacity)


def local_encoder(spec: SideSpec, config: Config, dropout: float) -> nn.Module:
    """The encoder of a side to a vector for each region or word."""
    if spec.kind == "tokens":
        return WordEncoder(spec, config.embed_size, config.word_size, dropout)
    return RegionEncoder(spec, config.embed_size)


def as_set(items: Items, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """Features as sets (B, n, D) in the precision of `like`, with their lengths; a vector is a set of one."""
    values = items.values.to(like.dtype)
    return values if values.dim() == 3 else values[:, None], items.lengths
