"""Generated pairs for measurements."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import mispair
import synthetic
from mispair.pairs.pairs import Regions, Tokens
from mispair.pairs.vocabulary import END, START


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WIDTH": 8, "REGIONS": 3, "WORDS": 60, "NOISE": 5, "CHUNK": 4}.items():
        monkeypatch.setattr(synthetic, name, value)


def test_synthetic_pairs_have_five_captions_an_image() -> None:
    pairs = synthetic.synthetic_pairs(9)
    texts = pairs.right
    assert isinstance(texts, Tokens)
    assert len(pairs.left) == 9
    assert Counter(pairs.link.tolist()) == dict.fromkeys(range(9), 5)
    for row in range(45):
        ids = texts.ids[texts.offsets[row] : texts.offsets[row + 1]].tolist()
        assert ids[0] == START
        assert ids[-1] == END
        assert not {START, END} & set(ids[1:-1])
        assert max(ids) < len(texts.vocabulary)
    assert isinstance(pairs.left, Regions)
    assert pairs.left.features.dtype == np.float16


def test_regions_carry_the_words_of_their_captions() -> None:
    pairs = synthetic.synthetic_pairs(30)
    codes = np.random.default_rng(0).standard_normal((60, 8), dtype=np.float32)
    texts = pairs.right
    assert isinstance(texts, Tokens)
    assert isinstance(pairs.left, Regions)
    own = [set(texts.ids[texts.offsets[5 * i] : texts.offsets[5 * i + 5]].tolist()) for i in range(30)]
    noise = np.random.default_rng([0, 1]).standard_normal((5, 8), dtype=np.float32)
    for image in range(30):
        for region in pairs.left.features[image].astype(np.float32):
            apart = np.abs(region - codes[:, None] - noise).max(axis=2).min(axis=1)
            assert int(apart.argmin()) in own[image]
            assert apart.min() < 0.01


@pytest.mark.slow
def test_a_network_learns_from_synthetic_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "REGIONS", 12)
    monkeypatch.setattr(synthetic, "WIDTH", 32)
    train = synthetic.synthetic_pairs(50)
    matcher = mispair.fit(
        train, warmup_epochs=5, epochs=5, model="vse", embed_size=32, word_size=16, batch_size=32, lr=3e-3,
        negatives_end=8, device="cpu", augment=False,
    )  # fmt: skip
    assert matcher.evaluate(train).averaged.rsum > 150  # chance: 2 * (2 + 10 + 20)
