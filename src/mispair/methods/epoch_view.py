"""All training pairs as encoded by a network at one moment: their losses and their vectors.

Every method that splits the pairs into clean and noisy ones starts its epochs with this pass. It has no gradients, no
dropout and no augmentation, and its batches are a function of the random generator alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

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
from mispair.pairs.pairs import IntArray

Inputs = TypeVar("Inputs")


@dataclass(frozen=True)
class EpochView:
    """All N pairs, by one network."""

    network: Network
    loader: PairLoader
    losses: Tensor  # (N,) mean over the negatives of a random batch: the paper's L_w
    left: Tensor  # (left items, D) pooled, in half precision
    right: Tensor  # (N, D)
    spread: float  # standard deviation of the similarities in a batch

    def left_of(self, pairs: IntArray) -> Encoded:
        """The left items of these pairs; where a network has only pooled vectors, they are known."""
        if not isinstance(self.network, CosineNetwork):
            return encode_left(self.network, self.loader, pairs)
        rows = torch.from_numpy(self.loader.pairs.link[pairs])
        return Encoded(None, None, self.left[send(rows, self.left.device)].float())

    def right_of(self, pairs: IntArray) -> Encoded:
        """The right items of these pairs."""
        if not isinstance(self.network, CosineNetwork):
            return encode_right(self.network, self.loader, pairs)
        return Encoded(None, None, self.right[send(torch.from_numpy(pairs), self.right.device)].float())


def encode_left(network: Network, loader: PairLoader, pairs: IntArray) -> Encoded:
    """The left items of these pairs in evaluation mode, without gradients."""
    with inference(network):
        return network.encode_left(loader.left.items(loader.pairs.link[pairs]))


def encode_right(network: Network, loader: PairLoader, pairs: IntArray) -> Encoded:
    """The same for the right items."""
    with inference(network):
        return network.encode_right(loader.right.items(pairs))


def epoch_view(net: Network, loader: PairLoader, margin: float, batches: list[IntArray], *, mask: bool) -> EpochView:
    """Computes the loss and the vectors of every pair once.

    Args:
        net: The network, put into evaluation mode for this.
        loader: The pairs.
        margin: Margin alpha of the loss.
        batches: The pairs of each batch; their other pairs are the negatives.
        mask: Whether pairs that share their left item are no negatives of each other.
    """
    with inference(net):
        if isinstance(net, CosineNetwork):
            return _VectorPass(net, loader, margin, mask=mask).run(batches)
        return _ItemPass(net, loader, margin, mask=mask).run(batches)


class _Pass(ABC, Generic[Inputs]):
    """Fills the losses, the spread and the vectors, batch by batch."""

    left: Tensor
    right: Tensor

    def __init__(self, net: Network, loader: PairLoader, margin: float, *, mask: bool) -> None:
        self.net, self.loader, self.margin, self.mask = net, loader, margin, mask
        self.device = next(net.parameters()).device
        self.losses = torch.empty(len(loader.pairs), device=self.device)
        self.spread = torch.zeros((), device=self.device)  # sum over the batches

    def run(self, batches: list[IntArray]) -> EpochView:
        with CudaGraphStep(self.step, on=self.net.team.alone and self.device.type == "cuda") as step:
            for pairs in batches:
                step(self.load(pairs))
        return EpochView(self.net, self.loader, self.losses, self.left, self.right, float(self.spread) / len(batches))

    @abstractmethod
    def load(self, pairs: IntArray) -> Inputs:
        """What `step` needs of a batch, on the device."""

    @abstractmethod
    def step(self, inputs: Inputs) -> None:
        """Computes a batch."""

    def score(self, S: Tensor, groups: Tensor, pairs: Tensor) -> None:
        self.losses[pairs] = sample_losses(S, self.margin, groups[:, None] == groups if self.mask else None)
        self.spread.add_(S.std())


class _VectorPass(_Pass[tuple[Tensor, Tensor]]):
    """Of a network whose pooled vectors give the similarity: each item is encoded once, whatever its pairs."""

    def __init__(self, net: Network, loader: PairLoader, margin: float, *, mask: bool) -> None:
        super().__init__(net, loader, margin, mask=mask)
        self.left = encode_side(net, loader.left, left=True).pooled().half()
        self.right = encode_side(net, loader.right, left=False).pooled().half()
        self.groups = send(torch.from_numpy(loader.pairs.left_groups), self.device)

    def load(self, pairs: IntArray) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(self.loader.pairs.link[pairs])
        return send(rows, self.device), send(torch.from_numpy(pairs), self.device)

    def step(self, inputs: tuple[Tensor, Tensor]) -> None:
        rows, pairs = inputs
        left, right = Encoded(None, None, self.left[rows]), Encoded(None, None, self.right[pairs])
        self.score(self.net.similarity(left, right), self.groups[rows], pairs)


class _ItemPass(_Pass[Batch]):
    """Of a network that compares local vectors: the items of each batch are encoded."""

    def __init__(self, net: Network, loader: PairLoader, margin: float, *, mask: bool) -> None:
        super().__init__(net, loader, margin, mask=mask)
        first = loader.batch(np.zeros(1, dtype=np.int64))  # tells the width
        a, b = net.encode_left(first.left).pooled, net.encode_right(first.right).pooled
        self.left = a.new_zeros(len(loader.pairs.left), a.shape[1], dtype=torch.float16)
        self.right = b.new_zeros(len(loader.pairs), b.shape[1], dtype=torch.float16)

    def load(self, pairs: IntArray) -> Batch:
        return self.loader.batch(pairs, pad_shapes=self.loader.pad_shapes(pairs))

    def step(self, inputs: Batch) -> None:
        with uncached(self.device):
            left, right = (encode_part(self.net, getattr(inputs, side), side) for side in ("left", "right"))
            self.left[inputs.left_rows] = gather_pooled(self.net, left, inputs.left).to(self.left.dtype)
            self.right[inputs.pairs] = gather_pooled(self.net, right, inputs.right).to(self.right.dtype)
            S = compare_parts(self.net, left, right, inputs.left, inputs.right)
            self.score(S, inputs.left_groups, inputs.pairs)
