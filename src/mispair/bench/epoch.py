"""`mispair bench epoch`: how long a whole epoch of a recipe takes at full size, and from that its whole schedule.

Pictures are made up (`standin.py`), captions and noise may be the real ones. An epoch of the warm-up, two main epochs
and two with noisy pairs are trained: everything that an epoch is, with split, labels, new partners and validation. The
first of a kind takes longer, because kernels are compiled and steps recorded in it.

What a memory bank costs is told apart: its size changes how long it takes to choose the pairs of an epoch, never a
step. So the same networks choose again by banks of several sizes, and without any.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from mispair.api import with_noise
from mispair.bench.standin import stand_in
from mispair.config import Config
from mispair.devices import autocast, pick_device
from mispair.engine import Trainer
from mispair.methods.repair import Repair
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
class Choice:
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
    phases: list[Phase]
    choices: list[Choice]  # of REPAIR
    memory: int | None  # most bytes ever in use on the GPU
    method: dict[str, Any]  # what the method found in the last epoch

    @property
    def seconds(self) -> float:
        """Of the whole schedule."""
        return sum(phase.total for phase in self.phases)

    def figures(self) -> dict[str, Any]:
        parts = {"phases": [vars(phase) for phase in self.phases], "choices": [vars(choice) for choice in self.choices]}
        return {**vars(self), **parts, "schedule_seconds": self.seconds, "torch": torch.__version__}


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


def _choices(trainer: Trainer, sizes: Sequence[int], main: Phase, noisy: Phase) -> list[Choice]:
    """The same networks choose the pairs of an epoch: without a bank, and by banks of each size."""
    method, config = trainer.method, trainer.config
    if not isinstance(method, Repair):
        return []
    queues, found = method.queues, []
    drop = replace(config, labels="hard", noisy="drop")
    kinds = [("hard + drop", 0, drop, main)]
    for size in sizes:
        kinds.append(("RC + drop", size, replace(config, noisy="drop"), main))
        kinds.append(("RC + NPR", size, replace(config, noisy="replace"), noisy))
    for name, size, method.config, phase in kinds:
        method.bank_size = size = min(size, queues[0].shape[1])
        method.queues = [queue[:, queue.shape[1] - size :] for queue in queues]
        start = time.perf_counter()
        with autocast(trainer.device, config.precision):
            method.begin_epoch(config.epochs - 1)
        seconds = time.perf_counter() - start
        size_bytes = sum(bank.nbytes for bank in method.banks) if size else 0
        found.append(Choice(name, size, seconds, seconds / (phase.seconds - phase.choosing + seconds), size_bytes))
    return found


def measure(
    config: Config, captions: Path | None, images: int, banks: Sequence[int] = (), console: Console | None = None
) -> Schedule:
    """Trains a few epochs of each kind, by the largest of these banks; then chooses by each of them."""
    config = replace(config, bank_size=max(banks, default=config.bank_size))
    device = pick_device(config.device)
    started = config.noisy_from  # main epochs before noisy pairs come in
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
            method = trainer.method.figures()
            choices = _choices(trainer, sorted(banks), *phases[1:])
        run.close()
    gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if gpu else f"{torch.get_num_threads()} CPU threads"
    memory = torch.cuda.max_memory_allocated(device) if gpu else None
    return Schedule(name, len(train), phases, choices, memory, method)
