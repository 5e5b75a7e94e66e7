"""`mispair bench run SUITE --dry-run`: the first steps of every kind of training of a suite, on made-up pictures.

Each kind starts and makes a few steps of the warm-up, of the main epochs and of those with noisy pairs. That tells
whether all of them run, how much memory they need, and how long the whole suite will take.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mispair.bench.suite.suite import Cell, digest
from mispair.compute.devices import give_back_memory
from mispair.config import Config, flat, override
from mispair.data.loading import with_noise
from mispair.data.pairs import Pairs
from mispair.data.synthetic import synthetic_pairs
from mispair.errors import MispairError
from mispair.training.phases import Phase, phases
from mispair.training.run_folder import Run
from mispair.training.trainer import Trainer

STEPS = 10  # of an epoch
FIRST, TIMED = 2, 2  # how often they are made: to compile kernels and to record each shape; by the clock
# Settings in which trainings of one kind may differ. None of them changes time or memory much but noise_ratio: epochs
# get shorter in proportion to it, so the training nearest to the mean stands for all (see `typical`).
ALIKE = ("seed", "tau", "eta", "noise_ratio", "noise_seed")


@dataclass(frozen=True)
class PhaseTime:
    """How long the epochs of one phase take."""

    name: str
    epochs: int
    selection_seconds: float  # seconds before the first step of an epoch
    step: float  # seconds
    steps: int  # of all networks in an epoch

    @property
    def seconds(self) -> float:
        return self.epochs * (self.selection_seconds + self.step * self.steps)


@dataclass(frozen=True)
class Rehearsal:
    """What the first steps tell of all trainings that are alike."""

    cell: Cell  # one of them
    trainings: int  # of the suite
    phases: list[PhaseTime]
    validation: float  # seconds an epoch
    memory: int | None  # most bytes ever in use on the GPU
    error: str | None = None

    @property
    def seconds(self) -> float:
        """Of one training."""
        return sum(phase.seconds for phase in self.phases) + self.validation * self.cell.config.total_epochs

    def figures(self) -> dict[str, object]:
        phases = [vars(phase) for phase in self.phases]
        return {**vars(self), "cell": self.cell.name, "phases": phases, "seconds": self.seconds}


def kinds(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells that are alike, together."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(digest(override(cell.config, {name: _DEFAULTS[name] for name in ALIKE})), []).append(cell)
    return list(found.values())


_DEFAULTS = flat(Config())


def typical(alike: Sequence[Cell]) -> Cell:
    """The one that takes as long as they do on average: epochs get shorter in proportion to the share of noise."""
    mean = sum(cell.config.noise_ratio for cell in alike) / len(alike)
    return min(alike, key=lambda cell: abs(cell.config.noise_ratio - mean))


def rehearse(
    cells: Sequence[Cell], captions: Path | None, images: int, tell: Callable[[str], None] = print
) -> Iterator[Rehearsal]:
    """Makes the first steps of a typical training of every kind.

    Args:
        cells: All trainings.
        captions: File with a caption a line; made up by default.
        images: How many training images, with five captions each.
        tell: Hears what is tried next.
    """
    train, dev = synthetic_pairs(captions, images), synthetic_pairs(captions, min(1000, images), seed=1)
    for alike in kinds(cells):
        cell = typical(alike)
        tell(cell.name)
        give_back_memory()
        try:
            yield replace(_first_steps(cell, train, dev), trainings=len(alike))
        except (MispairError, torch.OutOfMemoryError) as error:
            yield Rehearsal(cell, len(alike), [], 0.0, None, str(error).splitlines()[0])


def _first_steps(cell: Cell, train: Pairs, dev: Pairs) -> Rehearsal:
    config = replace(cell.config, data="stand-in", checkpoint_seconds=1e9)
    with tempfile.TemporaryDirectory(prefix="mispair-") as folder, Run(Path(folder) / "run", config) as run:
        trainer = Trainer(config, with_noise(config, train), dev, run)
        cuda = trainer.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(trainer.device)
        with torch.random.fork_rng([trainer.device] if cuda else []):
            times = [_timed(trainer, phase) for phase in phases(config) if phase.epochs]
            start = time.perf_counter()
            trainer.validate()
            validation = time.perf_counter() - start
        memory = torch.cuda.max_memory_allocated(trainer.device) if cuda else None
    return Rehearsal(cell, 1, times, validation, memory)


def _timed(trainer: Trainer, phase: Phase) -> PhaseTime:
    """The first steps of the first epoch of a phase, for the first network."""
    trainer.begin(phase.start)
    _make(trainer, FIRST)
    start = time.perf_counter()
    made = _make(trainer, TIMED)
    seconds = (time.perf_counter() - start) / max(1, made)
    steps = sum(_steps(trainer, number) for number in range(len(trainer.nets)))
    return PhaseTime(phase.name, phase.epochs, trainer.selection_seconds, seconds, steps)


def _make(trainer: Trainer, rounds: int) -> int:
    """Makes the first steps of the epoch several times; gives how many that were."""
    return sum(1 for _ in range(rounds) for _ in trainer.steps(first=0, most=STEPS))


def _steps(trainer: Trainer, number: int) -> int:
    """Of a network in such an epoch, if its clean part had the size that the noise leaves.

    The split of networks that have hardly been trained says nothing.
    """
    plan = trainer.plans(number)
    pairs, config = len(trainer.train_pairs), trainer.config
    chosen = sum(len(work.pairs) for work in plan if not work.on_noisy)
    if chosen > 0.99 * pairs:
        return len(plan)
    right = (1 - config.noise_ratio) * pairs
    return math.ceil(len(plan) * right / max(1, chosen))
