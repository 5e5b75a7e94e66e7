"""The optimizer of a network after its state was saved and loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mispair.compute.optimizer import make, restore, set_lr
from mispair.config import Config


def stepped(steps: int, lr: float) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    optimizer = make(Config(device="cpu"), list(layer.parameters()))
    set_lr(optimizer, lr)
    for _ in range(steps):
        layer(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return layer, optimizer


def test_a_restored_optimizer_goes_on() -> None:
    layer, whole = stepped(5, 0.1)
    half, saved = stepped(3, 0.1)
    again, restored = stepped(0, 0.3)  # whose rate would stay, if its training has ended
    again.load_state_dict(half.state_dict())
    restore(restored, saved.state_dict())
    for _ in range(2):
        again(torch.ones(4, 3)).square().sum().backward()
        restored.step()
        restored.zero_grad()
    assert torch.equal(again.weight, layer.weight)
    assert str(restored.state_dict()) == str(whole.state_dict())


def test_the_learning_rate_stays_where_a_recorded_step_reads_it() -> None:
    """A checkpoint is loaded to the CPU, and its rate must not be taken; `meta` stands for a GPU here."""
    saved: dict[str, Any] = stepped(2, 0.1)[1].state_dict()
    saved["param_groups"][0]["lr"] = torch.tensor(0.1)
    _, restored = stepped(0, 0.1)
    restored.param_groups[0]["lr"] = torch.empty((), device="meta")
    restore(restored, saved)
    assert restored.param_groups[0]["lr"].device.type == "meta"
    assert [float(state["step"]) for state in restored.state.values()] == [2, 2]
