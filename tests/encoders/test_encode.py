import json
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import mispair
from audit_cases import contents
from mispair.auditing.audit import Settings
from mispair.auditing.folder import audit_path
from mispair.auditing.inputs import AuditInput
from mispair.cli.main import main
from mispair.encoders import encode
from mispair.encoders.cache import cache_folder
from mispair.encoders.encode import Outcome, encode_to_folder
from mispair.errors import ChangedError, DamagedError, DataError, ExistsError
from mispair.pairs.edits import Edits
from mispair.pairs.layouts import clip_retrieval
from mispair.pairs.source import ImageFiles
from refusals import refused

pytest.importorskip("pyarrow")


class FakeImages:
    """The mean colour; counts what it encodes."""

    pixels = 1024

    def __init__(self, name: str = "colour", stop_after: int = 10**9) -> None:
        self.name, self.width, self.seen, self._stop = name, 3, 0, stop_after

    def prepare(self, image: Image.Image) -> npt.NDArray[np.float32]:
        colour: npt.NDArray[np.float32] = np.asarray(image, dtype=np.float32).mean(axis=(0, 1))
        return colour

    def encode(self, items: Sequence[Any], /) -> npt.NDArray[np.float32]:
        self.seen += len(items)
        if self.seen > self._stop:
            raise KeyboardInterrupt
        return np.stack(items)


class FakeTexts:
    """The number of letters, and whether it is the word that has no finite vector."""

    def __init__(self) -> None:
        self.name, self.width, self.seen = "letters", 2, 0

    def encode(self, items: Sequence[str], /) -> npt.NDArray[np.float32]:
        self.seen += len(items)
        return np.array([[len(text), 1e9 if text == "huge" else 1] for text in items], dtype=np.float32)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for shade in range(6):
        Image.new("RGB", (4, 3), (40 * shade, 1, 2)).save(tmp_path / f"{shade}.png")
    return tmp_path


class Rows(ImageFiles):
    """Pairs that need no file but their images."""

    def _check_images(self) -> None:
        pass

    def size(self, edits: Edits) -> int:
        raise NotImplementedError

    def write(self, edits: Edits, out: Path) -> None:
        raise NotImplementedError


def make_rows(folder: Path, pairs: Sequence[tuple[str, str]]) -> Rows:
    return Rows("rows", [], [(f"id{i}", name, text) for i, (name, text) in enumerate(pairs)], folder)


def encode_rows(
    rows: Rows,
    out: Path,
    images: FakeImages,
    texts: FakeTexts,
    *,
    cache: Path | None = None,
    shard: int = 4096,
    overwrite: bool = False,
) -> Outcome:
    place = cache or cache_folder()
    return encode_to_folder(rows, out, ([images], [texts]), place, shard=shard, overwrite=overwrite)


def read(out: Path) -> tuple[npt.NDArray[Any], npt.NDArray[Any], dict[str, list[Any]]]:
    import pyarrow.parquet

    source = clip_retrieval.open_split(out)
    metadata = [pyarrow.parquet.read_table(path).to_pylist() for path in source.files if path.suffix == ".parquet"]
    rows = [row for part in metadata for row in part]
    columns = {name: [row[name] for row in rows] for name in ("id", "image_path", "caption", "status")}
    every = np.arange(len(source))
    return source.left.gather(every, source.left.dtype), source.right.gather(every, source.right.dtype), columns


def test_vectors_and_metadata_in_shards(images: Path) -> None:
    rows = make_rows(images, [("0.png", "a"), ("1.png", "bb"), ("1.png", "ccc"), ("0.png", "bb"), ("5.png", "dddd")])
    encoder, texts = FakeImages(), FakeTexts()
    assert encode_rows(rows, images / "out", encoder, texts, shard=3) == Outcome(5)
    assert encoder.seen == 3  # once
    assert texts.seen == 4
    left, right, columns = read(images / "out")
    assert left.dtype == right.dtype == np.float16
    assert left[:, 0].tolist() == [0, 40, 40, 0, 200]
    assert right[:, 0].tolist() == [1, 2, 3, 2, 4]
    assert columns == {
        "id": [f"id{row}" for row in range(5)],
        "image_path": [str(images / f"{name}.png") for name in (0, 1, 1, 0, 5)],
        "caption": ["a", "bb", "ccc", "bb", "dddd"],
        "status": ["ok"] * 5,
    }
    assert sorted(contents(images / "out")) == [
        "encode.json", "img_emb/img_emb_0.npy", "img_emb/img_emb_1.npy", "metadata/metadata_0.parquet",
        "metadata/metadata_1.parquet", "text_emb/text_emb_0.npy", "text_emb/text_emb_1.npy",
    ]  # fmt: skip


