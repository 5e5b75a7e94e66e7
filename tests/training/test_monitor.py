"""Metrics and health of a training."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from mispair.methods.base import StepResult
from mispair.training.monitor import FEW, WINDOW, Health, StepMetrics, StepMonitor


def window(monitor: StepMonitor, S: torch.Tensor, pairs: int) -> None:
    for step in range(WINDOW):
        monitor.add(step, monitor.measure(StepResult(S.sum(), S), torch.tensor(1.0)), pairs)
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
    assert not monitor.health.collapsed  # nothing measured yet
    window(monitor, torch.eye(16), 16)
    assert not monitor.health.collapsed
    assert monitor.health.healthy
    window(monitor, torch.full((16, 16), 0.3), 16)
    assert monitor.health.collapsed
    assert not monitor.health.healthy


def test_a_network_that_never_distinguishes_anything_has_collapsed() -> None:
    monitor = StepMonitor(torch.device("cpu"))
    window(monitor, torch.full((16, 16), 0.3), 16)
    assert monitor.health.collapsed


def test_batches_of_a_few_pairs_are_not_judged() -> None:
    monitor = StepMonitor(torch.device("cpu"))
    window(monitor, torch.full((3, 3), 0.3), 3)  # three captions of one image
    assert not monitor.health.collapsed
    assert monitor.health.healthy
    window(monitor, torch.eye(FEW), FEW)
    window(monitor, torch.full((FEW - 1, FEW - 1), 0.3), FEW - 1)
    assert not monitor.health.collapsed
    assert monitor.health.healthy


SPREADS = [0.2] * 20 + [0.05] * 10 + [0.0003] + [0.05] * 9


@given(cuts=st.sets(st.integers(1, len(SPREADS) - 1)))
@example(cuts=set())
@example(cuts=set(range(1, len(SPREADS))))
def test_it_does_not_matter_when_metrics_are_read(cuts: set[int]) -> None:
    monitor, states = StepMonitor(torch.device("cpu")), []
    for number, spread in enumerate(SPREADS):
        metrics = StepMetrics(("loss", "spread", "grad_norm"), torch.tensor([1.0, spread, 1.0]))
        monitor.add(number, metrics, 16)
        if number + 1 in cuts or number + 1 in (20, 40):
            monitor.read()
            monitor.health = Health(**asdict(monitor.health))  # as from a checkpoint
            states.append(monitor.health)
    assert not any(state.collapsed or not state.healthy for state in states)
    assert monitor.health.peak == pytest.approx(0.2)
    assert monitor.health.spread == pytest.approx(sum(SPREADS[20:]) / 20)
