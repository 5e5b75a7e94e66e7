"""Epochs of recipes on generated pairs: python step_cost.py IMAGES DEVICE RECIPE[:LR] ...

Of each epoch: its seconds, how many of them the method took to select the pairs, and its steps. A later epoch of a
phase has no compiling in it. Where a method audits first, the truth takes the place of the match scores.
"""

import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from mispair import methods
from mispair.config import override, read_recipe
from mispair.pairs.layouts.loading import with_noise
from mispair.pairs.synthetic import synthetic_pairs
from mispair.training.phases import phases
from mispair.training.run_folder import Run
from mispair.training.trainer import Trainer


class StepsAlone(Trainer):
    """Neither validates nor saves; goes on where networks learn nothing from generated pairs."""

    def validate(self, seconds: float = 0.0) -> None:
        pass

    def _checkpoint(self) -> None:
        self._flush_metrics()

    def _refuse_collapse(self) -> None:
        pass


images, device, *recipes = sys.argv[1:]
for given in recipes:
    recipe, _, lr = given.partition(":")
    settings = {"data": "stand-in", "device": device, "noise_ratio": 0.4, "checkpoint_seconds": 1e9}
    halves = {"epochs": 4, "noisy_start": 0.5, "student_share": 0.5}
    config = override(read_recipe(recipe), {**settings, **halves, **({"lr": float(lr)} if lr else {})})
    config = override(config, {"warmup_epochs": min(1, config.warmup_epochs)})
    pairs, dev = with_noise(config, synthetic_pairs(None, int(images))), synthetic_pairs(None, 50, seed=1)
    if methods.select(config).audits:
        assert pairs.mismatched is not None
        pairs = replace(pairs, match_score=(~pairs.mismatched).astype(np.float32))
    with tempfile.TemporaryDirectory() as folder, Run(Path(folder) / "run", config) as run:
        trainer = StepsAlone(config, pairs, dev, run, None)
        for phase in phases(config):
            for _ in range(phase.epochs):
                before, started = trainer.cursor.step, time.perf_counter()
                trainer.epoch()
                row = {"recipe": recipe, "phase": phase.name, "seconds": round(time.perf_counter() - started, 3)}
                selection = round(trainer.selection_seconds, 3)
                print(json.dumps({**row, "selection": selection, "steps": trainer.cursor.step - before}), flush=True)
