"""Watching a training run from the device's side: figures, non-finite numbers and collapse, without waiting for it.

Reading anything back from a GPU makes the host wait, so figures are only collected at each step and read together
every now and then.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mispair.methods.base import Step

READ_EVERY = 20  # steps between two looks
COLLAPSED = 0.002  # share of the widest spread so far below which the similarities count as equal
FEW = 8  # batches of fewer pairs say nothing about the spread: they may all share one picture
HEALTHY = 0.02  # share of it above which a checkpoint is worth keeping


class Watch:
    """Collects the figures of the steps since the last look.

    Attributes:
        non_finite: 1 from the first step on whose loss or gradient was not finite. Given to the optimizers as
            their `found_inf`, it holds back that update and all that follow until somebody looks.
        spread: Standard deviation of a batch's similarities, mean since the look before last.
        peak: The widest spread so far.
    """

    def __init__(self, device: torch.device) -> None:
        self.non_finite = torch.zeros((), device=device)
        self.bad_step = torch.full((), -1, dtype=torch.long, device=device)
        self.spread, self.peak = math.inf, 0.0  # nothing seen yet that could be judged
        self._pairs = 0
        self._unread: list[dict[str, Tensor]] = []

    def observe(self, step: int, result: Step, pairs: int, norm: Tensor) -> None:
        """Notes a step, between its backward pass and its update."""
        # Both are looked at: the hinge has no gradient at NaN, so a NaN can hide from the norm.
        bad = ~torch.isfinite(result.loss.detach() + norm)
        self.bad_step = torch.where(bad & (self.bad_step < 0), step, self.bad_step)
        self.non_finite.copy_(torch.maximum(self.non_finite, bad.float()))
        figures = {"loss": result.loss.detach() / pairs, "spread": spread(result.S), "grad_norm": norm.detach()}
        self._pairs += pairs
        self._unread.append({**figures, **{name: value.detach() for name, value in result.report.items()}})

    @property
    def unread(self) -> int:
        """Steps since the last look."""
        return len(self._unread)

    def read(self) -> tuple[dict[str, float], int | None]:
        """Mean figures since the last look, and the first step that was not finite, if there was one."""
        names = list(self._unread[0])
        means = torch.stack([torch.stack([f[name].float() for name in names]) for f in self._unread]).mean(dim=0)
        bad_step = int(self.bad_step.item())
        figures = dict(zip(names, means.tolist(), strict=True))
        if self._pairs >= FEW * self.unread:
            self.spread = figures["spread"]
            self.peak = max(self.peak, self.spread)
        self._unread, self._pairs = [], 0
        return figures, bad_step if bad_step >= 0 else None

    @property
    def collapsed(self) -> bool:
        return self.spread < max(COLLAPSED * self.peak, 1e-6)

    @property
    def healthy(self) -> bool:
        """Whether a checkpoint of this state is worth more than the one before: not on its way to a collapse."""
        return self.spread >= HEALTHY * self.peak


def spread(S: Tensor) -> Tensor:
    """How far the similarities lie apart: their standard deviation. 0 means that the network tells nothing apart."""
    return S.detach().float().std()
