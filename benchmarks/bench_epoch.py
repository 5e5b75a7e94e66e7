"""Measure whole epochs of a recipe at full size, and estimate its schedule from them: `make bench-epoch`.

Images are generated (`synthetic.py`), captions and noise may be real. An epoch of the warm-up, two main
epochs and two of a later phase, with noisy pairs or a student, are trained with split, labels, replacements and
validation. The first of a kind takes longer, because kernels are compiled and steps recorded in it. Generated images
cannot be audited: where a method audits first, the truth takes the place of the match scores, and the audit is not part
of the time.

The cost of the memory bank is measured by itself: its size changes how long it takes to select the pairs of an epoch,
never a step. So the same networks select again with banks of several sizes, and without any.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from captions import stand_in
from common import at_least, run
from mispair import methods, models
from mispair.cli import output
from mispair.compute.devices import autocast, pick_device
from mispair.config import Config
from mispair.errors import NotFoundError
from mispair.methods.epoch_metrics import MethodReport
from mispair.methods.repair import Repair
from mispair.pairs.noise import with_noise
from mispair.settings import RepairSettings
from mispair.training.run_folder import Run
from mispair.training.settings import override, read_recipe
from mispair.training.trainer import Trainer
from phases import Phase, phases

VALIDATION = 1000  # images
MOST = 2  # epochs of a phase that are trained


@dataclass(frozen=True)
class EpochTime:
    """How long the epochs of one phase take."""

    name: str
    first: float  # seconds of the first one
    seconds: float  # of a later one
    selection_seconds: float  # of these, before the first step: split, labels, replacements
    steps: int
    epochs: int  # of this phase in the whole schedule

    @property
    def total(self) -> float:
        """Seconds of all epochs of this phase."""
        return self.first + (self.epochs - 1) * self.seconds if self.epochs else 0.0


@dataclass(frozen=True)
class BankCost:
    """Selecting the pairs of an epoch with banks of one size."""

    name: str
    bank_size: int  # 0: `hard + drop`, which needs no bank
    seconds: float
    fraction: float  # of a whole epoch of its phase
    bank_bytes: int  # of both networks' banks


@dataclass(frozen=True)
class Schedule:
    """The measured epochs, and the whole schedule of the recipe."""

    device: str
    pairs: int
    phases: list[EpochTime]
    banks: list[BankCost]  # of REPAIR
    memory: int | None  # peak bytes on the GPU
    report: MethodReport | None  # of the method, on the last epoch

    @property
    def seconds(self) -> float:
        """Of the whole schedule."""
        return sum(phase.total for phase in self.phases)

    def to_json(self) -> dict[str, Any]:
        report = None if self.report is None else self.report.model_dump(exclude_unset=True)
        return {**asdict(self), "report": report, "schedule_seconds": self.seconds, "torch": torch.__version__}

    def tables(self, recipe: str) -> list[Table]:
        return [self._epoch_table(recipe), *([self._bank_table()] if self.banks else [])]

    def _epoch_table(self, recipe: str) -> Table:
        memory = "" if self.memory is None else f"; at most {self.memory / 1e9:.1f} GB of GPU memory"
        caption = f"whole schedule: {self.seconds / 3600:.2f} h{memory}"
        table = Table(title=f"{recipe}, {self.pairs:,} pairs, {self.device}", caption=caption)
        for head in ("epoch", "first, s", "later, s", "selection, s", "steps", "epochs"):
            table.add_column(head, justify="left" if head == "epoch" else "right")
        for phase in self.phases:
            parts = (f"{seconds:,.1f}" for seconds in (phase.first, phase.seconds, phase.selection_seconds))
            table.add_row(phase.name, *parts, f"{phase.steps:,}", str(phase.epochs))
        return table

    def _bank_table(self) -> Table:
        table = Table(title="Cost of the bank", caption="the same networks select the pairs of an epoch")
        for head in ("", "pairs in a bank", "both banks, MB", "selection, s", "of an epoch"):
            table.add_column(head, justify="right" if head else "left")
        for cost in self.banks:
            bank = (f"{cost.bank_size:,}", f"{cost.bank_bytes / 1e6:,.0f}") if cost.bank_size else ("", "")
            table.add_row(cost.name, *bank, f"{cost.seconds:,.1f}", f"{cost.fraction:.1%}")
        return table


def _timed(trainer: Trainer, phase: Phase, count: int) -> EpochTime:
    """Trains so many epochs."""
    seconds, steps = [], 0
    for _ in range(count):
        start, before = time.perf_counter(), trainer.cursor.step
        trainer.epoch()
        if trainer.device.type == "cuda":
            torch.cuda.synchronize(trainer.device)
        seconds.append(time.perf_counter() - start)
        steps = trainer.cursor.step - before
    return EpochTime(phase.name, seconds[0], seconds[-1], trainer.selection_seconds, steps, phase.epochs)


def _bank_costs(trainer: Trainer, sizes: Sequence[int], main: EpochTime, noisy: EpochTime) -> list[BankCost]:
    """The same networks select the pairs of an epoch: without a bank, and with banks of each size."""
    method, config = trainer.method, trainer.config
    if not isinstance(method, Repair):
        return []
    queues, costs = method.queues, []
    kinds = [("hard + drop", 0, {"labels": "hard", "noisy": "drop"}, main)]
    for size in sizes:
        kinds.append(("RC + drop", size, {"noisy": "drop"}, main))
        kinds.append(("RC + NPR", size, {"noisy": "replace"}, noisy))
    for name, wanted, settings, phase in kinds:
        size = min(wanted, queues[0].shape[1])
        method.config = override(config, settings)
        method.bank_size = size
        method.queues = [queue[:, queue.shape[1] - size :] for queue in queues]
        start = time.perf_counter()
        with autocast(trainer.device, config.precision):
            method.begin_epoch(config.epochs - 1)
        seconds = time.perf_counter() - start
        epoch = phase.seconds - phase.selection_seconds + seconds
        bank_bytes = sum(bank.nbytes for bank in method.banks) if size else 0
        costs.append(BankCost(name, size, seconds, seconds / epoch, bank_bytes))
    return costs


def measure(
    config: Config, captions: Path | None, images: int, banks: Sequence[int] = (), console: Console | None = None
) -> Schedule:
    """Trains a few epochs of each phase with the largest of these banks; then selects with each of them."""
    config = override(config, {"bank_size": max(banks, default=config.of(RepairSettings).bank_size)})
    device = pick_device(config.device)
    vectors = models.find(config.model).takes_vectors
    train = stand_in(vectors, captions, images)
    dev = stand_in(vectors, captions, min(VALIDATION, images), seed=1)
    halves = {"noisy_start": 0.5, "student_share": 0.5}
    schedule = {"warmup_epochs": min(1, config.warmup_epochs), "epochs": 2 * MOST, "checkpoint_seconds": 1e9, **halves}
    short = override(config, {"data": "stand-in", **schedule})
    train = with_noise(config, train)
    if methods.select(config).audits:
        wrong = np.zeros(len(train), dtype=bool) if train.mismatched is None else train.mismatched
        train = replace(train, match_score=(~wrong).astype(np.float32))
    with tempfile.TemporaryDirectory(prefix="mispair-") as folder, Run(Path(folder) / "run", short) as run:
        trainer = Trainer(short, train, dev, run, console)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            planned = zip(*(phases(one) for one in (config, short)), strict=True)
            times = [_timed(trainer, phase, min(MOST, few.epochs)) for phase, few in planned if few.epochs]
            report = trainer.report
            main = next(epochs for epochs in times if epochs.name == "main")
            costs = _bank_costs(trainer, sorted(banks), main, noisy=times[-1])
    gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if gpu else f"{torch.get_num_threads()} CPU threads"
    memory = torch.cuda.max_memory_allocated(device) if gpu else None
    return Schedule(name, len(train), times, costs, memory, report)


def main(
    *,
    recipe: str = "f30k/repair-sgr",
    model: str | None = None,
    captions: Path | None = None,
    noise_file: Path | None = None,
    noise_ratio: float = 0.4,
    images: int = 29000,
    device: str = "auto",
    bank_size: tuple[int, ...] = (),
    json: bool = False,
) -> None:
    """Measure whole epochs of a recipe on generated images of full size, and estimate its whole schedule.

    Args:
        recipe: Name of a recipe, or a TOML file.
        model: Another model than that of the recipe.
        captions: File with a caption a line (.gz or not); generated by default.
        noise_file: Noise index to use.
        noise_ratio: Of the injected noise without it.
        images: How many training images, with five captions each.
        device: auto, cpu, cuda, cuda:1, mps.
        bank_size: Sizes of the memory bank whose cost is measured; the training uses the largest.
        json: Print the numbers as JSON.
    """
    at_least(2, images=images, bank_size=bank_size)
    if noise_file is not None and not noise_file.is_file():  # the training would write it
        raise NotFoundError("no such file", where=noise_file, advice="Give the file, or leave out `noise_file`")
    config = replace(read_recipe(recipe), device=device, noise_ratio=noise_ratio)
    config = config if model is None else replace(config, model=model)
    config = replace(config, noise_file=None if noise_file is None else str(noise_file))
    schedule = measure(config, captions, images, bank_size, output.console())
    if json:
        output.print_json(schedule.to_json())
    else:
        for table in schedule.tables(recipe):
            output.print_table(table)


if __name__ == "__main__":
    sys.exit(run(main))
