"""Watching a training run."""

from __future__ import annotations

import torch

from mispair.methods.base import Step
from mispair.watch import FEW, Watch


def look(watch: Watch, S: torch.Tensor, pairs: int) -> None:
    watch.note(0, watch.judge(Step(S.sum(), S), torch.tensor(1.0)), pairs)
    watch.read()


def test_equal_similarities_are_a_collapse() -> None:
    watch = Watch(torch.device("cpu"))
    assert not watch.collapsed  # nothing seen yet
    look(watch, torch.eye(16), 16)
    assert not watch.collapsed
    assert watch.healthy
    look(watch, torch.full((16, 16), 0.3), 16)
    assert watch.collapsed
    assert not watch.healthy


def test_a_network_that_never_tells_anything_apart_has_collapsed() -> None:
    watch = Watch(torch.device("cpu"))
    look(watch, torch.full((16, 16), 0.3), 16)
    assert watch.collapsed


def test_batches_of_a_few_pairs_are_not_judged() -> None:
    watch = Watch(torch.device("cpu"))
    look(watch, torch.full((3, 3), 0.3), 3)  # three captions of one picture
    assert not watch.collapsed
    assert watch.healthy
    look(watch, torch.eye(FEW), FEW)
    look(watch, torch.full((FEW - 1, FEW - 1), 0.3), FEW - 1)
    assert not watch.collapsed
    assert watch.healthy
