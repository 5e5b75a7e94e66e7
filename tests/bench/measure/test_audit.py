"""`mispair bench audit` and `bench scale`: metrics by independent references, and the commands."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from mispair.auditing.sources.source import from_memory
from mispair.bench.measure import audit_quality, audit_scale
from mispair.cli.main import main
from mispair.data.pairs import Vectors


def test_calibration_error_by_hand() -> None:
    probability = np.array([0.05, 0.05, 0.95, 0.95, 1.0])
    matched = np.array([False, True, True, True, False])
    # two at .05, half of them matched; three at (.95 + .95 + 1) / 3, two thirds of them matched
    expected = (2 * abs(0.05 - 0.5) + 3 * abs(2.9 / 3 - 2 / 3)) / 5
    assert audit_quality.calibration_error(probability, matched) == pytest.approx(expected)
    assert [count for *_, count in audit_quality.reliability(probability, matched)] == [2, 3]


def test_pairs_that_share_an_item_are_grouped() -> None:
    rng = np.random.default_rng(0)
    left = np.repeat(rng.standard_normal((4, 3)), 2, axis=0)
    source = from_memory(left, rng.standard_normal((8, 5)), groups=[7, 7, 1, 1, 4, 4, 2, 2])
    pairs = audit_quality.pairs_of(source)
    assert len(pairs.left) == 4
    assert isinstance(pairs.left, Vectors)
    assert np.abs(pairs.left.features[pairs.link] - left).max() < 1e-6
    some = audit_quality.pairs_of(source, count=5, seed=1)
    assert len(some) == 5


def test_the_command_measures_the_quality_of_an_audit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not audit_scale.generate(tmp_path, 300, 24, noise_ratio=0.0).any()
    files = ["--left", str(tmp_path / "left.npy"), "--right", str(tmp_path / "right.npy")]
    assert main(["bench", "audit", *files, "--noise-ratio", "0.3", "--seeds", "1", "--device", "cpu", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["audits"]
    assert row["noise_ratio"] == pytest.approx(0.3, abs=0.01)
    assert row["auroc"] > 0.8
    assert row["auroc"] > max(row["measures"].values()) - 0.03
    assert sum(count for *_, count in row["reliability"]) == row["pairs"] == 300
    assert 0 <= row["chance"] < row["right_correct"] <= 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [([], "Give a folder"), (["--left", "x.npy"], "Give a folder"), (["x", "--seeds", "0"], "--seeds")],
)
def test_wrong_arguments_get_a_sentence(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "audit", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_generated_pairs_are_the_same_every_time(tmp_path: Path) -> None:
    mismatched = audit_scale.generate(tmp_path, 500, 16, noise_ratio=0.4, seed=3)
    assert 0.3 < mismatched.mean() < 0.5
    again = tmp_path / "again"
    again.mkdir()
    assert np.array_equal(audit_scale.generate(again, 500, 16, noise_ratio=0.4, seed=3), mismatched)
    assert (again / "left.npy").read_bytes() == (tmp_path / "left.npy").read_bytes()


def test_scale_of_each_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "scale", "--pairs", "150", "100", "--width", "12", "--device", "cpu", "--json"]) == 0
    sizes = json.loads(capsys.readouterr().out)["audits"]
    assert [size["pairs"] for size in sizes] == [100, 150]
    for size in sizes:
        assert size["seconds"] == pytest.approx(sum(size["stages"].values()))
        assert {"learning", "measuring all pairs", "searching better partners"} <= set(size["stages"])
        assert sys.platform == "win32" or size["peak_bytes"] > 1e7
