"""Thumbnails: small, upright, on white, and a reason where there is none."""

from __future__ import annotations

import base64
import io
import struct
import tempfile
import time
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mispair.support import thumbnails
from mispair.support.thumbnails import MISSING, MOST_BYTES, TOO_LARGE, UNREADABLE, Thumbnail, thumbnail

START = "data:image/jpeg;base64,"
RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)
ORIENTATION = 0x0112


def decoded(found: Thumbnail) -> Image.Image:
    assert found.problem == ""
    assert found.uri.startswith(START)
    image = Image.open(io.BytesIO(base64.b64decode(found.uri.removeprefix(START))))
    assert image.format == "JPEG"
    return image


def saved(image: Image.Image, path: Path, **options: object) -> Path:
    image.save(path, **options)  # type: ignore[arg-type]
    return path


def near(image: Image.Image, at: tuple[int, int], colour: tuple[int, int, int]) -> bool:
    return bool(np.abs(np.asarray(image.convert("RGB"), dtype=int)[at[1], at[0]] - colour).max() < 40)


def two_halves(width: int, height: int) -> Image.Image:
    """Red on the left, blue on the right."""
    image = Image.new("RGB", (width, height), RED)
    image.paste(BLUE, (width // 2, 0, width, height))
    return image


@given(st.integers(1, 700), st.integers(1, 700), st.integers(16, 200))
def test_it_fits_and_keeps_its_shape(width: int, height: int, size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = saved(two_halves(width, height), Path(folder) / "a.png")
        small = decoded(thumbnail(path, size))
    scale = min(1.0, size / max(width, height))  # never larger than the image
    assert small.width <= size
    assert small.height <= size
    assert abs(small.width - width * scale) <= 1
    assert abs(small.height - height * scale) <= 1


def test_noise_and_comments_do_not_make_it_large(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (400, 400, 3), dtype=np.uint8)
    path = saved(Image.fromarray(noise), tmp_path / "a.jpg", comment=b"x" * 60_000)
    image = decoded(thumbnail(path))
    assert len(thumbnail(path).uri) <= MOST_BYTES * 4 / 3 + 40
    assert not image.getexif()
    assert "comment" not in image.info


@pytest.mark.parametrize("kind", ["jpg", "png", "webp", "tiff"])
def test_it_stands_upright(tmp_path: Path, kind: str) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 6  # turn a quarter to the right: what was left comes up
    small = decoded(thumbnail(saved(two_halves(600, 300), tmp_path / f"a.{kind}", exif=exif)))
    assert small.size == (80, 160)
    assert near(small, (40, 10), RED)
    assert near(small, (40, 150), BLUE)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA"])
def test_transparency_becomes_white(tmp_path: Path, mode: str) -> None:
    image = Image.new("RGBA", (80, 40), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (40, 0, 80, 40))
    if mode == "PA":
        palette = Image.new("P", (80, 40), 0)
        palette.putpalette([0, 0, 0, 0, 0, 0])
        palette.paste(1, (40, 0, 80, 40))
        path = saved(palette, tmp_path / "a.png", transparency=0)
    else:
        path = saved(image.convert(mode), tmp_path / "a.png")
    small = decoded(thumbnail(path))
    assert near(small, (5, 20), WHITE)
    assert near(small, (75, 20), (0, 0, 0))


def test_every_colour_mode(tmp_path: Path) -> None:
    image = two_halves(80, 40)
    paths = [
        saved(image.convert("P"), tmp_path / "palette.gif"),
        saved(image.convert("CMYK"), tmp_path / "cmyk.jpg", quality=95),
        saved(image, tmp_path / "lossy.webp"),
    ]
    for path in paths:
        small = decoded(thumbnail(path))
        assert near(small, (5, 20), RED), path
        assert near(small, (75, 20), BLUE), path
    assert decoded(thumbnail(saved(image.convert("1"), tmp_path / "bits.png"))).size == (80, 40)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_deep_grey_images_use_the_whole_range(tmp_path: Path, dtype: type) -> None:
    values: np.ndarray[Any, Any] = np.zeros((40, 80), dtype=dtype)
    values[:, 40:] = 900  # a depth map in millimetres: plain conversion would make all of it white
    values[:, 20:40] = 450
    small = decoded(thumbnail(saved(Image.fromarray(values), tmp_path / "a.tiff")))
    for x, colour in ((5, (0, 0, 0)), (30, (127, 127, 127)), (75, WHITE)):
        assert near(small, (x, 20), colour)


def png_header(width: int, height: int) -> bytes:
    """A tiny file that says it is a large image."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [9_000, 12_000, 60_000])  # above our limit, above PIL's warning, above PIL's refusal
def test_bombs_are_refused_without_a_word(tmp_path: Path, side: int) -> None:
    path = tmp_path / "bomb.png"
    path.write_bytes(png_header(side, side))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert thumbnail(path) == Thumbnail("", TOO_LARGE)


def test_a_large_photo_is_read_at_a_fraction(tmp_path: Path) -> None:
    path = saved(Image.new("L", (11_000, 5_000), 90), tmp_path / "large.jpg")  # 55 million pixels
    assert decoded(thumbnail(path)).size == (160, 73)


def test_why_there_is_none(tmp_path: Path) -> None:
    whole = saved(two_halves(300, 300), tmp_path / "whole.jpg").read_bytes()
    for name, content in {"empty.jpg": b"", "text.jpg": b"hello", "cut.jpg": whole[: len(whole) // 2]}.items():
        (tmp_path / name).write_bytes(content)
        assert thumbnail(tmp_path / name) == Thumbnail("", UNREADABLE), name
    for name in ("gone.jpg", ".", "a\0b.jpg"):
        assert thumbnail(tmp_path / name) == Thumbnail("", MISSING), name
    assert thumbnail(tmp_path / ("x" * 5000)).problem in (MISSING, UNREADABLE)


@given(st.sampled_from(["PNG", "JPEG", "GIF", "TIFF", "WEBP", "BMP"]), st.data())
def test_damaged_files_never_raise(kind: str, data: st.DataObject) -> None:
    buffer = io.BytesIO()
    two_halves(24, 24).save(buffer, kind)
    content = bytearray(buffer.getvalue())
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=6)):
        content[place] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a"
        path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
        found = thumbnail(path)
    assert (found.uri == "") == (found.problem in (UNREADABLE, TOO_LARGE))
    assert bool(found.uri) != bool(found.problem)


def test_only_known_formats_are_opened(tmp_path: Path) -> None:
    """A file that says to be PostScript would start another program; formats without need are closed as well."""
    (tmp_path / "x.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n")
    saved(Image.new("RGB", (4, 4)), tmp_path / "a.ppm")
    for name in ("x.jpg", "a.ppm"):
        assert thumbnail(tmp_path / name) == Thumbnail("", UNREADABLE)
        assert thumbnail((tmp_path / name).read_bytes()) == Thumbnail("", UNREADABLE)


def test_the_content_of_a_file_will_do(tmp_path: Path) -> None:
    path = saved(two_halves(40, 20), tmp_path / "a.png")
    assert thumbnail(path.read_bytes()) == thumbnail(path)


def test_large_images_are_decoded_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thumbnails, "MANY_PIXELS", 100)
    buffer = io.BytesIO()
    Image.new("RGB", (20, 20)).save(buffer, "PNG")
    open_now, most = 0, 0

    def decode(_: int) -> None:
        nonlocal open_now, most
        with thumbnails.open_image(buffer.getvalue(), 20) as image:
            open_now += 1
            most = max(most, open_now)
            time.sleep(0.01)  # gives the others their turn
            image.load()
            open_now -= 1

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(decode, range(8)))
    assert most == 1
