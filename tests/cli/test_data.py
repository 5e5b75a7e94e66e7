"""`mispair data get`, run as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mispair.cli.main import main
from mispair.pairs.published.catalogue import DATA_SETS, NO_DOWNLOADS, Split


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """CC152K with two pairs a split instead of thousands, and a folder that has them."""
    split, real = Split(name="train", images=2, captions=2, rows=2), DATA_SETS["cc152k"]
    sizes: list[dict[str, Any]] = [{"shape": (2, 3, 4)}, {"lines": 2}]
    small = [file.model_copy(update={"split": split, **size}) for file, size in zip(real.files[:2], sizes, strict=True)]
    monkeypatch.setitem(DATA_SETS, "cc152k", real.model_copy(update={"files": (*small, real.files[-1])}))
    folder = tmp_path / "my data"
    folder.mkdir()
    np.save(folder / "train_ims.npy", np.random.RandomState(0).rand(2, 3, 4).astype(np.float32))
    (folder / "train_caps.tsv").write_text("1\ta dog\n2\ta cat\n")
    return folder


@pytest.mark.parametrize("name", DATA_SETS)
def test_the_list(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "get", name]) == 0
    text = capsys.readouterr().out
    assert main(["data", "get", name, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["downloads"] == NO_DOWNLOADS
    assert NO_DOWNLOADS in text.replace("\n", " ")
    assert all(file["name"] in text and (file["sha256"] or "SHA-256 unknown") in text for file in content["files"])
    assert all(source["address"] in text for source in content["sources"])
    assert f"mispair data get {name} FOLDER" in text


def test_a_folder_that_is_right(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "get", "cc152k", str(small)]) == 0
    text = capsys.readouterr().out
    assert "there           train_ims.npy: 2 x 3 x 4 float32" in text
    assert "missing         cc152k_precomp_vocab.json: optional; mispair builds one" in text
    assert f"mispair bench run cc152k --data '{small}'" in text
    assert main(["data", "get", "cc152k", str(small), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ready"]


def test_a_folder_that_is_not(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (small / "train_caps.tsv").unlink()
    assert main(["data", "get", "cc152k", str(small)]) == 1
    text = capsys.readouterr().out
    assert "1 needed file to fix" in text
    assert "Fetch train_caps.tsv from https://ncr-paper" in text
    assert main(["data", "get", "cc152k", str(small), "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert not content["ready"]
    assert [file["verdict"] for file in content["files"]] == ["there", "missing", "missing"]


def test_shapes_is_made_not_fetched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "get", "shapes"]) == 0
    assert "mispair data make shapes" in capsys.readouterr().out
    assert main(["data", "get", "shapes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["next"] == ["mispair data make shapes FOLDER"]
    assert main(["data", "get", "shapes", str(tmp_path)]) == 2
    assert "mispair data check" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "folder", "names"),
    [("flickr30", None, '"flickr30k"'), ("coco", "nowhere", "nowhere: "), ("coco", "a file", "a file: ")],
)
def test_mistakes_are_sentences(
    name: str, folder: str | None, names: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a file").write_text("")
    assert main(["data", "get", name, *([str(tmp_path / folder)] if folder else [])]) == 2
    captured = capsys.readouterr()
    assert names in captured.err
    assert not captured.out
