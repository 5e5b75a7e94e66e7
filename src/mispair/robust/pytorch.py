"""Adapter for plain PyTorch: a loss module that takes the embeddings of a batch, on one GPU or several.

loader = DataLoader(dataset, batch_sampler=robust.sampler(64))  # the dataset gives the number of each pair, too
loss = RobustLoss(robust)(image_embeddings, text_embeddings, rows)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import normalize

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
        """The loss of a batch.

        Args:
            left: (B, D) embeddings of the left items, of any length.
            right: (B, D) embeddings of the right items.
            rows: (B,) numbers of the pairs.
            logit_scale: As in `Robust.loss`.
            logit_bias: As in `Robust.loss`.
        """
        left, right = (normalize(side.float(), dim=-1).contiguous() for side in (left, right))
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            left, right = (_Gather.apply(side) for side in (left, right))  # type: ignore[no-untyped-call]
            rows = _gathered(rows.to(left.device))
        with torch.autocast(left.device.type, enabled=False):  # bfloat16 has steps of 0.004 near 1
            similarity = left @ right.T
        return self.robust.loss(similarity, rows, logit_scale=logit_scale, logit_bias=logit_bias)


class _Gather(torch.autograd.Function):
    """The rows of all processes. A row's gradient is the sum of those that the losses of all give it."""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:  # noqa: ARG004 - one signature
        return _gathered(part)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ARG004
        gradient = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


def _gathered(part: Tensor) -> Tensor:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part)
    return torch.cat(parts)
