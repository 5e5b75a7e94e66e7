"""From image files to a search by words: `encode`, `train` and `search` on what `encode` wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from audit_cases import make_case, write_clip
from mispair.cli.main import main
from mispair.retrieval import encoded_search as search_module

ROWS = 60


class Lookup:
    """A text encoder that knows the captions of the data."""

    name, width = "lookup", 12

    def __init__(self, vectors: npt.NDArray[np.float32]) -> None:
        self.vectors = vectors

    def encode(self, items: Sequence[str], /) -> npt.NDArray[np.float32]:
        return np.stack([self.vectors[int(text.split()[-1])] for text in items])


@pytest.mark.filterwarnings("ignore")
def test_words_and_relative_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    case = make_case(ROWS, 0.0)
    paths = [str(tmp_path / f"photos/sub/{row}.jpg") for row in range(ROWS)]
    columns = {"image_path": paths, "caption": [f"caption {row}" for row in range(ROWS)]}
    write_clip(tmp_path / "made", case.left, case.right, columns)
    mark = {"request": {"image model": "none", "text model": "lookup"}, "finished": True}
    small = ["--model", "two-tower", "--method", "plain", "--embed-size", "16", "--epochs", "2", "--warmup-epochs", "0"]
    assert main(["train", "--data", "made", *small, "--device", "cpu", "--out", "run"]) == 0
    printed = " ".join(capsys.readouterr().err.split())
    assert "dev and test are the last rows of the same data as train" in printed  # their pairs may be mismatched, too
    search = ["search", "run", "--split", "train", "--device", "cpu", "--json"]
    assert main([*search, "--query", "caption 3"]) == 2
    assert "does not say which encoder made them" in capsys.readouterr().err
    (tmp_path / "made/encode.json").write_text(json.dumps(mark))
    monkeypatch.setattr(search_module, "text_encoder", lambda *_: Lookup(case.right))
    assert main([*search, "--query", "caption 3", "--top", "48"]) == 0
    hits = json.loads(capsys.readouterr().out)["hits"]
    assert len(hits) == 48
    assert paths[3] in [hit["image"] for hit in hits]
    for name in ("sub/3.jpg", "3.jpg", paths[3], "3"):
        assert main([*search, "--image", name, "--top", "1"]) == 0
        assert json.loads(capsys.readouterr().out)["hits"]
    assert main([*search, "--image", "other/3.jpg"]) == 2
