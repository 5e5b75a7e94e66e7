"""`make bench-audit`, `bench-coverage` and `bench-scale`: metrics by independent references, and the commands."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

import bench_audit
import bench_coverage
import bench_scale
from bench_audit import AuditQuality
from bench_coverage import Measured
from common import run
from forked import ThreadsForProcesses
from made_pairs import made_pairs
from mispair.errors import ConflictError, InvalidValueError, ShapeError
from mispair.functional.metrics import auroc
from mispair.pairs.layouts.arrays import from_memory
from mispair.pairs.pairs import Vectors
from refusals import refused


def test_calibration_error_by_hand() -> None:
    probability = np.array([0.05, 0.05, 0.95, 0.95, 1.0])
    matched = np.array([False, True, True, True, False])
    # two at .05, half of them matched; three at (.95 + .95 + 1) / 3, two thirds of them matched
    expected = (2 * abs(0.05 - 0.5) + 3 * abs(2.9 / 3 - 2 / 3)) / 5
    assert bench_audit.calibration_error(probability, matched) == pytest.approx(expected)
    assert [count for *_, count in bench_audit.reliability(probability, matched)] == [2, 3]


def test_pairs_that_share_an_item_are_grouped() -> None:
    rng = np.random.default_rng(0)
    left = np.repeat(rng.standard_normal((4, 3)), 2, axis=0)
    source = from_memory(left, rng.standard_normal((8, 5)), groups=[7, 7, 1, 1, 4, 4, 2, 2])
    pairs = bench_audit.pairs_of(source)
    assert len(pairs.left) == 4
    assert isinstance(pairs.left, Vectors)
    assert np.abs(pairs.left.features[pairs.link] - left).max() < 1e-6
    some = bench_audit.pairs_of(source, count=5, seed=1)
    assert len(some) == 5


def test_the_command_measures_the_quality_of_an_audit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not bench_scale.generate(tmp_path, 300, 24, noise_ratio=0.0).any()
    files = ["--left", str(tmp_path / "left.npy"), "--right", str(tmp_path / "right.npy")]
    assert run(bench_audit.main, [*files, "--noise-ratio", "0.3", "--seeds", "1", "--device", "cpu", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["audits"]
    assert row["noise_ratio"] == pytest.approx(0.3, abs=0.01)
    assert row["auroc"] > 0.8
    assert row["auroc"] > max(row["measures"].values()) - 0.03
    assert sum(count for *_, count in row["reliability"]) == row["pairs"] == 300
    assert 0 <= row["chance"] < row["right_correct"] <= 1
    assert set(row["baselines"]) == set(row["baseline_precision"]) >= {"cca cosine", "neighbours", "lemon"}
    assert min(row["baselines"].values()) > 0.7


def test_the_table_says_what_is_assumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench_scale.generate(tmp_path, 100, 12, noise_ratio=0.0)
    files = ["--left", str(tmp_path / "left.npy"), "--right", str(tmp_path / "right.npy")]
    command = [*files, "--noise-ratio", "0.3", "--seeds", "1", "--device", "cpu", "--natural-noise"]
    assert run(bench_audit.main, [*command, "0.05", "--no-baselines"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Assumed: your own pairs are matched" in said
    assert "You say that 5.0%" in said
    assert "corrected for natural noise" in said
    assert "baseline" not in said


def test_one_data_set_is_needed() -> None:
    with refused(ConflictError, "left"):
        bench_audit.main()
    with refused(ConflictError, "left"):
        bench_audit.main(left=Path("a.npy"))
    with refused(ConflictError, "left"):
        bench_audit.main(Path("folder"), left=Path("a.npy"))


def test_numbers_out_of_range_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("x")
    with refused(InvalidValueError, "seeds", "0"):
        bench_audit.main(folder, seeds=0)
    with refused(InvalidValueError, "natural_noise", "1"):
        bench_audit.main(folder, natural_noise=1.0)
    with refused(InvalidValueError, "audits", "0"):
        bench_coverage.main((folder,), audits=0)
    with refused(InvalidValueError, "folders"):
        bench_coverage.main(())
    with refused(InvalidValueError, "noise_ratio", "3"):
        bench_scale.main(noise_ratio=3.0)
    assert run(bench_scale.main, ["--noise-ratio", "3"]) == 2
    assert "--noise-ratio" in capsys.readouterr().err


@pytest.mark.parametrize(("natural", "noise"), [(0.3, 0.3), (0.1, 0.5)])
def test_the_correction_for_natural_noise(natural: float, noise: float) -> None:
    """Scores of pairs of which it is known which were mismatched before, and which on purpose."""
    rng = np.random.default_rng(0)
    before, injected = rng.random(40_000) < natural, rng.random(40_000) < noise
    score = rng.standard_normal(40_000) + 2 * ~(before | injected)
    truth = auroc(score, ~(before | injected))
    measured = auroc(score, ~injected)
    assert truth is not None
    assert measured is not None
    assert measured < truth - 0.03
    assert bench_audit.corrected_auroc(measured, natural) == pytest.approx(truth, abs=0.01)
    assert bench_audit.corrected_auroc(measured, 0) == measured
    assert bench_audit.corrected_auroc(0.6, 1) == 0.6


def test_natural_noise_is_found_and_corrected_for() -> None:
    pairs = made_pairs(300, 0.3)
    source = from_memory(pairs.left, pairs.right)
    natural = bench_audit.find_natural_noise(source, device="cpu")
    assert natural.rate == pytest.approx(0.3, abs=0.06)
    assert f"{natural.rate:.1%}" in natural.sentence()
    (found,) = bench_audit.measure(
        source, ("caption",), (0.3,), 1, natural_noise=natural.rate, device="cpu", baselines=False
    )
    assert found.auroc < 0.87
    assert found.corrected_auroc > 0.93
    assert found.all_noise == pytest.approx(0.51, abs=0.06)
    assert "You say that 10.0%" in bench_audit.NaturalNoise(0.1).sentence()


def test_coverage_of_simulated_audits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_coverage, "ProcessPoolExecutor", ThreadsForProcesses)
    for folder, seed in (("a", 0), ("b", 1)):
        pairs = made_pairs(90, 0.0, seed=seed)
        for side, vectors in (("img_emb", pairs.left), ("text_emb", pairs.right)):
            (tmp_path / folder / side).mkdir(parents=True)
            np.save(tmp_path / folder / side / f"{side}_0.npy", vectors)
    pairs = made_pairs(300, 0.5)
    judged = [tmp_path / f"{name}.npy" for name in ("left", "right", "matched")]
    for path, values in zip(judged, (pairs.left, pairs.right, ~pairs.mismatched), strict=True):
        np.save(path, values)
    out = tmp_path / "coverage.jsonl"
    command = [
        *(str(tmp_path / name) for name in "ab"),
        "--audits",
        "1",
        "--noise-ratio",
        "0",
        "0.5",
        "--out",
        str(out),
    ]
    command += ["--natural", *map(str, judged), "--threads", "1", "--kinds", "random", "mixed"]
    assert run(bench_coverage.main, [*command, "--pairs", "80", "2000", "--minutes", "0"]) == 0
    assert not out.read_text()  # out of time
    assert run(bench_coverage.main, [*command, "--pairs", "80", "2000"]) == 0
    first = out.read_text()
    found = [Measured.of(line) for line in first.splitlines()]
    assert Counter((one.data, one.kind, one.column) for one in found) == Counter(
        [(data, *of) for data in "ab" for of in (("random", 0.0), ("random", 0.5), ("mixed", 0.5))]
        + [("natural", "natural", ratio) for ratio in (0.0, 0.5)]
    )
    for one in found:
        assert one.wrong == pytest.approx(one.column, abs=0.07)
        shares = {"random": one.wrong, "mixed": one.column / 2, "natural": 0.0}
        assert one.unrelated == pytest.approx(shares[one.kind], abs=0.04)
        assert one.quality.covered == (one.quality.noise_low <= one.wrong <= one.quality.noise_high)
    assert run(bench_coverage.main, [*command, "--pairs", "80", "2000"]) == 0
    assert out.read_text() == first
    with refused(InvalidValueError, "pairs", "2000"):
        bench_coverage.main((tmp_path / "a",), pairs=(2000,))
    with refused(ShapeError, "natural", "1 files"):
        bench_coverage.main((tmp_path / "a",), natural=(tmp_path,))


def test_what_holds() -> None:
    """The interval must reach from the random exchanges to all wrong pairs, and the bound above these."""
    quality = dict.fromkeys(field.name for field in fields(AuditQuality)) | {"pairs": 1000, "noise_ratio": 0.3}
    quality |= dict.fromkeys(("calibration_error", "suggestion_error", "suggestion_claim", "suggestion_correct"), 0.0)

    def measured(seed: int, low: float, high: float, at_most: float, claimed: float) -> Measured:
        numbers = quality | {"noise_low": low, "noise_high": high, "seed": seed}
        audit = AuditQuality(**numbers)  # type: ignore[arg-type]
        return Measured(f"{seed}", "a", "mixed", 0.3, 0.3, 0.15, 0.5, claimed, at_most, audit)

    inside, below, above = (
        measured(0, 0.1, 0.2, 0.4, 0.6),
        measured(1, 0.0, 0.1, 0.3, 0.5),
        measured(2, 0.4, 0.5, 0.2, 0.1),
    )
    assert [one.outside for one in (inside, below, above)] == pytest.approx([0, 0.05, 0.1])
    assert [one.unbound for one in (inside, below, above)] == pytest.approx([0, 0, 0.1])
    assert Measured.of(inside.line()) == inside
    row = bench_coverage.coverage_table([inside, below, above]).splitlines()[2]
    cells = "a mixed 1,000 3", "33.3 %", "0.100", "0.100", "66.7 %", "0.100", "0.30", "-0.100, -0.100"
    assert row.strip("| ").split(" | ") == [*cells[0].split(), *cells[1:]]


def test_generated_pairs_are_the_same_every_time(tmp_path: Path) -> None:
    mismatched = bench_scale.generate(tmp_path, 500, 16, noise_ratio=0.4, seed=3)
    assert 0.3 < mismatched.mean() < 0.5
    again = tmp_path / "again"
    again.mkdir()
    assert np.array_equal(bench_scale.generate(again, 500, 16, noise_ratio=0.4, seed=3), mismatched)
    assert (again / "left.npy").read_bytes() == (tmp_path / "left.npy").read_bytes()


def test_scale_of_each_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(bench_scale.main, ["--pairs", "150", "100", "--width", "12", "--device", "cpu", "--json"]) == 0
    sizes = json.loads(capsys.readouterr().out)["audits"]
    assert [size["pairs"] for size in sizes] == [100, 150]
    for size in sizes:
        assert size["seconds"] == pytest.approx(sum(size["stages"].values()))
        assert {"learning", "measuring all pairs", "searching better partners"} <= set(size["stages"])
        assert sys.platform == "win32" or size["peak_bytes"] > 1e7
