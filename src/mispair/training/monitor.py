"""Monitor a training on the device: metrics, non-finite numbers, collapse.

Reading from a GPU makes the host wait, so metrics are collected at each step and read every 20 steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mispair.methods.base import StepResult

READ_EVERY = 20  # steps, at the latest
WINDOW = 20  # steps over which the spread is averaged
COLLAPSED = 0.002  # share of the widest spread so far below which the similarities count as equal
FEW = 8  # batches of fewer pairs say nothing about the spread: they may all share one image
HEALTHY = 0.02  # share of the widest spread above which a checkpoint is worth keeping


@dataclass
class Health:
    """Detect collapse of a network, by windows of `WINDOW` steps.

    The windows are counted in steps and saved with a checkpoint, so that it does not matter when metrics are read.
    """

    spread: float = math.inf  # standard deviation of a batch's similarities, mean over the last whole window
    peak: float = 0.0  # the widest spread so far
    steps: int = 0  # of the present window
    pairs: int = 0  # of these steps
    total: float = 0.0  # of their spreads

    def add(self, spread: float, pairs: int) -> None:
        """Count a step."""
        self.steps, self.pairs, self.total = self.steps + 1, self.pairs + pairs, self.total + spread
        if self.steps == WINDOW:
            if self.pairs >= FEW * WINDOW:
                self.spread = self.total / WINDOW
                self.peak = max(self.peak, self.spread)
            self.steps, self.pairs, self.total = 0, 0, 0.0

    @property
    def collapsed(self) -> bool:
        return self.spread < max(COLLAPSED * self.peak, 1e-6)

    @property
    def healthy(self) -> bool:
        """Whether a checkpoint is worth keeping: the network is not about to collapse."""
        return self.spread >= HEALTHY * self.peak


class StepMetrics(NamedTuple):
    """Metrics of a step, on the device."""

    names: tuple[str, ...]
    values: Tensor  # one for each name


class StepMonitor:
    """Collect the metrics of steps until they are read."""

    def __init__(self, device: torch.device) -> None:
        # 1 after a loss or gradient that is not finite. As `found_inf` of the optimizers it stops all further updates.
        self.non_finite = torch.zeros((), dtype=torch.float32, device=device)
        self.health = Health()  # by the steps read so far
        self._unread: list[tuple[int, int, tuple[str, ...], Tensor]] = []

    def measure(self, result: StepResult, norm: Tensor) -> StepMetrics:
        """Measure a step, between its backward pass and its update."""
        loss, pairs = result.loss.detach(), len(result.S)
        # Both are checked, because the hinge has no gradient at NaN, so the norm can miss a NaN.
        self.non_finite.copy_(torch.maximum(self.non_finite, (~torch.isfinite(loss + norm)).to(self.non_finite.dtype)))
        logged = loss / pairs if result.logged is None else result.logged.detach() + 0 * loss  # a NaN must be seen
        metrics = {"loss": logged, "spread": spread(result.S), "grad_norm": norm, **result.metrics}
        return StepMetrics(tuple(metrics), torch.stack([value.detach().float() for value in metrics.values()]))

    def add(self, step: int, metrics: StepMetrics, pairs: int) -> None:
        """Keep the metrics of a step until they are read."""
        self._unread.append((step, pairs, metrics.names, metrics.values.clone()))

    @property
    def unread(self) -> int:
        """Number of steps with unread metrics."""
        return len(self._unread)

    def read(self) -> tuple[dict[str, float], int | None]:
        """Return the mean metrics of the unread steps, and the first non-finite step or None."""
        steps, pairs, names, values = zip(*self._unread, strict=True)
        rows = [dict(zip(*row, strict=True)) for row in zip(names, torch.stack(values).tolist(), strict=True)]
        sums = (row["loss"] + row["grad_norm"] for row in rows)
        bad_step = next((step for step, value in zip(steps, sums, strict=True) if not math.isfinite(value)), None)
        metrics = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
        for row, count in zip(rows, pairs, strict=True):
            self.health.add(row["spread"], count)
        self._unread = []
        return metrics, bad_step


def spread(S: Tensor) -> Tensor:
    """Standard deviation of the similarities; 0 if the network distinguishes nothing."""
    return S.detach().float().std()
