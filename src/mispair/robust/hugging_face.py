"""Adapter for the Trainer of transformers: models with `image_embeds` and `text_embeds`, such as CLIP and SigLIP.

trainer = RobustTrainer(robust, model=model, args=arguments, train_dataset=data)

Items of the data have `rows`, the number of the pair, so `arguments` need `remove_unused_columns=False`.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from mispair.errors import NotFoundError
from mispair.robust.pytorch import RobustLoss
from mispair.robust.robust import Robust
from mispair.robust.trainer_callback import RobustCallback
from mispair.support.extras import cannot_import

try:
    from transformers import Trainer
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
