"""A pipe in the place of an input is refused at once: opening it would wait until somebody writes to it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mispair.auditing.folder import read_checked
from mispair.auditing.layouts.opening import open_raw
from mispair.data import clip_retrieval
from mispair.data.npy import open_array
from mispair.data.precomp import read_captions
from mispair.data.vocabulary import Vocabulary
from mispair.errors import DataError
from mispair.review.decisions import FILE, Decisions
from mispair.review.transfer import read_decisions
from mispair.support.tensor_files import load_tensors

pytestmark = pytest.mark.posix


def _embeddings(pipe: Path) -> None:
    folder = pipe.parent / "metadata"
    folder.mkdir()
    shutil.move(pipe, folder / "metadata_0.parquet")
    clip_retrieval._read_parquet(folder / "metadata_0.parquet")


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "array": ("left.npy", open_array),
    "captions": ("train_caps.txt", lambda pipe: read_captions(pipe.parent, "train")),
    "captions with ids": ("train_caps.tsv", lambda pipe: read_captions(pipe.parent, "train")),
    "vocabulary": ("vocab.json", Vocabulary.load),
    "checked pairs": ("checked.csv", read_checked),
    "images and captions": ("photos.csv", open_raw),
    "decisions": ("decisions.csv", lambda pipe: read_decisions(Decisions(pipe.parent / FILE), pipe, "")),
    "model": ("best.safetensors", load_tensors),
    "metadata": ("pipe", _embeddings),
}


@pytest.mark.parametrize(("name", "read"), READERS.values(), ids=READERS)
def test_a_pipe_is_refused(name: str, read: Callable[[Path], object], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=r"not a regular file|neither a file nor a folder"):
        read(tmp_path / name)
