"""Small pictures for a page that stands alone."""

from __future__ import annotations

import base64
import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from PIL import Image


# Why there is no thumbnail. A short list, so that a report can count them.
MISSING = "the picture file is missing"
UNREADABLE = "the picture file cannot be read"
TOO_LARGE = "the picture is too large"

MOST_PIXELS = 50_000_000  # 200 MB while it is made smaller
MOST_BYTES = 12_000  # 200 thumbnails of this size, written in base64, are 3.2 MB
_QUALITIES = (80, 65, 50, 35, 20, 10)


class Thumbnail(NamedTuple):
    """A small picture, or the reason why there is none: one of the two is empty."""

    uri: str
    problem: str


def thumbnail(path: Path, size: int = 160) -> Thumbnail:
    """A JPEG of at most `size` x `size` pixels as a data URI; without camera data, comments or transparency."""
    from PIL import Image

    try:
        if not path.is_file():
            return Thumbnail("", MISSING)
        # PIL warns about damage, and above 89 million pixels, before it refuses twice as many. The caller has our word.
        with warnings.catch_warnings(action="ignore"), Image.open(path) as image:
            image.draft(image.mode, (2 * size, 2 * size))  # a JPEG decodes to an eighth, a quarter or a half for free
            if image.width * image.height > MOST_PIXELS:
                return Thumbnail("", TOO_LARGE)
            return Thumbnail("data:image/jpeg;base64," + base64.b64encode(_jpeg(_small(image, size))).decode(), "")
    except Image.DecompressionBombError:
        return Thumbnail("", TOO_LARGE)
    except Exception:  # PIL raises almost anything for a damaged file: OSError, SyntaxError, ValueError, struct.error
        return Thumbnail("", UNREADABLE)


def _small(image: Image.Image, size: int) -> Image.Image:
    """The picture upright, made smaller, on white; a new one, so that nothing else of the file comes along."""
    from PIL import Image, ImageOps

    picture = _plain(ImageOps.exif_transpose(image))
    picture.thumbnail((size, size))
    small = Image.new("RGB", picture.size, "white")
    small.paste(picture, mask=picture.getchannel("A") if picture.mode == "RGBA" else None)
    return small


def _plain(image: Image.Image) -> Image.Image:
    """The picture as RGB, or as RGBA where it is transparent anywhere."""
    import numpy as np
    from PIL import Image

    if image.mode in ("I", "F") or image.mode.startswith("I;16"):  # depth maps, scans: no range that all agree on
        values = np.nan_to_num(np.asarray(image, dtype=np.float32))
        low, high = float(values.min()), float(values.max())
        image = Image.fromarray(((values - low) * (255 / ((high - low) or 1.0))).astype(np.uint8))
    transparent = "transparency" in image.info or image.mode in ("RGBA", "RGBa", "LA", "PA")
    return image.convert("RGBA" if transparent else "RGB")


def _jpeg(image: Image.Image) -> bytes:
    """The picture at the best quality that keeps it small."""
    content = b""
    for quality in _QUALITIES:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=quality, optimize=True)
        content = buffer.getvalue()
        if len(content) <= MOST_BYTES:
            break
    return content
