"""Folders that are claimed, filled and finished."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from kills import killed_runs
from mispair.errors import ChangedError, DamagedError, DataError, ExistsError, InUseError, WriteError
from mispair.support.files import Json, read_json
from mispair.support.owned_folder import (
    FolderKind,
    Mark,
    OwnedFolder,
    check_unchanged,
    delete_beside,
    read_mark,
    replacing_folder,
)
from refusals import refused

KIND = FolderKind("a result", "result.json", ("a.txt", "parts/*.txt"))
REQUEST: dict[str, Json] = {"size": 3, "the input": ["in", "61d0"]}
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked process")


def fill(out: Path, request: dict[str, Any] = REQUEST, *, overwrite: bool = False) -> bool:
    """Writes the folder unless it is finished; returns whether there was something to do."""
    with OwnedFolder(out, KIND, request, overwrite=overwrite) as folder:
        if folder.finished:
            return False
        folder.begin()
        folder.work.mkdir(exist_ok=True)
        (folder.work / "half").write_text(str(request))
        (out / "parts").mkdir(exist_ok=True)
        for name in ("a.txt", "parts/0.txt", "parts/1.txt"):
            (out / name).write_text(str(request))
        folder.finish()
        return True


def names(out: Path) -> list[str]:
    return sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())


def test_it_is_filled_once(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    assert fill(out)
    assert names(out) == [".lock", "a.txt", "parts/0.txt", "parts/1.txt", "result.json"]
    content = hashlib.sha256(str(REQUEST).encode()).hexdigest()
    written = dict.fromkeys(("a.txt", "parts/0.txt", "parts/1.txt"), content)
    assert read_mark(out, KIND) == Mark(REQUEST, finished=True, files=written)
    assert not fill(out)
    (out / "parts/0.txt").unlink()
    assert not fill(out)  # one file of each pattern is enough
    (out / "a.txt").unlink()
    assert fill(out)


def test_what_cannot_be_deleted_at_first_is_deleted_nevertheless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete, failures = os.unlink, [OSError(24, "Too many open files")]

    def unlink(*arguments: Any, **options: Any) -> None:
        if failures and str(arguments[0]).endswith("half"):
            raise failures.pop()
        delete(*arguments, **options)

    monkeypatch.setattr("os.unlink", unlink)
    fill(tmp_path / "out")
    assert not failures
    assert not (tmp_path / "out" / "unfinished").exists()


def test_requests_are_compared_as_json(tmp_path: Path) -> None:
    assert fill(tmp_path / "out", {"x": (1, 2)})
    assert not fill(tmp_path / "out", {"x": [1, 2]})


def test_another_request_is_refused_with_the_difference(tmp_path: Path) -> None:
    out = tmp_path / "out"
    fill(out)
    other = {"size": 4, "the input": ["in", "f3b7"]}
    for names_both in ("`size` was 3, now 4", "the input changed"):
        with refused(ChangedError, out, names_both):
            fill(out, other)
    assert not fill(out)
    assert fill(out, other, overwrite=True)
    assert (out / "a.txt").read_text() == str(other)
    with OwnedFolder(out, KIND, REQUEST, overwrite=True) as folder:
        folder.begin()
        assert names(out) == [".lock", "result.json"]
        assert folder.begun
        assert not folder.finished
    with refused(ChangedError, out, "a part of a result"):
        fill(out, other)


def test_a_damaged_mark_is_refused(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "result.json").write_text("[" * 100_000)
    with refused(DamagedError, tmp_path / "result.json", "a result"):
        fill(tmp_path)
    assert fill(tmp_path, overwrite=True)


def test_folders_of_others_are_refused_and_unchanged(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("important")
    with refused(ExistsError, tmp_path, "result.json"):
        fill(tmp_path)
    assert names(tmp_path) == ["thesis.txt"]
    (tmp_path / "a.txt").write_text("not ours")
    with refused(ExistsError, tmp_path, "a.txt"):
        fill(tmp_path, overwrite=True)
    assert names(tmp_path) == ["a.txt", "thesis.txt"]
    (tmp_path / "a.txt").unlink()
    assert fill(tmp_path, overwrite=True)
    assert (tmp_path / "thesis.txt").read_text() == "important"
    with refused(ExistsError, tmp_path / "thesis.txt"):
        fill(tmp_path / "thesis.txt")


def test_entering_leaves_nothing(tmp_path: Path) -> None:
    with refused(DataError, names="bad input"), OwnedFolder(tmp_path / "a", KIND, REQUEST):
        raise DataError("bad input")
    assert not (tmp_path / "a").exists()


@pytest.mark.posix
@pytest.mark.parametrize("name", ["caf\udce9", "a\0b"])
def test_a_name_that_formats_cannot_hold_is_refused(tmp_path: Path, name: str) -> None:
    with refused(WriteError, tmp_path / name):
        fill(tmp_path / name)
    assert os.listdir(tmp_path) == []


def test_what_was_abandoned_is_free(tmp_path: Path) -> None:
    with OwnedFolder(tmp_path, KIND, {}) as folder:
        folder.begin()
        (tmp_path / "a.txt").write_text("")
        folder.abandon()
    assert names(tmp_path) == [".lock"]
    assert fill(tmp_path)


def _enter(out: Path, answers: multiprocessing.Queue[str]) -> None:
    try:
        fill(out)
        answers.put("filled")
    except InUseError as error:
        answers.put(f"{error.where} is in use")


def test_a_second_process_is_refused_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answers: multiprocessing.Queue[str] = context.Queue()
    with OwnedFolder(tmp_path, KIND, REQUEST):
        with refused(InUseError, tmp_path):
            fill(tmp_path)  # nor by the same process
        child = context.Process(target=_enter, args=(tmp_path, answers))
        child.start()
        assert answers.get(timeout=60) == f"{tmp_path} is in use"
        child.join()
    assert fill(tmp_path)


@needs_fork
@pytest.mark.parametrize("older", [None, {"size": 2}])
def test_killed_at_any_point_it_goes_on(tmp_path: Path, older: dict[str, Any] | None) -> None:
    out = tmp_path / "out"
    if older is not None:
        fill(out, older)
    kills = 0
    for _ in killed_runs(lambda: fill(out, overwrite=older is not None), tmp_path):
        kills += 1
        for path in [out / "a.txt", *out.glob("parts/*")]:  # never files of another request than the mark's
            mark = read_mark(out, KIND)
            assert not path.exists() or mark is None or path.read_text() in ("", str(mark.request))
    assert kills > 10
    assert not fill(out)
    assert names(out) == [".lock", "a.txt", "parts/0.txt", "parts/1.txt", "result.json"]


def test_only_own_leftovers_are_deleted(tmp_path: Path) -> None:
    for name in (".result.json.4711.tmp", ".thesis.txt.4711.tmp"):
        (tmp_path / name).write_text("half of it")
    with OwnedFolder(tmp_path, KIND, REQUEST) as folder:
        assert names(tmp_path) == [".lock", ".thesis.txt.4711.tmp"]  # it is not known yet whose folder it is
        folder.begin()
    (tmp_path / "parts").mkdir()
    for name in ("parts/.0.txt.4711.tmp", "parts/.0.txt.mine.tmp", "parts/0.txt.4711.tmp"):
        (tmp_path / name).write_text("half of it")
    with OwnedFolder(tmp_path, KIND, REQUEST):
        assert names(tmp_path) == [".lock", "parts/.0.txt.mine.tmp", "parts/0.txt.4711.tmp", "result.json"]


@needs_fork
def test_a_replaced_folder_is_the_old_or_the_new_one(tmp_path: Path) -> None:
    out = tmp_path / "copy"

    def write(text: str) -> None:
        with replacing_folder(out) as folder:
            for name in "ab":
                (folder / name).write_text(text)

    def read() -> dict[str, str]:
        return {path.name: path.read_text() for path in out.iterdir()}

    write("old")
    kills = 0
    for _ in killed_runs(lambda: write("new"), tmp_path):
        kills += 1
        if not out.exists():  # killed between two renames
            with pytest.raises(RuntimeError), replacing_folder(out):
                raise RuntimeError
        assert set(read().values()) in ({"old"}, {"new"})
        write("old")
        assert os.listdir(tmp_path) == ["copy"]
    assert kills > 5
    assert read() == {"a": "new", "b": "new"}
    with replacing_folder(out), refused(InUseError, out):
        write("other")


def test_what_was_left_beside_a_whole_folder_is_deleted(tmp_path: Path) -> None:
    out = tmp_path / "copy"
    with replacing_folder(out) as folder:
        (folder / "a").write_text("new")
    (tmp_path / ".copy.4711.tmp/old").mkdir(parents=True)
    (tmp_path / ".copy.lock").touch()
    (tmp_path / ".other.4711.tmp").mkdir()
    with replacing_folder(tmp_path / "other"):
        delete_beside(tmp_path / "other")  # not what is being written
    delete_beside(out)
    assert sorted(os.listdir(tmp_path)) == ["copy", "other"]
    assert (out / "a").read_text() == "new"


def test_json_or_none(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    assert read_json(path) is None
    for text, value in (("[1]", [1]), ("[", None), ("[" * 100_000, None), ("1" * 5000, None), ("\xff", None)):
        path.write_text(text, encoding="latin-1")
        assert read_json(path) == value
    path.write_text(json.dumps(REQUEST))
    assert read_json(path) == REQUEST


def test_a_changed_file_is_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    fill(out)
    names = ["a.txt", "parts/1.txt", "of another version.txt"]
    check_unchanged(out, KIND, names)
    changed = bytearray((out / "parts/1.txt").read_bytes())
    changed[3] ^= 1
    (out / "parts/1.txt").write_bytes(changed)
    with refused(DamagedError, out / "parts/1.txt"):
        check_unchanged(out, KIND, names)
    check_unchanged(out, KIND, ["a.txt"])
    (out / "a.txt").unlink()
    with refused(DamagedError, out / "a.txt"):
        check_unchanged(out, KIND, ["a.txt"])
    check_unchanged(tmp_path, KIND, names)  # no mark, no hashes
