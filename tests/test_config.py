"""Settings: recipes in, recipes out, mistakes named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mispair.config import Config, difference, override, read_recipe, to_toml
from mispair.errors import ConfigError

RECIPES = sorted((Path(__file__).parent.parent / "src/mispair/recipes").glob("*/*.toml"))


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_recipe_can_be_read(file: Path) -> None:
    config = read_recipe(f"{file.parent.name}/{file.stem}")
    assert config == read_recipe(file)


@given(
    text=st.text(st.characters(blacklist_categories=["Cs", "Cc"])),
    lr=st.floats(1e-9, 1e9),
    seed=st.integers(0, 2**40),
    flag=st.booleans(),
)
def test_toml_round_trip(tmp_path_factory: pytest.TempPathFactory, text: str, lr: float, seed: int, flag: bool) -> None:
    config = Config(data=text, lr=lr, seed=seed, augment=flag, noise_file=text)
    file = tmp_path_factory.mktemp("recipe") / "recipe.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    assert read_recipe(file) == config


def test_whole_numbers_are_welcome_as_fractions() -> None:
    assert override(Config(), {"lr": 1}).lr == 1.0


@pytest.mark.parametrize("lr", [np.float64(0.5), np.float32(0.5), np.int64(1)])
def test_numbers_of_numpy_are_numbers(lr: Any, tmp_path: Path) -> None:
    config = override(Config(), {"lr": lr, "epochs": np.int64(3), "noise_seed": np.uint8(2)})
    assert (config.lr, config.epochs, config.noise_seed) == (float(lr), 3, 2)
    (tmp_path / "recipe.toml").write_text(to_toml(config))
    assert read_recipe(tmp_path / "recipe.toml") == config
    with pytest.raises(ConfigError, match="must be of type int"):
        override(Config(), {"epochs": np.float64(3)})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epoch": 1}, '"epochs"'),
        ({"zzzz": 1}, "the keys are data, method"),
        ({"epochs": "many"}, "must be of type int"),
        ({"epochs": True}, "must be of type int"),
        ({"model": "bert"}, "one of vse, sgr, saf, scan, two-tower"),
        ({"noise_ratio": -0.1}, "between 0 and 1"),
        ({"batch_size": 1}, "at least 2"),
        ({"negatives_end": 50, "negatives_start": 5}, "between 1 and negatives_start"),
        ({"lr": 0}, "above 0"),
        ({"margin": float("nan")}, "above 0"),
        ({"networks": 3}, "networks is 3 but must be 1 or 2"),
        ({"networks": 0}, "1 or 2"),
        ({"clean_threshold": 1.0}, "at least 0 and below 1"),
        ({"split": "double"}, "one of smoothed, joint, single"),
        ({"labels": "soft"}, "one of rank, hard"),
        ({"label_when": "step"}, "one of epoch, batch"),
        ({"noisy": "keep"}, "one of replace, drop, train"),
        ({"noisy_start": 1.5}, "between 0 and 1"),
        ({"bank_size": 0}, "at least 1"),
        ({"gamma_share": 0}, "above 0 and at most 1"),
        ({"margin_base": 1}, "above 1"),
        ({"margin_base": float("inf")}, "above 1 and finite"),
        ({"evidence_scale": 0.05}, "finite and at least 0.08"),
        ({"eta": -0.1}, "between 0 and 1"),
        ({"eta": float("nan")}, "between 0 and 1"),
        ({"tau": -1}, "0 or more"),
        ({"hinge_weight": -0.1}, "0 or more"),
        ({"kl_weight": -1}, "0 or more"),
        ({"hinge_decay": float("nan")}, "0 or more"),
        ({"label_floor": 1.1}, "between 0 and 1"),
        ({"label_floor": -0.1}, "between 0 and 1"),
        ({"lr": float("inf")}, "lr is inf but must be above 0 and finite"),
        ({"margin": float("inf")}, "above 0 and finite"),
        ({"checkpoint_seconds": float("inf")}, "0 or more and finite"),
        ({"checkpoint_seconds": -1}, "0 or more and finite"),
        ({"neighbours": 0}, "at least 1"),
        ({"replace_by": "both"}, "one of peer, own"),
        ({"replace_side": "image"}, "one of both, left, right"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        override(Config(), settings, "here")


def test_difference() -> None:
    assert difference(Config(), Config(seed=3, vocab="v.json")) == ["seed: 0 -> 3", "vocab: None -> 'v.json'"]


def test_a_broken_recipe(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("epochs = = 3")
    with pytest.raises(ConfigError, match="not a TOML file"):
        read_recipe(tmp_path / "bad.toml")
