"""Whole training runs that are stopped and go on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mispair.config import Config
from mispair.errors import StoppedError
from mispair.methods.base import StepPlan
from mispair.pairs.pairs import Pairs
from mispair.training import checkpoint
from mispair.training.run_folder import Run
from mispair.training.trainer import Trainer
from tiny import weights

Stop = tuple[int, int, int]  # epoch, network, batches done
Steps = list[tuple[int, StepPlan]]  # network and plan of each


def check_resume(
    config: Config, pairs: Pairs, folder: Path, stops: Sequence[Stop]
) -> tuple[Steps, tuple[dict[str, Any], dict[str, Any]]]:
    """A run that is stopped again and again takes the steps of an unbroken one to the same weights, bit for bit.

    Returns:
        All steps, and what the method had saved at the end of the unbroken and of the broken run.
    """
    whole = trained(config, pairs, folder / "whole", None)
    parts = [trained(config, pairs, folder / "broken", stop) for stop in (*stops, None)]
    assert all(parts)
    steps = [step for part in parts for step in part]
    assert [(net, plan.pairs.tolist()) for net, plan in steps] == [(net, plan.pairs.tolist()) for net, plan in whole]
    assert weights(folder / "broken") == weights(folder / "whole")
    states = [checkpoint.resume(folder / name / "checkpoints") for name in ("whole", "broken")]
    assert states[0] is not None
    assert states[1] is not None
    return whole, (states[0].method, states[1].method)


def with_other_truth(pairs: Pairs) -> Pairs:
    """The same link, but all of the first half is known to be right."""
    assert pairs.truth is not None
    return replace(pairs, truth=np.where(np.arange(len(pairs)) < len(pairs) // 2, pairs.link, pairs.truth))


def trained(config: Config, pairs: Pairs, folder: Path, stop: Stop | None) -> Steps:
    """Trains; stopped after batch `stop` (epoch, network, batches done). Gives network and plan of each step."""
    with Run(folder, config) as run:
        trainer = Trainer(config, pairs, None, run)
        steps, done = trainer.steps, []

        def stopping_steps() -> Iterator[StepPlan]:
            for plan in steps():
                cursor = trainer.cursor
                done.append((cursor.network, plan))
                if (cursor.epoch, cursor.network, cursor.position) == stop:
                    trainer.stop(15)
                yield plan

        trainer.steps = stopping_steps  # type: ignore[method-assign]
        with nullcontext() if stop is None else pytest.raises(StoppedError, match="and saved"):
            trainer.fit()
    return done
