"""`make bench-views`: audits by single views and by all, resumed."""

import json
from pathlib import Path

import numpy as np
import pytest

import bench_views
from common import run
from forked import ThreadsForProcesses
from mispair.errors import NotFoundError
from refusals import refused


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    common = random.standard_normal((200, 8))
    for side, count in (("left", 2), ("right", 1)):
        for number in range(count):
            mixed = np.hstack([common, random.standard_normal((200, 8))]) @ random.standard_normal((16, 16))
            np.save(tmp_path / f"{side}_{number + 1}.npy", mixed)
    monkeypatch.setattr(bench_views, "KINDS", ("random",))
    monkeypatch.setattr(bench_views, "ProcessPoolExecutor", ThreadsForProcesses)
    file = tmp_path / "out.jsonl"
    given = [str(tmp_path), "--out", str(file), "--seeds"]
    assert run(bench_views.main, [*given, "1"]) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 4
    rows += [{**row, "kind": "left", "auroc": row["auroc"] - 0.1} for row in rows]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    monkeypatch.setattr(bench_views, "KINDS", ("random", "left"))
    monkeypatch.setattr(bench_views, "measure", None)  # nothing is audited again
    capsys.readouterr()
    assert run(bench_views.main, [*given, "1"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    aurocs = {(row["kind"], row["views"]): row["auroc"] for row in rows}
    for line, kind in zip(lines, ("left", "random"), strict=True):
        cells = [cell.strip() for cell in line.split("|")]
        best = max(("1+1", "2+1"), key=lambda views: aurocs[kind, views])
        assert cells[4:7] == [
            f"{aurocs[kind, '1+1']:.3f}", f"{aurocs[kind, best]:.3f} ({best})", f"{aurocs[kind, 'all']:.3f}"
        ]  # fmt: skip
    with refused(NotFoundError, tmp_path / "gone"):
        bench_views.main((tmp_path / "gone",))
