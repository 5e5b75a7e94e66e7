"""Images as RGB, and thumbnails for self-contained pages."""

from __future__ import annotations

import base64
import io
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from PIL import Image


# Why there is no thumbnail. A short list, so that a report can count them.
MISSING = "the image file is missing"
UNREADABLE = "the image file cannot be read"
TOO_LARGE = "the image is too large"

# Others are seldom photos, and some of their readers start other programs.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
MOST_PIXELS = 50_000_000  # 200 MB while it is made smaller
MANY_PIXELS = 6_000_000  # images with more are decoded one at a time, however many threads read images
MOST_BYTES = 12_000  # 200 thumbnails of this size, written in base64, are 3.2 MB
_ONE_LARGE = threading.Lock()
_QUALITIES = (80, 65, 50, 35, 20, 10)


class Thumbnail(NamedTuple):
    """A thumbnail and an empty text, or no thumbnail and the reason."""

    uri: str
    problem: str

    @property
    def content(self) -> bytes:
        """The JPEG itself."""
        return base64.b64decode(self.uri.partition(",")[2])


class TooManyPixelsError(Exception):
    """An image would take too much memory."""


def thumbnail(source: Path | bytes, size: int = 160, most_bytes: int = MOST_BYTES) -> Thumbnail:
    """A JPEG of at most `size` x `size` pixels as a data URI; without camera data, comments or transparency.

    Its quality is lowered to keep it below `most_bytes`.
    """
    try:
        if isinstance(source, Path) and not source.is_file():
            return Thumbnail("", MISSING)
        # Pillow warns about damage, and above 89 million pixels; the caller gets the problem.
        with warnings.catch_warnings(action="ignore"), open_image(source, 2 * size) as image:
            small = upright(image)
            small.thumbnail((size, size))
            content = _jpeg(on_white(small), most_bytes)
            return Thumbnail("data:image/jpeg;base64," + base64.b64encode(content).decode(), "")
    except TooManyPixelsError:
        return Thumbnail("", TOO_LARGE)
    except Exception:  # PIL raises almost anything for a damaged file: OSError, SyntaxError, ValueError, struct.error
        return Thumbnail("", UNREADABLE)


@contextmanager
def open_image(source: str | Path | bytes, enough: int) -> Iterator[Image.Image]:
    """Open one of `FORMATS` without decoding it.

    With `enough` pixels a side, a JPEG decodes to a part of its size for free.

    Raises:
        TooManyPixelsError: It has more than `MOST_PIXELS` nevertheless.
        Exception: Whatever Pillow raises: its readers raise nearly anything on damaged files.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS) as image:
            image.draft(image.mode, (enough, enough))
            if image.width * image.height > MOST_PIXELS:
                raise TooManyPixelsError(f"{image.width:,} x {image.height:,} pixels are too many")
            with _ONE_LARGE if image.width * image.height > MANY_PIXELS else nullcontext():
                yield image
    except Image.DecompressionBombError:
        raise TooManyPixelsError("too many pixels") from None


def upright(image: Image.Image) -> Image.Image:
    """The image turned as its camera data say, in RGB, or RGBA where it has transparency."""
    import numpy as np
    from PIL import Image, ImageOps

    try:
        ImageOps.exif_transpose(image, in_place=True)
    except Exception:  # damaged camera data, which say nothing about the pixels
        image.load()
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):  # depth maps, scans: there is no common range
        values = np.nan_to_num(np.asarray(image, dtype=np.float32))
        low, high = float(values.min()), float(values.max())
        image = Image.fromarray(((values - low) * (255 / ((high - low) or 1.0))).astype(np.uint8))
    transparent = "transparency" in image.info or image.mode in ("RGBA", "RGBa", "LA", "PA")
    mode = "RGBA" if transparent else "RGB"
    return image if image.mode == mode else image.convert(mode)


def on_white(image: Image.Image) -> Image.Image:
    """An RGB or RGBA image as RGB on white; a new one, without anything else of the file."""
    from PIL import Image

    flat = Image.new("RGB", image.size, "white")
    flat.paste(image, mask=image.getchannel("A") if image.mode == "RGBA" else None)
    return flat


def _jpeg(image: Image.Image, most_bytes: int) -> bytes:
    """The image at the best quality below `most_bytes`."""
    content = b""
    for quality in _QUALITIES:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=quality, optimize=True)
        content = buffer.getvalue()
        if len(content) <= most_bytes:
            break
    return content
