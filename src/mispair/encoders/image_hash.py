"""Difference hashes: photos of one origin have nearly the same one, whatever their size, quality or watermark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from PIL.Image import Image

_CELLS = 8  # a side, in which two neighbours are compared
_DIFFERENT = 2  # grey levels from which a difference says something


class DifferenceHash:
    """Image encoder with 128 bits as 16 bytes: whether the grey level rises to the next cell, along and down.

    A hash is all zero, which means that there is none, where fewer than half of the neighbours differ by more than 2
    grey levels: drawings and products on white would otherwise all look alike.
    """

    name, width = "difference-hash", 2 * _CELLS

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
    """Hashes (n, 2) from the numbers that `DifferenceHash` encodes (n, 16)."""
    return np.ascontiguousarray(rows, dtype=np.uint8).view(np.uint64)
