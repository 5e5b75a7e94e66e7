"""The phases of a training: warm-up, main epochs, and a later phase such as epochs in which noisy pairs take part."""

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
    """In their order; the last one only where noisy pairs take part, or a student trains."""
    warm, noisy, student = config.warmup_epochs, noisy_from(config), student_from(config)
    later = noisy if student is None else student
    end = config.total_epochs if later is None else later
    found = [Phase("warm-up", 0, min(warm, end)), Phase("main", min(warm, end), end - min(warm, end))]
    if later is None:
        return found
    return [
        *found,
        Phase("main, with noisy pairs" if student is None else "student", later, config.total_epochs - later),
    ]


def noisy_from(config: Config) -> int | None:
    """After how many epochs the noisy pairs take part; None if they never do."""
    try:
        start = methods.select(config).noisy_from(config)
    except ConfigError:  # stored results may be of a method that is not installed here
        return None
    return None if start is None else config.warmup_epochs + start


def student_from(config: Config) -> int | None:
    """After how many epochs a student takes the place of its teachers; None if there is none."""
    try:
        return methods.select(config).student_from(config)
    except ConfigError:
        return None
