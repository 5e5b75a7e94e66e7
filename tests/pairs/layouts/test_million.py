"""A million pairs as WebDataset and as DataComp: read, encoded, audited, and written clean and mended.

    pytest -m slow -s tests/pairs/layouts/test_million.py

prints seconds and the largest memory of each step.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from mispair.auditing.audit import Settings
from mispair.auditing.folder import audit_path
from mispair.auditing.inputs import AuditInput
from mispair.encoders.encode import Encoders, encode
from mispair.functional.metrics import auroc
from mispair.pairs.edits import Edits
from mispair.pairs.layouts.copies import write_copy
from mispair.pairs.layouts.datacomp import open_datacomp
from mispair.pairs.layouts.opening import open_raw
from mispair.pairs.layouts.tars import tar_member
from mispair.pairs.shards import SideRows
from mispair.support.arrays import IntArray

PAIRS = int(os.environ.get("MISPAIR_PAIRS", 1_000_000))
SHARD = 10_000
MOST_MEMORY, WITH_CAPTIONS = 1.5e9, 2e9  # bytes; captions of 200 characters are held
T = TypeVar("T")

pytestmark = [pytest.mark.slow, pytest.mark.posix]


class Colours:
    """An image encoder: the mean colour."""

    name, width = "colours", 3
    pixels = 1024

    def prepare(self, image: Image.Image) -> npt.NDArray[np.float32]:
        return np.asarray(np.asarray(image).mean(axis=(0, 1)), dtype=np.float32)

    def encode(self, items: Sequence[Any], /) -> npt.NDArray[np.float32]:
        return np.stack(items)


class Lengths:
    """A text encoder: the length of the text."""

    name, width = "lengths", 2

    def encode(self, items: Sequence[str], /) -> npt.NDArray[np.float32]:
        return np.array([[len(text), 1] for text in items], dtype=np.float32)


def timed(name: str, work: Callable[[], T], most: float = MOST_MEMORY) -> T:
    start = time.perf_counter()
    found = work()
    resource = pytest.importorskip("resource")  # only on Unix
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{name}: {time.perf_counter() - start:.1f} s, at most {memory / 1e6:,.0f} MB")
    assert memory < most
    return found


def edits() -> Edits:
    """Every tenth row goes, every hundredth gets the caption, and another one the image, of a row far away."""
    own = np.arange(PAIRS)
    images, captions = own.copy(), own.copy()
    captions[1::100] = (captions[1::100] + PAIRS // 2) % PAIRS
    images[2::100] = (images[2::100] + PAIRS // 3) % PAIRS
    return Edits(own % 10 > 0, images, captions)


def image(number: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (number % 256, number // 256, 7)).save(buffer, "JPEG")
    return buffer.getvalue()


def test_webdataset(tmp_path: Path) -> None:
    images = [image(number) for number in range(1000)]
    (tmp_path / "in").mkdir()

    def make() -> None:
        for first in range(0, PAIRS, SHARD):
            with (tmp_path / f"in/{first // SHARD:05d}.tar").open("wb") as file:
                for row in range(first, first + SHARD):
                    file.writelines(tar_member(f"{row:09d}.jpg", images[row % 1000]))
                    file.writelines(tar_member(f"{row:09d}.txt", f"caption number {row}".encode()))
                file.write(bytes(1024))

    timed("made", make)
    pairs = timed("opened", lambda: open_raw(tmp_path / "in"))
    assert len(pairs) == PAIRS
    found = timed("encoded", lambda: encode(pairs, ([Colours()], [Lengths()]), tmp_path / "cache"))
    assert not found.problems
    again = timed("encoded again", lambda: encode(pairs, ([Colours()], [Lengths()]), tmp_path / "cache"))
    assert again.kept == PAIRS
    source = pairs.with_vectors(SideRows.of(found.left), SideRows.of(found.right), {})
    timed("vectors read", lambda: sum(len(source.block(start, start + SHARD)[0]) for start in range(0, PAIRS, SHARD)))
    edited = edits()
    timed("written", lambda: write_copy(source, edited, tmp_path / "out"))
    copy = timed("opened again", lambda: open_raw(tmp_path / "out"))
    rows = edited.rows
    assert len(copy) == len(rows)
    places = np.arange(0, len(rows), 997)
    for place in places.tolist():
        assert copy.texts([place])[0] == f"caption number {edited.caption_from[rows[place]]}"
        assert copy.read_image(place) == images[edited.image_from[rows[place]] % 1000]


def test_datacomp(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()

    def make() -> None:
        for first in range(0, PAIRS, SHARD):
            rng, rows = np.random.default_rng(first), np.arange(first, first + SHARD)
            columns = {
                "uid": [f"{row:032x}" for row in rows.tolist()],
                "url": [f"http://a/{row}" for row in rows.tolist()],
                "text": [f"caption number {row}" for row in rows.tolist()],
            }
            stem = tmp_path / f"in/{first // SHARD:08d}"
            pyarrow.parquet.write_table(pyarrow.table(columns), stem.with_suffix(".parquet"))
            sides = {
                f"b32_{side}": rng.standard_normal((SHARD, 512), np.float32).astype(np.float16)
                for side in ("img", "txt")
            }
            np.savez(stem.with_suffix(".npz"), **sides)  # type: ignore[arg-type]

    timed("made", make)
    source = timed("opened", lambda: open_datacomp(tmp_path / "in"))
    assert len(source) == PAIRS
    timed("vectors read", lambda: sum(len(source.block(start, start + SHARD)[0]) for start in range(0, PAIRS, SHARD)))
    edited = edits()
    timed("written", lambda: write_copy(source, edited, tmp_path / "out"))
    copy = timed("opened again", lambda: open_datacomp(tmp_path / "out"))
    rows, places = edited.rows, np.arange(0, len(edited.rows), 997)
    assert copy.ids(places) == [f"{row:032x}" for row in rows[places].tolist()]
    np.testing.assert_array_equal(copy.left.gather(places), source.left.gather(edited.image_from[rows[places]]))
    np.testing.assert_array_equal(copy.right.gather(places), source.right.gather(edited.caption_from[rows[places]]))


class Pixels:
    """An image encoder: the pixels."""

    name, width = "pixels", 192
    pixels = 1024

    def prepare(self, image: Image.Image) -> npt.NDArray[np.float32]:
        return np.asarray(image, dtype=np.float32).reshape(-1)

    def encode(self, items: Sequence[Any], /) -> npt.NDArray[np.float32]:
        return np.stack(items)


class Digits:
    """A text encoder: the bytes that the last word spells."""

    name, width = "digits", 96

    def encode(self, items: Sequence[str], /) -> npt.NDArray[np.float32]:
        spelled = b"".join(bytes.fromhex(text.split()[-1]) for text in items)
        return np.frombuffer(spelled, np.uint8).reshape(len(items), -1).astype(np.float32)


class Made:
    """Pairs of vectors with something in common, but for one in four."""

    def __init__(self, left: int, right: int) -> None:
        rng = np.random.default_rng(0)
        self.maps = [rng.standard_normal((24, width), np.float32) for width in (left, right)]
        self.mismatched = rng.random(PAIRS) < 0.25

    def shard(self, first: int) -> list[npt.NDArray[np.float32]]:
        rng = np.random.default_rng(first + 1)
        hidden, other = rng.standard_normal((2, SHARD, 24), np.float32)
        other = np.where(self.mismatched[first : first + SHARD, None], other, hidden)
        noise = [rng.standard_normal((SHARD, linear.shape[1]), np.float32) for linear in self.maps]
        sides = zip((hidden, other), self.maps, noise, strict=True)
        return [values @ linear + 3 * added for values, linear, added in sides]


def check_audit(
    tmp_path: Path, data: AuditInput, made: Made, rows_of: Callable[[Path], IntArray], most: float = MOST_MEMORY
) -> None:
    """Audits the folder `in` with a clean and a mended copy, which `rows_of` reads again."""
    out, clean, mended = (tmp_path / name for name in ("audit", "clean", "mended"))
    timed("audited", lambda: audit_path(data, out, Settings(device="cpu"), clean=clean, mended=mended), most)
    table = pyarrow.parquet.read_table(out / "pairs.parquet", columns=["match_score", "is_mismatch"])
    score, flagged = (table[name].to_numpy() for name in ("match_score", "is_mismatch"))
    found = auroc(score, ~made.mismatched)
    print(f"AUROC {found:.4f}, {flagged.sum():,} flagged, {made.mismatched.sum():,} mismatched")
    assert found is not None
    assert found > 0.95
    kept, repaired = timed("copies read again", lambda: (rows_of(clean), rows_of(mended)), most)
    np.testing.assert_array_equal(kept, np.flatnonzero(~flagged))
    assert np.isin(kept, repaired).all()


def test_audit_of_webdataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(192, 96)
    (tmp_path / "in").mkdir()

    def make() -> None:
        for first in range(0, PAIRS, SHARD):
            left, right = (np.clip(128 + 6 * side, 0, 255).astype(np.uint8) for side in made.shard(first))
            with (tmp_path / f"in/{first // SHARD:05d}.tar").open("wb") as file:
                for row in range(SHARD):
                    buffer, name = io.BytesIO(), f"{first + row:09d}"
                    Image.fromarray(left[row].reshape(8, 8, 3)).save(buffer, "BMP")
                    file.writelines(tar_member(f"{name}.bmp", buffer.getvalue()))
                    file.writelines(tar_member(f"{name}.txt", f"spelled {right[row].tobytes().hex()}".encode()))
                file.write(bytes(1024))

    def rows_of(place: Path) -> IntArray:
        return np.array([int(name.rpartition("/")[2].partition(".")[0]) for name in open_raw(place).ids()])

    timed("made", make)
    monkeypatch.setattr(Encoders, "views", lambda _: ([Pixels()], [Digits()]))
    check_audit(tmp_path, AuditInput(tmp_path / "in", cache=tmp_path / "cache"), made, rows_of, WITH_CAPTIONS)


def test_audit_of_datacomp(tmp_path: Path) -> None:
    made = Made(512, 512)
    (tmp_path / "in").mkdir()

    def make() -> None:
        for first in range(0, PAIRS, SHARD):
            uids = [f"{row:032x}" for row in range(first, first + SHARD)]
            stem = tmp_path / f"in/{first // SHARD:08d}"
            pyarrow.parquet.write_table(pyarrow.table({"uid": uids, "text": uids}), stem.with_suffix(".parquet"))
            left, right = (side.astype(np.float16) for side in made.shard(first))
            np.savez(stem.with_suffix(".npz"), b32_img=left, b32_txt=right)

    def rows_of(place: Path) -> IntArray:
        copy = open_datacomp(place)
        return np.array([int(uid, 16) for uid in copy.ids(np.arange(len(copy)))])

    timed("made", make)
    check_audit(tmp_path, AuditInput(tmp_path / "in"), made, rows_of)
    subset = np.load(tmp_path / "audit/subset.npy")
    np.testing.assert_array_equal(subset["f1"], rows_of(tmp_path / "clean"))
