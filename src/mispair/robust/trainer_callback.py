"""Callback for the Trainers of transformers and sentence-transformers: epochs and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mispair.errors import NotFoundError
from mispair.robust.robust import Robust
from mispair.support.extras import cannot_import

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise cannot_import(error, "transformers", "pip install transformers accelerate") from None


class RobustCallback(TrainerCallback):
    """End the epochs of `robust`, and keep its state in the checkpoints of a Trainer."""

    def __init__(self, robust: Robust) -> None:
        self.robust = robust

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self.robust.end_epoch()

    def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if args.should_save:
            torch.save(self.robust.state_dict(), _file(args, state))

    def on_train_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step:  # it goes on from a checkpoint, and skips the batches that are done by itself
            if not (file := _file(args, state)).is_file():
                advice = "Resume from a checkpoint that was written with RobustCallback"
                raise NotFoundError("no such file", where=file, advice=advice)
            self.robust.load_state_dict(torch.load(file, weights_only=True), skip=False)
            if self.robust.epoch < int(state.epoch):  # saved after the last step of an epoch
                self.robust.end_epoch()


def _file(args: Any, state: Any) -> Path:
    return Path(args.output_dir, f"checkpoint-{state.global_step}", "robust.pt")
