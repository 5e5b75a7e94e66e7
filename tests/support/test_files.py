"""Files that are whole or absent, and what the dead leave."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from mispair.support import files


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system does not say it")
def test_what_a_process_left_is_deleted_even_if_nobody_has_asked_how_it_ended(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, files.writer().encode())
        os._exit(0)
    name = os.read(reader, 100).decode()
    left = tmp_path / f".results.json.{name}.tmp"
    left.touch()
    until = time.monotonic() + 60
    while not files._is_zombie(child) and time.monotonic() < until:
        time.sleep(0.001)
    files.write_atomically(tmp_path / "results.json", b"{}")
    os.waitpid(child, 0)
    os.close(reader)
    os.close(writer)
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    assert not files.is_dead(files.writer())
