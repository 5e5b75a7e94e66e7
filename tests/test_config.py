"""Settings: recipes in, recipes out, mistakes named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mispair.config import KEYS, Config, VseSettings, difference, flat, override, read_recipe, to_toml
from mispair.errors import ConfigError

RECIPES = sorted((Path(__file__).parent.parent / "src/mispair/recipes").glob("*/*.toml"))


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_recipe_can_be_read(file: Path) -> None:
    config = read_recipe(f"{file.parent.name}/{file.stem}")
    assert config == read_recipe(file)


@pytest.mark.parametrize("data", ["f8k", "coco-small", "f30k", "coco", "cc152k"])
def test_every_data_set_has_a_recipe_of_mend(data: str) -> None:
    config = read_recipe(f"{data}/mend-sgr")
    assert (config.method, config.model, config.mend.trust) == ("mend", "sgr", "audit")
    assert config.total_epochs >= 2


@given(
    text=st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0")),
    lr=st.floats(1e-9, 1e9),
    seed=st.integers(0, 2**40),
    flag=st.booleans(),
)
def test_toml_round_trip(tmp_path_factory: pytest.TempPathFactory, text: str, lr: float, seed: int, flag: bool) -> None:
    config = Config(data=text, lr=lr, seed=seed, vse=VseSettings(augment=flag), noise_file=text)
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
    with pytest.raises(ConfigError, match="must be a whole number"):
        override(Config(), {"epochs": np.float64(3)})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epoch": 1}, '"epochs"'),
        ({"zzzz": 1}, "the keys are data, method"),
        ({"epochs": "many"}, "epochs is 'many' but must be a whole number"),
        ({"epochs": True}, "must be a whole number"),
        ({"model": "bert"}, "one of vse, sgr, saf, scan, two-tower"),
        ({"noise_ratio": -0.1}, "at least 0"),
        ({"batch_size": 1}, "at least 2"),
        ({"negatives_end": 50, "negatives_start": 5}, "at most negatives_start, 5"),
        ({"lr": 0}, "above 0"),
        ({"margin": float("nan")}, "a finite number"),
        ({"networks": 4}, "networks is 4 but must be one of 1, 2, 3"),
        ({"networks": 0}, "one of 1, 2"),
        ({"clean_threshold": 1.0}, "below 1"),
        ({"split_losses": "double"}, "one of smoothed, joint, single"),
        ({"labels": "soft"}, "one of rank, hard"),
        ({"label_when": "step"}, "one of epoch, batch"),
        ({"noisy": "keep"}, "one of replace, drop, train"),
        ({"noisy_start": 1.5}, "at most 1"),
        ({"bank_size": 0}, "at least 1"),
        ({"gamma_share": 0}, "above 0"),
        ({"margin_base": 1}, "above 1"),
        ({"margin_base": float("inf")}, "a finite number"),
        ({"evidence_scale": 0.05}, "at least 0.08"),
        ({"eta": -0.1}, "at least 0"),
        ({"eta": float("nan")}, "a finite number"),
        ({"tau": -1}, "at least 0"),
        ({"hinge_weight": -0.1}, "at least 0"),
        ({"kl_weight": -1}, "at least 0"),
        ({"hinge_decay": float("nan")}, "a finite number"),
        ({"label_floor": 1.1}, "at most 1"),
        ({"label_floor": -0.1}, "at least 0"),
        ({"lr": float("inf")}, "lr is inf but must be a finite number"),
        ({"margin": float("inf")}, "a finite number"),
        ({"checkpoint_seconds": float("inf")}, "a finite number"),
        ({"checkpoint_seconds": -1}, "at least 0"),
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


@pytest.mark.parametrize("text", ["epochs = = 3", f"epochs = {'9' * 5000}", f"epochs = {'[' * 100_000}"])
def test_a_broken_recipe(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(ConfigError, match="not a TOML file"):
        read_recipe(tmp_path / "bad.toml")


def test_flat_names_are_unique_and_all_there() -> None:
    assert len(set(KEYS)) == len(KEYS)
    assert set(flat(Config())) == set(KEYS)
    assert override(Config(), flat(Config())) == Config()


def test_a_direct_mistake_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"^epochs is -1 but must be at least 0; lr is 0 but must be above 0\.$"):
        Config(epochs=-1, lr=0)
    with pytest.raises(ConfigError, match="augment is 'yes' but must be true or false"):
        VseSettings(augment="yes")  # type: ignore[arg-type]


def test_a_setting_of_a_group_is_not_one_of_the_whole() -> None:
    unknown: dict[str, Any] = {"tau": 0.2}
    with pytest.raises(ConfigError, match='unknown key "tau"'):
        Config(**unknown)


@pytest.mark.parametrize(("key", "value"), [("data", "a\0b"), ("noise_file", "\udcff"), ("neighbours", 2**70)])
def test_what_no_recipe_can_hold_is_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=r"which no recipe can hold|must be at most 2,147,483,647"):
        override(Config(), {key: value})
