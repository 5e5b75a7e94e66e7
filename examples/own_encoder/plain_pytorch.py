"""Robust training in a loop of your own: `python examples/own_encoder/plain_pytorch.py --method mend`."""

from __future__ import annotations

from argparse import Namespace

import torch
from shapes_clip import BATCH, LEARNING_RATE, ShapesPairs, main
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import CLIPModel

from mispair import Robust
from mispair.robust.pytorch import RobustLoss


def train(model: CLIPModel, data: ShapesPairs, robust: Robust | None, arguments: Namespace) -> None:
    if robust is None:
        loader = DataLoader(data, BATCH, shuffle=True, drop_last=True)
    else:
        loader, loss_of = DataLoader(data, batch_sampler=robust.sampler(BATCH)), RobustLoss(robust)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    steps = arguments.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, steps, pct_start=0.1)
    model.train()
    for _ in range(arguments.epochs):
        for batch in loader:
            out = model(batch["input_ids"], batch["pixel_values"])
            if robust is None:
                logits, target = out.logits_per_image, torch.arange(len(out.logits_per_image))
                loss = (cross_entropy(logits, target) + cross_entropy(logits.T, target)) / 2
            else:
                loss = loss_of(out.image_embeds, out.text_embeds, batch["rows"], model.logit_scale.exp())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        if robust is not None:
            robust.end_epoch()


if __name__ == "__main__":
    main(train, "Robust training in plain PyTorch.")
