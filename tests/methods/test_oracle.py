"""The oracle sees right pairs only; and how many networks a method trains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pytest
import torch

import mispair
from mispair.errors import ConflictError, DataError, TooFewError
from mispair.methods import find
from mispair.methods.base import StepPlan
from mispair.methods.oracle import Oracle
from mispair.models import SideSpec, build
from mispair.pairs.batches import PairLoader
from mispair.pairs.noise import add_noise
from mispair.pairs.pairs import Pairs
from mispair.training.trainer import Trainer
from refusals import refused
from small_data import vectors

FAST: dict[str, Any] = {
    "model": "two-tower", "embed_size": 8, "batch_size": 16, "epochs": 2, "warmup_epochs": 1, "device": "cpu",
}  # fmt: skip


def vector_pairs(count: int = 60) -> Pairs:
    return Pairs(vectors(count, width=6), vectors(count, width=5, seed=1), np.arange(count))


@pytest.mark.parametrize("networks", [1, 2])
def test_it_trains_on_right_pairs_only(networks: Literal[1, 2], monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = add_noise(vector_pairs(), noise_ratio=0.5, seed=0)
    seen: dict[tuple[int, int], list[int]] = {}
    steps = Trainer.steps

    def noting_steps(trainer: Trainer) -> Iterator[StepPlan]:
        for plan in steps(trainer):
            assert plan.noisy is None
            place = trainer.cursor.epoch, trainer.cursor.network
            seen.setdefault(place, []).extend(plan.pairs.tolist())
            yield plan

    monkeypatch.setattr(Trainer, "steps", noting_steps)
    mispair.fit(pairs, method="oracle", networks=networks, **FAST)
    right = [pair for pair in range(60) if pairs.link[pair] == pair]
    assert 25 < len(right) < 40
    assert sorted(seen) == [(epoch, network) for epoch in range(3) for network in range(networks)]
    assert all(sorted(pairs_seen) == right for pairs_seen in seen.values())


def test_duplicates_of_an_image_count_as_matching() -> None:
    pairs = vector_pairs(8)
    twice = Pairs(pairs.left, pairs.right, np.array([1, 0, 3, 2, 4, 5, 6, 7]), np.arange(8), np.arange(8) // 2)
    wrong = Pairs(pairs.left, pairs.right, np.array([2, 1, 0, 3, 4, 5, 6, 7]), np.arange(8), np.arange(8) // 2)
    config = mispair.Config(**FAST)
    for given_pairs, expected in ((twice, list(range(8))), (wrong, [1, 3, 4, 5, 6, 7])):
        loader = PairLoader(given_pairs, torch.device("cpu"))
        net = build(config, SideSpec.of(given_pairs.left), SideSpec.of(given_pairs.right), seed=0)
        (split,) = Oracle(config, [net], loader).begin_epoch(0)
        assert split.clean.tolist() == expected


def test_unknown_truth_is_refused() -> None:
    with refused(DataError, names="`noise_ratio`"):
        mispair.fit(vector_pairs(), method="oracle", **FAST)


@pytest.mark.parametrize(("right", "images"), [([], 0), ([4], 1), ([4, 5], 1)])
def test_too_few_right_pairs_are_refused(right: list[int], images: int) -> None:
    pairs, link = vector_pairs(8), np.roll(np.arange(8), 1)
    link[right] = 4
    truth = np.arange(8)
    truth[right] = 4
    wrong = Pairs(pairs.left, pairs.right, link, truth, name="mine")
    with refused(TooFewError, where="mine", names=f"{len(right)} of 8 pairs match, with {images} different"):
        mispair.fit(wrong, method="oracle", **FAST)


def test_two_plain_networks_differ_and_are_averaged() -> None:
    pairs = vector_pairs()
    matcher = mispair.fit(pairs, networks=2, dropout=0.0, **FAST)
    assert len(matcher.networks) == 2
    first, second = (network.state_dict() for network in matcher.networks)
    for side in ("left", "right"):
        assert not torch.equal(first[f"{side}.fc.weight"], second[f"{side}.fc.weight"])
    alone = mispair.fit(pairs, dropout=0.0, **FAST).networks
    assert len(alone) == 1
    assert torch.equal(alone[0].state_dict()["left.fc.weight"], first["left.fc.weight"])  # the first is the same
    S = [network.score(pairs.left, pairs.right) for network in (matcher, mispair.fit(pairs, dropout=0.0, **FAST))]
    assert not np.allclose(S[0], S[1])


def test_repair_needs_two_networks() -> None:
    assert find("repair").networks == 2
    assert find("oracle").networks == find("plain").networks == 1
    with refused(ConflictError, where="networks", names="repair"):
        mispair.fit(vector_pairs(), method="repair", networks=1, **FAST)
