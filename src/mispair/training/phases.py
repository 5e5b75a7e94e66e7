"""The phases of a training: warm-up, main epochs, and main epochs in which noisy pairs take part."""

from __future__ import annotations

from dataclasses import dataclass

from mispair import methods
from mispair.config import Config
from mispair.errors import ConfigError


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
    try:
        start = methods.select(config).noisy_from(config)
    except ConfigError:  # stored results may be of a method that is not installed here
        return None
    return None if start is None else config.warmup_epochs + start
