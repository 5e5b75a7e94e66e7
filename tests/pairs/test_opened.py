"""Pairs from arrays, tables and files, for an audit and a training alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

import mispair
from audit_cases import make_case
from mispair.auditing import inputs
from mispair.encoders.encode import EncodedPairs, Encoders
from mispair.errors import ConflictError, NotFoundError, ShapeError
from mispair.pairs.noise import add_noise
from mispair.pairs.pairs import Pairs, Tokens, Vectors, subset
from mispair.pairs.shapes import dataset
from mispair.pairs.shards import ArrayRows
from mispair.pairs.source import Source
from refusals import refused

COUNT = 60
NAMES = [f"p{row}" for row in range(COUNT)]
CASE = make_case(COUNT, 0.3)
SMALL: dict[str, Any] = {"method": "plain", "epochs": 1, "device": "cpu", "embed_size": 8}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Thirty images with two captions each, as a table."""
    (tmp_path / "photos").mkdir()
    for number in range(COUNT // 2):
        Image.new("RGB", (8, 8), (8 * number, 0, 0)).save(tmp_path / f"photos/{number}.png")
    lines = [f"{row // 2}.png,caption {row}" for row in range(COUNT)]
    (tmp_path / "photos.csv").write_text("\n".join(["image,caption", *lines]) + "\n")
    return tmp_path / "photos.csv"


@pytest.fixture
def encoding(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Encodes nothing: row i has the vectors of `CASE`, and the last one cannot be read."""
    calls: list[str] = []

    def encode(source: Source, *_: object, **__: object) -> Any:
        calls.append(source.name)
        left, right = CASE.left.copy(), CASE.right.copy()
        left[::2] = left[1::2]
        hashes = ArrayRows(np.zeros((COUNT, 16), dtype=np.float16))
        bad = {COUNT - 1: "image is missing"}
        return EncodedPairs([ArrayRows(left)], [ArrayRows(right)], hashes, bad)  # type: ignore[list-item, arg-type]

    monkeypatch.setattr(inputs, "encode", encode)
    monkeypatch.setattr(Encoders, "views", lambda _: ([], []))
    return calls


def test_arrays_are_audited_like_the_arrays_themselves() -> None:
    texts = [f"caption {row}" for row in range(COUNT)]
    groups = np.arange(COUNT) // 2
    pairs = Pairs.from_arrays(CASE.left, CASE.right, ids=NAMES, captions=texts, groups=groups)
    assert pairs.left_groups[pairs.link].tolist() == groups.tolist()
    found = mispair.audit(pairs, device="cpu")
    wanted = mispair.audit(CASE.left, CASE.right, NAMES, groups, texts=texts, device="cpu")
    assert found.table.equals(wanted.table)
    np.testing.assert_array_equal(found.attach_to(pairs).flagged, wanted.is_mismatch)
    assert mispair.fit(pairs, **SMALL).config.data == pairs.name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_tensors_of_any_precision(dtype: torch.dtype) -> None:
    pairs = Pairs.from_arrays(torch.eye(3).to(dtype).requires_grad_(), np.eye(3))
    assert isinstance(pairs.left, Vectors)
    np.testing.assert_array_equal(pairs.left.features, np.eye(3))


def test_other_pairs_are_not_those_of_the_source() -> None:
    pairs = Pairs.from_arrays(CASE.left, CASE.right)
    assert pairs.source is not None
    assert subset(pairs, np.arange(9)).source is None
    assert add_noise(pairs, noise_ratio=0.5, seed=0).source is None


@pytest.mark.parametrize("kind", ["path", "pandas", "polars", "file"])
def test_tables_and_files_are_encoded_when_they_are_needed(photos: Path, encoding: list[str], kind: str) -> None:
    place = photos.parent / "photos"
    if kind == "file":
        pairs = Pairs.from_files(photos, place)
    else:
        table = photos if kind == "path" else pytest.importorskip(kind).read_csv(photos)
        pairs = Pairs.from_table(table, place)
    assert not encoding
    assert (len(pairs), len(pairs.left)) == (COUNT, COUNT // 2)
    found = mispair.audit(pairs, device="cpu")
    assert found.bad_rows.tolist() == [COUNT - 1]
    matcher = mispair.fit(found.attach_to(pairs), **SMALL)
    assert len(encoding) == 2
    assert matcher.origin is not None


def test_encoded_pairs_are_those_that_can_be_read(photos: Path, encoding: list[str]) -> None:
    pairs = inputs.encoded_pairs(Pairs.from_files(photos, photos.parent / "photos"))
    assert len(encoding) == 1
    assert len(pairs) == COUNT - 1
    assert isinstance(pairs.left, Vectors)
    left: npt.NDArray[Any] = pairs.left.features[pairs.link]
    np.testing.assert_array_equal(left, CASE.left[np.arange(COUNT - 1) // 2 * 2 + 1])
    assert pairs.left_ids[:2] == ["0.png", "1.png"]
    assert pairs.right_ids[:2] == ["caption 0", "caption 1"]
    assert pairs.origin is not None
    assert inputs.encoded_pairs(pairs) is pairs


@pytest.fixture
def shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in data set with a few images."""
    folder = dataset.make(tmp_path / "shapes", train=4, dev=4, test=4)
    monkeypatch.setattr(dataset, "cached", lambda **_: folder)


@pytest.mark.usefixtures("shapes")
def test_folders_that_can_be_trained_on_are_loaded() -> None:
    assert Pairs.from_files("shapes", split="dev").name == mispair.load("shapes", "dev").name


def test_what_is_none_of_these_is_refused(tmp_path: Path) -> None:
    with refused(NotFoundError, tmp_path / "nothing.csv"):
        Pairs.from_files(tmp_path / "nothing.csv")
    with refused(ShapeError, "the table", "int"):
        Pairs.from_table(3)
    with refused(ShapeError):
        Pairs.from_arrays([[1.0], [1.0, 2.0]], np.eye(2))
    with refused(ConflictError):
        mispair.audit(Pairs.from_arrays(np.eye(3), np.eye(3)), np.eye(3))


@pytest.mark.usefixtures("shapes")
def test_a_notebook_shows_the_first_rows(photos: Path) -> None:
    pairs = Pairs.from_files(photos, photos.parent / "photos")
    shown = pairs._repr_html_()
    assert shown.count("<tr>") == 6
    assert shown.count("data:image") == 5
    assert "caption 4" in shown
    assert "images and captions" in repr(pairs)
    scored = Pairs.from_arrays(np.eye(3), np.eye(3), ids=["<b>", "y", "z"]).with_audit(np.array([0.1, 0.9, 0.8]))
    shown = scored._repr_html_()
    assert "&lt;b&gt;" in shown
    assert "0.100" in shown
    assert "1 flagged" in repr(scored)
    shapes = mispair.load("shapes", "dev")
    assert isinstance(shapes.right, Tokens)
    assert shapes.right.texts[0] in shapes._repr_html_()
