"""The phases of a training: warm-up, main epochs, and main epochs in which noisy pairs take part."""

from __future__ import annotations

from dataclasses import dataclass

from mispair.config import Config
from mispair.methods import METHODS
from mispair.methods.coteaching import CoTeaching


@dataclass(frozen=True)
class Phase:
    """Epochs of one kind."""

    name: str
    start: int  # number of the first one
    epochs: int


def phases(config: Config) -> list[Phase]:
    """In their order; the last one only where noisy pairs take part."""
    warm, noisy = config.warmup_epochs, noisy_from(config)
    end = config.total_epochs if noisy is None else noisy
    found = [Phase("warm-up", 0, warm), Phase("main", warm, end - warm)]
    return found if noisy is None else [*found, Phase("main, with noisy pairs", noisy, config.total_epochs - noisy)]


def noisy_from(config: Config) -> int | None:
    """After how many epochs the noisy pairs take part; None if they never do."""
    splits = config.method in METHODS and issubclass(METHODS[config.method], CoTeaching)
    drops = config.method == "repair" and config.noisy == "drop"
    start = config.noisy_from
    return config.warmup_epochs + start if splits and not drops and start < config.epochs else None
