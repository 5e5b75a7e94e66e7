"""Claims: one owner at a time, and none lost for ever."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mispair.bench.suite import claims
from mispair.bench.suite.claims import claim, is_held


def write(path: Path, **owner: object) -> None:
    path.write_text(json.dumps({"host": "elsewhere", "pid": 1, "token": "t", **owner}))


def test_a_claim_is_held_by_one_and_given_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "claim.json"
    assert not is_held(path)
    with claim(path) as ours:
        assert ours
        assert is_held(path)
        with claim(path) as theirs:
            assert not theirs
        assert is_held(path)  # it was not theirs to give back
    assert not is_held(path)
    assert list(path.parent.iterdir()) == []


def test_it_is_given_back_after_an_error(tmp_path: Path) -> None:
    def work() -> None:
        with claim(tmp_path / "c"):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        work()
    assert not is_held(tmp_path / "c")


def test_what_another_machine_touches_is_held(tmp_path: Path) -> None:
    path = tmp_path / "c"
    write(path)
    with claim(path) as ours:
        assert not ours
    old = time.time() - claims.VOID - 1
    os.utime(path, (old, old))
    with claim(path) as ours:
        assert ours


def test_the_claim_of_a_dead_process_is_void_at_once(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    path = tmp_path / "c"
    write(path, host=socket.gethostname(), pid=int(ended.stdout))
    assert not is_held(path)
    with claim(path) as ours:
        assert ours


@pytest.mark.parametrize("content", ["", "{", "[]", "null"])
def test_a_claim_that_is_just_being_written_is_held(tmp_path: Path, content: str) -> None:
    path = tmp_path / "c"
    path.write_text(content)
    assert is_held(path)
    old = time.time() - claims.VOID - 1
    os.utime(path, (old, old))
    with claim(path) as ours:
        assert ours


def test_of_many_who_find_a_void_claim_one_gets_it(tmp_path: Path) -> None:
    for number in range(20):
        path = tmp_path / str(number)
        write(path)
        old = time.time() - claims.VOID - 1
        os.utime(path, (old, old))
        with ThreadPoolExecutor(8) as pool:
            taken = list(pool.map(lambda token, path=path: claims._take(path, str(token)), range(8)))
        assert sum(taken) == 1
        assert [file.name for file in tmp_path.iterdir() if file.name.startswith(f"{number}-")] == []


def test_a_guard_that_was_left_behind_does_not_block_for_ever(tmp_path: Path) -> None:
    path, guard = tmp_path / "c", tmp_path / "c-t"
    write(path)
    guard.write_text("")
    old = time.time() - claims.VOID - 1
    for file in (path, guard):
        os.utime(file, (old, old))
    with claim(path) as ours:
        assert not ours
    with claim(path) as ours:
        assert ours


def test_a_claim_is_kept_fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "BEAT", 0.01)
    path = tmp_path / "c"
    with claim(path):
        os.utime(path, (0, 0))
        until = time.monotonic() + 10
        while path.stat().st_mtime < 1 and time.monotonic() < until:
            time.sleep(0.01)
        assert path.stat().st_mtime > 1


def test_a_process_that_has_lost_its_claim_leaves_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with claim(path) as ours:
        assert ours
        write(path, token="another")
    assert json.loads(path.read_text())["token"] == "another"
