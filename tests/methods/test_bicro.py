"""BiCro: split, labels, margins and steps by plain loops. What it has in common with NCR: test_promises.py."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mispair.methods.base import EpochPairs, StepPlan
from mispair.methods.bicro import BiCro, BiCroInputs, _ratio, clean_probability
from mispair.methods.epoch_view import epoch_view
from mispair.models import Encoded
from mispair.pairs.batches import random_batches
from mispair.pairs.pairs import Pairs
from mispair.settings import BicroSettings
from mispair.support.arrays import IntArray
from small_data import lengths_of
from tiny import tiny_pairs
from training import trained
from two_networks import (
    ALPHA,
    CLEAN,
    COUNT,
    NOISY,
    in_evaluation,
    loop_losses,
    loop_quality,
    pair_loss,
    random_w,
    same_images,
    small,
    step_on,
    training,
    vector_pairs,
    with_w,
)

MODELS = ["two-tower", "vse", "sgr"]


def bicro(pairs: Pairs | None = None, **settings: Any) -> BiCro:
    """With labels of many values: those of untrained networks are all near 1."""
    method = small(BiCro, pairs, **{"label_floor": 0.2, **settings})
    method.clean = [CLEAN[:20], CLEAN[3:]]
    return method


# ---------------------------------------------------------------------- labels by loops


def plain_vectors(encoded: Encoded) -> list[list[float]]:
    """Mean over the real regions or words, not normalised; the only vector where there is but one."""
    if encoded.local is None:
        vectors: list[list[float]] = encoded.pooled.tolist()
        return vectors
    return [
        [sum(column) / length for column in zip(*item[:length], strict=True)]
        for item, length in zip(encoded.local.tolist(), lengths_of(encoded), strict=True)
    ]


def seen_by(method: BiCro, net: int, pairs: IntArray) -> tuple[list[list[float]], list[list[float]]]:
    """Vectors of images and texts in evaluation mode."""
    network, batch = method.nets[net].eval(), method.loader.batch(pairs)
    with torch.no_grad():
        left, right = network.encode_left(batch.left), network.encode_right(batch.right)
    network.train()
    return plain_vectors(left), plain_vectors(right)


def cosine(a: list[float], b: list[float]) -> float:
    norms = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(x * x for x in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / norms


def below_one(a: float, b: float) -> float:
    return a / b if a / b < 1 else b / a


def loop_ratios(left: Any, right: Any, anchor_left: Any, anchor_right: Any) -> list[float]:
    """Section 4.3: r1 + r2 of each pair."""
    sums = []
    for image, text in zip(left, right, strict=True):
        by_image = [cosine(image, anchor) for anchor in anchor_left]
        by_text = [cosine(text, anchor) for anchor in anchor_right]
        a, b = by_image.index(max(by_image)), by_text.index(max(by_text))
        sums.append(below_one(by_image[a], by_text[a]) + below_one(by_text[b], by_image[b]))
    return sums


def ranked(method: BiCro, net: int, pairs: IntArray) -> tuple[list[int], list[int]]:
    """Anchors and others of a clean batch, each from the worst to the best."""
    q = loop_quality(in_evaluation(method.nets[net], method, pairs), same_images(method, pairs))
    order = sorted(range(len(q)), key=lambda i: q[i])
    count = len(q) // 10 + 1
    return order[-count:], order[:-count]


def floored(method: BiCro, value: float) -> float:
    return min(1.0, max(0.0, value)) if value > method.config.of(BicroSettings).label_floor else 0.0


def loop_clean_labels(method: BiCro, net: int, pairs: IntArray) -> list[float]:
    """By network `net`."""
    anchors, _ = ranked(method, net, pairs)
    left, right = seen_by(method, net, pairs)
    sums = loop_ratios(left, right, [left[a] for a in anchors], [right[a] for a in anchors])
    values = [floored(method, 0.5 + value / 4) for value in sums]
    return [1.0 if i in anchors else values[i] for i in range(len(pairs))]


def loop_noisy_labels(method: BiCro, net: int, pairs: IntArray, clean: IntArray) -> list[float]:
    anchors, _ = ranked(method, net, clean)
    left, right = seen_by(method, net, clean)
    sums = loop_ratios(*seen_by(method, net, pairs), [left[a] for a in anchors], [right[a] for a in anchors])
    return [floored(method, value / 2) for value in sums]


def noisy_inputs(method: BiCro, net: int, main_step: int = 0, pairs: IntArray = NOISY) -> BiCroInputs:
    inputs = method.inputs(net, StepPlan(0, main_step, pairs, None, True), None)
    assert isinstance(inputs, BiCroInputs)
    return inputs


def anchors_of(method: BiCro, net: int, main_step: int = 0) -> IntArray:
    batch = noisy_inputs(method, net, main_step).clean
    assert batch is not None
    return batch.pairs.numpy()


# ---------------------------------------------------------------------- a step


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("net", [0, 1])
@pytest.mark.parametrize("model", MODELS)
def test_a_step_on_clean_pairs(model: str, net: int, mask: bool) -> None:
    method = bicro(model=model, mask_false_negatives=mask, margin_base=4.0)
    labels = loop_clean_labels(method, 1 - net, CLEAN)
    result = step_on(method, net, CLEAN)
    assert len({round(label, 4) for label in labels}) > len(CLEAN) / 2
    expected = pair_loss(result.S, labels, 5, same_images(method, CLEAN), base=4.0)
    assert result.loss.item() == pytest.approx(expected, rel=1e-4)
    assert result.metrics["label"].item() == pytest.approx(np.mean(labels), rel=1e-4)
    inputs = method.inputs(net, StepPlan(0, 0, CLEAN), None)
    assert method._labels(method.nets[1 - net], inputs).tolist() == pytest.approx(labels, abs=1e-4)  # type: ignore[arg-type]


@pytest.mark.parametrize("net", [0, 1])
@pytest.mark.parametrize("model", MODELS)
def test_a_step_on_noisy_pairs(model: str, net: int) -> None:
    method = bicro(model=model)
    inputs = noisy_inputs(method, net)
    labels = loop_noisy_labels(method, 1 - net, NOISY, anchors_of(method, net))
    assert method._labels(method.nets[1 - net], inputs).tolist() == pytest.approx(labels, abs=1e-4)
    result = method.loss(net, inputs)
    assert result.S.shape == (len(NOISY), len(NOISY))
    assert result.loss.item() == pytest.approx(pair_loss(result.S, labels, 5, same_images(method, NOISY)), rel=1e-4)


def labels_by_pair(method: BiCro, pairs: IntArray) -> dict[int, float]:
    inputs = method.inputs(0, StepPlan(0, 0, pairs), None)
    assert isinstance(inputs, BiCroInputs)
    return dict(zip(pairs.tolist(), method._labels(method.nets[1], inputs).tolist(), strict=True))


def test_labels_land_on_their_own_pairs() -> None:
    """The order of a batch makes no difference."""
    shuffled, method = np.random.default_rng(0).permutation(CLEAN), bicro()
    assert labels_by_pair(method, shuffled) == pytest.approx(labels_by_pair(method, CLEAN), abs=1e-5)


def test_labels_not_above_the_floor_are_zero() -> None:
    every = bicro(label_floor=0.0)._labels(bicro().nets[0], noisy_inputs(bicro(), 1)).tolist()
    floor = sum(sorted(every)[5:7]) / 2
    method = bicro(label_floor=floor)
    labels = method._labels(method.nets[0], noisy_inputs(method, 1)).tolist()
    assert labels == [0 if value <= floor else value for value in every]
    assert sum(label > 0 for label in labels) == len(NOISY) - 6


def test_ratios_with_zeros_and_other_signs() -> None:
    near = torch.tensor([[0.5, 0.2], [0.2, 0.5], [0.0, -0.1], [0.0, -1.0], [0.5, 0.4], [-0.1, -0.2]])
    far = torch.tensor([[0.25, 1.0], [1.0, 0.8], [0.0, 1.0], [0.3, 1.0], [-0.25, 0.4], [-0.4, 0.3]])
    # 0.25/0.5; 0.5/0.8; 0/0 counts as 0; 0/0.3; 0.5/-0.25 is below 1 as it stands; -0.1/-0.4
    assert _ratio(near, far).tolist() == pytest.approx([0.5, 0.625, 0, 0, -2, 0.25])
    assert _ratio(torch.tensor([[0.5]]), torch.tensor([[0.0]])).item() == 0


def test_clean_pairs_for_the_anchors_of_noisy_ones() -> None:
    """From the split that trains the network: others at every step, but the same in every call."""
    method, again = bicro(), bicro()
    chosen = {(net, step): anchors_of(method, net, step).tolist() for net in range(2) for step in (1, 0)}
    for (net, step), pairs in chosen.items():
        assert len(set(pairs)) == len(pairs) == 12
        assert set(pairs) <= set(method.clean[net].tolist())
        assert anchors_of(again, net, step).tolist() == pairs
    assert len({tuple(pairs) for pairs in chosen.values()}) == 4
    method.clean = [CLEAN] * 2
    assert anchors_of(method, 0).tolist() != anchors_of(method, 1).tolist()
    method.clean = [CLEAN[:2]] * 2
    assert sorted(anchors_of(method, 0)) == sorted(CLEAN[:2])


# ---------------------------------------------------------------------- warm-up


@pytest.mark.parametrize(("share", "size", "count"), [(0.3, 23, 6), (0.3, 2, 1), (0.29, 100, 29), (1.0, 23, 23)])
def test_the_warm_up_trains_on_the_smallest_losses(share: float, size: int, count: int) -> None:
    method = bicro(vector_pairs(100), warmup_share=share)
    pairs = np.arange(100)[:size]
    result = method.warmup_loss(1, method.inputs(1, StepPlan(0, None, pairs), None))
    losses = sorted(loop_losses(result.S, same_images(method, pairs)))
    assert result.loss.item() == pytest.approx(sum(losses[:count]), rel=1e-4)
    assert result.loss.requires_grad


# ---------------------------------------------------------------------- which pairs


def two_groups(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return 3 * np.concatenate([rng.beta(2, 15, 250), rng.beta(9, 5, 150)])


@pytest.mark.parametrize("seed", range(3))
def test_the_probability_of_being_clean(seed: int) -> None:
    losses = two_groups(seed)
    w = clean_probability(losses)
    assert np.isfinite(w).all()
    assert (np.diff(w[np.argsort(losses)]) <= 1e-9).all()
    assert w[losses.argmin()] > 0.5 > w[losses.argmax()]
    assert ((w > 0.5) == (np.arange(400) < 250)).mean() > 0.95


def test_losses_that_do_not_differ() -> None:
    with pytest.warns(UserWarning, match="taken for clean"):
        assert clean_probability(np.full(9, 0.3)).tolist() == [1] * 9


def test_the_split_of_one_epoch_and_of_many() -> None:
    one, many = (bicro(split_losses=split) for split in ("single", "smoothed"))
    memory: Any = None
    for epoch in range(2):
        batches = random_batches(COUNT, 12, np.random.default_rng([0, 100, epoch]))
        views = [epoch_view(net, one.loader, ALPHA, batches, mask=True) for net in one.nets]
        losses = np.stack([view.losses.numpy() for view in views])
        memory = losses if memory is None else (memory + losses) / 2
        one.begin_epoch(epoch)
        many.begin_epoch(epoch)
        assert np.allclose(one.w, [clean_probability(row) for row in losses], atol=1e-6)
        assert np.allclose(many.w, [clean_probability(row) for row in memory], atol=1e-5)
    assert not np.allclose(one.w, many.w, atol=1e-3)


# ---------------------------------------------------------------------- state and whole runs


def test_the_state_survives_a_checkpoint() -> None:
    method, copy = (with_w(bicro(noisy_start=0.0), random_w()) for _ in range(2))
    method.begin_epoch(0)
    buffer = io.BytesIO()
    torch.save(method.state_dict(), buffer)
    buffer.seek(0)
    copy.load_state_dict(torch.load(buffer, weights_only=True))
    for net in range(2):
        assert anchors_of(copy, net, 7).tolist() == anchors_of(method, net, 7).tolist()


def test_a_network_without_clean_pairs_is_not_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none, some = np.empty(0, dtype=np.int64), np.arange(30)

    def divide(self: BiCro, *_: Any) -> list[EpochPairs]:
        self.clean = [none, some]
        return [EpochPairs(none, np.arange(35), "before"), EpochPairs(some, np.arange(30, 35), "before")]

    monkeypatch.setattr(BiCro, "divide", divide)
    steps = trained(training("bicro"), tiny_pairs(7), tmp_path, None)
    main = [(net, plan.on_noisy) for net, plan in steps if plan.main_step is not None]
    assert main == [(1, True), (1, False)] * 8  # two epochs of four batches
