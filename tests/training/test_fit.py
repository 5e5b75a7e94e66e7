"""`fit` and `train_and_test`: what they refuse before any work."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import mispair
from mispair.config import Config
from mispair.errors import ChangedError, ConflictError, DamagedError, DataError, ShapeError
from mispair.pairs.noise import add_noise
from mispair.pairs.pairs import Tokens, Vectors
from mispair.pairs.vocabulary import SPECIAL_WORDS, Vocabulary
from mispair.training.fit import train_and_test
from mispair.training.settings import override
from mispair.training.splits import load_splits
from mispair.training.trainer import Trainer
from refusals import refused
from tiny import REGIONS, WIDTH, WORDS, tiny_folder, tiny_pairs
from training import with_other_truth
from two_networks import vector_pairs

SMALL: dict[str, Any] = {
    "embed_size": 16, "word_size": 8, "sim_size": 8, "batch_size": 16, "epochs": 1, "warmup_epochs": 0, "device": "cpu",
}  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "how"),
    [
        ({"noise_ratio": 0.4}, "mispair.add_noise"),
        ({"noise_kind": "image"}, "mispair.add_noise"),
        ({"noise_file": "x.npy"}, "mispair.add_noise"),
        ({"noise_seed": 1}, "mispair.add_noise"),
        ({"data": "shapes"}, "mispair.load"),
        ({"vocab": "x.json"}, "mispair.load"),
        ({"dev_protocol": "ncr"}, "mispair.load"),
        ({"captions_per_image": 5}, "mispair.load"),
    ],
)
def test_settings_about_the_data_are_refused(settings: dict[str, Any], how: str, tmp_path: Path) -> None:
    (name,) = settings
    with refused(ConflictError, where=name, names=how):
        mispair.fit(tiny_pairs(16), out=tmp_path / "run", **SMALL, **settings)
    assert not (tmp_path / "run").exists()
    assert hasattr(mispair, how.removeprefix("mispair."))


def test_too_few_epochs_for_a_student_are_refused_before_the_audit(tmp_path: Path) -> None:
    with refused(ConflictError, where="epochs", names="mend"):
        mispair.fit(tiny_pairs(16), out=tmp_path / "run", method="mend", **SMALL)
    config = Config(data=str(tmp_path / "nowhere"), method="mend", epochs=1, device="cpu")
    with refused(ConflictError, where="epochs", names="mend"):
        train_and_test(config, tmp_path / "run", given=["method", "epochs"])
    assert not (tmp_path / "run").exists()


def test_a_gpu_has_its_memory_back_when_a_training_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer refers to itself, so it would stay until Python looks for such things."""
    ended = []

    def fit(self: Trainer) -> Any:
        ended.append(weakref.ref(self))
        return SimpleNamespace(device=torch.device("cuda"))

    monkeypatch.setattr(Trainer, "fit", fit)
    mispair.fit(tiny_pairs(16), **SMALL)
    assert [trainer() for trainer in ended] == [None]


