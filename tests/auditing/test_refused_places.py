"""`mispair audit` refuses what cannot end well before it starts to work."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import refusals
from audit_cases import contents, make_case, write_clip
from mispair.auditing import inputs
from mispair.auditing.auditor import Auditor
from mispair.auditing.folder import read_checked
from mispair.cli.main import main
from mispair.encoders import encode
from mispair.errors import DataError

pytest.importorskip("pyarrow")

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Data of several kinds; any work is a mistake."""

    def work(*_: object, **__: object) -> None:
        raise AssertionError("it has started to work")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Auditor, "fit_source", work)
    monkeypatch.setattr(encode, "image_encoder", work)
    monkeypatch.setattr(inputs, "from_run", work)
    case = make_case(60, 0.3)
    write_clip(tmp_path / "in", case.left, case.right, {"id": [str(row) for row in range(60)]})
    np.save("a.npy", case.left)
    np.save("b.npy", case.right)
    Path("names.csv").write_text("id\n" + "".join(f"n{row}\n" for row in range(60)))
    Path("raw").mkdir()
    Image.new("RGB", (4, 3)).save("raw/dog.jpg")
    Path("raw/dog.txt").write_text("a dog")
    Path("raw.csv").write_text("image,caption\n" + "dog.jpg,a dog\n" * 60)
    Path("run").mkdir()
    Path("run/best.safetensors").write_bytes(b"")
    Path("file").write_text("a file")
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("important")
    return tmp_path


def refused(capsys: Capture, place: Path, *arguments: str) -> str:
    before = contents(place)
    assert main(["audit", *arguments, "--device", "cpu"]) == 2
    assert contents(place) == before
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("mispair: ")
    return error


@pytest.mark.parametrize(
    ("clean", "words"),
    [
        ("in/clean", "the audited data is"),
        ("in", "the audited data is"),
        ("out", "--out (out) and --clean (out)"),
        ("out/clean", "--clean (out/clean)"),
        (".", "--clean (.)"),
        ("file", "file: a file"),
        ("mine", "is not known to be a copy"),
    ],
)
@pytest.mark.parametrize("kind", ["folder", "arrays"])
def test_a_bad_place_for_the_copy(place: Path, capsys: Capture, kind: str, clean: str, words: str) -> None:
    data = {"folder": ["in"], "arrays": ["--left", "in/img_emb/img_emb_0.npy", "--right", "b.npy"]}[kind]
    if kind == "arrays" and clean == "in/clean":
        clean = "in/img_emb"  # beside the files is a good place, instead of them is not
    error = refused(capsys, place, *data, "--out", "out", "--clean", clean, "--overwrite")
    assert words in error


@pytest.mark.parametrize(
    ("clean", "words"),
    [
        ("raw/clean", "the audited data is"),
        ("file", "file: a file"),
        ("mine", "is not known to be a copy"),
        ("out", "--clean (out)"),
    ],
)
@pytest.mark.parametrize("source", ["raw", "raw.csv"])
def test_a_bad_place_is_refused_before_anything_is_encoded(
    place: Path, capsys: Capture, source: str, clean: str, words: str
) -> None:
    if (source, clean) == ("raw.csv", "raw/clean"):
        clean = "raw.csv/clean"
    options = ["--images", "raw", "--out", "out", "--clean", clean, "--overwrite"]
    assert words in refused(capsys, place, source, *options)


def test_a_bad_place_is_refused_before_a_run_is_read(place: Path, capsys: Capture) -> None:
    for clean, words in (("run/clean", "the audited data is"), ("mine", "is not known to be a copy")):
        assert words in refused(capsys, place, "run", "--out", "out", "--clean", clean, "--overwrite")


ARRAYS = ["--left", "a.npy", "--right", "b.npy"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            ["in"],
            "--images: in/metadata/metadata_0.parquet: found the columns id; expected a column image_path",
        ),
        (["bare"], "it is unknown which image belongs to which pair of bare. Add metadata/metadata_0.csv with a"),
        (ARRAYS, "pair of a.npy and b.npy. Give a table with a column image_path as --ids, or leave --images out"),
        ([*ARRAYS, "--ids", "names.csv"], "names.csv: found the col"),
        (["precomp"], "pair of precomp train. Add train_ids.txt with the name of an image on each line, or leave"),
    ],
)
def test_an_image_folder_that_nothing_refers_to(place: Path, capsys: Capture, data: list[str], words: str) -> None:
    write_clip(place / "bare", np.load("a.npy"), np.load("b.npy"))
    Path("precomp").mkdir()
    np.save("precomp/train_ims.npy", np.load("a.npy")[:, None])
    Path("precomp/train_caps.txt").write_text("a dog\n" * 60)
    error = refused(capsys, place, *data, "--images", "raw", "--out", "out")
    assert "--images: " in error
    assert words in error


def test_answers_that_contradict_each_other(place: Path, capsys: Capture) -> None:
    path = place / "t.csv"
    path.write_text("id,right\n1,yes\n2,no\n1,yes\n2,wrong\n")
    assert read_checked(path) == {"1": True, "2": False}
    path.write_text("id,right\n1,yes\n2,no\n1,no\n")
    with refusals.refused(DataError, where=path, names="'1'"):
        read_checked(path)
    assert "t.csv: the pair '1'" in refused(capsys, place, "in", "--out", "out", "--checked", "t.csv")


def test_good_places_are_taken(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.chdir(place)
    assert main(["audit", "in", "--out", "results/out", "--clean", "results/clean", "--device", "cpu"]) == 0
    assert (place / "results/clean/img_emb/img_emb_0.npy").exists()
