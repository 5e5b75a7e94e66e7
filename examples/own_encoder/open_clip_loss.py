"""Robust training with open_clip's loop: `python examples/own_encoder/open_clip_loss.py --method mend`.

The model gives what open_clip's models give, and the loss takes it as open_clip's losses do. Plain training needs
open_clip for its `ClipLoss`.
"""

from __future__ import annotations

from argparse import Namespace

import torch
from shapes_clip import BATCH, LEARNING_RATE, ShapesPairs, main
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import CLIPModel

from mispair import Robust
from mispair.robust.open_clip import RobustClipLoss


def model_out(model: CLIPModel, images: Tensor, texts: Tensor) -> dict[str, Tensor]:
    """As `open_clip.CLIP` with `output_dict`."""
    out = model(texts, images)
    features = {"image_features": out.image_embeds, "text_features": out.text_embeds}
    return {**features, "logit_scale": model.logit_scale.exp()}


def train(model: CLIPModel, data: ShapesPairs, robust: Robust | None, arguments: Namespace) -> None:
    if robust is None:
        from open_clip.loss import ClipLoss

        loss, loader = ClipLoss(), DataLoader(data, BATCH, shuffle=True, drop_last=True)
    else:
        loss, loader = RobustClipLoss(robust), DataLoader(data, batch_sampler=robust.sampler(BATCH))
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    steps = arguments.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, steps, pct_start=0.1)
    model.train()
    for _ in range(arguments.epochs):
        for batch in loader:
            if robust is not None:
                loss.rows = batch["rows"]
            losses = loss(**model_out(model, batch["pixel_values"], batch["input_ids"]), output_dict=True)
            optimizer.zero_grad()
            sum(losses.values()).backward()
            optimizer.step()
            schedule.step()
        if robust is not None:
            robust.end_epoch()


if __name__ == "__main__":
    main(train, "Robust training with open_clip.")
