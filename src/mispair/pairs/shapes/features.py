"""Features of images and texts without any network.

An image has 36 windows on a grid, each described by colours, edges and shape; a text has counts of words.

They play the part of detected regions in the built-in data set. Everything is computed from the pixels, image by
image: no statistics of the data set enter, and no BLAS whose sums depend on the number of threads, so an image has
the same features, bit for bit, in any company (to the last digit with numpy before 2.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from mispair.pairs.shapes.scene import IMAGE_SIZE, grammar_words
from mispair.pairs.vocabulary import SPECIAL_WORDS, Vocabulary

GRID = 6
_SIDE = IMAGE_SIZE // 2  # what is described is the image at half its size
_BLOCK = 4  # pixels of the half-sized image; windows are made of whole blocks
_BLOCKS = _SIDE // _BLOCK
_WINDOW = 5  # blocks: 20 pixels, the window of a large item
_STRIDE = (_BLOCKS - _WINDOW) // (GRID - 1)  # blocks: neighbouring windows overlap
_REACH = 8  # pixels that a window may move to centre on what it sees
_MOVES = 2  # moves of a window: after two of them it rests on the nearest thing

_HUES, _GREYS, _DIRECTIONS, _CHANNELS = 12, 5, 8, 3
_RINGS, _ORDERS = 4, 7
FEATURE_SIZE = _HUES + _GREYS + _DIRECTIONS + _CHANNELS + _RINGS * _ORDERS + 2 * GRID
_CHUNK = 64  # images at a time: their intermediate arrays stay in the processor's cache

Floats = npt.NDArray[np.float32]


def grid_features(images: npt.NDArray[np.uint8]) -> Floats:
    """Describe RGB images (N, 120, 120, 3) by a 6 × 6 grid of overlapping windows.

    Returns:
        (N, 36, FEATURE_SIZE): colours, edges, ground and shape of each window, all about 0 to 3, then the window's row
        and column as one-hot codes. They stay plain measurements: a random projection hid them from linear encoders.
    """
    chunks = [_chunk_features(images[start : start + _CHUNK]) for start in range(0, len(images), _CHUNK)]
    return np.concatenate(chunks) if chunks else np.empty((0, GRID**2, FEATURE_SIZE), np.float32)


def _chunk_features(images: npt.NDArray[np.uint8]) -> Floats:
    rgb = _halved(images)
    ground = np.median(rgb, axis=-1)
    foreground = _foreground(rgb, ground)
    codes = np.broadcast_to(_position_codes(), (len(images), GRID**2, 2 * GRID))
    parts = (_colours(rgb, foreground), _edges(rgb), _ground(ground), _shape(foreground), codes)
    return np.concatenate(parts, axis=-1)


def _halved(images: npt.NDArray[np.uint8]) -> Floats:
    """The images at half their size, (3, N, 60, 60) from 0 to 1: numpy sums faster with channels first."""
    rows = images[:, ::2].astype(np.float32) + images[:, 1::2]
    halved = (rows[:, :, ::2] + rows[:, :, 1::2]) * np.float32(0.25 / 255)
    return np.ascontiguousarray(np.moveaxis(halved, -1, 0))


def _foreground(rgb: Floats, ground: Floats) -> Floats:
    """Distance of each pixel from the ground colour of its row (3, N, 60): 0 to 1, (N, 60, 60)."""
    difference = np.abs(rgb - ground[..., None]).sum(axis=0)
    return np.asarray(np.clip(difference * 2.5 - 0.2, 0, 1))


def _window_sums(blocks: Floats) -> Floats:
    """Sums of blocks (N, 15, 15, C) over each window, (N, 36, C)."""
    cover = _window_cover()
    rows = np.einsum("gy,nyxc->ngxc", cover, blocks)
    sums: Floats = np.einsum("hx,ngxc->nghc", cover, rows)
    return sums.reshape(len(blocks), GRID**2, -1)


@cache
def _window_cover() -> Floats:
    """The blocks of each window along one axis, (6, 15), with weights that fall from the middle."""
    cover = np.zeros((GRID, _BLOCKS), np.float32)
    for index in range(GRID):
        cover[index, index * _STRIDE : index * _STRIDE + _WINDOW] = (0.5, 1, 1.5, 1, 0.5)
    return cover


def _window_histogram(bins: npt.NDArray[np.intp], weights: Floats, size: int) -> Floats:
    """Weighted counts in each window, (N, 36, size), as roots: the root lifts the small parts."""
    n = len(bins)
    of_pixel = np.arange(_SIDE) // _BLOCK
    block = np.add.outer(np.arange(n) * _BLOCKS**2, np.add.outer(of_pixel * _BLOCKS, of_pixel))
    counts = np.bincount((block * size + bins).ravel(), weights.ravel(), minlength=n * _BLOCKS**2 * size)
    sums = _window_sums(counts.reshape(n, _BLOCKS, _BLOCKS, size).astype(np.float32))
    return np.sqrt(sums / _BLOCK**2)


def _colours(rgb: Floats, foreground: Floats) -> Floats:
    """Colours of the foreground: hues where it is colourful, levels of grey where it is not."""
    red, green, blue = rgb
    lightness = (red + green + blue) / 3
    red_cyan = red - (green + blue) / 2
    green_violet = (green - blue) * np.float32(np.sqrt(3) / 2)
    chroma = np.minimum(2 * np.hypot(red_cyan, green_violet), 1)
    hue = np.floor(np.arctan2(green_violet, red_cyan) * (_HUES / (2 * np.pi))).astype(np.intp) % _HUES
    grey = np.minimum(lightness * _GREYS, _GREYS - 1).astype(np.intp)
    hues = _window_histogram(hue, foreground * chroma, _HUES)
    return np.concatenate([hues, _window_histogram(grey, foreground * (1 - chroma), _GREYS)], axis=-1)


def _edges(rgb: Floats) -> Floats:
    """Directions of the edges without sign, weighted by their strength."""
    channel = rgb.mean(axis=0)
    dy, dx = np.zeros_like(channel), np.zeros_like(channel)
    dy[:, 1:-1] = channel[:, 2:] - channel[:, :-2]
    dx[:, :, 1:-1] = channel[:, :, 2:] - channel[:, :, :-2]
    direction = np.floor(np.arctan2(dy, dx) * (_DIRECTIONS / np.pi)).astype(np.intp) % _DIRECTIONS
    return _window_histogram(direction, np.hypot(dx, dy), _DIRECTIONS)


def _ground(ground: Floats) -> Floats:
    """Ground colour of the rows of each window."""
    rows = ground.reshape(_CHANNELS, -1, _BLOCKS, _BLOCK).mean(axis=-1)
    return np.repeat(np.einsum("gy,cny->ngc", _window_cover(), rows) / _WINDOW, GRID, axis=1)


def _shape(foreground: Floats) -> Floats:
    """Rotation-invariant strength of the angular waves in rings around the thing in each window.

    A star has a strong fifth order, a cross a strong fourth, a ring has nothing in its innermost ring, and so on.
    """
    n, side = len(foreground), _WINDOW * _BLOCK
    padded = np.pad(foreground, ((0, 0), (_REACH, _REACH), (_REACH, _REACH)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (side, side), axis=(1, 2))
    image, cell = np.arange(n)[:, None], np.arange(GRID**2)
    home = np.stack(np.divmod(cell, GRID), axis=-1) * (_STRIDE * _BLOCK) + _REACH  # (36, 2), top and left
    at = np.tile(home, (n, 1, 1))
    for _ in range(_MOVES):
        seen = np.einsum("ncyx,yxf->ncf", windows[image, at[..., 0], at[..., 1]], _centroid_filters())
        step = np.rint(1.5 * seen[..., :2] / (seen[..., 2:] + 1)).astype(np.intp)
        at = np.clip(at + step, home - _REACH, home + _REACH)
    waves = np.einsum("ncyx,yxwf->ncwf", windows[image, at[..., 0], at[..., 1]], _wave_filters())
    return np.asarray(np.sqrt(np.hypot(waves[:, :, 0], waves[:, :, 1])))


def _window_offsets() -> npt.NDArray[np.float64]:
    """Vertical and horizontal distance of a window's pixels from its middle, (2, 20, 20)."""
    side = _WINDOW * _BLOCK
    return np.mgrid[:side, :side] - (side - 1) / 2


