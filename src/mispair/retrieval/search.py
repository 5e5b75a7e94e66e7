"""Find the images for a text and the texts for an image."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath

import numpy as np

from mispair.errors import ConflictError, NotFoundError
from mispair.pairs.pairs import FloatArray, Pairs, Side, Tokens, select
from mispair.pairs.vocabulary import UNK
from mispair.retrieval.matcher import Matcher

TextEncoder = Callable[[list[str]], FloatArray]  # texts to vectors (n, D)


@dataclass(frozen=True)
class Hit:
    """One answer. `image` of a found text is the image that it was written for."""

    score: float
    image: str
    text: str


def find_images(
    matcher: Matcher, pairs: Pairs, query: str, top: int = 5, *, encode: TextEncoder | None = None
) -> list[Hit]:
    """The `top` images that fit a text best, each with its best caption: others may be mismatched.

    `encode` makes the vectors of texts, for a model that was trained on such vectors.
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
    """A text in the form that a model takes.

    Raises:
        ConflictError: The model cannot read texts.
        NotFoundError: It knows no word of this one.
    """
    asked: list[str] | FloatArray = [query]
    if matcher.vocabulary is not None:
        ids, _ = matcher.vocabulary.encode([query])
        known = bool((ids[1:-1] != UNK).any())
    elif encode is None:
        raise ConflictError(
            "the model was trained on vectors, and its data does not say which encoder made them",
            where="query",
            expected="encode.json of `mispair encode` beside the data",
            advice="Search by `image` instead",
        )
    elif known := bool(query.strip()):
        asked = encode([query])
        known = bool(asked.any())
    if not known:
        advice = "Use words like those of the training captions"
        raise NotFoundError(f'the model knows no word of "{query}"', where="query", advice=advice)
    return asked


def find_texts(matcher: Matcher, pairs: Pairs, image: str | Side, top: int = 5) -> list[Hit]:
    """The `top` texts that fit an image best: one of the pairs, see `find_row`, or a side of one item."""
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
    """Row of an image, given by its path, the end of its path, its name without suffix, or its number."""
    wanted = PurePath(image).parts
    for row, name in enumerate(pairs.left_ids):
        path = PurePath(name)
        if image and (image in (name, path.stem) or path.parts[-len(wanted) :] == wanted):
            return row
    if image.isdecimal() and int(image) < len(pairs.left):
        return int(image)
    example = f", or a name such as {pairs.left_ids[0]}" if pairs.left_ids else ""
    expected = f"a number from 0 to {len(pairs.left) - 1:,}{example}"
    raise NotFoundError(f'there is no image "{image}"', where=pairs.name, expected=expected)


def image_name(pairs: Pairs, row: int) -> str:
    return pairs.left_ids[row] if pairs.left_ids else str(row)


def text_name(pairs: Pairs, pair: int) -> str:
    if isinstance(pairs.right, Tokens) and pairs.right.texts:
        return pairs.right.texts[pair]
    return pairs.right_ids[pair] if pairs.right_ids else str(pair)