@pytest.mark.parametrize("name", ["pairs", "dev"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_values_that_are_not_finite_are_refused_before_training(name: str, side: str, tmp_path: Path) -> None:
    good = vector_pairs(12)
    features = np.array(getattr(good, side).features)
    features[5, 1] = np.inf
    bad: dict[str, Any] = {side: Vectors(features)}
    given: dict[str, Any] = {"pairs": good, "dev": good, name: replace(good, **bad)}
    with refused(DamagedError, f"fit: the {side} side of {name}", "row 5"):
        mispair.fit(**given, out=tmp_path / "run", model="two-tower", **SMALL)
    assert not (tmp_path / "run").exists()


def test_a_model_that_does_not_take_the_data_is_refused_before_the_audit(tmp_path: Path) -> None:
    with refused(ConflictError, where="model", names="two-tower"):
        mispair.fit(tiny_pairs(16), out=tmp_path / "run", method="mend", model="two-tower", **SMALL | {"epochs": 5})
    assert not (tmp_path / "run").exists()


def test_texts_without_words_are_refused_before_training(tmp_path: Path) -> None:
    pairs = tiny_pairs(16)
    assert isinstance(pairs.right, Tokens)
    offsets = pairs.right.offsets.copy()
    offsets[7] = offsets[6]
    with refused(ShapeError, "fit: the right side of pairs", "text 6"):
        mispair.fit(replace(pairs, right=replace(pairs.right, offsets=offsets)), out=tmp_path / "run", **SMALL)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", ["plain", "repair", "decl"])
@pytest.mark.parametrize("side", ["left", "right", "texts"])
def test_items_that_are_all_the_same_are_refused_before_training(method: str, side: str, tmp_path: Path) -> None:
    pairs = tiny_pairs(16) if side == "texts" else vector_pairs(40)
    if isinstance(pairs.right, Tokens):
        vocabulary, texts = pairs.right.vocabulary, ["a b"] * len(pairs)
        pairs = replace(pairs, right=Tokens(*vocabulary.encode(texts), vocabulary, texts))
    else:
        same: dict[str, Any] = {side: Vectors(np.ones_like(getattr(pairs, side).features))}
        pairs = replace(pairs, **same)
    model = "vse" if side == "texts" else "two-tower"
    with refused(DataError, names=f"items of the {side.replace('texts', 'right')} side"):
        mispair.fit(pairs, out=tmp_path / "run", method=method, model=model, **SMALL)
    assert not (tmp_path / "run").exists()


def test_one_item_that_differs_is_enough() -> None:
    pairs = vector_pairs(40)
    features = np.ones((40, 5), np.float32)
    features[1] = 2  # not in the sample
    matcher = mispair.fit(replace(pairs, right=Vectors(features)), model="two-tower", **SMALL)
    assert np.isfinite(matcher.score(pairs.left, Vectors(features))).all()


def test_other_groups_are_other_pairs(tmp_path: Path) -> None:
    pairs = replace(vector_pairs(24), groups=np.arange(12) // 2)
    settings: dict[str, Any] = {"out": tmp_path / "run", "model": "two-tower", **SMALL}
    first, again = mispair.fit(pairs, **settings), mispair.fit(pairs, **settings)
    assert np.array_equal(first.score(pairs.left, pairs.right), again.score(pairs.left, pairs.right))
    for groups in (None, np.arange(12) // 3):
        with refused(ChangedError, where=tmp_path / "run"):
            mispair.fit(replace(pairs, groups=groups), **settings)


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("method", ["plain", "oracle"])
def test_another_truth_makes_other_pairs_for_methods_that_use_it(method: str, ended: bool, tmp_path: Path) -> None:
    pairs, reseeded = (add_noise(vector_pairs(24), noise_ratio=0.4, seed=seed) for seed in (0, 1))
    settings: dict[str, Any] = {"out": tmp_path / "run", "method": method, "model": "two-tower", **SMALL}
    mispair.fit(pairs, **settings)
    for given, other in ((pairs, False), (with_other_truth(pairs), method == "oracle"), (reseeded, True)):
        if not ended:
            (tmp_path / "run/result.json").unlink(missing_ok=True)
        with refused(ChangedError, where=tmp_path / "run") if other else nullcontext():
            mispair.fit(given, **settings)


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint64, np.int8, "reversed"])
@pytest.mark.parametrize("method", ["repair", "decl"])
def test_rows_of_any_whole_numbers_train_alike(kind: Any, method: str) -> None:
    plain = vector_pairs(24)
    rows: dict[str, Any] = {"link": plain.link, "groups": np.arange(len(plain.left)) // 2}
    odd = {key: value[::-1].copy()[::-1] if kind == "reversed" else value.astype(kind) for key, value in rows.items()}
    one, other = (
        mispair.fit(replace(plain, **given), method=method, model="two-tower", **SMALL) for given in (rows, odd)
    )
    assert np.array_equal(one.score(plain.left, plain.right), other.score(plain.left, plain.right))
    assert one.evaluate(replace(plain, **rows)) == other.evaluate(replace(plain, **odd))


@pytest.mark.parametrize(
    ("model", "regions", "width"), [("vse", REGIONS, WIDTH + 1), ("sgr", REGIONS + 1, WIDTH), ("saf", 1, WIDTH)]
)
def test_test_pairs_that_do_not_fit_are_refused_before_training(
    model: str, regions: int, width: int, tmp_path: Path
) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    np.save(folder / "test_ims.npy", np.ones((8, regions, width), np.float32))
    config = override(Config(), {"data": str(folder), "model": model, **SMALL})
    with pytest.raises(DataError, match=f"{regions} regions of width {width}.* {REGIONS} regions of width {WIDTH}"):
        train_and_test(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_vse_is_tested_on_any_number_of_regions(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    np.save(folder / "test_ims.npy", np.ones((8, REGIONS + 1, WIDTH), np.float32))
    result = train_and_test(override(Config(), {"data": str(folder), **SMALL}), tmp_path / "run")
    assert result.tested_on == "tiny test"


@pytest.mark.parametrize(("words", "noted"), [(("zebra", "yak"), True), (WORDS, False)])
def test_a_vocabulary_that_knows_hardly_a_word_is_noted(words: tuple[str, ...], noted: bool, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    Vocabulary((*SPECIAL_WORDS, *words)).save(tmp_path / "words.json")
    console = Console(file=StringIO(), width=300)
    load_splits(Config(data=str(folder), vocab=str(tmp_path / "words.json"), device="cpu"), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("tiny train: 100% of the words are not in the vocabulary" in text) == noted
    assert ("`vocab`" in text) == noted
