"""`make faults` itself: what it does to the processes of a command."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

pytest.importorskip("resource", reason="faults are injected into forked processes, which Windows has not")
inject = importlib.import_module("tests.faults.inject")


def write_in_a_worker() -> int:
    worker = os.fork()
    if worker == 0:
        Path("file").touch()
        os._exit(0)
    os.waitpid(worker, 0)
    return 0


def test_a_command_whose_worker_is_held_up_meets_a_second_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inject, "LONGEST", 10.0)
    (tmp_path / "work").mkdir()
    ended = inject.run(write_in_a_worker, tmp_path / "work", tmp_path / "log", inject.Fault(inject.SECOND, 0))
    assert ended.code == 0
    assert (tmp_path / "second").read_text() == "exit code 0\n"
