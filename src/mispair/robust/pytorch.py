"""Adapter for plain PyTorch: a loss module for the embeddings of a batch, on one GPU or several.

loader = DataLoader(dataset, batch_sampler=robust.sampler(64))  # the dataset gives the number of each pair, too
loss = RobustLoss(robust)(image_embeddings, text_embeddings, rows)
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import normalize

from mispair.compute.distributed import Team
from mispair.robust.robust import Robust


class RobustLoss(nn.Module):
    """`Robust.loss` of embeddings. With `torch.distributed`, items of all processes are each other's negatives."""

    def __init__(self, robust: Robust) -> None:
        super().__init__()
        self.robust = robust

    def forward(
        self,
        left: Tensor,
        right: Tensor,
        rows: Tensor,
        logit_scale: float | Tensor | None = None,
        logit_bias: float | Tensor | None = None,
    ) -> Tensor:
        """The loss of a batch: embeddings (B, D) of both sides, of any length, and the numbers of the pairs (B,).

        The scale and the bias are those of `Robust.loss`.
        """
        left, right = (normalize(side.float(), dim=-1).contiguous() for side in (left, right))
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            team = Team(dist.get_rank(), dist.get_world_size())
            count = team.size * len(rows)
            left, right, rows = (team.gather(part, count) for part in (left, right, rows.to(left.device)))
        with torch.autocast(left.device.type, enabled=False):  # bfloat16 has steps of 0.004 near 1
            similarity = left @ right.T
        return self.robust.loss(similarity, rows, logit_scale=logit_scale, logit_bias=logit_bias)
