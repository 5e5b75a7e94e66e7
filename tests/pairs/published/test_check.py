"""Every verdict on a folder of published files is reached."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mispair.errors import NotFoundError
from mispair.pairs.published.catalogue import DATA_SETS, DataSet, Split
from mispair.pairs.published.check import Finding, check_folder, folder_inside, ready, to_fetch
from mispair.pairs.vocabulary import Vocabulary
from refusals import refused

FORMATS = Path(__file__).parents[4] / "shared/data/formats"
REGIONS, WIDTH = 3, 4
NOISE = np.arange(20) // 5


def bytes_of(array: npt.NDArray[Any], folder: Path) -> bytes:
    np.save(folder / "any.npy", array)
    content = (folder / "any.npy").read_bytes()
    (folder / "any.npy").unlink()
    return content


def tiny_set(folder: Path) -> DataSet:
    """A data set as small as a test needs, with a file of each kind; train has images once, dev five times."""
    captions, noise = b"a dog runs .\n" * 20, bytes_of(NOISE, folder)
    files: list[dict[str, Any]] = [
        {"name": "train_ims.npy", "kind": "features", "split": "train", "shape": (4, REGIONS, WIDTH),
         "dtype": "float32"},
        {"name": "train_caps.txt", "kind": "captions", "split": "train", "lines": 20, "file_bytes": len(captions),
         "sha256": hashlib.sha256(captions).hexdigest(), "repacked": True},
        {"name": "dev_ims.npy", "kind": "features", "split": "dev", "shape": (10, REGIONS, WIDTH), "dtype": "float32"},
        {"name": "dev_caps.txt", "kind": "captions", "split": "dev", "lines": 10, "source": "B"},
        {"name": "train_ids.txt", "kind": "ids", "split": "train", "needed": False, "lines": 4},
        {"name": "tiny_precomp_vocab.json", "kind": "vocabulary", "needed": False, "words": 6,
         "other_places": ["../vocab/tiny_precomp_vocab.json"]},
        {"name": "noise_index/tiny_0.4.npy", "kind": "noise", "needed": False, "shape": [20], "dtype": "int64",
         "file_bytes": len(noise), "sha256": hashlib.sha256(noise).hexdigest(), "other_places": ["tiny_0.4.npy"],
         "source": "B"},
    ]  # fmt: skip
    splits = {
        "train": {"name": "train", "images": 4, "captions": 20, "rows": 4},
        "dev": {"name": "dev", "images": 2, "captions": 10, "rows": 10},
    }
    common = {"source": "A", "holds": "", "without": "none"}
    return DataSet.model_validate({
        "name": "tiny", "title": "Tiny", "folder": "tiny_precomp", "about": "Small.",
        "files": [{**common, **file, "split": splits.get(file.get("split", ""))} for file in files],
        "sources": [{"name": name, "address": f"https://{name.lower()}", "about": ""} for name in "AB"],
    })  # fmt: skip


def rows(count: int, *, regions: int = REGIONS, width: int = WIDTH) -> npt.NDArray[np.float32]:
    return np.random.RandomState(count).rand(count, regions, width).astype(np.float32)


def fill(folder: Path) -> None:
    """Everything as published."""
    (folder / "noise_index").mkdir(parents=True)
    np.save(folder / "train_ims.npy", rows(4))
    np.save(folder / "dev_ims.npy", rows(2).repeat(5, axis=0))
    (folder / "train_caps.txt").write_text("a dog runs .\n" * 20)
    (folder / "dev_caps.txt").write_text("a cat .\n" * 10)
    (folder / "train_ids.txt").write_text("1\n2\n3\n4\n")
    Vocabulary.build(["dog cat"], 1).save(folder / "tiny_precomp_vocab.json")
    np.save(folder / "noise_index/tiny_0.4.npy", NOISE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tiny_precomp"
    fill(path)
    return path


@pytest.fixture
def data_set(tmp_path: Path) -> DataSet:
    return tiny_set(tmp_path)


def finding(data_set: DataSet, folder: Path, name: str) -> Finding:
    return next(found for found in check_folder(data_set, folder) if found.file.name == name)


def test_a_folder_as_published_is_ready(data_set: DataSet, folder: Path) -> None:
    found = check_folder(data_set, folder)
    assert [one.verdict for one in found] == ["there", "right", "there", "there", "there", "there", "right"]
    assert ready(found)
    assert not to_fetch(data_set, found)


def spoil(folder: Path, what: str) -> None:
    """Changes one thing in a folder that is right."""
    train = folder / "train_ims.npy"
    match what:
        case "missing":
            train.unlink()
        case "other regions":
            np.save(train, rows(4, regions=2))
        case "other width":
            np.save(train, rows(4, width=5))
        case "vectors":
            np.save(train, rows(4)[:, 0])
        case "other rows":
            np.save(train, rows(7))
        case "repeated":
            np.save(train, rows(4).repeat(5, axis=0))
        case "as many rows as captions":
            np.save(train, rows(20))
        case "placeholder":
            np.save(folder / "dev_ims.npy", np.zeros((10, REGIONS, WIDTH), np.float32))
        case "once":
            np.save(folder / "dev_ims.npy", rows(2))
        case "float16" | "float64" | "int32":
            np.save(train, rows(4).astype(what))
        case "truncated":
            train.write_bytes(train.read_bytes()[:-1])
        case "appended":
            train.write_bytes(train.read_bytes() + b"\n")
        case "a page":
            train.write_text("<!DOCTYPE html><title>Sign in</title>")
        case "larger dev":
            np.save(folder / "dev_ims.npy", rows(5))
        case "fewer captions":
            (folder / "train_caps.txt").write_text("a dog runs .\n" * 19)
        case "more dev captions":
            (folder / "dev_caps.txt").write_text("a cat .\n" * 25)
        case "other captions":
            (folder / "train_caps.txt").write_text("A dog runs .\n" * 20)
        case "latin":
            (folder / "train_caps.txt").write_bytes(b"caf\xe9\n" * 20)
        case "tabbed":
            (folder / "train_caps.txt").unlink()
            (folder / "train_caps.tsv").write_text("7\ta dog runs .\n" * 20)
        case "ids":
            (folder / "train_ids.txt").write_text("1\n2\n")
        case "ids a caption":
            (folder / "train_ids.txt").write_text("1\n" * 20)
        case "more words":
            Vocabulary.build(["dog cat bird"], 1).save(folder / "tiny_precomp_vocab.json")
        case "no vocabulary":
            (folder / "tiny_precomp_vocab.json").write_text("{}")
        case "vocabulary beside":
            (folder.parent / "vocab").mkdir()
            (folder / "tiny_precomp_vocab.json").rename(folder.parent / "vocab/tiny_precomp_vocab.json")
        case "other noise":
            np.save(folder / "noise_index/tiny_0.4.npy", NOISE[::-1])
        case "small noise":
            np.save(folder / "noise_index/tiny_0.4.npy", NOISE.astype(np.int32))
        case "image noise":
            np.save(folder / "noise_index/tiny_0.4.npy", np.arange(4))
        case "noise elsewhere":
            (folder / "noise_index/tiny_0.4.npy").rename(folder / "tiny_0.4.npy")
        case "no noise":
            (folder / "noise_index/tiny_0.4.npy").unlink()


TRAIN, DEV, NOISE_FILE = "train_ims.npy", "dev_ims.npy", "noise_index/tiny_0.4.npy"
VERDICTS = {  # what was done: file, verdict, words of the sentence, whether the folder is still ready
    "missing": (TRAIN, "missing", "needed", False),
    "other regions": (TRAIN, "another shape", "4 x 2 x 4 float32; expected 4 x 3 x 4", False),
    "other width": (TRAIN, "another shape", "4 x 3 x 5 float32", False),
    "vectors": (TRAIN, "another shape", "4 x 4 float32", False),
    "other rows": (TRAIN, "another shape", "expected 4 or 20 rows", False),
    "repeated": (TRAIN, "there", "each image 5 times", True),
    "as many rows as captions": (TRAIN, "another shape", "not 4 images 5 times each", False),
    "placeholder": (DEV, "another shape", "not 2 images 5 times each", False),
    "once": (DEV, "there", "each image once", True),
    "float16": (TRAIN, "there", "digits are lost", True),
    "float64": (TRAIN, "there", "twice the space", True),
    "int32": (TRAIN, "unreadable", "float16", False),
    "truncated": (TRAIN, "another size", "expected 320 bytes", False),
    "appended": (TRAIN, "another size", "321 bytes where the header promises 320", False),
    "a page": (TRAIN, "unreadable", "expected one array written by numpy.save", False),
    "larger dev": (DEV, "another shape", "chooses the best epoch on other pairs", False),
    "fewer captions": ("train_caps.txt", "another length", "19 captions; expected 20.", False),
    "more dev captions": ("dev_caps.txt", "another length", "chooses the best epoch on other pairs", False),
    "other captions": ("train_caps.txt", "there", "not byte for byte the copy that we know", True),
    "latin": ("train_caps.txt", "unreadable", "not UTF-8", False),
    "tabbed": ("train_caps.txt", "there", "train_caps.tsv, which is published as train_caps.txt", True),
    "ids": ("train_ids.txt", "another length", "2 ids; expected 4", True),
    "ids a caption": ("train_ids.txt", "there", "as many ids as images or captions", True),
    "more words": ("tiny_precomp_vocab.json", "another length", "7 words; published with 6", True),
    "no vocabulary": ("tiny_precomp_vocab.json", "unreadable", "word2idx", True),
    "vocabulary beside": ("tiny_precomp_vocab.json", "there", "6 words", True),
    "other noise": (NOISE_FILE, "checksum wrong", "this is another file", True),
    "small noise": (NOISE_FILE, "another size", "208 bytes, expected 288", True),
    "image noise": (NOISE_FILE, "another shape", "fits only the set it was made for", True),
    "noise elsewhere": (NOISE_FILE, "right", "checksum right", True),
    "no noise": (NOISE_FILE, "missing", "optional; none", True),
}


@pytest.mark.parametrize("what", VERDICTS)
def test_verdicts(what: str, data_set: DataSet, folder: Path) -> None:
    name, verdict, words, still_ready = VERDICTS[what]
    spoil(folder, what)
    found = finding(data_set, folder, name)
    assert (found.verdict, found.fits) == (verdict, verdict in ("right", "there"))
    assert words in found.sentence
    assert ready(check_folder(data_set, folder)) == still_ready
    json.dumps(found.to_json(), allow_nan=False)


@given(
    count=st.integers(1, 24),
    regions=st.integers(2, 4),
    width=st.integers(3, 5),
    dtype=st.sampled_from(["float16", "float32", "float64"]),
    repeat=st.booleans(),
)
def test_features_fit_exactly_where_the_reader_finds_the_published_images(
    count: int, regions: int, width: int, dtype: str, repeat: bool
) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "tiny_precomp"
        fill(folder)
        features = rows(count, regions=regions, width=width).astype(dtype)
        np.save(folder / TRAIN, features.repeat(5, axis=0) if repeat else features)
        found = finding(tiny_set(Path(place)), folder, TRAIN)
        assert found.fits == ((count, regions, width) == (4, REGIONS, WIDTH))
        assert found.verdict in ("there", "another shape")


def test_one_caption_an_image(tmp_path: Path) -> None:
    data_set = tiny_set(tmp_path)
    split = Split(name="train", images=10, captions=10, rows=10)
    file = data_set.files[0].model_copy(update={"split": split, "shape": (10, REGIONS, WIDTH)})
    data_set = data_set.model_copy(update={"files": (file,)})
    np.save(tmp_path / TRAIN, rows(10))
    assert finding(data_set, tmp_path, TRAIN).fits
    np.save(tmp_path / TRAIN, rows(2).repeat(5, axis=0))
    assert finding(data_set, tmp_path, TRAIN).verdict == "another shape"
    np.save(tmp_path / TRAIN, rows(9))
    assert "expected 10 rows" in finding(data_set, tmp_path, TRAIN).sentence


def test_a_vocabulary_that_mispair_would_not_find_is_named(data_set: DataSet, folder: Path) -> None:
    other = folder.rename(folder.parent / "flickr")
    found = finding(data_set, other, "tiny_precomp_vocab.json")
    assert found.fits
    assert "mispair looks for flickr_vocab.json" in found.sentence


def test_a_mixed_up_folder_is_recognised(data_set: DataSet, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DATA_SETS, "tiny", data_set)
    np.save(folder / TRAIN, rows(10))
    assert "This is the shape of dev_ims.npy of Tiny." in finding(data_set, folder, TRAIN).sentence


def test_what_to_fetch_and_a_folder_that_is_one_deeper(data_set: DataSet, folder: Path) -> None:
    (folder / "dev_caps.txt").unlink()
    missing = to_fetch(data_set, check_folder(data_set, folder))
    assert {source.address: names for source, names in missing.items()} == {"https://b": ["dev_caps.txt"]}
    assert folder_inside(data_set, folder) is None
    above = folder.parent
    assert folder_inside(data_set, above) == folder
    missing = to_fetch(data_set, check_folder(data_set, above))
    assert next(iter(missing.values())) == ["train_ims.npy", "train_caps.txt", "dev_ims.npy"]


def test_a_folder_must_be_one(data_set: DataSet, folder: Path) -> None:
    with refused(NotFoundError, folder / "nowhere"):
        check_folder(data_set, folder / "nowhere")
    with refused(NotFoundError, folder / "train_ims.npy"):
        check_folder(data_set, folder / TRAIN)


@pytest.mark.skipif(not FORMATS.exists(), reason="needs the published files")
def test_published_files_at_hand_are_right(tmp_path: Path) -> None:
    folder = tmp_path / "f30k_precomp"
    (folder / "noise_index").mkdir(parents=True)
    shutil.copy(FORMATS / "f30k_precomp_vocab.json", folder)
    shutil.copy(FORMATS / "noise_inx_0.4.npy", folder)
    shutil.copy(FORMATS / "f30k_precomp_0.4.npy", folder / "noise_index")
    (folder / "train_caps.txt").write_bytes(gzip.decompress((FORMATS / "f30k_train_caps.txt.gz").read_bytes()))
    found = {one.file.name: one for one in check_folder(DATA_SETS["flickr30k"], folder) if one.verdict != "missing"}
    assert {one.verdict for one in found.values()} == {"right"}
    assert set(found) == {
        "train_caps.txt", "f30k_precomp_vocab.json", "noise_index/f30k_precomp_0.4.npy", "noise_inx_0.4.npy"
    }  # fmt: skip
