"""Watching a training run."""

from __future__ import annotations

import torch

from mispair.methods.base import StepResult
from mispair.training.monitor import FEW, StepMonitor


def look(watch: StepMonitor, S: torch.Tensor, pairs: int) -> None:
    watch.note(0, watch.judge(StepResult(S.sum(), S), torch.tensor(1.0)), pairs)
    watch.read()


def test_the_loss_is_logged_by_pair_unless_a_method_says_otherwise() -> None:
    watch, S = StepMonitor(torch.device("cpu")), torch.eye(4)
    for logged, expected in ((None, 3.0), (torch.tensor(0.5), 0.5)):
        watch.note(0, watch.judge(StepResult(torch.tensor(12.0), S, logged=logged), torch.tensor(1.0)), 4)
        figures, bad_step = watch.read()
        assert (figures["loss"], bad_step) == (expected, None)


def test_a_loss_that_is_not_finite_shows_whatever_is_logged() -> None:
    watch = StepMonitor(torch.device("cpu"))
    for step, loss in enumerate((1.0, torch.inf, 1.0)):
        result = StepResult(torch.tensor(loss), torch.eye(4), logged=torch.tensor(0.5))
        watch.note(step, watch.judge(result, torch.tensor(1.0)), 4)
    assert watch.read()[1] == 1


def test_equal_similarities_are_a_collapse() -> None:
    watch = StepMonitor(torch.device("cpu"))
    assert not watch.collapsed  # nothing seen yet
    look(watch, torch.eye(16), 16)
    assert not watch.collapsed
    assert watch.healthy
    look(watch, torch.full((16, 16), 0.3), 16)
    assert watch.collapsed
    assert not watch.healthy


def test_a_network_that_never_tells_anything_apart_has_collapsed() -> None:
    watch = StepMonitor(torch.device("cpu"))
    look(watch, torch.full((16, 16), 0.3), 16)
    assert watch.collapsed


def test_batches_of_a_few_pairs_are_not_judged() -> None:
    watch = StepMonitor(torch.device("cpu"))
    look(watch, torch.full((3, 3), 0.3), 3)  # three captions of one picture
    assert not watch.collapsed
    assert watch.healthy
    look(watch, torch.eye(FEW), FEW)
    look(watch, torch.full((FEW - 1, FEW - 1), 0.3), FEW - 1)
    assert not watch.collapsed
    assert watch.healthy