@cache
def _centroid_filters() -> Floats:
    """(20, 20, 3): vertical and horizontal offset and one, all weighted towards the middle of the window."""
    y, x = _window_offsets()
    weight = np.exp(-(y**2 + x**2) / (2 * 6.0**2))
    return np.stack([y * weight, x * weight, weight], axis=-1).astype(np.float32)


@cache
def _wave_filters() -> Floats:
    """(20, 20, 2, rings × orders): cosine and sine waves around soft rings, each divided by the ring's area."""
    y, x = _window_offsets()
    width = _WINDOW * _BLOCK / 2 / _RINGS
    middles = width * (np.arange(_RINGS) + 0.5)
    rings = np.exp(-(((np.hypot(y, x)[..., None] - middles) / (0.6 * width)) ** 2))
    rings /= rings.sum(axis=(0, 1))
    angles = np.arctan2(y, x)[..., None] * np.arange(_ORDERS)
    waves = np.stack([np.cos(angles), np.sin(angles)], axis=2)
    filters: npt.NDArray[np.float64] = np.einsum("yxr,yxwo->yxwro", rings, waves)
    return filters.reshape(*y.shape, 2, -1).astype(np.float32)


def _position_codes() -> Floats:
    """(36, 12): one-hot row, then one-hot column."""
    row, column = np.divmod(np.arange(GRID**2), GRID)
    one_hot = np.eye(GRID, dtype=np.float32)
    return np.concatenate([one_hot[row], one_hot[column]], axis=1)


def image_vectors(windows: Floats) -> Floats:
    """(N, 2 F): mean and maximum of the windows (N, 36, F) of `grid_features`."""
    return np.concatenate([windows.mean(axis=1), windows.max(axis=1)], axis=1)


def word_counts(texts: Sequence[str]) -> Floats:
    """(N, V): how often each text has each word of the captions of `shapes`; other words are left out."""
    words = vocabulary()
    ids, offsets = words.encode(text.replace(".", " ") for text in texts)  # of several sentences
    counts = np.zeros((len(texts), len(words)), dtype=np.float32)
    np.add.at(counts, (np.repeat(np.arange(len(texts)), np.diff(offsets)), ids), 1)
    return counts[:, len(SPECIAL_WORDS) :]


@cache
def vocabulary() -> Vocabulary:
    """Every word of the captions of `shapes`."""
    return Vocabulary((*SPECIAL_WORDS, *grammar_words()))
