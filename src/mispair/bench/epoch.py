"""`mispair bench epoch`: how long a whole epoch of a recipe takes at full size, and from that its whole schedule.

Pictures are made up (`standin.py`), captions and noise may be the real ones. An epoch of the warm-up, two main epochs
and two with noisy pairs are trained: everything that an epoch is, with split, labels, new partners and validation. The
first of a kind takes longer, because kernels are compiled and steps recorded in it.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from mispair.api import with_noise
from mispair.bench.standin import stand_in
from mispair.config import Config
from mispair.devices import pick_device
from mispair.engine import Trainer
from mispair.run import Run

VALIDATION = 1000  # images


@dataclass(frozen=True)
class Phase:
    """Epochs of one kind."""

    name: str
    first: float  # seconds of the first one
    seconds: float  # of a later one
    choosing: float  # of these, for the look at all pairs: split, labels, new partners
    steps: int
    epochs: int  # of this kind in the whole schedule

    @property
    def total(self) -> float:
        """Seconds of all epochs of this kind."""
        return self.first + (self.epochs - 1) * self.seconds if self.epochs else 0.0


@dataclass(frozen=True)
class Schedule:
    """What was measured, and what it means for the recipe."""

    device: str
    pairs: int
    phases: list[Phase]
    memory: int | None  # most bytes ever in use on the GPU
    method: dict[str, Any]  # what the method found in the last epoch

    @property
    def seconds(self) -> float:
        """Of the whole schedule."""
        return sum(phase.total for phase in self.phases)

    def figures(self) -> dict[str, Any]:
        phases = [vars(phase) for phase in self.phases]
        return {**vars(self), "phases": phases, "schedule_seconds": self.seconds, "torch": torch.__version__}


def _timed(trainer: Trainer, name: str, times: int, epochs: int) -> Phase:
    """So many epochs by the clock."""
    seconds, steps = [], 0
    for _ in range(times):
        start, before = time.perf_counter(), trainer.cursor.step
        trainer._epoch()
        if trainer.device.type == "cuda":
            torch.cuda.synchronize(trainer.device)
        seconds.append(time.perf_counter() - start)
        steps = trainer.cursor.step - before
    return Phase(name, seconds[0], seconds[-1], trainer.choosing, steps, epochs)


def measure(config: Config, captions: Path | None, images: int, console: Console | None = None) -> Schedule:
    """Trains a few epochs of each kind."""
    device = pick_device(config.device)
    started = int(config.noisy_start * config.epochs + 1e-9)  # main epochs before noisy pairs come in
    kinds = [
        ("warm-up", 1, config.warmup_epochs),
        ("main", 2, started),
        ("main, with noisy pairs", 2, config.epochs - started),
    ]
    train, dev = stand_in(captions, images), stand_in(captions, min(VALIDATION, images), seed=1)
    short = replace(config, data="stand-in", warmup_epochs=1, epochs=4, noisy_start=0.5, checkpoint_seconds=1e9)
    with tempfile.TemporaryDirectory(prefix="mispair-") as folder:
        run = Run(Path(folder) / "run", short)
        trainer = Trainer(short, with_noise(config, train), dev, run, console)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            phases = [_timed(trainer, *kind) for kind in kinds]
        run.close()
    gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if gpu else f"{torch.get_num_threads()} CPU threads"
    memory = torch.cuda.max_memory_allocated(device) if gpu else None
    return Schedule(name, len(train), phases, memory, trainer.method.figures())
