"""Pairs of mispair's own, and those of a training run, as an audit reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mispair.auditing.trained import from_pairs, from_run, is_run
from mispair.auditing.words import word_vectors
from mispair.cli import main
from mispair.data import formats, shapes
from mispair.data.noise import add_noise
from mispair.data.pairs import Pairs, Regions, Tokens, Vectors
from mispair.matcher import Matcher


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shapes.make(tmp_path_factory.mktemp("data") / "shapes", train=24, dev=6, test=6)


def test_pairs_keep_their_captions_pictures_and_groups(folder: Path) -> None:
    pairs = add_noise(formats.load(folder, "train"), ratio=0.5, seed=0)
    source = from_pairs(pairs, folder / "images")
    assert isinstance(pairs.left, Regions)
    assert isinstance(pairs.right, Tokens)
    rows = np.array([0, 7, len(pairs) - 1])
    left, right = source.gather(rows)
    np.testing.assert_allclose(left, np.asarray(pairs.left.features)[pairs.link[rows]].mean(axis=1), rtol=1e-5)
    np.testing.assert_allclose(right, word_vectors(pairs.right.texts)[rows], rtol=1e-5)
    assert source.texts(rows) == [pairs.right.texts[row] for row in rows]
    names = [pairs.left_ids[pairs.link[row]] for row in rows]
    assert source.ids(rows) == [f"{name}#{row}" for name, row in zip(names, rows, strict=True)]
    assert [path and path.stem for path in source.pictures(rows)] == names
    groups = source.groups
    assert groups is not None
    assert all((groups == groups[row]).tolist() == (pairs.link == pairs.link[row]).tolist() for row in rows)


def test_vectors_are_taken_as_they_are() -> None:
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((5, 3)), rng.standard_normal((5, 4))
    source = from_pairs(Pairs(Vectors(left), Vectors(right), np.array([3, 1, 0, 2, 4])))
    assert source.groups is None
    np.testing.assert_allclose(source.block(0, 5)[0], left[[3, 1, 0, 2, 4]], rtol=1e-6)
    assert source.ids([2]) == ["2"]


def test_a_run_is_audited_by_its_networks_with_its_noise(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    small = ["--embed-size", "16", "--word-size", "8", "--epochs", "1", "--warmup-epochs", "1", "--batch-size", "32"]
    train = ["train", "--data", str(folder), "--method", "repair", "--noise-ratio", "0.4", "--device", "cpu"]
    assert main([*train, *small, "--out", str(run)]) == 0
    assert is_run(run)
    assert not is_run(folder)
    source = from_run(run, "cpu")
    noisy = add_noise(formats.load(folder, "train"), ratio=0.4, seed=0)
    matcher = Matcher.load(run, "cpu")
    left, right = source.block(0, len(source))
    np.testing.assert_allclose(left, matcher.encode(noisy.left, "left")[noisy.link], atol=1e-5)
    np.testing.assert_allclose(right, matcher.encode(noisy.right, "right"), atol=1e-5)
    assert source.pictures([0])[0] is not None
    capsys.readouterr()
    assert main(["audit", str(run), "--device", "cpu", "--out", str(tmp_path / "audit"), "--json"]) == 0
    assert '"joint"' in capsys.readouterr().out  # both sides share the networks' space
