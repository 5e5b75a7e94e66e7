"""Scenes of the built-in data set: items and places, before they are drawn or described."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

IMAGE_SIZE = 120  # pixels; a multiple of the feature grid's 6 cells
SHAPES = ("circle", "square", "triangle", "star", "heart", "diamond", "cross", "ring", "moon", "flower")
COLOURS = ("red", "orange", "yellow", "green", "teal", "blue", "purple", "pink", "brown", "white")
TEXTURES = ("plain", "plain", "striped", "dotted")  # plain twice: half of all items are plain
RADII = {"small": 0.078, "medium": 0.114, "large": 0.150}  # as a part of the image's width
BACKGROUNDS = ("grass", "sky", "night", "sand", "sea", "snow")

_CELLS = 3  # items lie in separate cells of a 3 × 3 board, so that they never cover each other
_RADIUS_JITTER = 0.05
_GAP = 0.005  # between an item and the edge of its cell

T = TypeVar("T")


@dataclass(frozen=True)
class Item:
    """One thing on the image. Lengths are parts of the image's width; y grows downwards."""

    shape: str
    colour: str
    texture: str
    size: str
    x: float
    y: float
    radius: float

    @property
    def place(self) -> tuple[str, str]:
        """Its row and column in words, such as ("top", "left")."""
        return ("top", "middle", "bottom")[int(self.y * _CELLS)], ("left", "middle", "right")[int(self.x * _CELLS)]


@dataclass(frozen=True)
class Scene:
    """A background and two to four items, no two of the same shape and colour."""

    background: str
    items: tuple[Item, ...]


def pick(rng: np.random.Generator, choices: Sequence[T]) -> T:
    """One of `choices`, each as likely as the other."""
    return choices[int(rng.integers(len(choices)))]


def sample_scene(rng: np.random.Generator) -> Scene:
    """Draw a scene at random."""
    count = int(rng.integers(2, 5))
    cells = rng.permutation(_CELLS**2)[:count]
    kinds: dict[tuple[str, str], None] = {}  # a dict and not a set: its order does not depend on the hash seed
    while len(kinds) < count:
        kinds[pick(rng, SHAPES), pick(rng, COLOURS)] = None
    items = (_sample_item(rng, shape, colour, int(cell)) for (shape, colour), cell in zip(kinds, cells, strict=True))
    return Scene(background=pick(rng, BACKGROUNDS), items=tuple(items))


def _sample_item(rng: np.random.Generator, shape: str, colour: str, cell: int) -> Item:
    size = pick(rng, tuple(RADII))
    radius = RADII[size] * (1 + float(rng.uniform(-_RADIUS_JITTER, _RADIUS_JITTER)))
    row, column = divmod(cell, _CELLS)
    slack = 0.5 / _CELLS - radius - _GAP
    x = (column + 0.5) / _CELLS + float(rng.uniform(-slack, slack))
    y = (row + 0.5) / _CELLS + float(rng.uniform(-slack, slack))
    return Item(shape, colour, pick(rng, TEXTURES), size, x, y, radius)
