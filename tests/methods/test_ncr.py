"""NCR: labels, margins and steps by plain loops. What it has in common with BiCro: test_promises.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import mispair
from mispair.functional.gaussian_mixture import clean_probability
from mispair.methods.base import StepPlan
from mispair.methods.epoch_view import epoch_view
from mispair.methods.ncr import NCR
from mispair.pairs.batches import random_batches
from mispair.pairs.pairs import Pairs
from mispair.support.arrays import IntArray
from two_networks import (
    ALPHA,
    CLEAN,
    COUNT,
    NOISY,
    in_evaluation,
    loop_quality,
    pair_loss,
    random_w,
    same_images,
    small,
    step_on,
)

MODELS = ["two-tower", "vse", "sgr"]


def ncr(pairs: Pairs | None = None, **settings: Any) -> NCR:
    method = small(NCR, pairs, **settings)
    method.w = random_w(7)
    return method


def loop_prediction(method: NCR, net: int, pairs: IntArray) -> list[float]:
    """Section 4.1: quality over the mean of the best (B // 10 + 1), by a network in evaluation mode."""
    q = loop_quality(in_evaluation(method.nets[net], method, pairs), same_images(method, pairs))
    best = sorted(q)[-(len(q) // 10 + 1) :]
    return [min(1.0, value / (sum(best) / len(best))) for value in q]


# ---------------------------------------------------------------------- a step


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("net", [0, 1])
@pytest.mark.parametrize("model", MODELS)
def test_a_step_on_clean_pairs(model: str, net: int, mask: bool) -> None:
    """y = w + (1 - w) p, with w of the other network and p of the one that is trained."""
    method = ncr(model=model, mask_false_negatives=mask, margin_base=4.0)
    w, p = method.w[1 - net, CLEAN].tolist(), loop_prediction(method, net, CLEAN)
    labels = [w[i] + (1 - w[i]) * p[i] for i in range(len(CLEAN))]
    result = step_on(method, net, CLEAN)
    masked = same_images(method, CLEAN)
    assert len({round(label, 3) for label in labels}) > len(labels) / 2
    assert any(map(any, masked)) == mask
    assert result.loss.item() == pytest.approx(pair_loss(result.S, labels, 5, masked, base=4.0), rel=1e-4)
    assert result.metrics["label"].item() == pytest.approx(np.mean(labels), rel=1e-4)


@pytest.mark.parametrize("net", [0, 1])
@pytest.mark.parametrize("model", MODELS)
def test_a_step_on_noisy_pairs(model: str, net: int) -> None:
    """y is the mean of both predictions; w has no say."""
    method = ncr(model=model)
    predictions = [loop_prediction(method, number, NOISY) for number in range(2)]
    labels = [(a + b) / 2 for a, b in zip(*predictions, strict=True)]
    result = step_on(method, net, NOISY, on_noisy=True)
    assert result.loss.item() == pytest.approx(pair_loss(result.S, labels, 5, same_images(method, NOISY)), rel=1e-4)
    method.w = random_w(8)
    assert result.metrics["label"] == step_on(method, net, NOISY, on_noisy=True).metrics["label"]


@pytest.mark.parametrize(("main_step", "negatives"), [(0, 5), (5, 3), (10, 2), (99, 2)])
def test_negatives_harden(main_step: int, negatives: int) -> None:
    method = ncr()
    p = loop_prediction(method, 0, CLEAN)
    labels = [w + (1 - w) * own for w, own in zip(method.w[1, CLEAN].tolist(), p, strict=True)]
    result = step_on(method, 0, CLEAN, main_step=main_step)
    expected = pair_loss(result.S, labels, negatives, same_images(method, CLEAN))
    assert result.loss.item() == pytest.approx(expected, rel=1e-4)


def test_the_warm_up_is_the_mean_over_all_negatives() -> None:
    method = ncr(dropout=0.0)
    inputs = method.inputs(1, StepPlan(0, None, CLEAN), None)
    result, plain = method.warmup_loss(1, inputs), mispair.methods.find("plain")
    assert torch.equal(result.loss, plain(method.config, method.nets, method.loader).warmup_loss(1, inputs).loss)


# ---------------------------------------------------------------------- which pairs


def test_the_published_split_is_that_of_one_epoch() -> None:
    method = small(NCR, split_losses="single")
    for epoch in (0, 1):
        batches = random_batches(COUNT, 12, np.random.default_rng([0, 100, epoch]))
        views = [epoch_view(net, method.loader, ALPHA, batches, mask=True) for net in method.nets]
        method.begin_epoch(epoch)
        assert np.allclose(method.w, [clean_probability(view.losses.numpy()) for view in views], atol=1e-6)
