"""Robust training with sentence-transformers: `python examples/own_encoder/sentence_transformers_loss.py`."""

from __future__ import annotations

import tempfile
from argparse import Namespace
from dataclasses import dataclass

import datasets
import torch
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesSymmetricRankingLoss
from shapes_clip import BATCH, LEARNING_RATE, ShapesPairs, main
from torch import Tensor, nn
from transformers import CLIPModel

from mispair import Robust
from mispair.robust.hugging_face import RobustCallback
from mispair.robust.sentence_transformers import RobustRankingLoss, batch_sampler


class EitherTower(nn.Module):
    """The embedding of images or of captions."""

    def __init__(self, clip: CLIPModel) -> None:
        super().__init__()
        self.clip = clip

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        if "pixel_values" in features:
            embedding = self.clip.get_image_features(features["pixel_values"])
        else:
            embedding = self.clip.get_text_features(features["input_ids"])
        return {**features, "sentence_embedding": embedding.pooler_output}


@dataclass(frozen=True)
class Collate:
    """Images and captions of some pairs, under the names that sentence-transformers looks for."""

    data: ShapesPairs
    valid_label_columns: tuple[str, ...] = ("label",)

    def __call__(self, items: list[dict[str, int]]) -> dict[str, Tensor]:
        pairs = [self.data[item["label"]] for item in items]
        names = {"image_pixel_values": "pixel_values", "caption_input_ids": "input_ids", "label": "rows"}
        return {name: torch.stack([pair[key] for pair in pairs]) for name, key in names.items()}


def train(model: CLIPModel, data: ShapesPairs, robust: Robust | None, arguments: Namespace) -> None:
    encoder = SentenceTransformer(modules=[EitherTower(model)], device="cuda" if torch.cuda.is_available() else "cpu")
    loss = MultipleNegativesSymmetricRankingLoss(encoder) if robust is None else RobustRankingLoss(encoder, robust)
    own = {} if robust is None else {"batch_sampler": batch_sampler(robust)}
    with tempfile.TemporaryDirectory() as folder:
        settings = SentenceTransformerTrainingArguments(
            folder,
            per_device_train_batch_size=BATCH,
            num_train_epochs=arguments.epochs,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="cosine",
            warmup_steps=30,
            dataloader_drop_last=True,
            seed=arguments.seed,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **own,
        )
        SentenceTransformerTrainer(
            encoder,
            settings,
            datasets.Dataset.from_dict({"label": range(len(data))}),
            loss=loss,
            data_collator=Collate(data),
            callbacks=[] if robust is None else [RobustCallback(robust)],
        ).train()


if __name__ == "__main__":
    main(train, "Robust training with sentence-transformers.")
