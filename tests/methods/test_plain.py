"""Plain training's step against the loss written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mispair.config import Config
from mispair.methods import METHODS, find
from mispair.methods.plain import Plain
from mispair.models import SideSpec, build
from mispair.pairs.batches import PairLoader
from small_data import take_step
from tiny import tiny_pairs


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("main_step", [0, 3, 6, 100])
def test_step_is_the_mean_of_the_hardest_negatives(mask: bool, main_step: int) -> None:
    config = Config(
        embed_size=8, word_size=8, batch_size=12, negatives_start=8, negatives_end=2, hardening_steps=6,
        mask_false_negatives=mask, own={"augment": False},
    )  # fmt: skip
    pairs = tiny_pairs(6)
    network = build(config, SideSpec.of(pairs.left), SideSpec.of(pairs.right), seed=0).eval()
    loader = PairLoader(pairs, torch.device("cpu"))
    chosen = np.array([0, 1, 5, 6, 7, 10, 11, 15, 20, 21, 25, 29])
    result = take_step(Plain(config, [network], loader), 0, main_step, chosen)

    negatives = {0: 8, 3: 4, 6: 2, 100: 2}[main_step]
    S, rows, expected = result.S.detach().numpy(), pairs.link[chosen], 0.0
    for i in range(len(S)):
        others = [j for j in range(len(S)) if j != i]
        allowed = [j for j in others if not mask or rows[j] != rows[i]]
        for scores in (S[i], S[:, i]):
            costs = [max(0.0, 0.2 + scores[j] - S[i, i]) for j in allowed] + [0.0] * (len(others) - len(allowed))
            expected += sum(sorted(costs)[-negatives:]) / negatives
    assert result.loss.item() == pytest.approx(expected, rel=1e-5)


def test_it_is_registered() -> None:
    assert find("plain") is METHODS["plain"] is Plain
    assert Plain.networks == 1
