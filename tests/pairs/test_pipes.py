"""A pipe in the place of an input is refused at once: opening it would wait until somebody writes to it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from PIL import Image

from mispair.auditing.folder import read_checked
from mispair.auditing.output_files import AUDIT
from mispair.auditing.summary import AuditSummary
from mispair.bench.suite.record import read_record
from mispair.config import Config, to_toml
from mispair.encoders.cache import EncodingCache
from mispair.errors import DataError
from mispair.pairs.layouts import datacomp
from mispair.pairs.layouts.copies import read_edits
from mispair.pairs.layouts.opening import open_raw
from mispair.pairs.layouts.precomp import read_captions
from mispair.pairs.npy import open_array
from mispair.pairs.source import Source
from mispair.pairs.tables import open_table
from mispair.pairs.vocabulary import Vocabulary
from mispair.reviewing.decisions import FILE, Decisions
from mispair.reviewing.transfer import read_decisions
from mispair.support.owned_folder import check_unchanged
from mispair.support.tensor_files import load_tensors
from mispair.training.checkpoint import resume
from mispair.training.events import StepEvent
from mispair.training.run_folder import Run, read_environment, read_events, read_examples, read_result

pytestmark = pytest.mark.posix


def _embeddings(pipe: Path) -> None:
    folder = pipe.parent / "metadata"
    folder.mkdir()
    shutil.move(pipe, folder / "metadata_0.parquet")
    open_table(folder / "metadata_0.parquet")


def _inside(name: str) -> Callable[[Path], object]:
    """Opens a folder in which the pipe stands beside a whole image."""

    def read(pipe: Path) -> None:
        Image.new("RGB", (8, 8)).save(pipe.parent / "a.png")
        shutil.move(pipe, pipe.parent / name)
        open_raw(pipe.parent)

    return read


def _changed(pipe: Path) -> None:
    (pipe.parent / "audit.json").write_text(json.dumps({"request": {}, "finished": True, "files": {pipe.name: ""}}))
    check_unchanged(pipe.parent, AUDIT, [pipe.name])


def _run(pipe: Path) -> None:
    (pipe.parent / "config.toml").write_text(to_toml(Config()))
    Run(pipe.parent, Config())


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
    "lines of an imagefolder": ("pipe", _inside("metadata.jsonl")),
    "tar of a folder": ("pipe", _inside("0.tar")),
    "arrays of DataComp": ("0.npz", datacomp._members),
    "summary of an audit": ("summary.json", AuditSummary.read),
    "table of an audit": ("pairs.parquet", lambda pipe: read_edits(pipe, cast("Source", None), mend=False)),
    "table of an audit that is checked": ("pairs.parquet", _changed),
    "log of a run": ("metrics.jsonl", _run),
    "log of a run that has ended": ("metrics.jsonl", lambda pipe: read_events(pipe.parent, StepEvent)),
    "environment of a run": ("environment.json", lambda pipe: read_environment(pipe.parent)),
    "pairs of a run": ("pairs.parquet", lambda pipe: read_examples(pipe.parent)),
}


@pytest.mark.parametrize(("name", "read"), READERS.values(), ids=READERS)
def test_a_pipe_is_refused(name: str, read: Callable[[Path], object], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError):  # at once
        read(tmp_path / name)


def test_pipes_among_what_may_be_missing_are_passed_over(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "result.json")
    os.mkfifo(tmp_path / "record.json")
    os.mkfifo(tmp_path / f"step-000000001-{'0' * 16}.pt")
    assert read_result(tmp_path) is None
    assert read_record(tmp_path) is None
    assert resume(tmp_path) is None
    assert EncodingCache(tmp_path, "encoder", 2).find(b"") == 0
