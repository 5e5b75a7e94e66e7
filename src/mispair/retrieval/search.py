"""Finding the images for a text and the texts for an image."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath

import numpy as np

from mispair.errors import DataError
from mispair.pairs.pairs import FloatArray, Pairs, Side, Tokens, select
from mispair.pairs.vocabulary import UNK
from mispair.retrieval.matcher import Matcher

TextEncoder = Callable[[list[str]], FloatArray]  # texts to vectors (n, D)


@dataclass(frozen=True)
class Hit:
    """One answer. For a text found by an image, `image` is the image that the text was written for."""

    score: float
    image: str
    text: str


def find_images(
    matcher: Matcher, pairs: Pairs, query: str, top: int = 5, *, encode: TextEncoder | None = None
) -> list[Hit]:
    """The images that fit a text best; `text` is that caption of each which fits it best: others may be mismatched.

    Args:
        matcher: The model.
        pairs: What is searched.
        query: The text.
        top: How many.
        encode: Makes the vectors of texts, for a model that was trained on such vectors.

    Raises:
        DataError: The model cannot read a text, or knows no word of it.
    """
    scores = matcher.score(pairs.left, encoded_query(matcher, query, encode))[:, 0]
    return [Hit(float(scores[row]), image_name(pairs, row), _caption(matcher, pairs, row)) for row in best(scores, top)]


def _caption(matcher: Matcher, pairs: Pairs, row: int) -> str:
    """The caption of an image that fits it best; empty if it has none."""
    captions = np.flatnonzero(pairs.link == row)
    if not len(captions):
        return ""
    if len(captions) > 1:
        fits = matcher.score(select(pairs.left, np.array([row])), select(pairs.right, captions))[0]
        captions = captions[best(fits, 1)]
    return text_name(pairs, int(captions[0]))


def encoded_query(matcher: Matcher, query: str, encode: TextEncoder | None) -> list[str] | FloatArray:
    """A text as a model takes it.

    Raises:
        DataError: The model cannot read a text, or knows no word of it.
    """
    if matcher.vocabulary is None:
        if encode is None:
            raise DataError(
                "This model was trained on vectors, and its data does not say which encoder made them (as encode.json "
                "of `mispair encode` does); search by --image instead."
            )
        vector = encode([query]) if query.strip() else None
        if vector is None or not vector.any():
            raise DataError(f'The encoder knows no word of "{query}"; use words like those of the captions.')
        return vector
    ids, _ = matcher.vocabulary.encode([query])
    if (ids[1:-1] == UNK).all():
        raise DataError(f'The model knows no word of "{query}"; use words like those of its training captions.')
    return [query]


def find_texts(matcher: Matcher, pairs: Pairs, image: str | Side, top: int = 5) -> list[Hit]:
    """The texts that fit an image best.

    Args:
        matcher: The model.
        pairs: What is searched.
        image: An image of the pairs, see `find_row`; or the features of any image, as a side of one item.
        top: How many.
    """
    asked = select(pairs.left, np.array([find_row(pairs, image)])) if isinstance(image, str) else image
    scores = matcher.score(asked, pairs.right)[0]
    return [
        Hit(float(scores[pair]), image_name(pairs, int(pairs.link[pair])), text_name(pairs, pair))
        for pair in best(scores, top)
    ]


def best(scores: FloatArray, top: int) -> list[int]:
    """Positions of the `top` highest scores, equal ones in their order."""
    return [int(position) for position in np.argsort(-scores, kind="stable")[: max(top, 0)]]


def find_row(pairs: Pairs, image: str) -> int:
    """Row of an image given by its path, the end of its path, its name without ending, or its number."""
    wanted = PurePath(image).parts
    for row, name in enumerate(pairs.left_ids):
        path = PurePath(name)
        if image and (image in (name, path.stem) or path.parts[-len(wanted) :] == wanted):
            return row
    if image.isdecimal() and int(image) < len(pairs.left):
        return int(image)
    names = f", or a name such as {pairs.left_ids[0]}" if pairs.left_ids else ""
    raise DataError(f'{pairs.name} has no image "{image}"; give a number from 0 to {len(pairs.left) - 1:,}{names}.')


def image_name(pairs: Pairs, row: int) -> str:
    return pairs.left_ids[row] if pairs.left_ids else str(row)


def text_name(pairs: Pairs, pair: int) -> str:
    if isinstance(pairs.right, Tokens) and pairs.right.texts:
        return pairs.right.texts[pair]
    return pairs.right_ids[pair] if pairs.right_ids else str(pair)
