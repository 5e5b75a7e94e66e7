"""`mispair bench run SUITE --dry-run`: the first steps of every kind of training of a suite, on generated images.

A few steps of the warm-up, of the main epochs and of those with noisy pairs show whether a kind runs, how much memory
it needs, and how long the whole suite will take.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from mispair import methods, models
from mispair.bench.suite.suite import Cell, digest
from mispair.bench.suite.synthetic import synthetic_pairs, synthetic_vectors
from mispair.compute.devices import give_back_memory
from mispair.config import Config
from mispair.errors import MispairError
from mispair.methods.base import Phase
from mispair.pairs.noise import with_noise
from mispair.pairs.pairs import Pairs
from mispair.training.run_folder import Run
from mispair.training.settings import every_setting, override
from mispair.training.trainer import Trainer

STEPS = 10  # of an epoch
WARMUP_ROUNDS, TIMED_ROUNDS = 2, 2  # over these steps: to compile kernels and to record each shape; to measure
# Trainings of one kind may differ in these. Only noise_ratio changes the time, see `typical`.
IGNORED = ("seed", "lr", "tau", "eta", "noise_ratio", "noise_seed")


@dataclass(frozen=True)
class PhaseTime:
    """Duration of the epochs of one phase."""

    name: str
    epochs: int
    selection_seconds: float  # before the first step of an epoch
    step: float  # seconds
    steps: int  # of all networks in an epoch

    @property
    def seconds(self) -> float:
        return self.epochs * (self.selection_seconds + self.step * self.steps)


@dataclass(frozen=True)
class TrainingCost:
    """Time and memory of all trainings of one kind."""

    cell: Cell  # one of them
    trainings: int  # of the suite
    phases: list[PhaseTime]
    validation: float  # seconds an epoch
    memory: int | None  # peak bytes on the GPU
    error: str | None = None

    @property
    def seconds(self) -> float:
        """Of one training."""
        return sum(phase.seconds for phase in self.phases) + self.validation * self.cell.config.total_epochs

    def to_json(self) -> dict[str, object]:
        phases = [asdict(phase) for phase in self.phases]
        return {**vars(self), "cell": self.cell.name, "phases": phases, "seconds": self.seconds}


def group(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells of the same kind together."""
    defaults = every_setting(Config())
    kinds: dict[str, list[Cell]] = {}
    for cell in cells:
        kinds.setdefault(digest(override(cell.config, {name: defaults[name] for name in IGNORED})), []).append(cell)
    return list(kinds.values())


def typical(alike: Sequence[Cell]) -> Cell:
    """The cell of average duration: epochs get shorter in proportion to the noise ratio."""
    mean = sum(cell.config.noise_ratio for cell in alike) / len(alike)
    return min(alike, key=lambda cell: abs(cell.config.noise_ratio - mean))


def measure(cells: Sequence[Cell], images: int, on_start: Callable[[str], None] = print) -> Iterator[TrainingCost]:
    """Make the first steps of a typical training of every kind, on synthetic pairs; announce each to `on_start`."""
    made: dict[bool, tuple[Pairs, Pairs]] = {}
    for alike in group(cells):
        cell = typical(alike)
        on_start(cell.name)
        give_back_memory()
        vectors = models.find(cell.config.model).takes_vectors
        if vectors not in made:
            make = synthetic_vectors if vectors else synthetic_pairs
            made[vectors] = make(images), make(min(1000, images), seed=1)
        try:
            yield replace(_first_steps(cell, *made[vectors]), trainings=len(alike))
        except (MispairError, torch.OutOfMemoryError) as error:
            yield TrainingCost(cell, len(alike), [], 0.0, None, str(error).splitlines()[0])


def _first_steps(cell: Cell, train: Pairs, dev: Pairs) -> TrainingCost:
    config = replace(cell.config, data="stand-in", checkpoint_seconds=1e9)
    with tempfile.TemporaryDirectory(prefix="mispair-") as folder, Run(Path(folder) / "run", config) as run:
        trainer = Trainer(config, with_noise(config, train), dev, run)
        cuda = trainer.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(trainer.device)
        with torch.random.fork_rng([trainer.device] if cuda else []):
            times = [_timed(trainer, phase) for phase in methods.select(config).phases(config) if phase.epochs]
            start = time.perf_counter()
            trainer.validate()
            validation = time.perf_counter() - start
        memory = torch.cuda.max_memory_allocated(trainer.device) if cuda else None
    return TrainingCost(cell, 1, times, validation, memory)


def _timed(trainer: Trainer, phase: Phase) -> PhaseTime:
    """The first steps of the first epoch of a phase, for the first network."""
    trainer.begin(phase.start)
    for _ in range(WARMUP_ROUNDS):
        list(trainer.steps(first=0, most=STEPS))
    start = time.perf_counter()
    count = sum(len(list(trainer.steps(first=0, most=STEPS))) for _ in range(TIMED_ROUNDS))
    seconds = (time.perf_counter() - start) / max(1, count)
    steps = sum(_steps(trainer, number) for number in range(len(trainer.nets)))
    return PhaseTime(phase.name, phase.epochs, trainer.selection_seconds, seconds, steps)


def _steps(trainer: Trainer, number: int) -> int:
    """Number of a network's steps in an epoch on the matching pairs.

    The split of networks that have hardly been trained does not have that size.
    """
    plan = trainer.plans(number)
    pairs, config = len(trainer.train_pairs), trainer.config
    chosen = sum(len(work.pairs) for work in plan if not work.on_noisy)
    if chosen > 0.99 * pairs:
        return len(plan)
    return math.ceil(len(plan) * (1 - config.noise_ratio) * pairs / max(1, chosen))
