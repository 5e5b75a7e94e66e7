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
from itertools import islice
from pathlib import Path

import torch

from mispair.api import with_noise
from mispair.bench.standin import stand_in
from mispair.bench.suite import Cell, digest
from mispair.config import Config
from mispair.data.pairs import Pairs
from mispair.devices import autocast, give_back_memory
from mispair.engine import Trainer
from mispair.errors import MispairError
from mispair.run import Run

STEPS = 10  # of an epoch
FIRST, TIMED = 2, 2  # how often they are made: to compile kernels and to record each shape; by the clock
ALIKE = ("seed", "tau", "eta", "noise_ratio", "noise_seed")  # settings that change neither time nor memory much


@dataclass(frozen=True)
class Phase:
    """Epochs of one kind."""

    name: str
    epochs: int
    choosing: float  # seconds before the first step of an epoch
    step: float  # seconds
    steps: int  # of all networks in an epoch

    @property
    def seconds(self) -> float:
        return self.epochs * (self.choosing + self.step * self.steps)


@dataclass(frozen=True)
class Kind:
    """Trainings that are alike."""

    cell: Cell  # one of them
    trainings: int  # of the suite
    phases: list[Phase]
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
        found.setdefault(digest(replace(cell.config, **{name: _DEFAULTS[name] for name in ALIKE})), []).append(cell)
    return list(found.values())


_DEFAULTS = vars(Config())


def typical(alike: Sequence[Cell]) -> Cell:
    """The one that takes as long as they do on average: epochs get shorter in proportion to the share of noise."""
    mean = sum(cell.config.noise_ratio for cell in alike) / len(alike)
    return min(alike, key=lambda cell: abs(cell.config.noise_ratio - mean))


def rehearse(
    cells: Sequence[Cell], captions: Path | None, images: int, tell: Callable[[str], None] = print
) -> Iterator[Kind]:
    """Makes the first steps of a typical training of every kind.

    Args:
        cells: All trainings.
        captions: File with a caption a line; made up by default.
        images: How many training images, with five captions each.
        tell: Hears what is tried next.
    """
    train, dev = stand_in(captions, images), stand_in(captions, min(1000, images), seed=1)
    for alike in kinds(cells):
        cell = typical(alike)
        tell(cell.name)
        give_back_memory()
        try:
            yield replace(_first_steps(cell, train, dev), trainings=len(alike))
        except (MispairError, torch.OutOfMemoryError) as error:
            yield Kind(cell, len(alike), [], 0.0, None, str(error).splitlines()[0])


def _first_steps(cell: Cell, train: Pairs, dev: Pairs) -> Kind:
    config = replace(cell.config, data="stand-in", checkpoint_seconds=1e9)
    noisy = config.noisy_from
    warm = config.warmup_epochs
    plans = [
        ("warm-up", warm, 0),
        ("main", noisy, warm),
        ("main, with noisy pairs", config.epochs - noisy, warm + noisy),
    ]
    with tempfile.TemporaryDirectory(prefix="mispair-") as folder:
        run = Run(Path(folder) / "run", config)
        trainer = Trainer(config, with_noise(config, train), dev, run)
        cuda = trainer.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(trainer.device)
        with torch.random.fork_rng([trainer.device] if cuda else []):
            phases = [_phase(trainer, name, epochs, epoch) for name, epochs, epoch in plans if epochs]
            start = time.perf_counter()
            trainer._validate(0.0)
            validation = time.perf_counter() - start
        run.close()
        memory = torch.cuda.max_memory_allocated(trainer.device) if cuda else None
    return Kind(cell, 1, phases, validation, memory)


def _phase(trainer: Trainer, name: str, epochs: int, epoch: int) -> Phase:
    """The first steps of an epoch of this kind, for the first network."""
    cursor, config = trainer.cursor, trainer.config
    cursor.epoch, cursor.network, cursor.position = epoch, 0, 0
    main = epoch - config.warmup_epochs
    start = time.perf_counter()
    with autocast(trainer.device, config.precision):
        trainer.splits = trainer.method.begin_warmup() if main < 0 else trainer.method.begin_epoch(main)
    choosing = time.perf_counter() - start
    _make(trainer, FIRST)
    start = time.perf_counter()
    made = _make(trainer, TIMED)
    seconds = (time.perf_counter() - start) / max(1, made)
    return Phase(name, epochs, choosing, seconds, sum(_steps(trainer, number) for number in range(len(trainer.nets))))


def _make(trainer: Trainer, rounds: int) -> int:
    """Makes the first steps of the epoch several times; gives how many that were."""
    made = 0
    for _ in range(rounds):
        trainer.cursor.position = 0
        for work, inputs in islice(trainer._inputs(), STEPS):
            trainer._step(work, inputs)
            made += 1
    trainer._look()  # reads from the GPU, so everything has ended
    return made


def _steps(trainer: Trainer, number: int) -> int:
    """Of a network in such an epoch, if its clean part had the size that the noise leaves.

    The split of networks that have hardly been trained says nothing.
    """
    plan = trainer._plan(trainer.cursor.epoch, number)
    pairs, config = len(trainer.train_pairs), trainer.config
    chosen = sum(len(work.clean) for work in plan if not work.on_noisy)
    if chosen > 0.99 * pairs:
        return len(plan)
    right = (1 - config.noise_ratio) * pairs
    return math.ceil(len(plan) * right / max(1, chosen))
