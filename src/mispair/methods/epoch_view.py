"""All training pairs as a network sees them at one moment: their losses and their vectors.

Every method that splits the pairs into clean and noisy ones starts its epochs with this pass. It has no gradients, no
dropout and no augmentation, and its batches are a function of the random generator alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mispair.compute.cuda_graphs import CudaGraphStep
from mispair.compute.devices import send, uncached
from mispair.data.batches import Batch, PairLoader
from mispair.data.pairs import IntArray
from mispair.functional.losses import sample_losses
from mispair.models import CosineNetwork, Encoded, Network
from mispair.models.inference import encode_side, inference


@dataclass(frozen=True)
class EpochView:
    """What one network says about all N pairs."""

    network: Network
    loader: PairLoader
    losses: Tensor  # (N,) mean over the negatives of a random batch: the paper's L_w
    left: Tensor  # (left items, D) pooled, in half precision
    right: Tensor  # (N, D)
    spread: float  # standard deviation of the similarities in a batch

    def left_of(self, pairs: IntArray) -> Encoded:
        """The left items of these pairs; where pooled vectors are all that a network has, they are at hand."""
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
    """The left items of these pairs as they are seen in evaluation mode, without gradients."""
    with inference(network):
        return network.encode_left(loader.left.items(loader.pairs.link[pairs]))


def encode_right(network: Network, loader: PairLoader, pairs: IntArray) -> Encoded:
    """The same for the right items."""
    with inference(network):
        return network.encode_right(loader.right.items(pairs))


def epoch_view(net: Network, loader: PairLoader, margin: float, batches: list[IntArray], *, mask: bool) -> EpochView:
    """Looks at every pair once.

    Args:
        net: The network, put into evaluation mode for this.
        loader: The pairs.
        margin: Margin alpha of the loss.
        batches: The pairs of each batch; their other pairs are the negatives.
        mask: Whether pairs that share their left item are no negatives of each other.
    """
    pairs, device = loader.pairs, next(net.parameters()).device
    losses, spread = torch.empty(len(pairs), device=device), torch.zeros((), device=device)
    group = send(torch.from_numpy(pairs.left_groups), device)
    once = isinstance(net, CosineNetwork)  # its vectors are all there is to know, so each item is encoded only once
    with inference(net):
        left, right = _pooled(net, loader) if once else _room(net, loader)

        def look(a: Encoded, b: Encoded, groups: Tensor, numbers: Tensor) -> None:
            S = net.similarity(a, b)
            losses[numbers] = sample_losses(S, margin, groups[:, None] == groups if mask else None)
            spread.add_(S.std() / len(batches))

        def look_at_vectors(indices: tuple[Tensor, Tensor]) -> None:
            rows, numbers = indices
            look(Encoded(None, None, left[rows]), Encoded(None, None, right[numbers]), group[rows], numbers)

        def look_at_items(batch: Batch) -> None:
            with uncached(device):
                a, b = net.encode_left(batch.left), net.encode_right(batch.right)
                left[batch.left_rows], right[batch.pairs] = a.pooled.to(left.dtype), b.pooled.to(right.dtype)
                look(a, b, batch.left_groups, batch.pairs)

        on = device.type == "cuda"
        with CudaGraphStep(look_at_vectors, on=on) as at_vectors, CudaGraphStep(look_at_items, on=on) as at_items:
            for chosen in batches:
                if once:
                    rows = torch.from_numpy(pairs.link[chosen])
                    at_vectors((send(rows, device), send(torch.from_numpy(chosen), device)))
                else:
                    at_items(loader.batch(chosen, pad_shapes=loader.pad_shapes(chosen)))
    return EpochView(net, loader, losses, left, right, float(spread))


def _pooled(net: Network, loader: PairLoader) -> tuple[Tensor, Tensor]:
    left, right = encode_side(net, loader.left, left=True), encode_side(net, loader.right, left=False)
    return left.pooled().half(), right.pooled().half()


def _room(net: Network, loader: PairLoader) -> tuple[Tensor, Tensor]:
    """Empty vectors of all items, as wide as those of the first pair."""
    first = loader.batch(np.zeros(1, dtype=np.int64))
    a, b = net.encode_left(first.left).pooled, net.encode_right(first.right).pooled
    left = a.new_zeros(len(loader.pairs.left), a.shape[1], dtype=torch.float16)
    return left, b.new_zeros(len(loader.pairs), b.shape[1], dtype=torch.float16)
