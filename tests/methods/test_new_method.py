"""Adding a method or a model takes one file, as one of ours or as one of another package, with settings of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import mispair
from mispair import models
from mispair.cli.main import main
from mispair.errors import ConfigError, ConflictError, InvalidValueError, UnknownNameError
from mispair.methods import METHODS, find, find_all
from mispair.methods.plain import Plain
from mispair.models import MODELS
from mispair.training.settings import owners, read_recipe
from refusals import refused
from tiny import tiny_folder, tiny_pairs

SOFTMAX = '''"""A contrastive loss, which mispair does not have."""

from mispair.config import Count, Positive, validated
from mispair.methods.base import Method, StepInputs, StepResult, similarity
from mispair.models import VSE


@validated
class SoftmaxSettings:
    """Softmax."""

    heat: Positive = 0.07
    """Temperature of the softmax."""


class Softmax(Method):
    settings = (SoftmaxSettings,)

    def loss(self, net: int, inputs: StepInputs) -> StepResult:
        S = similarity(self.nets[net], inputs.batch)
        heat = self.config.of(SoftmaxSettings).heat
        positive = S.diagonal() / heat
        loss = (S / heat).logsumexp(dim=0) + (S / heat).logsumexp(dim=1) - 2 * positive
        return StepResult(loss.sum(), S, {"heat": S.new_tensor(heat)})


@validated
class NarrowSettings:
    """Narrow."""

    narrow: Count = 8
    """Width of everything."""


class Narrow(VSE):
    """A narrow VSE-inf."""

    settings = (*VSE.settings, NarrowSettings)

    def __init__(self, left, right, config):
        narrow = config.of(NarrowSettings).narrow
        super().__init__(left, right, config.changed({"embed_size": narrow, "word_size": narrow}))
'''
SETTINGS: dict[str, Any] = {
    "method": "softmax", "model": "vse", "embed_size": 32, "word_size": 16, "batch_size": 32, "augment": False,
    "lr": 3e-3, "warmup_epochs": 0, "epochs": 6, "device": "cpu",
}  # fmt: skip


def install(folder: Path, methods: str, model: str = "") -> None:
    """What pip leaves of a package with one module and these entry points."""
    name = f"softmax_of_{folder.name}"
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[mispair.methods]\n{methods}\n[mispair.models]\n{model}\n")
    (folder / f"{name}.py").write_text(SOFTMAX)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The module of an installed package with a method and a model."""
    module = f"softmax_of_{tmp_path.name}"
    install(tmp_path, f"softmax = {module}:Softmax\nplain = {module}:Softmax", f"narrow = {module}:Narrow")
    monkeypatch.syspath_prepend(tmp_path)
    return module


def test_a_new_method_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(UnknownNameError, where="method", names="softmax"):
        mispair.fit(tiny_pairs(8), method="softmax", device="cpu")
    names: dict[str, Any] = {}
    exec(compile(SOFTMAX, "softmax", "exec", dont_inherit=True), names)
    monkeypatch.setitem(METHODS, "softmax", names["Softmax"])
    pairs = tiny_pairs(30)
    assert mispair.fit(pairs, **SETTINGS).evaluate(pairs).averaged.rsum > 200  # chance: about 105


def test_a_method_of_an_installed_package_trains(installed: str) -> None:
    assert find("softmax").__module__ == installed
    pairs = tiny_pairs(30)
    assert mispair.fit(pairs, **SETTINGS).evaluate(pairs).averaged.rsum > 200


