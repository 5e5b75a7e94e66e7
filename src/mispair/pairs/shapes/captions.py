"""Captions of a scene: a small grammar of English with synonyms. Every caption is true of its scene."""

from __future__ import annotations

from itertools import chain
from string import Formatter

import numpy as np

from mispair.pairs.shapes.scene import Item, Scene, pick

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


def describe(scene: Scene, rng: np.random.Generator) -> list[str]:
    """Five different captions of a scene."""
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
