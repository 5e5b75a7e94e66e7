"""Region features from images: the SCAN layout, splits, projection, and what happens to bad rows."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

import mispair
from audit_cases import contents
from mispair.cli.main import main
from mispair.encoders import encoders
from mispair.encoders.encoders import GridEncoder, image_encoder, load_image
from mispair.encoders.regions import encode_regions
from mispair.errors import ChangedError, DamagedError, DataError, InvalidValueError, TooFewError
from mispair.pairs.layouts.opening import open_raw
from mispair.pairs.origin import Origin, Projection
from mispair.pairs.splits import SplitRule
from refusals import refused

pq = pytest.importorskip("pyarrow.parquet")
IMAGES = 12


class FakeMaps:
    """The colours of 4 x 4 parts of an image."""

    name, width = "colours", 3
    pixels = 1024

    def __init__(self, stop_after: int = 10**9) -> None:
        self.seen, self._stop = 0, stop_after

    def prepare(self, image: Image.Image) -> npt.NDArray[np.float32]:
        return np.asarray(image.resize((4, 4), Image.Resampling.BOX), dtype=np.float32)

    def maps(self, items: Sequence[Any], /) -> torch.Tensor:
        self.seen += len(items)
        if self.seen > self._stop:
            raise KeyboardInterrupt
        return torch.from_numpy(np.stack(items)).permute(0, 3, 1, 2)

    def encode(self, items: Sequence[Any], /) -> npt.NDArray[np.float32]:
        raise NotImplementedError


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Two captions an image; the last image is missing."""
    rng = np.random.default_rng(0)
    with (tmp_path / "photos.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image_path", "caption"])
        for number in range(IMAGES):
            if number < IMAGES - 1:
                pixels = rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / f"{number}.png")
            writer.writerows([f"{number}.png", f"text {number} {which}"] for which in range(2))
    return tmp_path / "photos.csv"


def encode(table: Path, out: Path, maps: FakeMaps | None = None, grid: int = 2, **options: Any) -> Any:
    return encode_regions(
        open_raw(table), out, GridEncoder(maps or FakeMaps(), grid), table.parent / "cache", **options
    )


def test_layout_values_and_status(table: Path) -> None:
    outcome = encode(table, table.parent / "out", splits=SplitRule(dev=2, test=0.25))
    assert (outcome.rows, outcome.bad, outcome.bad_images) == (24, 2, 2)
    rows = pq.read_table(table.parent / "out/rows.parquet").to_pydict()
    assert len(rows["id"]) == 24
    assert rows["status"].count("image is missing") == 2
    seen: set[str] = set()
    for split, most in (("train", 7), ("dev", 2), ("test", 3)):
        pairs = mispair.load(table.parent / "out", split, vocabulary=None)
        assert len(pairs.left) in (most, most - 1)  # the missing one is somewhere
        seen.update(pairs.left_ids)
        for text, row in zip(pairs.right.texts, pairs.link, strict=True):  # type: ignore[union-attr]
            name = pairs.left_ids[row]
            assert text.split()[1] == name.removesuffix(".png")
            pixels = np.asarray(load_image(table.parent / name), dtype=np.float32)
            cells = pixels.reshape(2, 4, 2, 4, 3).mean(axis=(1, 3)).reshape(4, 3)
            np.testing.assert_allclose(pairs.left.features[row], cells, atol=1)  # type: ignore[union-attr]
            assert rows["split"][rows["caption"].index(text)] == split
    assert len(seen) == IMAGES - 1
    assert Origin.read(table.parent / "out") == Origin("colours", None, 2, None)


def test_stopped_and_continued(table: Path) -> None:
    encode(table, table.parent / "whole")
    before = contents(table.parent / "whole")
    again = FakeMaps()
    for path in (table.parent / "cache").rglob("*.npy"):
        path.unlink()
    with pytest.raises(KeyboardInterrupt):
        encode(table, table.parent / "stopped", FakeMaps(stop_after=1))
    encode(table, table.parent / "stopped", again)
    assert contents(table.parent / "stopped") == before
    assert again.seen <= IMAGES
    with refused(ChangedError, table.parent / "stopped", "`grid` was 2, now 3"):
        encode(table, table.parent / "stopped", grid=3)


