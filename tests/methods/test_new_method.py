"""Adding a method takes one file: a method of ten lines, trained as one of ours and as one of another package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import mispair
from mispair.cli.main import main
from mispair.errors import ConfigError
from mispair.methods import METHODS, find, find_all
from mispair.methods.plain import Plain
from tiny import tiny_pairs

SOFTMAX = '''"""A contrastive loss, which mispair does not have."""

from mispair.methods.base import Method, StepInputs, StepResult, similarity


class Softmax(Method):
    def loss(self, net: int, inputs: StepInputs) -> StepResult:
        S = similarity(self.nets[net], inputs.batch)
        positive = S.diagonal() / 0.07
        loss = (S / 0.07).logsumexp(dim=0) + (S / 0.07).logsumexp(dim=1) - 2 * positive
        return StepResult(loss.sum(), S, {"margin": (positive - S.mean()).mean()})
'''
SETTINGS: dict[str, Any] = {
    "method": "softmax", "model": "vse", "embed_size": 32, "word_size": 16, "batch_size": 32, "augment": False,
    "lr": 3e-3, "warmup_epochs": 0, "epochs": 6, "device": "cpu",
}  # fmt: skip


def install(folder: Path, entries: str) -> None:
    """What pip leaves of a package with one module and these entry points."""
    name = f"softmax_of_{folder.name}"
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[mispair.methods]\n{entries}\n")
    (folder / f"{name}.py").write_text(SOFTMAX)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The module of an installed package with a method."""
    module = f"softmax_of_{tmp_path.name}"
    install(tmp_path, f"softmax = {module}:Softmax\nplain = {module}:Softmax\nwrong = {module}:similarity\n"
            f"gone = {module}:Gone")  # fmt: skip
    monkeypatch.syspath_prepend(tmp_path)
    return module


def test_a_new_method_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match='no method "softmax"'):
        mispair.fit(tiny_pairs(8), method="softmax", device="cpu")
    names: dict[str, Any] = {}
    exec(SOFTMAX, names)
    monkeypatch.setitem(METHODS, "softmax", names["Softmax"])
    pairs = tiny_pairs(30)
    assert mispair.fit(pairs, **SETTINGS).evaluate(pairs).averaged.rsum > 200  # chance: about 105


def test_a_method_of_an_installed_package_trains(installed: str) -> None:
    assert find("softmax").__module__ == installed
    pairs = tiny_pairs(30)
    assert mispair.fit(pairs, **SETTINGS).evaluate(pairs).averaged.rsum > 200


def test_a_package_cannot_take_the_name_of_our_methods(installed: str) -> None:  # noqa: ARG001
    assert find("plain") is Plain


def test_what_is_no_method_is_refused_with_a_sentence(installed: str) -> None:
    with pytest.raises(ConfigError, match=rf'"wrong" \({installed}:similarity\) is no subclass'):
        find("wrong")
    with pytest.raises(ConfigError, match=r'"gone" .* cannot be imported: AttributeError'):
        find("gone")
    with pytest.raises(ConfigError, match=r'no method "softmac".* Did you mean "softmax"'):
        find("softmac")


def test_methods_of_packages_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, f"softmax = softmax_of_{tmp_path.name}:Softmax")
    monkeypatch.syspath_prepend(tmp_path)
    assert set(find_all()) == {*METHODS, "softmax"}
    assert main(["methods"]) == 0
    assert "softmax  A contrastive loss, which mispair does not have." in capsys.readouterr().out
