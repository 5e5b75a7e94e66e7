"""The script that draws the calibration of an audit."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from bench_audit import AuditQuality
from bench_scale import ScaleResult

SCRIPT = Path(__file__).parents[2] / "benchmarks/figure_audit.py"


@pytest.mark.parametrize("arguments", [[], ["audit.json"], ["a", "b", "c", "d"]])
def test_without_its_arguments_it_prints_its_usage(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    with pytest.raises(SystemExit, match=r"Usage: python benchmarks/figure_audit\.py AUDIT\.json SCALE\.json OUT\.svg"):
        runpy.run_path(str(SCRIPT), run_name="__main__")


def test_it_draws_what_bench_prints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = dict.fromkeys(AuditQuality.__dataclass_fields__, 0.5)
    quality = AuditQuality(**{**names, "reliability": [(0.1, 0.2, 5), (0.9, 0.8, 5)]})  # type: ignore[arg-type]
    size = ScaleResult(
        pairs=100, seconds=2.0, stages={"measuring all pairs": 1.0}, peak_bytes=1, auroc=0.9, noise_rate=0.4
    )
    audit, scale, out = tmp_path / "audit.json", tmp_path / "scale.json", tmp_path / "out.svg"
    audit.write_text(json.dumps({"audits": [asdict(quality)]}))
    scale.write_text(json.dumps({"audits": [asdict(size)]}))
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(audit), str(scale), str(out)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "50% mismatched, error 0.500" in out.read_text()
