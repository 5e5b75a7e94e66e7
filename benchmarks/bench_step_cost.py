"""Measure epochs of recipes on generated pairs: `make bench-step-cost ARGS="IMAGES DEVICE RECIPE[:LR] ..."`.

Of each epoch: its seconds, how many of them the method took to select the pairs, and its steps. A later epoch of a
phase has no compiling in it. Where a method audits first, the truth takes the place of the match scores.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from tyro.conf import Positional

from common import run
from mispair import methods
from mispair.pairs.noise import with_noise
from mispair.training.run_folder import Run
from mispair.training.settings import override, read_recipe
from mispair.training.trainer import Trainer
from phases import phases
from synthetic import synthetic_pairs


class StepsAlone(Trainer):
    """Neither validates nor saves; goes on where networks learn nothing from generated pairs."""

    def validate(self, seconds: float = 0.0) -> None:
        pass

    def _checkpoint(self) -> None:
        self._flush_metrics()

    def _refuse_collapse(self) -> None:
        pass


def main(images: Positional[int], device: Positional[str], recipes: Positional[tuple[str, ...]]) -> None:
    """Print a JSON line for each epoch.

    Args:
        images: Generated training images, with five captions each.
        device: cpu, cuda, cuda:1, mps.
        recipes: Names of recipes, each with another learning rate if need be: f30k/mend-sgr:1e-4.
    """
    for given in recipes:
        recipe, _, lr = given.partition(":")
        settings = {"data": "stand-in", "device": device, "noise_ratio": 0.4, "checkpoint_seconds": 1e9}
        halves = {"epochs": 4, "noisy_start": 0.5, "student_share": 0.5}
        config = override(read_recipe(recipe), {**settings, **halves, **({"lr": float(lr)} if lr else {})})
        config = override(config, {"warmup_epochs": min(1, config.warmup_epochs)})
        pairs, dev = with_noise(config, synthetic_pairs(images)), synthetic_pairs(50, seed=1)
        if methods.select(config).audits:
            assert pairs.mismatched is not None
            pairs = replace(pairs, match_score=(~pairs.mismatched).astype(np.float32))
        with tempfile.TemporaryDirectory() as folder, Run(Path(folder) / "run", config) as folder_of_run:
            trainer = StepsAlone(config, pairs, dev, folder_of_run, None)
            for phase in phases(config):
                for _ in range(phase.epochs):
                    before, started = trainer.cursor.step, time.perf_counter()
                    trainer.epoch()
                    row = {"recipe": recipe, "phase": phase.name, "seconds": round(time.perf_counter() - started, 3)}
                    selection = round(trainer.selection_seconds, 3)
                    print(
                        json.dumps({**row, "selection": selection, "steps": trainer.cursor.step - before}), flush=True
                    )


if __name__ == "__main__":
    sys.exit(run(main))
