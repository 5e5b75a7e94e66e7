"""Features of pictures without any network: 36 grid cells, each described by its colours, edges and surroundings.

They play the part of detected regions in the built-in data set. Everything is computed from the pixels, picture by
picture: no statistics of the data set enter, so a picture has the same features in any company.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

GRID = 6
_HUES, _GREYS, _ORIENTATIONS = 12, 5, 8
_DESCRIPTOR = _HUES + _GREYS + _ORIENTATIONS + 6  # and the means and deviations of three colour channels
_PROJECTED = 84
FEATURE_SIZE = _PROJECTED + 2 * GRID
_CHUNK = 64  # pictures at a time: their intermediate arrays stay in the processor's cache
_GAIN = 2.0  # brings the projected values to about unit size

Floats = npt.NDArray[np.float32]


def grid_features(pictures: npt.NDArray[np.uint8]) -> Floats:
    """Describe pictures by a 6 × 6 grid of cells.

    Args:
        pictures: RGB pixels (N, H, W, 3), H and W multiples of 6.

    Returns:
        (N, 36, FEATURE_SIZE): a fixed random projection with ReLU of what the cell and its surroundings look like,
        then the cell's row and column as one-hot codes.
    """
    starts = range(0, len(pictures), _CHUNK)
    chunks = [_chunk_features(pictures[start : start + _CHUNK]) for start in starts]
    return np.concatenate(chunks) if chunks else np.empty((0, GRID**2, FEATURE_SIZE), np.float32)


def _chunk_features(pictures: npt.NDArray[np.uint8]) -> Floats:
    rgb = pictures.astype(np.float32) / 255
    cells = np.concatenate([_colour_histogram(rgb), _edge_histogram(rgb), _colour_moments(rgb)], axis=-1)
    described = np.concatenate([cells, _surroundings(cells)], axis=-1).reshape(len(rgb), GRID**2, -1)
    weights, offset = _projection(described.shape[-1])
    projected = np.maximum(_GAIN * described @ weights + offset, 0)
    codes = np.broadcast_to(_position_codes(), (len(rgb), GRID**2, 2 * GRID))
    return np.concatenate([projected, codes], axis=-1)


def _opponent(rgb: Floats) -> tuple[Floats, Floats, Floats]:
    """Lightness, red against cyan, green against blue-violet: near to how people see, far cheaper than CIELAB."""
    red, green, blue = rgb[..., 0], rgb[..., 1], rgb[..., 2]
    return (red + green + blue) / 3, red - (green + blue) / 2, (green - blue) * np.float32(np.sqrt(3) / 2)


def _cell_of_pixel(pictures: int, height: int, width: int) -> npt.NDArray[np.int64]:
    """Running number of the cell that each pixel lies in, (N, H, W)."""
    rows, columns = np.arange(height) * GRID // height, np.arange(width) * GRID // width
    cells = np.add.outer(rows * GRID, columns)
    return np.add.outer(np.arange(pictures) * GRID**2, cells)


def _cell_histogram(bins: npt.NDArray[np.int64], weights: Floats, size: int) -> Floats:
    """Weighted counts a cell, (N, 6, 6, size), as roots of parts of the cell: the root lifts the small parts."""
    n, height, width = bins.shape
    index = _cell_of_pixel(n, height, width) * size + bins
    counts = np.bincount(index.ravel(), weights.ravel(), minlength=n * GRID**2 * size)
    parts = counts.reshape(n, GRID, GRID, size) * (GRID**2 / (height * width))
    return np.sqrt(parts).astype(np.float32)


def _colour_histogram(rgb: Floats) -> Floats:
    """Hues weighted by how colourful a pixel is, and levels of grey weighted by how colourless it is."""
    lightness, alpha, beta = _opponent(rgb)
    chroma = np.minimum(np.hypot(alpha, beta), 1)
    hue = (np.arctan2(beta, alpha) * (_HUES / (2 * np.pi))).astype(np.int64) % _HUES
    grey = np.minimum((lightness * _GREYS).astype(np.int64), _GREYS - 1)
    return np.concatenate([_cell_histogram(hue, chroma, _HUES), _cell_histogram(grey, 1 - chroma, _GREYS)], axis=-1)


def _edge_histogram(rgb: Floats) -> Floats:
    """Directions of the edges, whatever their sign, weighted by their strength."""
    channel = rgb.max(axis=-1)
    dy, dx = np.zeros_like(channel), np.zeros_like(channel)
    dy[:, 1:-1] = channel[:, 2:] - channel[:, :-2]
    dx[:, :, 1:-1] = channel[:, :, 2:] - channel[:, :, :-2]
    direction = (np.arctan2(dy, dx) * (_ORIENTATIONS / np.pi)).astype(np.int64) % _ORIENTATIONS
    return _cell_histogram(direction, np.hypot(dx, dy), _ORIENTATIONS)


def _colour_moments(rgb: Floats) -> Floats:
    n, height, width, _ = rgb.shape
    channels = np.stack(_opponent(rgb), axis=-1)
    blocks = channels.reshape(n, GRID, height // GRID, GRID, width // GRID, 3)
    return np.concatenate([blocks.mean(axis=(2, 4)), blocks.std(axis=(2, 4))], axis=-1)


def _surroundings(cells: Floats) -> Floats:
    """Mean of the 3 × 3 cells around each cell, the border repeated outwards."""
    padded = np.pad(cells, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    return np.asarray(windows.mean(axis=(-2, -1)), dtype=np.float32)


def _projection(size: int) -> tuple[Floats, Floats]:
    """The same weights always: they belong to the definition of the features, not to a data set's seed."""
    rng = np.random.default_rng(36)
    weights = rng.standard_normal((size, _PROJECTED), dtype=np.float32)
    return weights, rng.standard_normal(_PROJECTED, dtype=np.float32) * np.float32(0.5)


def _position_codes() -> npt.NDArray[Any]:
    """(36, 12): one-hot row, then one-hot column."""
    row, column = np.divmod(np.arange(GRID**2), GRID)
    return np.concatenate([np.eye(GRID, dtype=np.float32)[row], np.eye(GRID, dtype=np.float32)[column]], axis=1)
