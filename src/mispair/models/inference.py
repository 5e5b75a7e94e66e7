"""Encoding whole sides and scoring them against each other, in chunks of bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mispair.models import CosineNetwork, Encoded, Network
from mispair.pairs.batches import SideLoader
from mispair.pairs.pairs import Side, Tokens
from mispair.support.arrays import IntArray

CHUNK = 128  # items of either side encoded and scored at a time
CHUNK_WORDS = 4096  # and words: SGR needs memory for each image with each word
LARGER = 8  # so many times more where only vectors are compared
GPU_IMAGES = 2  # and so many times more images where a GPU scores them


@dataclass(frozen=True)
class EncodedSide:
    """An encoded side: chunks in the order of `rows`, with texts sorted by length to waste no padding."""

    rows: Tensor
    chunks: list[Encoded]

    def pooled(self) -> Tensor:
        """(N, D) unit vectors in the order of the side."""
        pooled = torch.cat([chunk.pooled for chunk in self.chunks])
        return pooled[self.rows.argsort().to(pooled.device)]


@contextmanager
def inference(network: Network) -> Iterator[None]:
    """Evaluation mode without gradients; the mode it was in comes back afterwards."""
    was_training = network.training
    network.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        network.train(was_training)


def encode_side(network: Network, loader: SideLoader, *, left: bool) -> EncodedSide:
    """Encodes all items of a side; the ranks of the network's team share the work where a vector an item is all."""
    side, team = loader.side, network.team
    order = np.argsort(side.lengths, kind="stable") if isinstance(side, Tokens) else np.arange(len(side))
    encode = network.encode_left if left else network.encode_right
    shares = isinstance(network, CosineNetwork) and team.splits(len(side))
    if shares:  # each rank takes texts of all lengths
        order = np.concatenate([order[rank :: team.size] for rank in range(team.size)])
    own = order[team.part(len(side))] if shares else order
    with inference(network):
        more = GPU_IMAGES if loader.device.type == "cuda" and not isinstance(side, Tokens) else 1
        times = LARGER if isinstance(network, CosineNetwork) else more
        chunks = [encode(loader.items(rows)) for rows in _chunks(side, own, times)]
        if shares:
            chunks = [Encoded(None, None, team.gather_alike(torch.cat([c.pooled for c in chunks]), len(side)))]
    return EncodedSide(torch.from_numpy(order), chunks)


def _chunks(side: Side, order: IntArray, times: int) -> Iterator[IntArray]:
    """Cut rows, sorted by length, into chunks of at most `times` the usual items and padded words."""
    start = 0
    while start < len(order):
        rows = order[start : start + times * CHUNK]
        if isinstance(side, Tokens):
            fits = side.lengths[rows] * np.arange(1, len(rows) + 1) <= times * CHUNK_WORDS
            rows = rows[: max(1, int(fits.sum()))]
        yield rows
        start += len(rows)


def score(network: Network, left: EncodedSide, right: EncodedSide) -> Tensor:
    """Similarity of every left item with every right item, (l, r).

    Where that takes long, the ranks of the network's team share the chunks of right items.
    """
    device, team = left.chunks[0].pooled.device, network.team
    shares = not isinstance(network, CosineNetwork) and not team.alone
    S = torch.zeros(len(left.rows), len(right.rows), device=device)
    column = 0
    with inference(network):
        for number, chunk in enumerate(right.chunks):
            columns = right.rows[column : column + len(chunk)].to(device)
            if not shares or number % team.size == team.rank:
                S[:, columns] = torch.cat([network.similarity(part, chunk) for part in left.chunks])
            column += len(chunk)
        if shares:
            S = team.total(S)
    rows = left.rows.argsort().to(device)
    return S[rows]


def similarities(networks: Sequence[Network], left: SideLoader, right: SideLoader) -> list[Tensor]:
    """One (l, r) matrix for each network."""
    return [
        score(network, encode_side(network, left, left=True), encode_side(network, right, left=False))
        for network in networks
    ]


def alike(networks: Sequence[Network]) -> bool:
    """Whether the similarities of all networks have one scale: sigmoids and cosines do not."""
    return len({network.squashed for network in networks}) == 1


def average(networks: Sequence[Network], matrices: Sequence[Tensor], *, bounded: bool = False) -> Tensor:
    """The mean of the networks' similarities (l, r); of their bounded scores if `bounded`, or if they are unlike."""
    if bounded or not alike(networks):
        matrices = [network.bounded(S) for network, S in zip(networks, matrices, strict=True)]
    return torch.stack(list(matrices)).mean(dim=0)
