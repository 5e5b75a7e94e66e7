"""Layers for a rank's part of a batch: the random numbers and statistics of the whole batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mispair.compute.distributed import ALONE


class Dropout(nn.Dropout):
    """Dropout of a rank's part of a batch: all ranks together draw the same numbers as one process."""

    team = ALONE

    def forward(self, x: Tensor) -> Tensor:
        count = self.team.count
        if not count or not self.training or not self.p:
            return super().forward(x)
        mask = x.new_empty(count, *x.shape[1:]).bernoulli_(1 - self.p).div_(1 - self.p)
        return x * mask[self.team.part(count)]


class BatchNorm(nn.BatchNorm1d):
    """Batch normalisation of (N, D) or (N, D, L) by the statistics of the `real` rows of all ranks."""

    team = ALONE

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        if not self.training or (real is None and not self.team.count):
            return super().forward(x)
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        team = self.team if self.team.count else ALONE
        kind = torch.promote_types(x.dtype, torch.float32)
        x = x.to(kind).transpose(1, -1)  # features last
        over = tuple(range(x.dim() - 1))
        weight = x.new_ones(x.shape[:-1]) if real is None else real.to(kind)
        weight = weight[..., None]
        count = team.total(weight.sum())
        mean = team.total((x * weight).sum(dim=over)) / count
        centred = (x - mean) * weight
        variance = team.total(centred.square().sum(dim=over)) / count
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum or 0)
            unbiased = variance * count / (count - 1).clamp(min=1)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum or 0)
        normal = centred * (variance + self.eps).rsqrt()
        if self.affine:
            normal = normal * self.weight + self.bias
        return normal.transpose(1, -1)
