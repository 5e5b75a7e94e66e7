"""Checkpoints: whole or absent, newest first, and nothing that can run code."""

from __future__ import annotations

import hashlib
import io
import math
import os
import pickle
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mispair.errors import DamagedError, DataError
from mispair.methods.base import EpochPairs
from mispair.methods.epoch_metrics import MethodReport
from mispair.support.files import write_atomically
from mispair.training import checkpoint
from mispair.training.checkpoint import Best, Checkpoint, Cursor, find, resume, save
from mispair.training.monitor import Health
from refusals import refused


def state(number: int, step: int | None = None) -> Checkpoint:
    return Checkpoint(
        cursor=Cursor(epoch=number, step=number if step is None else step, main_steps=[1, 2]),
        networks=[{"weight": torch.full((2, 3), float(number))}],
        optimizers=[{"state": {}, "param_groups": [{"lr": 0.1}]}],
        method={"steps": [1, 2], "w": torch.ones(3)},
        epoch_pairs=[EpochPairs(np.arange(5), np.arange(5, 7), "after")],
        report=MethodReport(clean_share=[0.1, 1 / 3], clean_precision=[None, math.nan], eta_share=0.2),
        best=Best(300.5, 2),
        health=[Health(0.1, 0.3), Health(0.2, 0.2, steps=3, pairs=24, total=0.7)],
        random_state=torch.get_rng_state(),
        cuda_random_state=None,
        logged_bytes=77,
        fingerprint="abc",
    )


def test_a_checkpoint_comes_back(tmp_path: Path) -> None:
    saved = state(7)
    path = save(tmp_path / "new/folder", saved)
    loaded = resume(tmp_path / "new/folder")
    assert loaded is not None
    for field in fields(Checkpoint):
        if field.name not in ("networks", "method", "epoch_pairs", "report", "random_state"):
            assert getattr(loaded, field.name) == getattr(saved, field.name), field.name
    assert torch.equal(loaded.networks[0]["weight"], torch.full((2, 3), 7.0))
    assert torch.equal(loaded.random_state, saved.random_state)
    assert loaded.method["steps"] == [1, 2]
    (pairs,) = loaded.epoch_pairs
    assert (pairs.clean.tolist(), pairs.noisy.tolist(), pairs.order) == ([0, 1, 2, 3, 4], [5, 6], "after")
    assert loaded.report is not None
    assert loaded.report.clean_share == [0.1, 1 / 3]
    assert str(loaded.report.clean_precision) == "[None, nan]"
    assert path.name == f"step-000000007-{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}.pt"
    assert list(path.parent.iterdir()) == [path]  # no temporary file stays


def test_nothing_is_found_in_an_empty_or_missing_folder(tmp_path: Path) -> None:
    assert resume(tmp_path) is None
    assert resume(tmp_path / "missing") is None


def test_two_are_kept_and_the_newest_is_loaded(tmp_path: Path) -> None:
    paths = [save(tmp_path, state(step)) for step in (1, 9, 10, 100, 1000)]
    assert find(tmp_path) == [paths[4], paths[3]]
    assert sorted(tmp_path.iterdir()) == sorted(paths[3:])
    loaded = resume(tmp_path)
    assert loaded is not None
    assert loaded.cursor.step == 1000


def test_what_a_killed_save_did_not_delete_is_deleted_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as killed:
        killed.setattr(checkpoint, "KEPT", 9)
        paths = [save(tmp_path, state(step)) for step in (1, 2, 3, 4)]
    again = save(tmp_path / "again", state(5, 4))  # one of the same step that was to be replaced
    again.replace(tmp_path / again.name)
    newest, other = sorted((paths[3], tmp_path / again.name), reverse=True)
    assert resume(tmp_path) is not None
    assert find(tmp_path) == [newest, paths[2]]
    assert not other.exists()


def test_a_damaged_newest_is_kept_with_two_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as killed:
        killed.setattr(checkpoint, "KEPT", 9)
        paths = [save(tmp_path, state(step)) for step in (1, 2, 3, 4)]
    paths[3].write_bytes(b"")
    with pytest.warns(UserWarning, match="damaged"):
        assert resume(tmp_path) is not None
    assert find(tmp_path) == [paths[3], paths[2], paths[1]]


