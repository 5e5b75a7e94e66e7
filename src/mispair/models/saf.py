"""SAF (Diao et al., AAAI 2021): a gate lets the similarity vectors of telling words through and holds others back.

Only its training departs from the published code. That calls the gate's batch normalisation once a caption: its
statistics are those of one caption with all images, and the running ones move as often as a batch has captions. Here it
is called once, over the nodes of all captions. In evaluation mode both compute the same numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mispair.config import Config
from mispair.models.base import SideSpec, l2norm, xavier_linear
from mispair.models.precision import EPSILON, full_precision, working
from mispair.models.ragged import MaskedBatchNorm, Packing
from mispair.models.sgraf import SimilarityVectors, ownership, score_layer


class AttentionFilter(nn.Module):
    """A sum of the nodes of each graph, weighted by how much of each passes its gate, brought to unit length."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gate, self.norm = xavier_linear(size, 1), MaskedBatchNorm(1)

    def forward(self, nodes: Tensor, words: Packing) -> Tensor:
        """From nodes (l, r + T, s), as `GraphReasoning` has them, to (l, r, s)."""
        owner = ownership(words).T
        graphs = torch.cat([torch.eye(len(owner), device=owner.device), owner], dim=1)  # (r, r + T) 0 or 1
        real = torch.cat([words.taken.new_ones(len(owner)), words.taken]).expand(nodes.shape[:2])
        with full_precision(nodes):
            # The normalisation would blow up what half precision has rounded.
            passed = self.norm(self.gate(nodes.float()).flatten(0, 1), real.flatten()).sigmoid().view(real.shape)
            total = passed @ graphs.T  # (l, r)
        summed = (working(passed)[:, None] * working(graphs)) @ working(nodes)
        return l2norm(summed.float() / (total + EPSILON)[..., None])


class SAF(SimilarityVectors):
    """Similarity attention filtration."""

    def __init__(self, left: SideSpec, right: SideSpec, config: Config) -> None:
        super().__init__(left, right, config)
        self.filter = AttentionFilter(config.sim_size)
        self.score = score_layer(config)

    def join(self, nodes: Tensor, words: Packing) -> Tensor:
        joined: Tensor = self.filter(nodes, words)
        return joined
