"""From image files to a search by words: `encode`, `train` and `search` on what `encode` wrote."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from audit_cases import Case, make_case, write_clip
from mispair.cli.main import main
from mispair.retrieval import search as search_module

ROWS = 60


class Lookup:
    """A text encoder that knows the captions of the data."""

    name, width = "lookup", 12

    def __init__(self, vectors: npt.NDArray[np.float32]) -> None:
        self.vectors = vectors

    def encode(self, items: Sequence[str], /) -> npt.NDArray[np.float32]:
        return np.stack([self.vectors[int(text.split()[-1])] for text in items])


SEARCH = ["search", "run", "--split", "train", "--device", "cpu", "--json"]


def image_path(folder: Path, row: int) -> str:
    return str(folder / f"photos/sub/{row}.jpg")


@pytest.fixture(scope="module")
def case() -> Case:
    return make_case(ROWS, 0.0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, case: Case) -> Path:
    """A folder with vectors in `made` and a model of them in `run`."""
    folder = tmp_path_factory.mktemp("search")
    columns = {
        "image_path": [image_path(folder, row) for row in range(ROWS)],
        "caption": [f"caption {row}" for row in range(ROWS)],
    }
    write_clip(folder / "made", case.left, case.right, columns)
    small = ["--model", "two-tower", "--method", "plain", "--embed-size", "16", "--epochs", "2", "--warmup-epochs", "0"]
    printed = io.StringIO()
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch, redirect_stderr(printed):
        warnings.simplefilter("ignore")
        patch.chdir(folder)
        assert main(["train", "--data", "made", *small, "--device", "cpu", "--out", "run"]) == 0
    (folder / "printed.txt").write_text(printed.getvalue())
    return folder


@pytest.fixture
def place(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(trained)
    (trained / "made/encode.json").unlink(missing_ok=True)
    return trained


def hits(capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main([*SEARCH, *options]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["hits"]
    return found


def test_training_tells_where_dev_and_test_come_from(trained: Path) -> None:
    printed = " ".join((trained / "printed.txt").read_text().split())
    assert "dev and test are the last rows of the training data" in printed


def test_words_need_an_encoder(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert place.is_dir()
    assert main([*SEARCH, "--query", "caption 3"]) == 2
    assert "encode.json" in capsys.readouterr().err


def test_words_find_images(
    place: Path, case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = {"request": {"image model": "none", "text model": "lookup"}, "finished": True}
    (place / "made/encode.json").write_text(json.dumps(mark))
    monkeypatch.setattr(search_module, "text_encoder", lambda *_: Lookup(case.right))
    found = hits(capsys, "--query", "caption 3", "--top", "48")
    assert len(found) == 48
    assert image_path(place, 3) in [hit["image"] for hit in found]


@pytest.mark.parametrize("name", ["sub/3.jpg", "3.jpg", "3", "the whole path"])
def test_an_image_is_named_in_many_ways(name: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = image_path(place, 3) if name == "the whole path" else name
    assert hits(capsys, "--image", name, "--top", "1")


def test_an_image_that_is_not_there_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert place.is_dir()
    assert main([*SEARCH, "--image", "other/3.jpg"]) == 2
    assert "other/3.jpg" in capsys.readouterr().err
