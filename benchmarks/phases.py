"""The phases of a schedule: consecutive epochs of one kind, which take about equally long."""

from __future__ import annotations

from dataclasses import dataclass

from mispair import methods
from mispair.config import Config
from mispair.methods.mend import Mend


@dataclass(frozen=True)
class Phase:
    """Consecutive epochs of one kind."""

    name: str
    start: int  # number of the first one
    epochs: int


def phases(config: Config) -> list[Phase]:
    """The phases of a training, in order."""
    method, total, warm = methods.select(config), config.total_epochs, config.warmup_epochs
    name, end = "main, with noisy pairs", None
    if issubclass(method, Mend):
        name, end = "student", method.student_from(config)
        warm = min(warm, end)
    elif (later := method.noisy_from(config)) is not None:
        end = warm + later
    found = [Phase("warm-up", 0, warm), Phase("main", warm, (total if end is None else end) - warm)]
    return found if end is None else [*found, Phase(name, end, total - end)]
