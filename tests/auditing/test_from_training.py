"""Pairs of mispair's own, and those of a training run, as an audit reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mispair
from mispair.auditing.from_training import RIVALS, NetworkScore, contrast, from_run, is_run
from mispair.cli.main import main
from mispair.config import Config
from mispair.errors import NotFoundError
from mispair.models import SideSpec, build
from mispair.pairs.layouts import opening
from mispair.pairs.layouts.arrays import from_pairs
from mispair.pairs.layouts.opening import open_source
from mispair.pairs.noise import add_noise
from mispair.pairs.pairs import Pairs, Regions, Tokens, Vectors
from mispair.pairs.shapes import dataset
from mispair.pairs.tfidf import word_vectors
from mispair.retrieval.matcher import Matcher
from mispair.training.settings import override
from refusals import refused


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dataset.make(tmp_path_factory.mktemp("data") / "shapes", train=24, dev=6, test=6)


def test_pairs_keep_their_captions_images_and_groups(folder: Path) -> None:
    pairs = add_noise(opening.load(folder, "train"), noise_ratio=0.5, seed=0)
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
    assert [path and path.stem for path in map(source.image_file, rows)] == names
    groups = source.groups
    assert groups is not None
    assert all((groups == groups[row]).tolist() == (pairs.link == pairs.link[row]).tolist() for row in rows)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("captions", [1, 5])
def test_a_pair_has_the_id_that_an_audit_of_the_folder_gives_it(
    folder: Path, tmp_path: Path, captions: int, *, named: bool
) -> None:
    """So that what was checked in one audit can be told to the other."""
    np.save(tmp_path / "train_ims.npy", np.load(folder / "train_ims.npy"))
    lines = (folder / "train_caps.txt").read_text().splitlines()[:: 5 // captions]
    (tmp_path / "train_caps.txt").write_text("\n".join(lines))
    if named:
        (tmp_path / "train_ids.txt").write_text("".join(f"photo{row}.jpg\n" for row in range(24)))
    pairs = opening.load(tmp_path, "train")
    rows = np.arange(len(pairs))
    ids = from_pairs(pairs).ids(rows)
    assert ids == open_source(tmp_path).ids(rows)
    assert ids[-1] == {(1, True): "photo23.jpg", (5, True): "photo23.jpg#4"}.get((captions, named), str(rows[-1]))
    if named:  # made wrong, they are other pairs
        assert not set(from_pairs(add_noise(pairs, noise_ratio=0.5, seed=0)).ids(rows[captions:])) & set(ids)


def test_vectors_are_taken_as_they_are() -> None:
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((5, 3)), rng.standard_normal((5, 4))
    source = from_pairs(Pairs(Vectors(left), Vectors(right), np.array([3, 1, 0, 2, 4])))
    assert source.groups is None
    np.testing.assert_allclose(source.block(0, 5)[0], left[[3, 1, 0, 2, 4]], rtol=1e-6)
    assert source.ids([2]) == ["2"]


def test_copies_of_an_item_are_of_one_group() -> None:
    rng = np.random.default_rng(0)
    sides = Vectors(rng.standard_normal((4, 3))), Vectors(rng.standard_normal((4, 4)))
    groups = from_pairs(Pairs(*sides, np.arange(4), groups=np.array([5, 5, 9, 9]))).groups
    assert groups is not None
    assert (groups[0] == groups[1], groups[0] == groups[2], groups[2] == groups[3]) == (True, False, True)


def test_a_run_that_python_has_trained_is_refused_with_a_way_out(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pairs = Pairs(Vectors(rng.random((8, 3))), Vectors(rng.random((8, 3))), np.arange(8), name="mine")
    mispair.fit(pairs, method="plain", model="two-tower", out=tmp_path / "run", epochs=1, warmup_epochs=0, device="cpu")
    with refused(NotFoundError, "mine"):
        from_run(tmp_path / "run", "cpu")


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
    assert source.network_score is None  # the vectors contain all that these networks know
    noisy = add_noise(opening.load(folder, "train"), noise_ratio=0.4, seed=0)
    matcher = Matcher.load(run, "cpu")
    left, right = source.block(0, len(source))
    np.testing.assert_allclose(left, matcher.encode(noisy.left, "left")[noisy.link], atol=1e-5)
    np.testing.assert_allclose(right, matcher.encode(noisy.right, "right"), atol=1e-5)
    assert source.image_file(0) is not None
    capsys.readouterr()
    assert main(["audit", str(run), "--device", "cpu", "--out", str(tmp_path / "audit"), "--json"]) == 0
    assert '"joint"' in capsys.readouterr().out  # both sides share the networks' space


def test_a_run_is_audited_with_its_captions_per_image(tmp_path: Path) -> None:
    """Rows that repeat five times are taken for one image with five captions, unless the run was told otherwise."""
    data, run = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    regions = np.random.default_rng(0).random((12, 2, 3), dtype=np.float32)
    for split in ("train", "dev"):
        np.save(data / f"{split}_ims.npy", np.repeat(regions, 5, axis=0))
        (data / f"{split}_caps.txt").write_text("a dog in the snow\n" * 30 + "a cat on the sofa\n" * 30)
    small = ["--embed-size", "16", "--word-size", "8", "--epochs", "1", "--warmup-epochs", "0", "--device", "cpu"]
    options = ["--method", "plain", "--captions-per-image", "1", "--noise-ratio", "0.4", "--out", str(run)]
    assert main(["train", "--data", str(data), *small, *options]) == 0
    noisy = add_noise(opening.load(data, "train", captions_per_image=1), noise_ratio=0.4, seed=0)
    source = from_run(run, "cpu")
    assert source.groups is None  # 60 images, each with its own caption
    left = Matcher.load(run, "cpu").encode(noisy.left, "left")
    np.testing.assert_allclose(source.block(0, 60)[0], left[noisy.link], atol=1e-5)


def test_scores_of_networks_that_compare_regions_and_words_are_a_measure(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run, out = tmp_path / "data", tmp_path / "run", tmp_path / "audit"
    data.mkdir()
    for split in ("train", "dev"):  # fewer regions and words, to take less time
        np.save(data / f"{split}_ims.npy", np.load(folder / f"{split}_ims.npy")[:, :4])
        lines = [line for n, line in enumerate((folder / f"{split}_caps.txt").read_text().splitlines()) if n % 5 < 3]
        (data / f"{split}_caps.txt").write_text("".join(f"{' '.join(line.split()[:4])}\n" for line in lines))
    small = ["--embed-size", "8", "--word-size", "8", "--sim-size", "8", "--epochs", "1", "--batch-size", "32"]
    train = ["train", "--data", str(data), "--model", "sgr", "--noise-ratio", "0.4", "--device", "cpu"]
    train += ["--method", "plain", "--warmup-epochs", "0"]
    assert main([*train, *small, "--out", str(run)]) == 0
    source, matcher = from_run(run, "cpu"), Matcher.load(run, "cpu")
    pairs = add_noise(opening.load(data, "train", vocabulary=matcher.vocabulary), noise_ratio=0.4, seed=0)
    rows = np.unique(pairs.link, return_index=True)[1]  # one caption of each image, all in one batch
    S = matcher.score(pairs.left, pairs.right)[pairs.link[rows]][:, rows]
    expected = [2 * S[k, k] - _best(np.delete(S[k], k)) - _best(np.delete(S[:, k], k)) for k in range(len(rows))]
    assert source.network_score is not None
    found = source.network_score(rows, rows)
    assert found == pytest.approx(expected, abs=1e-4)
    capsys.readouterr()
    assert main(["audit", str(run), "--device", "cpu", "--out", str(out), "--json"]) == 0
    assert '"networks"' in capsys.readouterr().out
    assert "networks" in (out / "pairs.csv").read_text().splitlines()[0]


def _best(scores: np.ndarray) -> float:
    return float(np.sort(scores)[-RIVALS:].mean())


def test_an_own_partner_is_no_rival_of_a_shuffled_pair(folder: Path) -> None:
    pairs = opening.load(folder, "train")
    assert isinstance(pairs.right, Tokens)
    config = override(Config(), {"model": "sgr", "embed_size": 16, "word_size": 8, "sim_size": 8})
    specs = (SideSpec.of(pairs.left), SideSpec.of(pairs.right))
    matcher = Matcher(config, specs, [build(config, *specs, seed=0)], pairs.right.vocabulary, torch.device("cpu"))
    score = NetworkScore(matcher, pairs)
    nothing = np.empty(0, dtype=np.int64)
    assert len(score(nothing, nothing)) == 0
    lefts, rights = np.array([0, 5, 10]), np.array([5, 0, 10])  # the first two have exchanged their captions
    S = matcher.score(pairs.left, pairs.right)[pairs.link[lefts]][:, rights]
    expected = [2 * S[0, 0] - S[0, 2] - S[2, 0], 2 * S[1, 1] - S[1, 2] - S[2, 1]]
    assert score(lefts, rights)[:2] == pytest.approx(expected, abs=1e-5)


@given(st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_contrast_equals_a_loop(count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    S, same = rng.integers(-3, 4, (count, count)) / 4, rng.random((count, count)) < 0.5
    np.fill_diagonal(same, True)
    expected = []
    for k in range(count):
        along = [sorted(S[k][~same[k]])[-RIVALS:], sorted(S[:, k][~same[:, k]])[-RIVALS:]]
        expected.append(2 * S[k, k] - sum(np.mean(best) if best else S[k, k] for best in along))
    found = contrast(torch.from_numpy(S), torch.from_numpy(same))
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)
