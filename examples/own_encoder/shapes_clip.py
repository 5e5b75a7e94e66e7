"""A small CLIP and drawn images with captions, 40 % of the pairs mismatched: what the examples here train on.

Nothing is downloaded: the encoders are CLIP's of transformers, from scratch, and mispair draws the images.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import CLIPConfig, CLIPModel

import mispair
from mispair.data.shapes.dataset import cached

WORDS, SIDE = 24, 6
NOISE_RATIO = 0.4


@dataclass(frozen=True)
class ShapesPairs(Dataset[dict[str, Tensor]]):
    """Pairs of an image and a caption; `rows` is the number of the pair."""

    pairs: mispair.Pairs
    images: Tensor  # (images, 3, SIDE, SIDE)
    captions: Tensor  # (pairs, WORDS) numbers of words, 0 behind the end

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, pair: int) -> dict[str, Tensor]:
        image, text = self.images[self.pairs.link[pair]], self.captions[pair]
        return {"pixel_values": image, "input_ids": text, "rows": torch.tensor(pair)}


def load_shapes(split: str, train_images: int = 600, noise_seed: int | None = None) -> ShapesPairs:
    """Reads a split, and mismatches 40 % of its pairs if there is a seed for it."""
    folder = cached(train=train_images)
    pairs = mispair.load(folder, split)
    grid = torch.from_numpy(np.array(pairs.left.features)).view(len(pairs.left), SIDE, SIDE, -1).permute(0, 3, 1, 2)
    captions = torch.zeros(len(pairs), WORDS, dtype=torch.long)
    for row, (start, stop) in enumerate(zip(pairs.right.offsets, pairs.right.offsets[1:], strict=False)):
        words = torch.from_numpy(pairs.right.ids[start:stop].astype(np.int64))[:WORDS]
        captions[row, : len(words)] = words + 1
    if noise_seed is not None:
        pairs = mispair.add_noise(pairs, noise_ratio=NOISE_RATIO, seed=noise_seed)
    return ShapesPairs(pairs, grid.float(), captions)


def small_clip(seed: int, words: int, channels: int) -> CLIPModel:
    """CLIP with two small towers, untrained."""
    torch.manual_seed(seed)
    tower = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    text = {
        **tower,
        "vocab_size": words + 1,
        "max_position_embeddings": WORDS,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "pad_token_id": 0,
    }
    vision = {**tower, "image_size": SIDE, "patch_size": 1, "num_channels": channels}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=64))


@torch.no_grad()
def features(model: CLIPModel, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    out = model(batch["input_ids"], batch["pixel_values"])
    return out.image_embeds, out.text_embeds
