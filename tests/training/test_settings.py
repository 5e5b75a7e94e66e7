"""Settings of all methods and models: recipes in, recipes out, mistakes named, names typed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mispair
from mispair.config import RUN_SETTINGS, Config, RunSettings, to_toml
from mispair.errors import InvalidValueError, UnknownNameError
from mispair.methods import METHODS
from mispair.models import MODELS
from mispair.settings import MendSettings
from mispair.training.fit import NOISE, READING
from mispair.training.settings import (
    Settings,
    all_names,
    complete,
    every_setting,
    override,
    read_recipe,
    setting_classes,
)
from refusals import refused
from tiny import tiny_pairs

SOURCE = Path(__file__).parent.parent.parent / "src"
RECIPES = sorted((SOURCE / "mispair/recipes").glob("*/*.toml"))


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_recipe_can_be_read(file: Path) -> None:
    config = read_recipe(f"{file.parent.name}/{file.stem}")
    assert config == read_recipe(file)


@pytest.mark.parametrize("data", ["f8k", "coco-small", "f30k", "coco", "cc152k"])
def test_every_data_set_has_a_recipe_of_mend(data: str) -> None:
    config = read_recipe(f"{data}/mend-sgr")
    assert (config.method, config.model, config.of(MendSettings).trust) == ("mend", "sgr", "audit")
    assert config.total_epochs >= 2


@given(
    text=st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0")),
    lr=st.floats(1e-9, 1e9),
    seed=st.integers(0, 2**40),
    flag=st.booleans(),
)
def test_toml_round_trip(tmp_path_factory: pytest.TempPathFactory, text: str, lr: float, seed: int, flag: bool) -> None:
    config = Config(data=text, lr=lr, seed=seed, own={"augment": flag}, noise_file=text)
    file = tmp_path_factory.mktemp("recipe") / "recipe.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    assert read_recipe(file) == config


def test_whole_numbers_are_welcome_as_fractions() -> None:
    assert override(Config(), {"lr": 1}).lr == 1.0


@pytest.mark.parametrize("lr", [np.float64(0.5), np.float32(0.5), np.int64(1)])
def test_numbers_of_numpy_are_numbers(lr: Any, tmp_path: Path) -> None:
    config = override(Config(), {"lr": lr, "epochs": np.int64(3), "noise_seed": np.uint8(2), "tau": lr})
    assert (config.lr, config.epochs, config.noise_seed) == (float(lr), 3, 2)
    (tmp_path / "recipe.toml").write_text(to_toml(config))
    assert read_recipe(tmp_path / "recipe.toml") == config
    with refused(InvalidValueError, where="epochs", names="3.0"):
        override(Config(), {"epochs": np.float64(3)})


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"epochs": "many"}, ""),
        ({"epochs": True}, ""),
        ({"noise_ratio": -0.1}, "0"),
        ({"batch_size": 1}, "2"),
        ({"lr": 0}, "0"),
        ({"margin": float("nan")}, ""),
        ({"networks": 4}, "1, 2 or 3"),
        ({"networks": 0}, "1, 2"),
        ({"clean_threshold": 1.0}, "1"),
        ({"split_losses": "double"}, "'smoothed', 'joint' or 'single'"),
        ({"labels": "soft"}, "'rank' or 'hard'"),
        ({"label_when": "step"}, "'epoch' or 'batch'"),
        ({"noisy": "keep"}, "'replace', 'drop' or 'train'"),
        ({"noisy_start": 1.5}, "1"),
        ({"bank_size": 0}, "1"),
        ({"gamma_share": 0}, "0"),
        ({"margin_base": 1}, "1"),
        ({"margin_base": float("inf")}, ""),
        ({"evidence_scale": 0.05}, "0.08"),
        ({"eta": -0.1}, "0"),
        ({"eta": float("nan")}, ""),
        ({"tau": -1}, "0"),
        ({"hinge_weight": -0.1}, "0"),
        ({"kl_weight": -1}, "0"),
        ({"hinge_decay": float("nan")}, ""),
        ({"label_floor": 1.1}, "1"),
        ({"label_floor": -0.1}, "0"),
        ({"lr": float("inf")}, ""),
        ({"margin": float("inf")}, ""),
        ({"checkpoint_seconds": float("inf")}, ""),
        ({"checkpoint_seconds": -1}, "0"),
        ({"neighbours": 0}, "1"),
        ({"neighbours": 2**70}, "2147483647"),
        ({"replace_by": "both"}, "'peer' or 'own'"),
        ({"replace_side": "image"}, "'both', 'left' or 'right'"),
        ({"data": "a\0b"}, ""),
        ({"noise_file": "\udcff"}, ""),
    ],
)
def test_wrong_values_are_named_with_what_is_allowed(settings: dict[str, object], names: str) -> None:
    with refused(InvalidValueError, where=next(iter(settings)), names=names):
        override(Config(), settings)


def test_a_wrong_value_is_named_with_its_file() -> None:
    with refused(InvalidValueError, where="tau", names="mine.toml"):
        override(Config(), {"tau": -1}, "mine.toml")


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with refused(UnknownNameError, where="epoch", names="`epochs`"):
        override(Config(), {"epoch": 1}, "here")
    with refused(UnknownNameError, where="zzzz", names="data, method"):
        override(Config(), {"zzzz": 1})
    with refused(UnknownNameError, where="model", names="two-tower"):
        override(Config(), {"model": "two-towers"})


def test_names_are_unique_and_all_there() -> None:
    names = all_names()
    assert len(set(names)) == len(names)
    assert set(every_setting(Config())) == set(names)
    kinds = {kind for owner in METHODS.values() for kind in owner.settings}
    kinds |= {kind for network in MODELS.values() for kind in network.settings}
    assert set(setting_classes()) == kinds


def test_a_run_keeps_the_settings_that_have_an_effect() -> None:
    given = {"tau": 0.2, "bank_size": 9, "attend": "i2t"}
    assert complete(Config(model="two-tower", own=given)).own == {}
    repair = complete(Config(method="repair", model="vse", own=given)).own
    assert (repair["tau"], repair["bank_size"], repair["noisy_start"], repair["augment"]) == (0.2, 9, 0.5, True)
    assert not {"attend", "sim_size", "hinge_decay"} & set(repair)
    teachers = complete(Config(method="mend", model="vse", own={"second_model": "scan"})).own
    assert {"augment", "attend", "trust"} <= set(teachers)


# ---------------------------------------------------------------------- types


def test_the_typed_arguments_of_fit_are_the_settings() -> None:
    """Each with its type; those about the data are given as pairs."""
    found = get_type_hints(Settings)
    classes = [RunSettings, *setting_classes()]
    expected = {name: kind for one in classes for name, kind in get_type_hints(one).items()}
    about_data = {*READING, *NOISE}
    assert set(found) == set(expected) - about_data
    assert about_data < set(RUN_SETTINGS)
    assert {name: found[name] for name in found} == {name: expected[name] for name in found}


def test_wrong_arguments_of_fit_are_refused() -> None:
    """By mypy as well: without an error there, `make test` finds that an ignore is not needed."""
    pairs = tiny_pairs(8)
    with refused(UnknownNameError, where="epoch", names="`epochs`"):
        mispair.fit(pairs, epoch=3)  # type: ignore[call-arg]
    with refused(InvalidValueError, where="epochs", names="many"):
        mispair.fit(pairs, epochs="many")  # type: ignore[arg-type]
    with refused(InvalidValueError, where="noisy", names="keep"):
        mispair.fit(pairs, noisy="keep")  # type: ignore[arg-type]


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, mispair, mispair.cli.main as m; assert not {'torch', 'pydantic'} & sys.modules.keys(); "
    code += "m.train_arguments(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
