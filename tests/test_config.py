"""Settings of a run: wrong values are named, and recipes hold them all."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field

from mispair.config import Config, difference, find_packaged, read_toml, validated
from mispair.errors import ConfigError, ConflictError, InvalidValueError, UnknownNameError
from refusals import refused


@validated
class Own:
    """Settings of a method."""

    height: Annotated[float, Field(gt=0)] = 1.5
    steep: bool = False


def test_difference() -> None:
    assert difference(Config(), Config(seed=3, vocab="v.json")) == ["seed: 0 -> 3", "vocab: None -> 'v.json'"]
    assert difference(Config(own={"height": 2.0}), Config()) == ["height: 2.0 -> None"]


def test_a_method_reads_its_own_settings() -> None:
    config = Config(own={"height": 2, "width": 7})
    assert config.of(Own) == Own(height=2.0)
    assert Config().of(Own) == Own()
    assert config.changed({"steep": True, "epochs": 3}).flat()["steep"]
    with refused(InvalidValueError, where="height", names="-1"):
        Config(own={"height": -1}).of(Own)


def test_a_direct_mistake_names_every_wrong_setting() -> None:
    for names in ("-1", "`lr`"):
        with refused(InvalidValueError, where="epochs", names=names):
            Config(epochs=-1, lr=0)
    with refused(InvalidValueError, where="steep", names="yes"):
        Own(steep="yes")  # type: ignore[arg-type]
    with refused(ConflictError, where="negatives_end", names="50"):
        Config(negatives_end=50, negatives_start=5)
    with refused(ConflictError, where="epochs"):
        Config(epochs=0, warmup_epochs=0)


def test_a_setting_of_a_method_is_not_one_of_every_run() -> None:
    unknown: dict[str, Any] = {"tau": 0.2}
    with refused(UnknownNameError, where="tau"):
        Config(**unknown)


@pytest.mark.parametrize("text", ["epochs = = 3", f"epochs = {'9' * 5000}", f"epochs = {'[' * 100_000}"])
def test_a_broken_recipe(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.toml").write_text(text)
    with refused(ConfigError, where=tmp_path / "bad.toml"):
        read_toml(tmp_path / "bad.toml")


def test_a_recipe_that_does_not_exist() -> None:
    with refused(UnknownNameError, where="f8k/plain-sg", names="f8k/plain-sgr"):
        find_packaged("recipe", "f8k/plain-sg")
