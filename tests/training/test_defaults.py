"""Settings that follow the data and the device, and validation without flagged pairs."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mispair
from mispair.auditing.audit import score_pairs, score_splits
from mispair.config import Config
from mispair.pairs.audited import AuditColumns
from mispair.pairs.pairs import Pairs, Vectors, subset, unflagged
from mispair.training.defaults import first_line, fitted, note_unused
from mispair.training.settings import all_names, override


def pairs_of(count: int, seed: int = 0) -> Pairs:
    """Two captions an image."""
    rng = np.random.default_rng(seed)
    left = rng.normal(size=(count // 2, 6)).astype(np.float32)
    link = np.repeat(np.arange(count // 2), 2)
    right = (left[link] @ rng.normal(size=(6, 5)) + 0.1 * rng.normal(size=(count, 5))).astype(np.float32)
    return Pairs(Vectors(left), Vectors(right), link)


@given(
    st.integers(1, 40_000),
    st.sampled_from(["vse", "sgr", "two-tower"]),
    st.sampled_from(["plain", "mend", "repair"]),
    st.sets(st.sampled_from(["embed_size", "epochs", "lr", "negatives_end", "negatives_start", "batch_size"])),
)
def test_what_is_given_stays(count: int, model: str, method: str, given_names: set[str]) -> None:
    config = override(Config(device="cpu"), {"model": model, "method": method})
    pairs = Pairs(Vectors(np.zeros((1, 2))), Vectors(np.zeros((count, 2))), np.zeros(count, dtype=np.int64))
    found = fitted(config, given_names, pairs)
    for name in given_names:
        assert getattr(found, name) == getattr(config, name)
    if not given_names:
        steps = found.total_epochs * -(-count // found.batch_size)
        assert steps <= max(3500, 8 * -(-count // found.batch_size))  # 25 minutes of the built-in data were 100,000
        assert found.embed_size <= 512


@pytest.mark.parametrize(
    ("method", "model", "settings", "unused"),
    [
        ("plain", "vse", {"tau", "sim_size", "dropout", "epochs", "out"}, "dropout, sim_size, tau have"),
        ("repair", "sgr", {"tau", "eta", "sim_size", "dropout", "split_memory", "margin"}, None),
        ("repair", "two-tower", {"trust", "word_size"}, "word_size, trust have"),
        ("decl", "vse", {"negatives_end", "hinge_least", "margin"}, "negatives_end has"),
        ("mend", "sgr", {"margin", "lr_decay_epochs", "temperature", "augment"}, "lr_decay_epochs, margin have"),
        ("mscn", "sgr", {"clean_threshold", "margin_base"}, "margin_base has"),
        ("plain", "vse", set(all_names()), None),
    ],
)
def test_settings_without_an_effect_are_noted(method: str, model: str, settings: set[str], unused: str | None) -> None:
    config = override(Config(device="cpu"), {"model": model, "method": method})
    with pytest.warns(UserWarning, match=f"^{unused} no effect on") if unused else nullcontext():
        note_unused(config, settings)


def test_the_first_line() -> None:
    config = fitted(Config(device="cpu", model="two-tower", method="mend"), (), pairs_of(100))
    words = first_line(config, 100)
    assert words.startswith("Training mend with two-tower, 512 wide: 40 epochs of up to 2 steps on ")


def test_networks_that_train_on_mismatched_vectors_are_smaller() -> None:
    small, large = (
        fitted(Config(device="cpu", model="two-tower", audit=audit), (), pairs_of(2000)) for audit in (False, True)
    )
    assert small.embed_size < large.embed_size
    assert small.total_epochs < large.total_epochs


def test_subset_and_unflagged() -> None:
    pairs = replace(pairs_of(8), match_score=np.array([0.9, 0.1, 0.2, 0.3, 0.8, 0.7, 0.6, 0.4], dtype=np.float32))
    kept = unflagged(pairs)
    assert kept.link.tolist() == [0, 1, 1, 2]  # the second image has no caption left
    assert isinstance(kept.left, Vectors)
    assert isinstance(pairs.left, Vectors)
    np.testing.assert_array_equal(kept.left.features, pairs.left.features[[0, 2, 3]])
    moved = subset(replace(pairs, truth=pairs.link[::-1].copy()), np.array([0]))
    assert (moved.link.tolist(), moved.truth.tolist() if moved.truth is not None else None) == ([0], [1])
    assert unflagged(replace(pairs, match_score=None)).match_score is None


def test_flagged_validation_pairs_do_not_decide(tmp_path: Path) -> None:
    pairs = pairs_of(240)
    train, dev = subset(pairs, np.arange(160)), subset(pairs, np.arange(160, 240))
    wrong = np.arange(80) % 4 == 0
    link = dev.link.copy()
    link[wrong] = np.roll(link[wrong], 1)
    noisy = replace(dev, link=link)
    mispair.fit(
        train, dev=noisy, out=tmp_path / "run", model="two-tower", audit=True, embed_size=8, epochs=2, device="cpu"
    )
    score = AuditColumns.read(tmp_path / "run/audited_dev.parquet").match_score
    assert score.shape == (80,)
    assert score[~wrong].mean() > score[wrong].mean() + 0.3
    together = score_splits([train, noisy], "cpu")
    np.testing.assert_array_equal(together[1], score)
    np.testing.assert_array_equal(score_splits([train], "cpu")[0], score_pairs(train, "cpu"))


def test_settings_that_an_existing_noise_index_decides_are_noted(tmp_path: Path) -> None:
    config = Config(noise_file=str(tmp_path / "noise.npy"), noise_ratio=0.4, noise_seed=3)
    names = ("noise_file", "noise_ratio", "noise_seed")
    with warnings.catch_warnings(action="error"):
        note_unused(config, names)  # it will be written
    (tmp_path / "noise.npy").touch()
    with pytest.warns(UserWarning, match="noise_ratio, noise_seed have no effect"):
        note_unused(config, names)
    with warnings.catch_warnings(action="error"):
        note_unused(config, ["noise_file"])
