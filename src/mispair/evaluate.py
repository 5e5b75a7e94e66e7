"""Encoding whole sides and scoring them against each other, in chunks of bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from string import ascii_uppercase

import numpy as np
import torch
from torch import Tensor

from mispair.data.loader import SideLoader
from mispair.data.pairs import IntArray, Pairs, Side, Tokens
from mispair.errors import ConfigError
from mispair.metrics import Retrieval, fold_retrieval, retrieval
from mispair.models import CosineNetwork, Encoded, Network

CHUNK = 128  # items of either side encoded and scored at a time
CHUNK_WORDS = 4096  # and words: SGR needs memory for each image with each word
LARGER = 8  # so many times more where only vectors are compared
GPU_IMAGES = 4  # and so many times more images where a GPU scores them: its kernels keep the wide tensors to themselves


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
        chunks = [encode(loader.items(rows)) for rows in _chunks(side, order, _times(network, loader))]
    return EncodedSide(torch.from_numpy(order), chunks)


def _times(network: Network, loader: SideLoader) -> int:
    """How many times larger than usual the chunks may be."""
    if isinstance(network, CosineNetwork):
        return LARGER
    return GPU_IMAGES if loader.device.type == "cuda" and not isinstance(loader.side, Tokens) else 1


def _chunks(side: Side, order: IntArray, times: int) -> Iterator[IntArray]:
    """Cuts rows, which are sorted by length, into chunks of at most `times` the usual items and padded words."""
    start = 0
    while start < len(order):
        rows = order[start : start + times * CHUNK]
        if isinstance(side, Tokens):
            fits = side.lengths[rows] * np.arange(1, len(rows) + 1) <= times * CHUNK_WORDS
            rows = rows[: max(1, int(fits.sum()))]
        yield rows
        start += len(rows)


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
    folds: Retrieval | None = None  # mean over slices of the images, with averaged networks

    def figures(self, names: Sequence[str] = ()) -> dict[str, dict[str, float]]:
        """Figures by name: `network`, or `network A`, `network B` and `averaged`; `folds` where asked for.

        Args:
            names: What to call the networks instead.
        """
        letters = ascii_uppercase[: len(self.networks)]
        usual = ["network"] if len(letters) == 1 else [f"network {letter}" for letter in letters]
        rows = dict(zip(names or usual, self.networks, strict=True))
        if len(self.networks) > 1:
            rows["averaged"] = self.averaged
        if self.folds is not None:
            rows["folds"] = self.folds
        return {name: result.figures() for name, result in rows.items()}


def check_folds(pairs: Pairs, folds: int) -> None:
    """Refuses a number of slices into which the left items cannot be cut."""
    if folds != 1 and not (isinstance(folds, int) and 1 <= folds <= len(pairs.left)):
        raise ConfigError(
            f"{pairs.name}: {len(pairs.left):,} images cannot be cut into {folds!r} folds; give a number from 1 to "
            f"{len(pairs.left):,}."
        )


def evaluate(matrices: Sequence[Tensor], pairs: Pairs, folds: int = 1) -> Evaluation:
    """Ranks all left items against all right items of `pairs`, by each network's matrix and by their mean."""
    groups = torch.from_numpy(pairs.left_groups), torch.from_numpy(pairs.right_groups)
    average = torch.stack(list(matrices)).mean(dim=0)
    sliced = None if folds == 1 else fold_retrieval(average, *groups, folds)
    return Evaluation([retrieval(S, *groups) for S in matrices], retrieval(average, *groups), sliced)
