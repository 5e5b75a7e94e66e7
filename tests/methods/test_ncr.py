"""NCR: labels, margins and steps by plain loops; exact after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mispair
from helpers import gradients
from mispair.config import Config, override
from mispair.data.noise import add_noise
from mispair.data.pairs import IntArray, Pairs
from mispair.methods import find
from mispair.methods.base import Work, similarity
from mispair.methods.ncr import NCR, NCRInputs
from mispair.mixture import clean_probability
from mispair.survey import random_batches, survey
from tiny import tiny_pairs
from training import check_resume
from two_networks import (
    ALPHA,
    CLEAN,
    COUNT,
    LEARNING,
    LITTLE,
    NOISY,
    SMALL,
    ends_well,
    in_evaluation,
    loop_hard_loss,
    loop_quality,
    margin_of,
    pair_loss,
    random_w,
    same_images,
    small,
    step_on,
    with_w,
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
    assert result.report["label"].item() == pytest.approx(np.mean(labels), rel=1e-4)


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
    assert result.report["label"] == step_on(method, net, NOISY, on_noisy=True).report["label"]


@pytest.mark.parametrize("net", [0, 1])
@pytest.mark.parametrize("model", MODELS)
def test_as_published_a_clean_label_is_a_matrix(model: str, net: int) -> None:
    """S2: Y[i, j] = w_i + (1 - w_i) p_j, and so the margin, in both directions."""
    method = ncr(model=model, as_published=True)
    w, p = method.w[1 - net, CLEAN].tolist(), loop_prediction(method, net, CLEAN)
    B = range(len(CLEAN))
    margin = [[margin_of(w[i] + (1 - w[i]) * p[j]) for j in B] for i in B]
    result = step_on(method, net, CLEAN)
    expected = loop_hard_loss(result.S, margin, margin, 5, same_images(method, CLEAN))
    assert result.loss.item() == pytest.approx(expected, rel=1e-4)
    right = pair_loss(result.S, [w[i] + (1 - w[i]) * p[i] for i in B], 5, same_images(method, CLEAN))
    assert abs(expected - right) > 1e-3 * right


@pytest.mark.parametrize("model", MODELS)
def test_as_published_a_noisy_margin_is_that_of_the_row(model: str) -> None:
    """S2: margin of row i, right for images but not for captions."""
    method = ncr(model=model, as_published=True)
    predictions = [loop_prediction(method, number, NOISY) for number in range(2)]
    margin = [[margin_of((a + b) / 2)] * len(NOISY) for a, b in zip(*predictions, strict=True)]
    result = step_on(method, 0, NOISY, on_noisy=True)
    expected = loop_hard_loss(result.S, margin, margin, 5, same_images(method, NOISY))
    assert result.loss.item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("main_step", "negatives"), [(0, 5), (5, 3), (10, 2), (99, 2)])
def test_negatives_harden(main_step: int, negatives: int) -> None:
    method = ncr()
    p = loop_prediction(method, 0, CLEAN)
    labels = [w + (1 - w) * own for w, own in zip(method.w[1, CLEAN].tolist(), p, strict=True)]
    result = step_on(method, 0, CLEAN, main_step=main_step)
    expected = pair_loss(result.S, labels, negatives, same_images(method, CLEAN))
    assert result.loss.item() == pytest.approx(expected, rel=1e-4)


def named(grads: dict[str, Tensor | None]) -> set[str]:
    return {name for name, grad in grads.items() if grad is not None}


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("on_noisy", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_the_trained_network_alone_gets_gradients_and_all_of_them(model: str, on_noisy: bool, half: bool) -> None:
    """In half precision, weights converted for a prediction must not come back without gradients (older torch)."""
    method = ncr(model=model)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        result = step_on(method, 1, CLEAN, on_noisy=on_noisy)
    assert not result.report["label"].requires_grad
    result.loss.backward()  # type: ignore[no-untyped-call]
    found = named(gradients(method.nets[1]))
    similarity(method.nets[1], method.loader.batch(CLEAN)).sum().backward()  # type: ignore[no-untyped-call]
    assert found == named(gradients(method.nets[1]))
    assert not named(gradients(method.nets[0]))
    assert all(net.training for net in method.nets)


def test_a_step_is_a_function_of_its_inputs_and_networks() -> None:
    method = ncr(dropout=0.0)
    inputs = method.inputs(0, Work(0, 3, CLEAN), None)
    assert isinstance(inputs, NCRInputs)
    before = method.loss(0, inputs).loss
    method.w, method.mean_losses, method.found = random_w(9), random_w(9), {}
    assert torch.equal(method.loss(0, inputs).loss, before)
    assert method.repeatable


@pytest.mark.parametrize("on_noisy", [False, True])
def test_predictions_see_pairs_without_augmentation(on_noisy: bool) -> None:
    method = ncr(model="vse", augment=True)
    work = Work(0, 0, CLEAN, None, on_noisy)
    augmented = method.inputs(0, work, np.random.default_rng(0))
    assert isinstance(augmented, NCRInputs)
    plain = method.loader.batch(CLEAN)
    assert torch.equal(augmented.seen.left.values, plain.left.values)
    assert torch.equal(augmented.seen.right.values, plain.right.values)
    assert not torch.equal(augmented.clean.left.lengths, torch.full((len(CLEAN),), 5))  # type: ignore[arg-type]
    labels = [step_on(method, 0, CLEAN, on_noisy=on_noisy).report["label"], method.loss(0, augmented).report["label"]]
    assert labels[0] == labels[1]


def test_the_warm_up_is_the_mean_over_all_negatives() -> None:
    method = ncr(dropout=0.0)
    inputs = method.inputs(1, Work(0, None, CLEAN), None)
    result, plain = method.warmup_loss(1, inputs), mispair.methods.find("plain")
    assert torch.equal(result.loss, plain(method.config, method.nets, method.loader).warmup_loss(1, inputs).loss)


# ---------------------------------------------------------------------- which pairs


def test_each_network_trains_on_what_the_other_calls_clean() -> None:
    w = random_w()
    method = with_w(ncr(clean_threshold=0.6, epochs=4), w)
    for epoch in range(4):
        for net, split in enumerate(method.begin_epoch(epoch)):
            assert split.clean.tolist() == [i for i in range(COUNT) if w[1 - net, i] > 0.6]
            noisy = [i for i in range(COUNT) if w[1 - net, i] <= 0.6]
            assert split.noisy.tolist() == (noisy if epoch >= 2 else [])
            assert split.order == "after"


def test_the_published_split_is_that_of_one_epoch() -> None:
    method = small(NCR, split="single")
    for epoch in (0, 1):
        batches = random_batches(COUNT, 12, np.random.default_rng([0, 100, epoch]))
        views = [survey(net, method.loader, ALPHA, batches, mask=True) for net in method.nets]
        method.begin_epoch(epoch)
        assert np.allclose(method.w, [clean_probability(view.losses.numpy()) for view in views], atol=1e-6)


def training(**settings: Any) -> Config:
    chosen = {**SMALL, "method": "ncr", "model": "vse", "batch_size": 8, "checkpoint_seconds": 1000.0, **settings}
    return override(Config(data="test"), chosen)


def check_order(works: list[Work]) -> None:
    """Steps of one network in main epochs: at first on clean pairs alone, then on noisy ones after each."""
    first = [work.on_noisy for work in works].index(True) - 1
    late = works[first:]
    assert first > 0
    assert not any(work.on_noisy for work in works[:first])
    assert [work.on_noisy for work in late] == [False, True] * (len(late) // 2)
    assert [work.main_step for work in late[::2]] == [work.main_step for work in late[1::2]]
    clean, noisy = (set(np.concatenate([work.clean for work in part])) for part in (late[::2], late[1::2]))
    assert not clean & noisy


STOPS = [(0, 0, 1), (1, 1, 1), (2, 0, 1), (2, 0, 2), (2, 1, 3)]  # warm-up, clean steps alone, after clean, after noisy


@pytest.mark.parametrize("settings", [{"augment": True}, {"split": "single", "as_published": True}])
def test_resume_is_exact_wherever_it_stopped(tmp_path: Path, settings: dict[str, Any]) -> None:
    chosen, pairs = training(**settings), add_noise(tiny_pairs(7), ratio=0.4, seed=0)
    steps, _ = check_resume(chosen, pairs, tmp_path, STOPS)
    for net in range(2):
        check_order([work for number, work in steps if number == net and work.main_step is not None])


# ---------------------------------------------------------------------- whole runs


@pytest.mark.parametrize(("pairs", "settings"), [case[1:] for case in LITTLE], ids=[case[0] for case in LITTLE])
def test_little_or_much_noise_few_pairs(pairs: Pairs, settings: dict[str, Any]) -> None:
    assert ends_well("ncr", pairs, **settings)


def test_it_learns_from_noisy_pairs() -> None:
    """40 % wrong pairs; chance is an rSum of 126. Seeds 0-2: 364, 398, 410."""
    noisy, test = add_noise(tiny_pairs(100), ratio=0.4, seed=0), tiny_pairs(24, seed=5)
    matcher = mispair.fit(noisy, method="ncr", split="single", **LEARNING)
    assert matcher.evaluate(test).averaged.rsum > 300
    assert matcher.score(test.left, test.right).std() > 0.02


def test_it_is_registered() -> None:
    assert find("ncr") is NCR