@pytest.mark.parametrize("damage", ["empty", "truncated", "flipped"])
def test_a_damaged_newest_falls_back_with_a_warning(tmp_path: Path, damage: str) -> None:
    save(tmp_path, state(1))
    newest = save(tmp_path, state(2))
    content = bytearray(newest.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
    newest.write_bytes(content[: {"empty": 0, "truncated": -1, "flipped": None}[damage]])
    with pytest.warns(UserWarning, match=f"{newest.name} is damaged"):
        loaded = resume(tmp_path)
    assert loaded is not None
    assert loaded.cursor.step == 1


def test_only_damaged_ones_are_none(tmp_path: Path) -> None:
    save(tmp_path, state(1)).write_bytes(b"")
    with pytest.warns(UserWarning, match="damaged"):
        assert resume(tmp_path) is None


def test_a_good_one_gives_no_warning(tmp_path: Path) -> None:
    save(tmp_path, state(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resume(tmp_path) is not None


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    others = ["step-1.pt", "best.safetensors", "step-000000009-xyz.pt"]
    left_behind = ".step-000000009-0123456789abcdef.pt.77.tmp"  # by a process that was killed while it wrote
    for name in (*others, left_behind):
        (tmp_path / name).write_bytes(b"not ours")
    for step in range(4):
        save(tmp_path, state(step))
    assert all((tmp_path / name).read_bytes() == b"not ours" for name in others)
    assert not (tmp_path / left_behind).exists()
    loaded = resume(tmp_path)
    assert loaded is not None
    assert loaded.cursor.step == 3


def test_of_two_with_the_same_step_the_later_one_is_newest(tmp_path: Path) -> None:
    """The trainer saves after the last step of an epoch and again after its validation: same step, other state."""
    for number in range(8):
        save(tmp_path, state(number, step=5))
        loaded = resume(tmp_path)
        assert loaded is not None
        assert loaded.cursor.epoch == number


def test_damaged_ones_of_later_steps_do_not_push_out_a_good_one(tmp_path: Path) -> None:
    for step in (8, 9):
        save(tmp_path, state(step)).write_bytes(b"")
    path = save(tmp_path, state(3))
    assert find(tmp_path) == [path]


class Attack:
    """Writes a file when unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (self.target, "code ran"))


def write(folder: Path, content: bytes) -> None:
    """A file of any content under the name of a checkpoint that is whole."""
    (folder / f"step-000000001-{hashlib.sha256(content).hexdigest()[:16]}.pt").write_bytes(content)


def saved_bytes(state: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def test_pickled_code_does_not_run(tmp_path: Path) -> None:
    target = tmp_path / "trace"
    write(tmp_path, saved_bytes({"weights": Attack(target)}))
    with refused(DamagedError, where=find(tmp_path)[0]):
        resume(tmp_path)
    assert not target.exists()


@pytest.mark.parametrize("content", [b"", b"no archive", b"junk", pickle.dumps([1])])
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, content: bytes) -> None:
    write(tmp_path, content)
    with refused(DamagedError, where=find(tmp_path)[0]):
        resume(tmp_path)


@pytest.mark.parametrize("old", [{"cursor": {"step": 1}, "method": {}}, {"format": 1}, [1, 2]])
def test_a_checkpoint_of_another_version_is_refused_with_a_sentence(tmp_path: Path, old: object) -> None:
    write(tmp_path, saved_bytes(old))
    with refused(DamagedError, where=find(tmp_path)[0]):
        resume(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"cursor": [1]},
        {"cursor": {"epoch": "x"}},
        {"cursor": {"positions": ["a"]}},
        {"best": {"rsum": 1, "age": 3}},
        {"epoch_pairs": [(1, 2, 3)]},
        {"report": "[1"},
        {"health": [7]},
    ],
)
def test_a_checkpoint_with_other_content_than_ours_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    write(tmp_path, saved_bytes({**state(3)._packed(), **change}))
    with refused(DamagedError, where=find(tmp_path)[0]):
        resume(tmp_path)


# ---------------------------------------------------------------- whole or absent


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_atomically(path, b"old")
    write_atomically(path, b"new, and longer")
    assert path.read_bytes() == b"new, and longer"
    assert list(tmp_path.iterdir()) == [path]


def test_the_content_is_on_disk_before_the_name_points_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def noted_fsync(descriptor: int) -> None:
        events.append("sync folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "sync file")
        fsync(descriptor)

    def noted_replace(self: Path, target: Path) -> Path:
        assert self.read_bytes() == b"new"
        events.append("replace")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    write_atomically(tmp_path / "f", b"new")
    assert events == ["sync file", "replace", "sync folder"]


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_failing_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    path = tmp_path / "f"
    write_atomically(path, b"old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((os, "fsync", fail) if where == "fsync" else (Path, "replace", fail)))
    with pytest.raises(DataError):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"


def test_a_failing_save_leaves_the_older_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        save(tmp_path, state(step))
    before = find(tmp_path)

    def fail(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(DataError):
            save(tmp_path, state(3))
    assert find(tmp_path) == before
    loaded = resume(tmp_path)
    assert loaded is not None
    assert loaded.cursor.step == 2


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files by /proc")
def test_a_folder_that_cannot_be_synced_costs_no_open_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def only_files(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(22, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", only_files)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        write_atomically(tmp_path / "f", b"content")
    assert len(os.listdir("/proc/self/fd")) == before
    assert (tmp_path / "f").read_bytes() == b"content"


def test_the_number_kept_is_the_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "KEPT", 3)
    for step in range(6):
        save(tmp_path, state(step))
    assert len(find(tmp_path)) == 3