def test_a_setting_of_an_installed_method_goes_from_flag_to_log_and_model(installed: str, tmp_path: Path) -> None:
    data, out, recipe = tiny_folder(tmp_path / "data"), tmp_path / "run", tmp_path / "mine.toml"
    recipe.write_text('method = "softmax"\nepochs = 1\nembed_size = 8\nword_size = 8\nheat = 0.5\ntau = 0.3\n')
    train = ["train", "--recipe", str(recipe), "--data", str(data), "--device", "cpu", "--out", str(out)]
    assert main([*train, "--heat", "0.25", "--no-augment"]) == 0
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert {step["metrics"]["heat"] for step in steps if step["event"] == "steps" and step["epoch"] == 1} == {0.25}
    assert read_recipe(out / "config.toml").own == {"heat": 0.25, "augment": False}
    assert mispair.Matcher.load(out, "cpu").config.own["heat"] == 0.25
    assert owners()["heat"].__module__ == installed


def test_a_setting_of_an_installed_method_is_checked(installed: str, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: ARG001
    wrong: dict[str, Any] = {"heat": -1}
    with refused(InvalidValueError, where="heat", names="-1"):
        mispair.fit(tiny_pairs(8), method="softmax", **wrong)
    unknown: dict[str, Any] = {"heet": 1.0}
    with refused(UnknownNameError, where="heet", names="`heat`"):
        mispair.fit(tiny_pairs(8), method="softmax", **unknown)
    assert main(["train", "--heat", "-1", "--out", "run"]) == 2
    assert "--heat" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert "Temperature of the softmax." in capsys.readouterr().out


def test_two_settings_of_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"softmax_of_{tmp_path.name}"
    install(tmp_path, f"softmax = {module}:Softmax")
    (tmp_path / f"{module}.py").write_text(SOFTMAX.replace("heat", "tau"))
    monkeypatch.syspath_prepend(tmp_path)
    with refused(ConflictError, where="tau", names="SoftmaxSettings"):
        owners()


def test_a_setting_without_effect_is_noted(installed: str) -> None:  # noqa: ARG001
    heat: dict[str, Any] = {"heat": 0.3}
    with pytest.warns(UserWarning, match="heat"):
        mispair.fit(tiny_pairs(8), **{**SETTINGS, "method": "plain", "epochs": 1}, **heat)


def test_a_model_of_an_installed_package_trains(installed: str, tmp_path: Path) -> None:
    assert models.find("narrow").__module__ == installed
    narrow: dict[str, Any] = {"narrow": 5}
    matcher = mispair.fit(
        tiny_pairs(8), out=tmp_path / "run", model="narrow", epochs=1, warmup_epochs=0, device="cpu", **narrow
    )
    assert matcher.encode(["a b"], "right").shape == (1, 5)
    assert mispair.Matcher.load(tmp_path / "run", "cpu").encode(["a b"], "right").shape == (1, 5)


def test_a_package_cannot_take_the_name_of_our_methods(installed: str) -> None:  # noqa: ARG001
    assert find("plain") is Plain
    assert find_all()["plain"] is Plain


def test_what_is_no_method_is_refused_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"softmax_of_{tmp_path.name}"
    install(tmp_path, f"softmax = {module}:Softmax\nwrong = {module}:similarity\ngone = {module}:Gone")
    monkeypatch.syspath_prepend(tmp_path)
    with refused(ConfigError, where="method", names=f'"wrong" ({module}:similarity)'):
        find("wrong")
    with refused(ConfigError, where="method", names="AttributeError"):
        find("gone")
    with refused(UnknownNameError, where="method", names='"softmax"'):
        find("softmac")
    with pytest.warns(UserWarning, match='"gone"'):  # they do not stop others
        assert "softmax" in find_all()


def test_methods_and_models_are_listed(installed: str, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: ARG001
    assert list(mispair.list_methods()) == [*METHODS, "softmax"]
    assert mispair.list_methods()["softmax"] == "A contrastive loss, which mispair does not have."
    assert list(mispair.list_models()) == [*MODELS, "narrow"]
    assert all("\n" not in line and line.endswith(".") for line in mispair.list_models().values())
    assert main(["methods"]) == 0
    assert "softmax  A contrastive loss, which mispair does not have." in capsys.readouterr().out
