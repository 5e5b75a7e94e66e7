"""The model as users hold it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mispair
from mispair.data.pairs import Tokens
from mispair.data.text import Vocabulary
from mispair.errors import DataError
from tiny import REGIONS, WIDTH, tiny_pairs

SMALL: dict[str, Any] = {
    "embed_size": 16,
    "word_size": 8,
    "sim_size": 8,
    "batch_size": 16,
    "epochs": 1,
    "device": "cpu",
}


@pytest.fixture(scope="module", params=["vse", "sgr"])
def matcher(request: pytest.FixtureRequest) -> mispair.Matcher:
    return mispair.fit(tiny_pairs(16), model=request.param, **SMALL)


def test_save_and_load_give_the_same_scores(matcher: mispair.Matcher, tmp_path: Path) -> None:
    matcher.save(tmp_path / "model.safetensors")
    loaded = mispair.Matcher.load(tmp_path / "model.safetensors", "cpu")
    pairs = tiny_pairs(7, seed=3)
    assert np.array_equal(matcher.score(pairs.left, pairs.right), loaded.score(pairs.left, pairs.right))
    assert loaded.config == matcher.config


def test_arrays_and_texts_are_taken_as_they_come(matcher: mispair.Matcher) -> None:
    pairs = tiny_pairs(5, seed=3)
    assert isinstance(pairs.right, Tokens)
    features = pairs.left.features  # type: ignore[union-attr]
    assert np.array_equal(matcher.score(features, pairs.right.texts), matcher.score(pairs.left, pairs.right))
    assert np.allclose(np.linalg.norm(matcher.encode(["a b", "c"], "right"), axis=1), 1, atol=1e-5)


def test_one_text_scores_the_same_alone_and_in_company(matcher: mispair.Matcher) -> None:
    left = tiny_pairs(5, seed=3).left
    together = matcher.score(left, ["a", "b c d e f g h", "c d"])
    assert np.allclose(together[:, 1:2], matcher.score(left, ["b c d e f g h"]), atol=1e-6)


def test_texts_of_another_vocabulary_are_read_again(matcher: mispair.Matcher) -> None:
    pairs = tiny_pairs(5)
    assert isinstance(pairs.right, Tokens)
    other = Vocabulary(("<pad>", "<start>", "<end>", "<unk>", *reversed("abcdefghijklmnopqrstuvwxyz")))
    foreign = Tokens(*other.encode(pairs.right.texts), other, pairs.right.texts)
    assert np.array_equal(matcher.score(pairs.left, foreign), matcher.score(pairs.left, pairs.right))
    with pytest.raises(DataError, match="takes texts"):
        matcher.score(pairs.left, Tokens(foreign.ids, foreign.offsets, other))


def test_wrong_items_are_refused(matcher: mispair.Matcher) -> None:
    wide = np.zeros((2, REGIONS, WIDTH + 1), np.float32)
    with pytest.raises(DataError, match=f"width {WIDTH}, but got .* width {WIDTH + 1}"):
        matcher.score(wide, ["a"])
    with pytest.raises(DataError, match="left side of this model takes"):
        matcher.score(["a"], ["a"])
    with pytest.raises(DataError, match="right side of this model takes"):
        matcher.score(wide[..., :WIDTH], "a")
    with pytest.raises(DataError, match="right side of this model takes"):
        matcher.score(wide[..., :WIDTH], [])


def test_only_sgr_is_bound_to_its_number_of_regions(matcher: mispair.Matcher) -> None:
    more = np.ones((2, REGIONS + 2, WIDTH), np.float32)
    if matcher.config.model == "vse":
        assert matcher.score(more, ["a"]).shape == (2, 1)
    else:
        with pytest.raises(DataError, match=f"{REGIONS} regions .* but got {REGIONS + 2} regions"):
            matcher.score(more, ["a"])


def test_odd_values_are_refused(matcher: mispair.Matcher) -> None:
    with pytest.raises(DataError, match="not finite"):
        matcher.score(np.full((2, REGIONS, WIDTH), np.nan, np.float32), ["a"])
    with pytest.raises(DataError, match="left"):
        matcher.encode(["a"], "text")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="takes texts"):
        matcher.encode([1, 2], "right")  # type: ignore[list-item]


def test_a_damaged_or_foreign_file_is_refused(matcher: mispair.Matcher, tmp_path: Path) -> None:
    matcher.save(tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-100])
    (tmp_path / "foreign.safetensors").write_bytes(b"hello world, this is no model")
    for name in ("cut", "foreign", "absent"):
        with pytest.raises(DataError):
            mispair.Matcher.load(tmp_path / f"{name}.safetensors")
