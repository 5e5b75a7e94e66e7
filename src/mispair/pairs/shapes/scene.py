"""Scenes of the built-in data set, and their captions: a small grammar of English with synonyms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from string import Formatter
from typing import TypeVar

import numpy as np

IMAGE_SIZE = 120  # pixels; a multiple of the feature grid's 6 cells
SHAPES = ("circle", "square", "triangle", "star", "heart", "diamond", "cross", "ring", "moon", "flower")
COLOURS = ("red", "orange", "yellow", "green", "teal", "blue", "purple", "pink", "brown", "white")
TEXTURES = ("plain", "plain", "striped", "dotted")  # plain twice: half of all items are plain
RADII = {"small": 0.078, "medium": 0.114, "large": 0.150}  # as a part of the image's width
BACKGROUNDS = ("grass", "sky", "night", "sand", "sea", "snow")

CAPTIONS_PER_IMAGE = 5
MAX_WORDS = 16

# Each table maps what the scene says to the ways of saying it.
SHAPE_NOUNS = {
    "circle": ("circle", "disc", "ball"),
    "square": ("square", "box"),
    "triangle": ("triangle", "wedge"),
    "star": ("star",),
    "heart": ("heart",),
    "diamond": ("diamond", "rhombus"),
    "cross": ("cross", "plus"),
    "ring": ("ring", "hoop"),
    "moon": ("moon", "crescent"),
    "flower": ("flower", "blossom"),
}
COLOUR_WORDS = {
    "red": ("red", "crimson", "scarlet"),
    "orange": ("orange", "tangerine"),
    "yellow": ("yellow", "golden"),
    "green": ("green", "emerald"),
    "teal": ("teal", "turquoise"),
    "blue": ("blue", "cobalt"),
    "purple": ("purple", "violet"),
    "pink": ("pink", "rosy"),
    "brown": ("brown", "chocolate"),
    "white": ("white", "snowy"),
}
SIZE_WORDS = {
    "small": ("small", "little", "tiny"),
    "medium": ("medium", "medium sized"),
    "large": ("big", "large", "huge"),
}
TEXTURE_ADJECTIVES = {"plain": ("plain", "solid"), "striped": ("striped", "stripy"), "dotted": ("dotted", "spotted")}
TEXTURE_PHRASES = {"plain": ("in one colour",), "striped": ("with stripes",), "dotted": ("with dots", "with spots")}
GROUND_PHRASES = {
    "grass": ("on the grass", "on a lawn", "in the meadow"),
    "sky": ("in the sky", "up in the air", "among the clouds"),
    "night": ("at night", "in the dark", "by night"),
    "sand": ("on the sand", "on a beach", "in the desert"),
    "sea": ("in the sea", "in the water", "on the waves"),
    "snow": ("in the snow", "on the ice", "on a winter day"),
}
PLACE_PHRASES = {
    ("top", "left"): ("in the top left corner", "in the upper left corner"),
    ("top", "middle"): ("at the top", "near the upper edge"),
    ("top", "right"): ("in the top right corner", "in the upper right corner"),
    ("middle", "left"): ("on the left", "near the left edge"),
    ("middle", "middle"): ("in the centre", "in the middle"),
    ("middle", "right"): ("on the right", "near the right edge"),
    ("bottom", "left"): ("in the bottom left corner", "in the lower left corner"),
    ("bottom", "middle"): ("at the bottom", "near the lower edge"),
    ("bottom", "right"): ("in the bottom right corner", "in the lower right corner"),
}
RELATION_PHRASES = {
    "left": ("to the left of", "left of"),
    "right": ("to the right of", "right of"),
    "above": ("above", "over", "higher than"),
    "below": ("below", "under", "lower than"),
    "near": ("next to", "beside", "close to"),
}
NUMBERS = {2: ("two",), 3: ("three",), 4: ("four",)}
VERBS = ("is", "sits", "rests")

# {a} and {b} are two different items; {ground} is the background, {place} and {relation} belong to {a}.
TEMPLATES = (
    "{a} {place}",
    "{place} there is {a}",
    "{a} {verb} {place}",
    "{a} {ground}",
    "{ground} there is {a} {place}",
    "{number} shapes {ground} and one of them is {a}",
    "a picture of {number} shapes with {a} {place}",
    "{a} and {b}",
    "{a} and {b} {ground}",
    "{ground} we see {a} and {b}",
    "{a} {relation} {b}",
    "{a} {verb} {relation} {b}",
    "{a} {relation} {b} {ground}",
    "{ground} {a} {verb} {relation} {b}",
    "there is {a} {relation} {b}",
)

# How often a caption mentions an attribute. Medium and plain are what one would not mention.
_MENTION_COLOUR = 0.9
_MENTION_SIZE = {"small": 0.6, "medium": 0.2, "large": 0.6}
_MENTION_TEXTURE = {"plain": 0.15, "striped": 0.7, "dotted": 0.7}
_APART = 0.16  # centres this far apart are clearly left of, or above, one another: half a cell of the board
_NEAR = 0.40  # centres this close are in cells side by side

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


def describe(scene: Scene, rng: np.random.Generator) -> list[str]:
    """Five different captions of a scene, all true of it."""
    captions: dict[str, None] = {}  # keeps the order, drops what was said already
    while len(captions) < CAPTIONS_PER_IMAGE:
        caption = _caption(scene, rng)
        if len(caption.split()) <= MAX_WORDS:
            captions[caption] = None
    return list(captions)


def grammar_words() -> list[str]:
    """Every word of the grammar, sorted."""
    tables = (
        SHAPE_NOUNS, COLOUR_WORDS, SIZE_WORDS, TEXTURE_ADJECTIVES, TEXTURE_PHRASES, GROUND_PHRASES, PLACE_PHRASES,
        RELATION_PHRASES, NUMBERS,
    )  # fmt: skip
    phrases = chain.from_iterable(chain.from_iterable(table.values()) for table in tables)
    literals = (text for template in TEMPLATES for text, *_ in Formatter().parse(template))
    return sorted({"a", "an", *VERBS, *chain.from_iterable(text.split() for text in chain(phrases, literals))})


def relations(a: Item, b: Item) -> list[str]:
    """Keys of `RELATION_PHRASES` for item `a` as seen from item `b`; never empty for items of one scene."""
    dx, dy = a.x - b.x, a.y - b.y
    holds = {
        "left": dx <= -_APART,
        "right": dx >= _APART,
        "above": dy <= -_APART,
        "below": dy >= _APART,
        "near": float(np.hypot(dx, dy)) <= _NEAR,
    }
    return [relation for relation, true in holds.items() if true]


def _caption(scene: Scene, rng: np.random.Generator) -> str:
    first, second = rng.permutation(len(scene.items))[:2]
    a, b = scene.items[first], scene.items[second]
    return pick(rng, TEMPLATES).format(
        a=_noun_phrase(a, rng),
        b=_noun_phrase(b, rng),
        place=pick(rng, PLACE_PHRASES[a.place]),
        ground=pick(rng, GROUND_PHRASES[scene.background]),
        number=pick(rng, NUMBERS[len(scene.items)]),
        relation=pick(rng, RELATION_PHRASES[pick(rng, relations(a, b))]),
        verb=pick(rng, VERBS),
    )


def _noun_phrase(item: Item, rng: np.random.Generator) -> str:
    mention_size, mention_texture, mention_colour, texture_first = rng.random(4)
    words, tail = [], ""
    if mention_size < _MENTION_SIZE[item.size]:
        words.append(pick(rng, SIZE_WORDS[item.size]))
    if mention_texture < _MENTION_TEXTURE[item.texture]:
        if texture_first < 0.7:
            words.append(pick(rng, TEXTURE_ADJECTIVES[item.texture]))
        else:
            tail = " " + pick(rng, TEXTURE_PHRASES[item.texture])
    if mention_colour < _MENTION_COLOUR:
        words.append(pick(rng, COLOUR_WORDS[item.colour]))
    words.append(pick(rng, SHAPE_NOUNS[item.shape]))
    article = "an" if words[0][0] in "aeiou" else "a"
    return " ".join([article, *words]) + tail
