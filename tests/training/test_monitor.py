"""Metrics and health of a training."""

from __future__ import annotations

import torch

from mispair.methods.base import StepResult
from mispair.training.monitor import FEW, StepMonitor


def step(monitor: StepMonitor, S: torch.Tensor, pairs: int) -> None:
    monitor.add(0, monitor.measure(StepResult(S.sum(), S), torch.tensor(1.0)), pairs)
    monitor.read()


def test_the_loss_is_logged_by_pair_unless_a_method_says_otherwise() -> None:
    monitor, S = StepMonitor(torch.device("cpu")), torch.eye(4)
    for logged, expected in ((None, 3.0), (torch.tensor(0.5), 0.5)):
        monitor.add(0, monitor.measure(StepResult(torch.tensor(12.0), S, logged=logged), torch.tensor(1.0)), 4)
        metrics, bad_step = monitor.read()
        assert (metrics["loss"], bad_step) == (expected, None)


def test_a_loss_that_is_not_finite_shows_whatever_is_logged() -> None:
    monitor = StepMonitor(torch.device("cpu"))
    for step, loss in enumerate((1.0, torch.inf, 1.0)):
        result = StepResult(torch.tensor(loss), torch.eye(4), logged=torch.tensor(0.5))
        monitor.add(step, monitor.measure(result, torch.tensor(1.0)), 4)
    assert monitor.read()[1] == 1


def test_equal_similarities_are_a_collapse() -> None:
    monitor = StepMonitor(torch.device("cpu"))
    assert not monitor.collapsed  # nothing measured yet
    step(monitor, torch.eye(16), 16)
    assert not monitor.collapsed
    assert monitor.healthy
    step(monitor, torch.full((16, 16), 0.3), 16)
    assert monitor.collapsed
    assert not monitor.healthy


def test_a_network_that_never_distinguishes_anything_has_collapsed() -> None:
    monitor = StepMonitor(torch.device("cpu"))
    step(monitor, torch.full((16, 16), 0.3), 16)
    assert monitor.collapsed


def test_batches_of_a_few_pairs_are_not_judged() -> None:
    monitor = StepMonitor(torch.device("cpu"))
    step(monitor, torch.full((3, 3), 0.3), 3)  # three captions of one image
    assert not monitor.collapsed
    assert monitor.healthy
    step(monitor, torch.eye(FEW), FEW)
    step(monitor, torch.full((FEW - 1, FEW - 1), 0.3), FEW - 1)
    assert not monitor.collapsed
    assert monitor.healthy
