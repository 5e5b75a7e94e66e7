"""Search with a model: images for a text, texts for an image, also among files outside the data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

import numpy as np
from rich.console import Console

from mispair.encoders.cache import writable_cache
from mispair.encoders.encode import encode_images
from mispair.encoders.encoders import GridEncoder, image_encoder, parts_of, text_encoder
from mispair.encoders.regions import as_cells
from mispair.errors import ConflictError, DamagedError, DataError, NotFoundError
from mispair.pairs import shards
from mispair.pairs.layouts.table import open_pairs
from mispair.pairs.origin import Origin
from mispair.pairs.pairs import Pairs, Regions, Side, Tokens, Vectors, select
from mispair.pairs.tables import IMAGE_SUFFIXES, Table
from mispair.pairs.vocabulary import UNK
from mispair.retrieval.matcher import Matcher
from mispair.support.arrays import FloatArray

Query = list[str] | FloatArray  # a text, or its vector (1, D)


@dataclass(frozen=True)
class Hit:
    """One answer; a found text has the image of its pair."""

    score: float
    image: str
    text: str


def search_files(
    matcher: Matcher, query: str, images: Path, top: int = 5, device: str = "auto", console: Console | None = None
) -> tuple[list[Hit], int]:
    """Find the `top` images of a folder for a text; count the unreadable images."""
    origin = _known_origin(matcher)
    if not images.is_dir():
        raise NotFoundError("no such folder", where=images, expected="`images`: a folder of image files")
    files = [
        path
        for path in sorted(images.rglob("*"))
        if path.suffix.lower() in IMAGE_SUFFIXES
        and not any(part.startswith(".") for part in path.relative_to(images).parts)
    ]
    if not files:
        raise NotFoundError("no images in this folder", where=images, expected="files such as dog.jpg")
    asked = _encoded_query(matcher, query, origin, device)
    features, problems = _image_features(origin, files, device, console)
    good = [number for number in range(len(files)) if number not in problems]
    if not good:
        raise DamagedError(f"none of {len(files):,} images can be read; the first: {problems[0]}", where=images)
    scores = matcher.score(features[good], asked)[:, 0]
    return [Hit(float(scores[row]), str(files[good[row]]), "") for row in best(scores, top)], len(problems)


def search_pairs(
    matcher: Matcher, splits: Sequence[Pairs], query: str | None, image: str | None, top: int, device: str
) -> list[Hit]:
    """Find the `top` answers in some splits of a data set: images for the text `query`, or texts for an `image`.

    An image is one of the data set (see `find_row`) or a file.
    """
    if query is not None:
        text = _encoded_query(matcher, query, matcher.origin or splits[0].origin, device)
        hits = [hit for pairs in splits for hit in find_images(matcher, pairs, text, top)]
    else:
        asked = _image_side(matcher, splits, str(image), device)
        hits = [hit for pairs in splits for hit in _find_texts(matcher, pairs, asked, top)]
    return sorted(hits, key=lambda hit: -hit.score)[:top]


def find_images(matcher: Matcher, pairs: Pairs, query: Query, top: int) -> list[Hit]:
    """Find the `top` images for a text, each with its best caption: others may be mismatched."""
    scores = matcher.score(pairs.left, query)[:, 0]
    return [
        Hit(float(scores[row]), _image_name(pairs, row), _caption(matcher, pairs, row)) for row in best(scores, top)
    ]


def _caption(matcher: Matcher, pairs: Pairs, row: int) -> str:
    """The best caption of an image; empty if it has none."""
    captions = np.flatnonzero(pairs.link == row)
    if not len(captions):
        return ""
    if len(captions) > 1:
        fits = matcher.score(select(pairs.left, np.array([row])), select(pairs.right, captions))[0]
        captions = captions[best(fits, 1)]
    return _text_name(pairs, int(captions[0]))


def _find_texts(matcher: Matcher, pairs: Pairs, image: Side, top: int) -> list[Hit]:
    """Find the `top` texts for an image."""
    scores = matcher.score(image, pairs.right)[0]
    return [
        Hit(float(scores[pair]), _image_name(pairs, int(pairs.link[pair])), _text_name(pairs, pair))
        for pair in best(scores, top)
    ]


def best(scores: FloatArray, top: int) -> list[int]:
    """Positions of the `top` highest scores, equal ones in their order."""
    return [int(position) for position in np.argsort(-scores, kind="stable")[: max(top, 0)]]


def _image_name(pairs: Pairs, row: int) -> str:
    return pairs.left_ids[row] if pairs.left_ids else str(row)


def _text_name(pairs: Pairs, pair: int) -> str:
    if isinstance(pairs.right, Tokens) and pairs.right.texts:
        return pairs.right.texts[pair]
    return pairs.right_ids[pair] if pairs.right_ids else str(pair)


def find_row(pairs: Pairs, image: str) -> int:
    """Find an image by its path, the end of its path, its name without suffix, or its number."""
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


def _image_side(matcher: Matcher, splits: Sequence[Pairs], image: str, device: str) -> Side:
    """Features of an image of the data set, or of a file."""
    refused = None
    for pairs in splits:
        try:
            return select(pairs.left, np.array([find_row(pairs, image)]))
        except DataError as error:
            refused = refused or error
    if refused is not None and not Path(image).is_file():
        raise refused
    features, problems = _image_features(_known_origin(matcher), [Path(image)], device)
    if problems:
        raise DamagedError(problems[0], where=image, advice="Give another image")
    return Vectors(features) if features.ndim == 2 else Regions(features)


def _known_origin(matcher: Matcher) -> Origin:
    if matcher.origin is None:
        what = "the model does not know which encoder made its training features, so it cannot read new images"
        advice = "Train on the output of `mispair encode`, or on the images themselves: mispair train photos.csv"
        raise ConflictError(what, advice=advice)
    return matcher.origin


def _encoded_query(matcher: Matcher, query: str, origin: Origin | None, device: str) -> Query:
    """Turn a text into input of the model.

    Raises:
        ConflictError: The model takes vectors, and their encoder is unknown.
        NotFoundError: The model knows no word of the text.
    """
    asked: Query = [query]
    if matcher.vocabulary is not None:
        ids, _ = matcher.vocabulary.encode(asked)
        known = bool((ids[1:-1] != UNK).any())
    elif origin is None or origin.text_model is None:
        what = "the model was trained on vectors, and its data does not say which encoder made them"
        expected = "encode.json of `mispair encode` beside the data"
        raise ConflictError(what, where="query", expected=expected, advice="Search by `image` instead")
    elif known := bool(query.strip()):
        encoders = [text_encoder(name, device) for name in parts_of(origin.text_model)]
        each = [np.asarray(encoder.encode([query]), np.float32) for encoder in encoders]
        asked = each[0] if len(each) == 1 else np.hstack([shards.unit(vectors)[0] for vectors in each])
        known = bool(asked.any())
    if not known:
        advice = "Use words like those of the training captions"
        raise NotFoundError(f'the model knows no word of "{query}"', where="query", advice=advice)
    return asked


def _image_features(
    origin: Origin, files: Sequence[Path], device: str, console: Console | None = None
) -> tuple[FloatArray, dict[int, str]]:
    """Encode image files like the training images: (n, D) or (n, R, D), zeros if unreadable; and the problems."""
    import pyarrow

    table = pyarrow.table({"image": [str(file) for file in files], "caption": [""] * len(files)})
    pairs = open_pairs(Table.of(table, "the images"), Path())
    pairs.allow_outside = True  # the user named these files, not a table
    place = writable_cache()
    if origin.grid is not None:
        encoder = GridEncoder(image_encoder(origin.image_model, device), origin.grid)
        (found,) = encode_images(pairs, [encoder], place, console=console)
        return as_cells(found.of_pairs.read(slice(None)), encoder.channels, origin.projection), found.problems
    encoders = [image_encoder(name, device) for name in parts_of(origin.image_model)]
    views = encode_images(pairs, encoders, place, console=console)
    side = shards.join_views([shards.SideRows.of([view.of_pairs]) for view in views], "")
    rows = np.arange(len(files))
    return side.gather(rows, np.float16).astype(np.float32), views[0].problems  # half precision, as in the training
