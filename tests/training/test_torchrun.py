"""`torchrun -m mispair train`, with a rank that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tiny import tiny_folder

pytestmark = [pytest.mark.slow, pytest.mark.posix]
SETTINGS = "--method repair --embed-size 16 --word-size 8 --warmup-epochs 1 --epochs 12 --batch-size 20 --bank-size 64"


def command(data: Path, out: Path, *torchrun: str) -> list[str]:
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *torchrun]
    flags = f"{SETTINGS} --noise-ratio 0.4 --checkpoint-seconds 0 --device cpu --json".split()
    return [*start, "-m", "mispair", "train", "--data", str(data), "--out", str(out), *flags]


def ranks_of(parent: int) -> list[int]:
    """Processes that a process has started, on Linux."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, _, rest = status.read_text().partition(" (")
            words = (status.parent / "cmdline").read_text()
        except OSError:  # it has just ended
            continue
        if int(rest.rpartition(") ")[2].split()[1]) == parent and "mispair" in words:
            found.append(int(pid))
    return sorted(found)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_torchrun_starts_a_killed_run_again(tmp_path: Path) -> None:
    data, out = tiny_folder(tmp_path / "data", images=40), tmp_path / "run"
    with subprocess.Popen(command(data, out, "--max-restarts", "1"), stdout=subprocess.PIPE, text=True) as started:
        while len(list((out / "checkpoints").glob("*.pt"))) < 2:
            assert started.poll() is None
            time.sleep(0.1)
        os.kill(ranks_of(started.pid)[-1], signal.SIGKILL)
        result, _ = started.communicate()
    assert started.returncode == 0
    assert json.loads(result)["averaged"]["rsum"] > 0
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    epochs = [event["epoch"] for event in events if event["event"] == "validation"]
    assert epochs == list(range(13))


def test_a_refusal_is_printed_once(tmp_path: Path) -> None:
    data, out = tiny_folder(tmp_path / "data"), tmp_path / "run"
    out.mkdir()
    (out / "mine.txt").write_text("not a run")
    found = subprocess.run(command(data, out), capture_output=True, text=True, check=False)
    assert found.returncode != 0
    assert found.stderr.count("is not a run folder") == 1
