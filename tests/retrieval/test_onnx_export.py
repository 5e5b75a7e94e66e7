"""ONNX files give what torch gives."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import mispair
from mispair.config import Config
from mispair.errors import ConflictError, MissingPackageError, WriteError
from mispair.models import SideSpec, build
from mispair.models.layers import BatchNorm
from mispair.pairs.vocabulary import MOST_WORDS, Vocabulary
from refusals import refused

VECTORS, OTHERS, REGIONS = SideSpec("vectors", 6), SideSpec("vectors", 9), SideSpec("regions", 5, count=4)
TEXTS = ["a dog", "a black dog runs after a cat", "cat", "a dog and a zebra", " ".join(["dog"] * (MOST_WORDS + 9))]
VOCABULARY = Vocabulary.build(TEXTS[:3], threshold=1)
TOKENS = SideSpec("tokens", len(VOCABULARY.words))
CPU = torch.device("cpu")


def matcher(model: Any, specs: tuple[SideSpec, SideSpec], count: int = 1) -> mispair.Matcher:
    """With statistics as after a training."""
    config = Config(model=model, embed_size=8, word_size=7)
    networks = [build(config, *specs, seed=seed) for seed in range(count)]
    for layer in (layer for network in networks for layer in network.modules() if isinstance(layer, BatchNorm)):
        assert layer.running_mean is not None
        assert layer.running_var is not None
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.5, 2)
    return mispair.Matcher(config, specs, networks, VOCABULARY if TOKENS in specs else None, CPU)


def features(spec: SideSpec, seed: int) -> npt.NDArray[np.float32]:
    shape = (5, spec.count, spec.size) if spec.count else (5, spec.size)
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def numbers(texts: list[str], words: list[str]) -> dict[str, npt.NDArray[np.int64]]:
    """The inputs of some texts, as somebody without mispair makes them."""
    known = {word: number for number, word in enumerate(words)}
    found = [
        [known["<start>"], *(known.get(word, known["<unk>"]) for word in text.split()[:MOST_WORDS]), known["<end>"]]
        for text in texts
    ]
    lengths = np.array([len(text) for text in found])
    items = np.zeros((len(found), lengths.max()), dtype=np.int64)
    for row, text in enumerate(found):
        items[row, : len(text)] = text
    return {"items": items, "lengths": lengths}


@pytest.mark.parametrize(
    ("model", "left", "right", "count"),
    [
        ("two-tower", VECTORS, OTHERS, 1),
        ("two-tower", VECTORS, OTHERS, 2),
        ("vse", REGIONS, TOKENS, 2),
        ("vse", TOKENS, VECTORS, 1),
    ],
)
def test_onnx_and_torch_agree(model: str, left: SideSpec, right: SideSpec, count: int, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    pytest.importorskip("onnx", reason="onnx is not installed")
    torch.manual_seed(0)
    ours = matcher(model, (left, right), count)
    files = ours.to_onnx(tmp_path / "onnx")
    items = [TEXTS if spec is TOKENS else features(spec, seed) for seed, spec in enumerate((left, right))]
    theirs = []
    for file, side in zip(files, items, strict=False):
        words = json.loads(files[2].read_text("utf-8")) if isinstance(side, list) else []
        inputs = numbers(side, words) if isinstance(side, list) else {"items": side}
        theirs.append(runtime.InferenceSession(file, providers=["CPUExecutionProvider"]).run(None, inputs)[0])
    for name, side, vectors in zip(("left", "right"), items, theirs, strict=True):
        assert np.allclose(vectors, ours.encode(side, name), atol=1e-5)  # type: ignore[arg-type]
    assert np.allclose(theirs[0] @ theirs[1].T, ours.score(*items), atol=1e-4)


def test_what_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(ConflictError, "to_onnx"):
        matcher("sgr", (REGIONS, TOKENS)).to_onnx(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setitem(sys.modules, "onnx", sys)  # so that it is there
    with refused(WriteError, tmp_path / "file"):
        matcher("two-tower", (VECTORS, OTHERS)).to_onnx(tmp_path / "file")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with refused(MissingPackageError, "onnx", "'.[onnx]'"):
        matcher("two-tower", (VECTORS, OTHERS)).to_onnx(tmp_path)
