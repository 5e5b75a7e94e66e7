"""Losses and vectors of all training pairs, by one network at one moment.

Co-teaching starts its epochs with this pass, without gradients, dropout and augmentation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mispair.compute.cuda_graphs import CudaGraphStep
from mispair.compute.devices import send, uncached
from mispair.functional.losses import sample_losses
from mispair.models import CosineNetwork, Encoded, Network
from mispair.models.comparison import compare_parts, encode_part, gather_pooled
from mispair.models.inference import encode_side, inference
from mispair.pairs.batches import Batch, PairLoader
from mispair.support.arrays import IntArray

Compared = tuple[Tensor, Tensor, Tensor]  # similarities of a batch, the groups of its left items, its pairs
Pass = tuple[Tensor, Tensor, Callable[[IntArray], Any], Callable[[Any], Compared]]  # vectors; loads, compares a batch


@dataclass(frozen=True)
class EpochView:
    """All N pairs as one network sees them."""

    network: Network
    loader: PairLoader
    losses: Tensor  # (N,) mean over the negatives of a random batch: the paper's L_w
    left: Tensor  # (left items, D) pooled, in half precision
    right: Tensor  # (N, D)
    spread: float  # standard deviation of the similarities in a batch

    def encoded(self, pairs: IntArray, *, left: bool) -> Encoded:
        """Encode one side of these pairs, or look it up if the network has only pooled vectors."""
        if not isinstance(self.network, CosineNetwork):
            return encode_items(self.network, self.loader, pairs, left=left)
        known, rows = (self.left, self.loader.pairs.link[pairs]) if left else (self.right, pairs)
        return Encoded(None, None, known[send(torch.from_numpy(rows), known.device)].float())


def encode_items(network: Network, loader: PairLoader, pairs: IntArray, *, left: bool) -> Encoded:
    """Encode the left or right items of these pairs in evaluation mode, without gradients."""
    with inference(network):
        if left:
            return network.encode_left(loader.left.items(loader.pairs.link[pairs]))
        return network.encode_right(loader.right.items(pairs))


def epoch_view(net: Network, loader: PairLoader, margin: float, batches: list[IntArray], *, mask: bool) -> EpochView:
    """Compute the loss and the vectors of every pair once, in evaluation mode.

    The negatives are the other pairs of a batch, with `mask` without those of the same left item.
    """
    device = next(net.parameters()).device
    losses, spread = torch.empty(len(loader.pairs), device=device), torch.zeros((), device=device)
    with inference(net):
        left, right, load, compared = (_of_vectors if isinstance(net, CosineNetwork) else _of_items)(
            net, loader, device
        )

        def step(inputs: Any) -> None:
            S, groups, pairs = compared(inputs)
            losses[pairs] = sample_losses(S, margin, groups[:, None] == groups if mask else None)
            spread.add_(S.std())

        with CudaGraphStep(step, on=net.team.alone and device.type == "cuda") as run:
            for pairs in batches:
                run(load(pairs))
    return EpochView(net, loader, losses, left, right, float(spread) / len(batches))


def _of_vectors(net: Network, loader: PairLoader, device: torch.device) -> Pass:
    """Prepare a pass for networks with pooled vectors: encode each item once, for all its pairs."""
    left = encode_side(net, loader.left, left=True).pooled().half()
    right = encode_side(net, loader.right, left=False).pooled().half()
    groups = send(torch.from_numpy(loader.pairs.left_groups), device)

    def load(pairs: IntArray) -> tuple[Tensor, Tensor]:
        return send(torch.from_numpy(loader.pairs.link[pairs]), device), send(torch.from_numpy(pairs), device)

    def compared(inputs: tuple[Tensor, Tensor]) -> Compared:
        rows, pairs = inputs
        sides = Encoded(None, None, left[rows]), Encoded(None, None, right[pairs])
        return net.similarity(*sides), groups[rows], pairs

    return left, right, load, compared


def _of_items(net: Network, loader: PairLoader, device: torch.device) -> Pass:
    """Prepare a pass for networks with local vectors: encode the items of each batch."""
    first = loader.batch(np.zeros(1, dtype=np.int64))  # tells the width
    a, b = net.encode_left(first.left).pooled, net.encode_right(first.right).pooled
    left = a.new_zeros(len(loader.pairs.left), a.shape[1], dtype=torch.float16)
    right = b.new_zeros(len(loader.pairs), b.shape[1], dtype=torch.float16)

    def load(pairs: IntArray) -> Batch:
        return loader.batch(pairs, pad_shapes=loader.pad_shapes(pairs))

    def compared(batch: Batch) -> Compared:
        with uncached(device):
            one, other = (encode_part(net, getattr(batch, side), side) for side in ("left", "right"))
            left[batch.left_rows] = gather_pooled(net, one, batch.left).to(left.dtype)
            right[batch.pairs] = gather_pooled(net, other, batch.right).to(right.dtype)
            return compare_parts(net, one, other, batch.left, batch.right), batch.left_groups, batch.pairs

    return left, right, load, compared
