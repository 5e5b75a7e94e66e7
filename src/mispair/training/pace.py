"""Timing of the agreements between ranks on stopping and saving: about once a second."""

from __future__ import annotations

import time
from typing import NamedTuple

from mispair.compute.distributed import Ranks
from mispair.training.events import StepEvent

ROUND_SECONDS, ROUND_STEPS = 1.0, 100  # about how long ranks train before they agree; at most


class Pause(NamedTuple):
    """The state of one rank between two steps, or the agreement of all ranks."""

    signal: int | None  # that asks to stop
    save: bool  # whether it is time for a checkpoint
    done: bool  # whether there are no more steps in this epoch
    events: list[StepEvent]  # for the log
    steps: int  # since the last time
    seconds: float


class Pace:
    """Count steps and seconds between agreements, and between checkpoints."""

    def __init__(self, ranks: Ranks, checkpoint_seconds: float) -> None:
        self.ranks, self.checkpoint_seconds = ranks, checkpoint_seconds
        self.signal: int | None = None  # received by this rank
        self._saved_at = self._met_at = time.monotonic()
        self._round, self._steps = 1, 0  # steps until the next meeting, and made since the last one

    def due(self, done: bool) -> bool:
        """Count a step unless `done`, and return whether the ranks meet now."""
        self._steps += not done
        return done or self._steps >= self._round

    def meet(self, done: bool, events: list[StepEvent]) -> Pause:
        """Exchange states and return the agreement of all ranks."""
        now = time.monotonic()
        save = now - self._saved_at >= self.checkpoint_seconds
        pauses = self.ranks.exchange(Pause(self.signal, save, done, events, self._steps, now - self._met_at))
        first = pauses[0]
        if self.ranks.size > 1:
            self._round = min(max(1, int(first.steps * ROUND_SECONDS / max(first.seconds, 1e-3))), ROUND_STEPS)
        self._met_at, self._steps = time.monotonic(), 0
        return first._replace(
            signal=next((pause.signal for pause in pauses if pause.signal is not None), None),
            done=all(pause.done for pause in pauses),
            events=[event for pause in pauses for event in pause.events],
        )

    def saved(self) -> None:
        """Note the time of a new checkpoint."""
        self._saved_at = time.monotonic()
