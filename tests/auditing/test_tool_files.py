"""Files for other tools, as these tools document them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from xml.etree import ElementTree

import pyarrow
import pytest

from mispair.auditing.tool_files import export
from mispair.errors import NotFoundError
from refusals import refused

TABLE = pyarrow.table(
    {
        "id": ["a", "b", "c"],
        "image": ["a 1.jpg", "sub/b.jpg", "c.jpg"],
        "caption": ['says "x", y', "=1", None],
        "status": ["ok", "ok", "image is missing"],
        "match_score": pyarrow.array([0.9, 0.2, None], pyarrow.float32()),
        "is_mismatch": [False, True, None],
        "reason": ["", "why", ""],
        "contrast": [1.0, 2.0, 3.0],
    }
)


def test_fiftyone(tmp_path: Path) -> None:
    (path,) = export([TABLE[:1], TABLE[1:]], "fiftyone", tmp_path, tmp_path / "photos")
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["filepath"] for row in rows] == [str(tmp_path / "photos" / name) for name in TABLE["image"].to_pylist()]
    assert [row["verdict"] for row in rows] == ["matched", "mismatched", ""]
    assert rows[0]["caption"] == 'says "x", y'


def test_label_studio(tmp_path: Path) -> None:
    path, interface = export([TABLE], "label-studio", tmp_path)
    tasks = json.loads(path.read_text())
    assert tasks[0]["data"]["image"] == "/data/local-files/?d=a%201.jpg"
    assert [len(task.get("predictions", [])) for task in tasks] == [1, 1, 0]
    prediction = tasks[1]["predictions"][0]
    assert prediction["score"] == pytest.approx(0.8)
    (result,) = prediction["result"]
    view = ElementTree.fromstring(interface.read_text())
    choices = view.find("Choices")
    assert choices is not None
    assert (result["from_name"], result["to_name"]) == (choices.get("name"), choices.get("toName"))
    assert result["value"]["choices"] == ["mismatched"]
    assert {choice.get("value") for choice in choices} == {"matched", "mismatched"}
    for part in ("Image", "Text"):
        element = view.find(part)
        assert element is not None
        assert str(element.get("value")).removeprefix("$") in tasks[0]["data"]


def test_argilla(tmp_path: Path) -> None:
    (path,) = export([TABLE], "argilla", tmp_path, Path("photos"))
    records = json.loads(path.read_text())
    assert [record["verdict"] for record in records] == ["matched", "mismatched", None]
    assert records[2]["caption"] == ""
    assert records[1]["image"] == str(Path("photos").absolute() / "sub/b.jpg")


def test_pairs_without_images_are_refused(tmp_path: Path) -> None:
    with refused(NotFoundError):
        export([TABLE.drop(["image"])], "argilla", tmp_path)
    assert list(tmp_path.iterdir()) == []
