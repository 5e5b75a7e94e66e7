"""Whole training runs that are stopped and go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from mispair.config import Config
from mispair.data.pairs import Pairs
from mispair.engine import Trainer
from mispair.errors import StoppedError
from mispair.methods.base import Inputs, Work
from mispair.run import Run


def trained(config: Config, pairs: Pairs, folder: Path, stop: tuple[int, int, int] | None) -> list[tuple[int, Work]]:
    """Trains; asked to stop after batch `stop` (epoch, network, batches done). Gives network and work of each step."""
    run = Run(folder, config)
    trainer = Trainer(config, pairs, None, run)
    step, done = trainer._step, []

    def stopping_step(work: Work, inputs: Inputs) -> None:
        step(work, inputs)
        cursor = trainer.cursor
        done.append((cursor.network, work))
        if (cursor.epoch, cursor.network, cursor.position) == stop:
            trainer._signal = 15

    trainer._step = stopping_step  # type: ignore[method-assign]
    if stop is None:
        trainer.fit()
    else:
        with pytest.raises(StoppedError, match="and saved"):
            trainer.fit()
    run.close()
    return done
