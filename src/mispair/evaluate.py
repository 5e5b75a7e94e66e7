"""Encoding whole sides and scoring them against each other, in chunks of bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mispair.data.loader import SideLoader
from mispair.data.pairs import Pairs, Tokens
from mispair.metrics import Retrieval, retrieval
from mispair.models import Encoded, Network

CHUNK = 128  # items of either side encoded and scored at a time: SGR needs memory for each image with each word


@dataclass(frozen=True)
class EncodedSide:
    """A whole side, encoded: chunks in the order of `rows`, which sorts texts by length to waste no padding."""

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
    """Encodes all items of a side."""
    side = loader.side
    order = np.argsort(side.lengths, kind="stable") if isinstance(side, Tokens) else np.arange(len(side))
    encode = network.encode_left if left else network.encode_right
    with inference(network):
        chunks = [encode(loader.items(order[start : start + CHUNK])) for start in range(0, len(order), CHUNK)]
    return EncodedSide(torch.from_numpy(order), chunks)


def score(network: Network, left: EncodedSide, right: EncodedSide) -> Tensor:
    """Similarity of every left item with every right item, (l, r)."""
    device = left.chunks[0].pooled.device
    S = torch.empty(len(left.rows), len(right.rows), device=device)
    column = 0
    with inference(network):
        for chunk in right.chunks:
            columns = right.rows[column : column + len(chunk)].to(device)
            S[:, columns] = torch.cat([network.similarity(part, chunk) for part in left.chunks])
            column += len(chunk)
    rows = left.rows.argsort().to(device)
    return S[rows]


def similarities(networks: Sequence[Network], left: SideLoader, right: SideLoader) -> list[Tensor]:
    """One (l, r) matrix for each network."""
    return [
        score(network, encode_side(network, left, left=True), encode_side(network, right, left=False))
        for network in networks
    ]


@dataclass(frozen=True)
class Evaluation:
    """What a set of networks reaches: each alone, and their averaged similarities."""

    networks: list[Retrieval]
    averaged: Retrieval


def evaluate(matrices: Sequence[Tensor], pairs: Pairs) -> Evaluation:
    """Ranks all left items against all right items of `pairs`, by each network's matrix and by their mean."""
    groups = torch.from_numpy(pairs.left_groups), torch.from_numpy(pairs.right_groups)
    average = torch.stack(list(matrices)).mean(dim=0)
    return Evaluation([retrieval(S, *groups) for S in matrices], retrieval(average, *groups))
