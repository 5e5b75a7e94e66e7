"""The lists of published files agree with themselves."""

from __future__ import annotations

import json
import math
import re
import tomllib
from importlib.resources import files

import numpy as np
import pytest

from mispair.cli.data import SUITES
from mispair.errors import UnknownNameError
from mispair.pairs.published.catalogue import DATA_SETS, DataSet, PublishedFile, find_data_set
from refusals import refused

ALL_FILES = [(data_set, file) for data_set in DATA_SETS.values() for file in data_set.files]


def named(one: object) -> str:
    return one.name if isinstance(one, DataSet | PublishedFile) else str(one)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("flickr30", "flickr30k"), ("f30k", "flickr30k"), ("Flickr30K", "flickr30k"), ("cocoa", "coco"),
        ("MSCOCO", "coco"), ("cc152", "cc152k"), ("shape", "shapes"),
    ],
)  # fmt: skip
def test_an_unknown_name_gets_the_nearest_one(name: str, nearest: str) -> None:
    with refused(UnknownNameError, names=f'"{nearest}"'):
        find_data_set(name)


def test_a_name_like_no_other() -> None:
    with refused(UnknownNameError, names="flickr30k, coco, cc152k or shapes"):
        find_data_set("imagenet")


@pytest.mark.parametrize("data_set", DATA_SETS.values(), ids=named)
def test_lists_are_consistent(data_set: DataSet) -> None:
    names = [file.name for file in data_set.files]
    needed = [file.needed for file in data_set.files]
    assert len(set(names)) == len(names)
    assert needed == sorted(needed, reverse=True)
    assert {file.source for file in data_set.files} == {source.name for source in data_set.sources}
    assert all(source.address.startswith("https://") and source.about for source in data_set.sources)
    assert find_data_set(data_set.name) is data_set
    suite = tomllib.loads((files("mispair") / f"suites/{SUITES[data_set.name]}.toml").read_text(encoding="utf-8"))
    assert suite["data"] == data_set.folder
    tested = {file.split.name for file in data_set.files if file.needed and file.split}
    assert tested in ({"train", "dev", "test"}, {"train", "dev", "testall"})
    assert data_set.needed_bytes == sum(file.n_bytes or 0 for file in data_set.files if file.needed)
    assert json.loads(data_set.model_dump_json(by_alias=True))["name"] == data_set.name


@pytest.mark.parametrize(("data_set", "file"), ALL_FILES, ids=named)
def test_files_are_consistent(data_set: DataSet, file: PublishedFile) -> None:
    assert file.needed or file.without
    assert file.sha256 is None or re.fullmatch("[0-9a-f]{64}", file.sha256)
    assert (file.sha256 is None) == (file.file_bytes is None)
    if file.shape:
        item = np.dtype(file.dtype).itemsize
        assert file.n_bytes is not None
        assert file.n_bytes == math.prod(file.shape) * item
        assert file.file_bytes in (None, file.n_bytes + 128)  # the header of today's numpy
    if file.split:
        split = file.split
        assert split.captions % split.images == 0
        assert split.rows in (split.images, split.captions)
        assert file.name.startswith(f"{split.name}_")
        assert file.kind != "features" or file.shape == (split.rows, 36, 2048)
        assert file.kind != "captions" or file.lines == split.captions
    if file.kind == "noise":
        train = next(one.split for one in data_set.files if one.split)
        assert file.shape is not None
        assert file.shape[0] == (train.images if "inx" in file.name else train.captions)


@pytest.mark.parametrize(
    ("name", "gigabytes"), [("flickr30k", 8.55), ("coco", 33.41), ("cc152k", 44.24)]
)  # rows x 36 x 2048 x 4
def test_training_features_are_as_large_as_people_find_them(name: str, gigabytes: float) -> None:
    assert (DATA_SETS[name].files[0].n_bytes or 0) / 1e9 == pytest.approx(gigabytes, abs=0.005)
