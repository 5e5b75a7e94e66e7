"""`make bench-encoders`: the separation of own captions, and the command on vectors that are there."""

import json
from pathlib import Path

import numpy as np
import pytest

import bench_encoders
from common import run
from forked import ThreadsForProcesses
from mispair.errors import InvalidValueError
from refusals import refused


def made(count: int = 200) -> tuple[bench_encoders.Vectors, bench_encoders.Vectors]:
    random = np.random.default_rng(0)
    common = random.standard_normal((count, 6))
    sides = [np.hstack([common, random.standard_normal((count, 10))]) @ random.standard_normal((16, 16)) for _ in "lr"]
    return sides[0].astype(np.float32), sides[1].astype(np.float32)


def test_separation() -> None:
    left, right = made()
    others = {"random": np.roll(np.arange(200), 1)[:, None]}
    found, _ = bench_encoders.separation(left, right, others, 1)
    nothing, _ = bench_encoders.separation(left, np.random.default_rng(1).permutation(right), others, 1)
    assert found["random"] > 0.9
    assert 0.35 < nothing["random"] < 0.65


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_encoders, "ProcessPoolExecutor", ThreadsForProcesses)
    for name, side in zip(("image.efficientnet-lite0", "text.all-minilm-l6-v2"), made(), strict=True):
        np.save(tmp_path / f"{name}.npy", side)
    lines = ["image_path,caption", *(f"{row}.jpg,a caption" for row in range(200)), "0.jpg,another"]
    (tmp_path / "photos.csv").write_text("\n".join(lines), encoding="utf-8")
    given = [str(tmp_path / "photos.csv"), str(tmp_path), str(tmp_path), "--seeds", "1", "--audits"]
    assert run(bench_encoders.main, [*given, "--noise-ratio", "0.4"]) == 0
    first, second = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| eff")]
    assert float(first.split("|")[3]) > 0.9
    rows = [json.loads(line) for line in (tmp_path / "audits.jsonl").read_text().splitlines()]
    assert {row["kind"] for row in rows} == {"random", "left", "right", "both"}
    random = next(row["auroc"] for row in rows if row["kind"] == "random")
    assert f"{random:.3f}" == second.split("|")[3].strip()
    with refused(InvalidValueError, "encoders"):
        bench_encoders.main(tmp_path / "photos.csv", tmp_path, tmp_path, encoders=("a",))
