"""`mispair bench epoch`: how long a whole epoch of a recipe takes at full size, and from that its whole schedule.

Pictures are made up (`standin.py`), captions and noise may be the real ones. An epoch of the warm-up, two main epochs
and two with noisy pairs, where they take part, are trained: everything that an epoch is, with split, labels, new
partners and validation. The first of a kind takes longer, because kernels are compiled and steps recorded in it.

What a memory bank costs is told apart: its size changes how long it takes to choose the pairs of an epoch, never a
step. So the same networks choose again by banks of several sizes, and without any.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from mispair.compute.devices import autocast, pick_device
from mispair.config import Config, override
from mispair.data.loading import with_noise
from mispair.data.synthetic import synthetic_pairs
from mispair.methods.repair import Repair
from mispair.methods.report import MethodReport
from mispair.training.phases import Phase, phases
from mispair.training.run_folder import Run
from mispair.training.trainer import Trainer

VALIDATION = 1000  # images
TRAINED = (1, 2, 2)  # epochs of the warm-up, of the main ones without and with noisy pairs


@dataclass(frozen=True)
class EpochTime:
    """How long the epochs of one phase take."""

    name: str
    first: float  # seconds of the first one
    seconds: float  # of a later one
    selection_seconds: float  # of these, for the look at all pairs: split, labels, new partners
    steps: int
    epochs: int  # of this kind in the whole schedule

    @property
    def total(self) -> float:
        """Seconds of all epochs of this kind."""
        return self.first + (self.epochs - 1) * self.seconds if self.epochs else 0.0


@dataclass(frozen=True)
class BankCost:
    """Choosing the pairs of an epoch, by banks of one size."""

    name: str
    bank_size: int  # 0: `hard + drop`, which needs no bank
    seconds: float
    share: float  # of a whole epoch of its kind
    bank_bytes: int  # of both networks' banks


@dataclass(frozen=True)
class Schedule:
    """What was measured, and what it means for the recipe."""

    device: str
    pairs: int
    phases: list[EpochTime]
    choices: list[BankCost]  # of REPAIR
    memory: int | None  # most bytes ever in use on the GPU
    method: MethodReport | None  # the method's report on the last epoch

    @property
    def seconds(self) -> float:
        """Of the whole schedule."""
        return sum(phase.total for phase in self.phases)

    def figures(self) -> dict[str, Any]:
        parts: dict[str, Any] = {
            "phases": [vars(phase) for phase in self.phases],
            "choices": [vars(choice) for choice in self.choices],
        }
        parts["method"] = None if self.method is None else self.method.model_dump(exclude_unset=True)
        return {**vars(self), **parts, "schedule_seconds": self.seconds, "torch": torch.__version__}

    def tables(self, recipe: str) -> list[Table]:
        return [self._epoch_table(recipe), *([self._choice_table()] if self.choices else [])]

    def _epoch_table(self, recipe: str) -> Table:
        memory = "" if self.memory is None else f"; at most {self.memory / 1e9:.1f} GB of GPU memory"
        caption = f"whole schedule: {self.seconds / 3600:.2f} h{memory}"
        table = Table(title=f"{recipe}, {self.pairs:,} pairs, {self.device}", caption=caption)
        for head in ("epoch", "first, s", "later, s", "choosing, s", "steps", "epochs"):
            table.add_column(head, justify="left" if head == "epoch" else "right")
        for phase in self.phases:
            parts = (f"{seconds:,.1f}" for seconds in (phase.first, phase.seconds, phase.selection_seconds))
            table.add_row(phase.name, *parts, f"{phase.steps:,}", str(phase.epochs))
        return table

    def _choice_table(self) -> Table:
        table = Table(title="What a bank costs", caption="the same networks choose the pairs of an epoch")
        for head in ("", "pairs in a bank", "both banks, MB", "choosing, s", "of an epoch"):
            table.add_column(head, justify="right" if head else "left")
        for choice in self.choices:
            bank = (f"{choice.bank_size:,}", f"{choice.bank_bytes / 1e6:,.0f}") if choice.bank_size else ("", "")
            table.add_row(choice.name, *bank, f"{choice.seconds:,.1f}", f"{choice.share:.1%}")
        return table


def _timed(trainer: Trainer, phase: Phase, count: int) -> EpochTime:
    """So many epochs by the clock."""
    seconds, steps = [], 0
    for _ in range(count):
        start, before = time.perf_counter(), trainer.cursor.step
        trainer.epoch()
        if trainer.device.type == "cuda":
            torch.cuda.synchronize(trainer.device)
        seconds.append(time.perf_counter() - start)
        steps = trainer.cursor.step - before
    return EpochTime(phase.name, seconds[0], seconds[-1], trainer.selection_seconds, steps, phase.epochs)


def _choices(trainer: Trainer, sizes: Sequence[int], main: EpochTime, noisy: EpochTime) -> list[BankCost]:
    """The same networks choose the pairs of an epoch: without a bank, and by banks of each size."""
    method, config = trainer.method, trainer.config
    if not isinstance(method, Repair):
        return []
    queues, found = method.queues, []
    drop = override(config, {"labels": "hard", "noisy": "drop"})
    kinds = [("hard + drop", 0, drop, main)]
    for size in sizes:
        kinds.append(("RC + drop", size, override(config, {"noisy": "drop"}), main))
        kinds.append(("RC + NPR", size, override(config, {"noisy": "replace"}), noisy))
    for name, size, method.config, phase in kinds:
        method.bank_size = size = min(size, queues[0].shape[1])
        method.queues = [queue[:, queue.shape[1] - size :] for queue in queues]
        start = time.perf_counter()
        with autocast(trainer.device, config.precision):
            method.begin_epoch(config.epochs - 1)
        seconds = time.perf_counter() - start
        size_bytes = sum(bank.nbytes for bank in method.banks) if size else 0
        found.append(
            BankCost(name, size, seconds, seconds / (phase.seconds - phase.selection_seconds + seconds), size_bytes)
        )
    return found


def measure(
    config: Config, captions: Path | None, images: int, banks: Sequence[int] = (), console: Console | None = None
) -> Schedule:
    """Trains a few epochs of each kind, by the largest of these banks; then chooses by each of them."""
    config = override(config, {"bank_size": max(banks, default=config.repair.bank_size)})
    device = pick_device(config.device)
    train, dev = synthetic_pairs(captions, images), synthetic_pairs(captions, min(VALIDATION, images), seed=1)
    schedule = {"warmup_epochs": 1, "epochs": 4, "noisy_start": 0.5, "checkpoint_seconds": 1e9}
    short = override(config, {"data": "stand-in", **schedule})
    with tempfile.TemporaryDirectory(prefix="mispair-") as folder, Run(Path(folder) / "run", short) as run:
        trainer = Trainer(short, with_noise(config, train), dev, run, console)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            times = [_timed(trainer, phase, count) for phase, count in zip(phases(config), TRAINED, strict=False)]
            report = trainer.report
            choices = _choices(trainer, sorted(banks), main=times[1], noisy=times[-1])
    gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if gpu else f"{torch.get_num_threads()} CPU threads"
    memory = torch.cuda.max_memory_allocated(device) if gpu else None
    return Schedule(name, len(train), times, choices, memory, report)