def png_of(width: int, height: int) -> bytes:
    """Start of an image that claims this size."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk)) + b"\0\0\0\1IDAT"


def test_bad_rows_stay_with_a_status(images: Path) -> None:
    (images / "empty.png").touch()
    (images / "text.png").write_text("not an image")
    Image.effect_noise((64, 64), 50).save(images / "cut.jpg")
    (images / "cut.jpg").write_bytes((images / "cut.jpg").read_bytes()[:1000])
    (images / "bomb.png").write_bytes(png_of(60_000, 60_000))
    names = [
        "0.png",
        "gone.png",
        "empty.png",
        "text.png",
        "cut.jpg",
        "bomb.png",
        ".",
        "",
        "a\0b",
        "1.png",
        "1.png",
        "x",
    ]
    texts = ["fine"] * 9 + [" ", "huge", ""]
    outcome = encode_rows(
        make_rows(images, list(zip(names, texts, strict=True))), images / "out", FakeImages(), FakeTexts(), shard=7
    )
    left, right, columns = read(images / "out")
    status = columns["status"]
    assert status[0] == "ok"
    assert status[1] == "image is missing"
    assert status[2] == "image is empty"
    assert status[3] == "image cannot be read: not an image that Pillow knows"
    assert [word[:22] for word in status[3:7]] == ["image cannot be read: "] * 4
    assert "truncated" in status[4]
    assert "too many pixels" in status[5]
    assert status[7] == "image is not named"
    assert status[8] == "image cannot be read: embedded null byte"
    assert status[9:] == [
        "caption is blank",
        "caption has a vector that is not finite",
        "image is missing; caption is blank",
    ]
    good = [0, 9, 10]
    assert np.flatnonzero(left.any(axis=1)).tolist() == good
    assert np.flatnonzero(right.any(axis=1)).tolist() == list(range(9))
    assert (outcome.bad, outcome.bad_images, outcome.bad_captions) == (11, 9, 3)
    assert outcome.example == "id1: image is missing"
    assert outcome.too_many_bad


def test_one_per_cent_is_not_too_many() -> None:
    assert not Outcome(1000, bad=10).too_many_bad
    assert Outcome(1000, bad=11).too_many_bad


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.sampled_from(["0.png", "1.png", "gone", ""]), st.sampled_from(["", "a", "bb"])), min_size=1),
    st.integers(1, 5),
    st.integers(0, 8),
)
def test_a_stopped_run_goes_on_and_equals_an_unbroken_one(
    images: Path, tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]], shard: int, stop: int
) -> None:
    rows, out = make_rows(images, pairs), tmp_path_factory.mktemp("out")
    whole = encode_rows(rows, out / "whole", FakeImages(), FakeTexts(), shard=shard, cache=out / "a")
    seen = 0
    try:
        stopped = FakeImages(stop_after=stop)
        encode_rows(rows, out / "stopped", stopped, FakeTexts(), shard=shard, cache=out / "b")
    except KeyboardInterrupt:
        again = FakeImages()
        outcome = encode_rows(rows, out / "stopped", again, FakeTexts(), shard=shard, cache=out / "b")
        seen = again.seen
        assert replace(outcome, kept=0) == whole
    assert contents(out / "stopped") == contents(out / "whole")
    assert len(read(out / "whole")[0]) == len(rows)
    assert seen <= len({name for name, _ in pairs if name.endswith(".png")})


def test_nothing_is_encoded_twice_whatever_the_folder(images: Path) -> None:
    rows, out = make_rows(images, [(f"{i}.png", "a") for i in range(6)]), images / "out"
    encode_rows(rows, out, FakeImages(), FakeTexts(), shard=2)
    before = contents(out)
    encoder = FakeImages()
    assert encode_rows(rows, out, encoder, FakeTexts(), shard=2).kept == 6
    (out / "img_emb/img_emb_1.npy").write_bytes(before["img_emb/img_emb_1.npy"][:-1])
    (out / "metadata/metadata_2.parquet").unlink()
    assert encode_rows(rows, out, encoder, FakeTexts(), shard=2).kept == 6
    assert contents(out) == before
    (images / "elsewhere").mkdir()
    (images / "0.png").rename(images / "elsewhere/x.png")
    moved = make_rows(images / "elsewhere", [("x.png", "a")])
    assert encode_rows(moved, images / "other", encoder, FakeTexts()).kept == 1
    assert encoder.seen == 0


def test_an_image_that_is_replaced_is_encoded_again(images: Path) -> None:
    rows, out = make_rows(images, [("0.png", "a"), ("1.png", "b")]), images / "out"
    encode_rows(rows, out, FakeImages(), FakeTexts())
    state = (images / "1.png").stat()
    (images / "5.png").replace(images / "1.png")
    os.utime(images / "1.png", ns=(state.st_atime_ns, state.st_mtime_ns))
    encoder = FakeImages()
    assert encode_rows(rows, out, encoder, FakeTexts()).kept == 1
    assert encoder.seen == 1
    assert read(out)[0][:, 0].tolist() == [0, 200]


def test_a_damaged_cache_is_made_again(images: Path, tmp_path: Path) -> None:
    rows, cache = make_rows(images, [("0.png", "a"), ("1.png", "b")]), tmp_path / "cache"
    encode_rows(rows, images / "out", FakeImages(), FakeTexts(), cache=cache)
    before = contents(images / "out")
    for path in cache.rglob("*.npy"):
        path.write_bytes(path.read_bytes()[:-1])
    encoder = FakeImages()
    assert encode_rows(rows, images / "out", encoder, FakeTexts(), cache=cache).kept == 0
    assert encoder.seen == 2
    assert contents(images / "out") == before


def flip(path: Path) -> None:
    """Changes the last bit of the last number."""
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


def test_a_flipped_bit_of_the_cache_is_encoded_again(images: Path, tmp_path: Path) -> None:
    rows, cache = make_rows(images, [("0.png", "a"), ("1.png", "b")]), tmp_path / "cache"
    encode_rows(rows, images / "out", FakeImages(), FakeTexts(), cache=cache)
    before = contents(images / "out")
    for path in cache.rglob("*.npy"):
        if not path.name.endswith(".keys.npy"):
            flip(path)
    for seen in (2, 0):  # what was encoded again is found the next time, although the damaged files are still there
        encoder = FakeImages()
        encode_rows(rows, images / "out", encoder, FakeTexts(), cache=cache)
        assert encoder.seen == seen
        assert contents(images / "out") == before


@pytest.mark.parametrize("name", ["img_emb/img_emb_1.npy", "text_emb/text_emb_0.npy", "metadata/metadata_1.parquet"])
def test_a_flipped_bit_of_embeddings_is_named(images: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    rows = make_rows(images, [(f"{row % 6}.png", f"a{row}") for row in range(12)])
    encode_rows(rows, out, FakeImages(), FakeTexts(), shard=6)
    mispair.load(out)
    flip(out / name)
    for read in (mispair.load, mispair.audit, lambda place: audit_path(AuditInput(place), tmp_path / "a", Settings())):
        with pytest.raises(DataError) as caught:
            read(out)
        assert name in str(caught.value)
    assert not (tmp_path / "a").exists()
    (out / name).unlink()
    with pytest.raises(DataError):
        mispair.audit(out)
    encode_rows(rows, out, FakeImages(), FakeTexts(), shard=6)
    mispair.load(out)


def test_a_folder_made_from_something_else_is_refused(images: Path) -> None:
    pairs = [("0.png", "a"), ("1.png", "b"), ("2.png", "c")]
    rows, fewer, out = make_rows(images, pairs), make_rows(images, pairs[:2]), images / "out"
    encode_rows(rows, out, FakeImages(), FakeTexts(), shard=1)
    before = contents(out)
    with refused(ChangedError, out, "image model was colour, now shade"):
        encode_rows(rows, out, FakeImages("shade"), FakeTexts(), shard=1)
    with refused(ChangedError, out, names="4096"):
        encode_rows(fewer, out, FakeImages(), FakeTexts())
    with refused(ChangedError, out):
        encode_rows(make_rows(images, [*pairs[:2], ("2.png", "d")]), out, FakeImages(), FakeTexts(), shard=1)
    assert contents(out) == before
    (out / "mine.txt").write_text("stays")
    encode_rows(fewer, out, FakeImages("shade"), FakeTexts(), shard=2, overwrite=True)
    assert len(read(out)[0]) == 2
    assert len(contents(out)) == 3 + 1 + 1
    (out / "encode.json").write_text("{")
    with refused(DamagedError, out / "encode.json"):
        encode_rows(rows, out, FakeImages(), FakeTexts())


def test_embeddings_of_others_are_never_replaced(images: Path) -> None:
    rows, out = make_rows(images, [("0.png", "a")]), images / "out"
    (out / "img_emb").mkdir(parents=True)
    (out / "img_emb/img_emb_0.npy").write_text("not ours")
    for overwrite, names in ((False, "encode.json"), (True, "img_emb/img_emb_0.npy")):
        with refused(ExistsError, out, names):
            encode_rows(rows, out, FakeImages(), FakeTexts(), overwrite=overwrite)
    with refused(ExistsError, images / "0.png"):
        encode_rows(rows, images / "0.png", FakeImages(), FakeTexts())


@pytest.mark.skipif(os.name != "posix", reason="file names are text there")
def test_a_file_name_that_is_no_text(images: Path) -> None:
    name = os.fsencode(images) + b"/caf\xe9.png"
    try:
        os.rename(os.fsencode(images / "1.png"), name)
    except OSError:
        pytest.skip("the file system takes text only")
    encode_rows(Rows("rows", [], [("a", os.fsdecode(name), "text")], images), images / "out", FakeImages(), FakeTexts())
    left, _, columns = read(images / "out")
    assert left[0, 0] == 40
    assert columns["image_path"][0].endswith("caf?.png")


def test_images_outside_their_folder_are_read_only_when_told_so(images: Path) -> None:
    inside, secret = images / "inside", images / "secret.png"
    inside.mkdir()
    (images / "0.png").rename(secret)
    (images / "1.png").rename(inside / "1.png")
    (inside / "link.png").symlink_to(secret)
    rows = make_rows(inside, [(name, name) for name in ("../secret.png", str(secret), "link.png", "1.png")])
    encode_rows(rows, images / "out", FakeImages(), FakeTexts())
    _, _, columns = read(images / "out")
    outside = "image cannot be read: it lies outside the folder of the images; `allow_outside` reads it"
    assert columns["status"] == [outside] * 3 + ["ok"]
    rows.allow_outside = True
    encode_rows(rows, images / "out", FakeImages(), FakeTexts(), overwrite=True)
    _, _, columns = read(images / "out")
    assert columns["status"] == ["ok"] * 4


@pytest.mark.parametrize("more", [[], ["--grid", "2"], ["--engine", "ray"]])
def test_a_wrong_folder_is_refused_before_encoders_are_loaded(
    images: Path, more: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def loaded(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("mispair.encoders.encode.Encoders.views", loaded)
    monkeypatch.setattr("mispair.encoders.encoders.image_encoder", loaded)
    (images / "t.csv").write_text("image,caption\n0.png,A dog.\n1.png,A cat.")
    assert main(["encode", str(images / "t.csv"), "--out", str(images), *more]) == 2
    assert str(images) in capsys.readouterr().err


@pytest.mark.parametrize(("bad", "code"), [(0, 0), (1, 3)])
def test_command(
    images: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bad: int, code: int
) -> None:
    monkeypatch.setattr(encode, "image_encoder", lambda *_: FakeImages())
    monkeypatch.setattr(encode, "text_encoder", lambda *_: FakeTexts())
    lines = ["image,caption", "0.png,A dog.", "1.png,A cat.", *["gone.png,A bird."] * bad]
    (images / "t.csv").write_text("\n".join(lines))
    out = images / "out"
    assert main(["encode", str(images / "t.csv"), "--out", str(out)]) == code
    printed = capsys.readouterr().out
    assert f"{2 + bad} pairs." in printed
    assert ("gone.png#0: image is missing" in printed) == bool(bad)
    assert main(["encode", str(images / "t.csv"), "--out", str(out), "--json"]) == code
    figures = json.loads(capsys.readouterr().out)
    assert (figures["rows"], figures["bad"], figures["kept"]) == (2 + bad, bad, 2)


def test_several_encoders_of_a_side_are_views_side_by_side(images: Path) -> None:
    rows = make_rows(images, [("0.png", "a"), ("1.png", "bb"), ("gone.png", "c")])
    other, texts = FakeImages("shade"), FakeTexts()
    encode_to_folder(rows, images / "out", ([FakeImages(), other], [texts]), cache_folder())
    left, right, _ = read(images / "out")
    colours = np.array([[0, 1, 2], [40, 1, 2]]) / np.sqrt([[5], [1605]])
    np.testing.assert_allclose(left, np.vstack([np.hstack([colours, colours]), np.zeros(6)]), atol=1e-3)
    assert right.tolist() == [[1, 1], [2, 1], [1, 1]]
    encode_rows(rows, images / "alone", again := FakeImages("shade"), texts)
    assert again.seen == 0  # each view has a cache of its own
