"""Hash photos so that copies of other size, quality or watermark have similar hashes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from PIL.Image import Image

_CELLS = 8  # neighbours to compare, a side
_DIFFERENT = 2  # grey levels; smaller differences are noise


class DifferenceHash:
    """Encode an image as 128 bits in 16 bytes: whether the grey level rises to the next cell, along and down.

    The hash is zero (no hash) if fewer than half of the neighbours differ by more than 2 grey levels.
    Otherwise all drawings and products on white would look alike.
    """

    name, width, pixels = "difference-hash", 2 * _CELLS, 16 * _CELLS

    def prepare(self, image: Image) -> npt.NDArray[np.uint8]:
        from PIL.Image import Resampling

        grey = image.convert("L")
        along, down = (
            np.asarray(grey.resize(size, Resampling.BICUBIC, reducing_gap=3.0), dtype=np.int16)
            for size in ((_CELLS + 1, _CELLS), (_CELLS, _CELLS + 1))
        )
        steps = np.concatenate([np.diff(along, axis=1).ravel(), np.diff(down, axis=0).ravel()])
        telling = np.count_nonzero(np.abs(steps) > _DIFFERENT)
        return np.packbits(steps > 0) if 2 * telling >= len(steps) else np.zeros(self.width, dtype=np.uint8)

    def encode(self, items: Sequence[Any], /) -> npt.NDArray[np.float32]:
        return np.stack(items).astype(np.float32)


def as_hashes(rows: npt.NDArray[np.float16]) -> npt.NDArray[np.uint64]:
    """Turn encodings (n, 16) of `DifferenceHash` into hashes (n, 2)."""
    return np.ascontiguousarray(rows, dtype=np.uint8).view(np.uint64)
