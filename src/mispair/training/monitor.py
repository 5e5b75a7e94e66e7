"""Watching a training run from the device's side: figures, non-finite numbers and collapse, without waiting for it.

Reading anything back from a GPU makes the host wait, so figures are only collected at each step and read together
every now and then.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mispair.methods.base import StepResult

READ_EVERY = 20  # steps between two looks
COLLAPSED = 0.002  # share of the widest spread so far below which the similarities count as equal
FEW = 8  # batches of fewer pairs say nothing about the spread: they may all share one picture
HEALTHY = 0.02  # share of it above which a checkpoint is worth keeping


class Figures(NamedTuple):
    """What is worth knowing of a step, on the device."""

    names: tuple[str, ...]
    values: Tensor  # one for each name


class StepMonitor:
    """Collects the figures of the steps since the last look.

    Attributes:
        non_finite: 1 from the first step on whose loss or gradient was not finite. Given to the optimizers as
            their `found_inf`, it holds back that update and all that follow until somebody looks.
        spread: Standard deviation of a batch's similarities, mean since the look before last.
        peak: The widest spread so far.
    """

    def __init__(self, device: torch.device) -> None:
        self.non_finite = torch.zeros((), device=device)
        self.spread, self.peak = math.inf, 0.0  # nothing seen yet that could be judged
        self._pairs = 0
        self._unread: list[tuple[int, tuple[str, ...], Tensor]] = []

    def judge(self, result: StepResult, norm: Tensor) -> Figures:
        """The figures of a step, between its backward pass and its update."""
        loss, pairs = result.loss.detach(), len(result.S)
        # Both are looked at: the hinge has no gradient at NaN, so a NaN can hide from the norm.
        self.non_finite.copy_(torch.maximum(self.non_finite, (~torch.isfinite(loss + norm)).float()))
        logged = loss / pairs if result.logged is None else result.logged.detach() + 0 * loss  # a NaN must be seen
        figures = {"loss": logged, "spread": spread(result.S), "grad_norm": norm, **result.report}
        return Figures(tuple(figures), torch.stack([value.detach().float() for value in figures.values()]))

    def note(self, step: int, figures: Figures, pairs: int) -> None:
        """Keeps the figures of step number `step` until somebody looks."""
        self._pairs += pairs
        self._unread.append((step, figures.names, figures.values.clone()))

    @property
    def unread(self) -> int:
        """Steps since the last look."""
        return len(self._unread)

    def read(self) -> tuple[dict[str, float], int | None]:
        """Mean figures since the last look, and the first step that was not finite, if there was one."""
        steps, names, values = zip(*self._unread, strict=True)
        rows = [dict(zip(*row, strict=True)) for row in zip(names, torch.stack(values).tolist(), strict=True)]
        bad = (row["loss"] + row["grad_norm"] for row in rows)
        bad_step = next((step for step, figure in zip(steps, bad, strict=True) if not math.isfinite(figure)), None)
        figures = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
        if self._pairs >= FEW * self.unread:
            self.spread = figures["spread"]
            self.peak = max(self.peak, self.spread)
        self._unread, self._pairs = [], 0
        return figures, bad_step

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
