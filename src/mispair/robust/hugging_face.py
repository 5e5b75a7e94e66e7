"""Adapter for the Trainer of transformers: models with `image_embeds` and `text_embeds`, such as CLIP and SigLIP.

Its callback is for the Trainer of sentence-transformers, too.

trainer = RobustTrainer(robust, model=model, args=arguments, train_dataset=data)

Items of the data have `rows`, the number of the pair, so `arguments` need `remove_unused_columns=False`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from mispair.errors import NotFoundError
from mispair.robust.pytorch import RobustLoss
from mispair.robust.robust import Robust
from mispair.support.extras import cannot_import

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise cannot_import(error, "transformers", "pip install transformers accelerate") from None


class RobustTrainer(Trainer):
    """Train with the batches and the loss of `robust`; evaluate with the model's own loss."""

    def __init__(self, robust: Robust, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.robust, self.robust_loss = robust, RobustLoss(robust)
        self.model_accepts_loss_kwargs = False  # the loss is a mean over the batch
        self.add_callback(RobustCallback(robust))

    def get_train_dataloader(self) -> DataLoader[Any]:
        sampler = self.robust.sampler(self.args.train_batch_size, rank=0, world=1)  # accelerate shares batches out
        data: Any = self.train_dataset
        workers = self.args.dataloader_num_workers
        loader = DataLoader(
            data,
            batch_sampler=sampler,
            collate_fn=self.data_collator,
            num_workers=workers,
            pin_memory=self.args.dataloader_pin_memory,
            persistent_workers=workers > 0 and self.args.dataloader_persistent_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor if workers else None,
        )
        return self.accelerator.prepare(loader)  # type: ignore[no-any-return]

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, *_: Any, **__: Any) -> Any:
        rows = inputs.pop("rows", None)
        if rows is None and model.training:
            advice = "Give each item the number of its pair, and TrainingArguments remove_unused_columns=False"
            raise NotFoundError("no pair numbers", where="the batch", expected="a key `rows`", advice=advice)
        outputs, learned = model(**inputs, return_loss=not model.training), self.accelerator.unwrap_model(model)
        loss = outputs.loss
        if model.training:
            bias = getattr(learned, "logit_bias", None)
            loss = self.robust_loss(outputs.image_embeds, outputs.text_embeds, rows, learned.logit_scale.exp(), bias)
        return (loss, outputs) if return_outputs else loss


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
