"""Optimizers for recorded GPU steps."""

from __future__ import annotations

from typing import Any

import torch

from mispair.config import Config


def make(config: Config, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Adam; AdamW if there is weight decay."""
    kind = torch.optim.AdamW if config.weight_decay else torch.optim.Adam
    device = parameters[0].device
    if device.type != "cuda":
        return kind(parameters, config.lr, weight_decay=config.weight_decay, fused=True)
    # A recorded step must find everything on the GPU, the learning rate as well.
    lr = torch.tensor(config.lr, device=device)
    return kind(parameters, lr, weight_decay=config.weight_decay, fused=True, capturable=True)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Changes the learning rate, in place where a recorded step reads it."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def restore(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Restore a saved state, on any device.

    The learning rate is taken in place: torch would take the tensor that was loaded, and with one on the CPU a recorded
    step repeats the rate it was recorded with.
    """
    optimizer.load_state_dict({**saved, "param_groups": optimizer.state_dict()["param_groups"]})
    set_lr(optimizer, float(saved["param_groups"][0]["lr"]))