def test_projection(table: Path) -> None:
    encode(table, table.parent / "plain", splits=SplitRule(only="train"))
    encode(table, table.parent / "out", splits=SplitRule(only="train"), pca=2)
    cells, found = (np.load(table.parent / name / "train_ims.npy") for name in ("plain", "out"))
    assert found.shape == (IMAGES - 1, 4, 2)
    centred = (cells - cells.mean(axis=(0, 1))).reshape(-1, 3)
    directions = np.linalg.svd(centred, full_matrices=False)[2][:2]
    np.testing.assert_allclose(np.abs(found.reshape(-1, 2)), np.abs(centred @ directions.T), atol=0.05)
    known = Projection.load(table.parent / "out/basis.npz")
    encode(table, table.parent / "again", splits=SplitRule(only="train"), pca=known)
    np.testing.assert_array_equal(np.load(table.parent / "again/train_ims.npy"), found)


def test_splits_of_the_data_and_uneven_captions(table: Path) -> None:
    lines = table.read_text().splitlines()
    parts = ["split", *(["train"] * 9 + ["val"] * 2 + ["restval"] * 4 + ["test"] * 9)]
    table.write_text("\n".join(f"{line},{part}" for line, part in zip(lines, parts, strict=True)))
    encode(table, table.parent / "out")
    train = mispair.load(table.parent / "out", "train")
    assert len(train) == 13
    assert np.bincount(train.link).tolist() == [2, 2, 2, 2, 1, 1, 2, 1]
    assert (table.parent / "out/train_caps.tsv").exists()
    table.write_text(table.read_text().replace("restval", "holdout"))
    with refused(DamagedError, table, names="holdout"):
        encode(table, table.parent / "other")


def test_refused_before_any_work(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with refused(InvalidValueError, "grid", names="4"):
        GridEncoder(FakeMaps(), 5)
    with refused(InvalidValueError, "pca", names="3"):
        encode(table, tmp_path / "out", pca=4)
    with refused(TooFewError, table):
        encode(table, tmp_path / "out", splits=SplitRule(dev=6, test=6))
    (tmp_path / "bad.npz").write_bytes(b"no")
    with pytest.raises(DataError, match="no projection can be read here"):
        Projection.load(tmp_path / "bad.npz")
    assert main(["encode", str(table), "--pca", "3", "--out", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(encoders, "image_encoder", lambda *_: FakeMaps())
    assert (
        main(["encode", str(table), "--grid", "2", "--cache", str(tmp_path / "c"), "--out", str(tmp_path / "o")]) == 3
    )
    assert f"so the exit code is 3; {tmp_path / 'o/rows.parquet'} says which ones, and why." in capsys.readouterr().err
    assert np.load(tmp_path / "o/train_ims.npy").shape[1:] == (4, 3)


COCO = Path(os.environ.get("MISPAIR_COCO", "coco"))  # where `photos.csv`, `basis.npz` and the stored features are


@pytest.mark.slow
@pytest.mark.skipif(not (COCO / "basis.npz").exists(), reason="needs the photos that the features were made from")
def test_the_features_of_coco_small(tmp_path: Path) -> None:
    pytest.importorskip("efficientnet_lite_pytorch")
    lines = (COCO / "photos.csv").read_text().splitlines()[: 1 + 5 * 8]
    (tmp_path / "photos.csv").write_text("\n".join(lines))
    encoder = GridEncoder(image_encoder("efficientnet-lite0", "cpu"), 5)
    pairs = open_raw(tmp_path / "photos.csv", COCO / "photos")
    encode_regions(
        pairs, tmp_path / "out", encoder, tmp_path / "cache", pca=Projection.load(COCO / "basis.npz"),
        splits=SplitRule(only="test"),
    )  # fmt: skip
    ids = (COCO / "image_ids.txt").read_text().split()
    rows = [ids.index(name.split(".")[0]) for name in (tmp_path / "out/test_ids.txt").read_text().split()]
    steps = np.load(tmp_path / "out/test_ims.npy") / np.load(COCO / "regions_scale.npy")
    stored = np.load(COCO / "regions.npy", mmap_mode="r")[rows]
    np.testing.assert_allclose(steps.clip(-127, 127), stored, atol=0.51)  # stored as whole steps
