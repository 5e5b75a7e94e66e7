"""`fit` and `train_and_test`: what they refuse before any work."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import mispair
from mispair.api import load_splits, train_and_test
from mispair.config import Config
from mispair.data.text import SPECIAL_WORDS, Vocabulary
from mispair.errors import ConfigError, DataError
from tiny import REGIONS, WIDTH, WORDS, tiny_folder, tiny_pairs

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
    with pytest.raises(ConfigError, match=f"fit: {name} is about the data, .* {how}"):
        mispair.fit(tiny_pairs(16), out=tmp_path / "run", **SMALL, **settings)
    assert not (tmp_path / "run").exists()
    assert hasattr(mispair, how.removeprefix("mispair."))


@pytest.mark.parametrize(
    ("model", "regions", "width"), [("vse", REGIONS, WIDTH + 1), ("sgr", REGIONS + 1, WIDTH), ("saf", 1, WIDTH)]
)
def test_test_pairs_that_do_not_fit_are_refused_before_training(
    model: str, regions: int, width: int, tmp_path: Path
) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    np.save(folder / "test_ims.npy", np.ones((8, regions, width), np.float32))
    config = Config(data=str(folder), model=model, **SMALL)  # type: ignore[arg-type]
    message = f"tiny test: the left side has {regions} regions of width {width}, but {REGIONS} regions of width {WIDTH}"
    with pytest.raises(DataError, match=message):
        train_and_test(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_vse_is_tested_on_any_number_of_regions(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    np.save(folder / "test_ims.npy", np.ones((8, REGIONS + 1, WIDTH), np.float32))
    result = train_and_test(Config(data=str(folder), **SMALL), tmp_path / "run")
    assert result["tested_on"] == "tiny test"


@pytest.mark.parametrize(("words", "said"), [(("zebra", "yak"), True), (WORDS, False)])
def test_a_vocabulary_that_knows_hardly_a_word_is_noted(words: tuple[str, ...], said: bool, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    Vocabulary((*SPECIAL_WORDS, *words)).save(tmp_path / "words.json")
    console = Console(file=StringIO(), width=300)
    load_splits(Config(data=str(folder), vocab=str(tmp_path / "words.json"), device="cpu"), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("tiny train: 100% of the words are not in the vocabulary" in text) == said
    assert ("--vocab" in text) == said
