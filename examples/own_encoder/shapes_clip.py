"""A small CLIP and drawn images with captions, 40 % of the pairs mismatched: what the examples here train on.

Nothing is downloaded. The encoders are those of transformers' CLIP, from scratch. Its patches are the 6 x 6 windows of
an image, as colours, edges and shapes that mispair computes from the pixels.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import CLIPConfig, CLIPModel

import mispair
from mispair.auditing.audit import score_pairs
from mispair.functional.metrics import retrieval
from mispair.pairs.shapes.dataset import cached

WORDS, SIDE = 24, 6  # longest caption; windows along a side of an image
NOISE_RATIO, BATCH, LEARNING_RATE = 0.4, 64, 1e-3


@dataclass(frozen=True)
class ShapesPairs(Dataset[dict[str, Tensor]]):
    """Pairs of an image and a caption; `rows` is the number of the pair."""

    pairs: mispair.Pairs
    images: Tensor  # (images, channels, SIDE, SIDE)
    captions: Tensor  # (pairs, WORDS) numbers of words, 0 behind the end

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, pair: int) -> dict[str, Tensor]:
        image, text = self.images[self.pairs.link[pair]], self.captions[pair]
        return {"pixel_values": image, "input_ids": text, "rows": torch.tensor(pair)}


def load_shapes(split: str, images: int, noise_seed: int | None = None) -> ShapesPairs:
    """Reads a split; with a seed, mismatches 40 % of its pairs and audits them, by features that nobody has trained."""
    pairs = mispair.load(cached(train=images), split)
    grid = torch.from_numpy(np.array(pairs.left.features)).view(len(pairs.left), SIDE, SIDE, -1)
    captions = torch.zeros(len(pairs), WORDS, dtype=torch.long)
    for row, words in enumerate(np.split(pairs.right.ids, pairs.right.offsets[1:-1])):
        captions[row, : len(words)] = torch.from_numpy(words.astype(np.int64) + 1)[:WORDS]  # 0 is the padding
    if noise_seed is not None:
        pairs = mispair.add_noise(pairs, noise_ratio=NOISE_RATIO, seed=noise_seed)
        pairs = replace(pairs, match_score=score_pairs(pairs, "cpu"))
    return ShapesPairs(pairs, grid.permute(0, 3, 1, 2).contiguous(), captions)


def small_clip(data: ShapesPairs, seed: int) -> CLIPModel:
    """CLIP with two towers of one layer, untrained."""
    torch.manual_seed(seed)
    tower = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    # An end of text of 2 would make transformers pool the word with the highest number.
    marks = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    words = len(data.pairs.right.vocabulary) + 1
    text = {**tower, **marks, "vocab_size": words, "max_position_embeddings": WORDS}
    vision = {**tower, "image_size": SIDE, "patch_size": 1, "num_channels": data.images.shape[1]}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=64))


@torch.no_grad()
def test_metrics(model: CLIPModel, test: ShapesPairs) -> dict[str, float]:
    """Retrieval over all test images and captions."""
    model.eval()
    image = torch.cat([model(test.captions[:1], part).image_embeds for part in test.images.split(250)])
    text = torch.cat([model(part, test.images[:1]).text_embeds for part in test.captions.split(500)])
    return retrieval(image @ text.T, torch.arange(len(image)), torch.from_numpy(test.pairs.link)).metrics()


Train = Callable[[CLIPModel, ShapesPairs, "mispair.Robust | None", argparse.Namespace], None]


def main(train: Train, about: str) -> None:
    """Trains and tests, by the flags of the command line; prints the metrics as JSON."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--method", default="weights", choices=["plain", "weights", "mend", "repair"])
    parser.add_argument("--loss", default="infonce", choices=["infonce", "siglip", "triplet"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--images", type=int, default=1000, help="training images, with five captions each")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = load_shapes("train", arguments.images, noise_seed=arguments.seed)
    robust = None
    if arguments.method != "plain":
        robust = mispair.Robust(data.pairs, arguments.method, loss=arguments.loss, seed=arguments.seed)
    model = small_clip(data, arguments.seed)
    train(model, data, robust, arguments)
    metrics = test_metrics(model, load_shapes("test", arguments.images))
    kept = {name: round(metrics[name], 1) for name in ("i2t_r1", "i2t_r10", "t2i_r1", "t2i_r10", "rsum")}
    print(json.dumps({"method": arguments.method, "loss": arguments.loss, "seed": arguments.seed, **kept}))
