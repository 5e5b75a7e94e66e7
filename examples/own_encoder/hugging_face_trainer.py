"""Robust training with the Trainer of transformers: `python examples/own_encoder/hugging_face_trainer.py`."""

from __future__ import annotations

import tempfile
from argparse import Namespace

import torch
from shapes_clip import BATCH, LEARNING_RATE, ShapesPairs, main
from transformers import CLIPModel, Trainer, TrainingArguments

from mispair import Robust
from mispair.robust.hugging_face import RobustTrainer


def collate_plain(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch for CLIP's own loss."""
    batch = {name: torch.stack([item[name] for item in items]) for name in ("pixel_values", "input_ids")}
    return {**batch, "return_loss": True}


def train(model: CLIPModel, data: ShapesPairs, robust: Robust | None, arguments: Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH,
            num_train_epochs=arguments.epochs,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="cosine",
            warmup_steps=30,
            remove_unused_columns=False,
            dataloader_drop_last=True,
            seed=arguments.seed,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        if robust is None:
            trainer = Trainer(model, settings, data_collator=collate_plain, train_dataset=data)
        else:
            trainer = RobustTrainer(robust, model=model, args=settings, train_dataset=data)
        trainer.train()


if __name__ == "__main__":
    main(train, "Robust training with the Trainer of transformers.")
