"""ONNX files give what torch gives."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import mispair
from mispair.config import Config
from mispair.errors import ConfigError
from mispair.models import SideSpec, build

SPECS = SideSpec("vectors", 6), SideSpec("vectors", 9)
CPU = torch.device("cpu")


@pytest.mark.parametrize("count", [1, 2])
def test_onnx_and_torch_agree(count: int, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    pytest.importorskip("onnx", reason="onnx is not installed")
    config = Config(model="two-tower", embed_size=8)
    networks = [build(config, *SPECS, seed=seed) for seed in range(count)]
    rng = np.random.default_rng(0)
    for network in networks:  # statistics of a training
        for tower in (network.left, network.right):
            tower.standardise.running_mean.normal_()  # type: ignore[operator, union-attr]
            tower.standardise.running_var.uniform_(0.5, 2)  # type: ignore[operator, union-attr]
    matcher = mispair.Matcher(config, SPECS, networks, None, CPU)
    files = matcher.to_onnx(tmp_path / "onnx")
    items = [rng.normal(size=(5, spec.size)).astype(np.float32) for spec in SPECS]
    sessions = [runtime.InferenceSession(file, providers=["CPUExecutionProvider"]) for file in files]
    left, right = (session.run(None, {"items": side})[0] for session, side in zip(sessions, items, strict=True))
    assert np.allclose(left, matcher.encode(items[0], "left"), atol=1e-5)
    assert np.allclose(left @ right.T, matcher.score(*items), atol=1e-4)


def test_what_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(model="two-tower", embed_size=8)
    other = replace(config, model="vse")
    with pytest.raises(ConfigError, match="Only two-tower models"):
        mispair.Matcher(other, SPECS, [build(other, *SPECS, seed=0)], None, CPU).to_onnx(tmp_path)
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ConfigError, match=r"install it: pip install 'mispair\[onnx\]'"):
        mispair.Matcher(config, SPECS, [build(config, *SPECS, seed=0)], None, CPU).to_onnx(tmp_path)
