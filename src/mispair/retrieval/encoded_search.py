"""Search with a model on image files and texts that it has never seen."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from mispair.encoders.cache import writable_cache
from mispair.encoders.encode import encode_images
from mispair.encoders.encoders import GridEncoder, image_encoder, text_encoder
from mispair.encoders.regions import as_cells
from mispair.errors import ConflictError, DamagedError, DataError, NotFoundError
from mispair.pairs.layouts.table import open_pairs
from mispair.pairs.origin import Origin
from mispair.pairs.pairs import FloatArray, Pairs, Regions, Side, Vectors, select
from mispair.pairs.tables import IMAGE_SUFFIXES, Table
from mispair.retrieval.matcher import Matcher
from mispair.retrieval.search import Hit, TextEncoder, best, encoded_query, find_images, find_row, find_texts


def image_features(
    origin: Origin,
    files: Sequence[Path],
    device: str = "auto",
    cache: Path | None = None,
    console: Console | None = None,
) -> tuple[FloatArray, dict[int, str]]:
    """Features of image files, made by the encoders in `Matcher.origin`.

    Args:
        origin: Of the model.
        files: The images.
        device: Where the encoder runs.
        cache: Folder of encodings; by default that of the user.
        console: Where to show progress.

    Returns:
        (n, D) vectors or (n, R, D) regions, zeros for unreadable files; and the problems of these, by number.
    """
    import pyarrow

    table = pyarrow.table({"image": [str(file) for file in files], "caption": [""] * len(files)})
    pairs = open_pairs(Table.of(table, "the images"), Path())
    pairs.allow_outside = True  # these files were named by who asks, not by a table
    place = writable_cache(cache)
    encoder = image_encoder(origin.image_model, device)
    if origin.grid is not None:
        encoder = GridEncoder(encoder, origin.grid)
    (found,) = encode_images(pairs, [encoder], place, console=console)
    vectors = found.cells.read(found.image)
    if isinstance(encoder, GridEncoder):
        return as_cells(vectors, encoder.channels, origin.projection), found.problems
    return vectors.astype(np.float32), found.problems


def search_files(
    matcher: Matcher, query: str, images: Path, top: int = 5, device: str = "auto", console: Console | None = None
) -> tuple[list[Hit], int]:
    """The `top` images of a folder that fit a text best, and the number of unreadable ones."""
    origin = known_origin(matcher)
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
    asked = encoded_query(matcher, query, _encode(origin, device))
    features, problems = image_features(origin, files, device, console=console)
    good = [number for number in range(len(files)) if number not in problems]
    if not good:
        raise DamagedError(f"none of {len(files):,} images can be read; the first: {problems[0]}", where=images)
    scores = matcher.score(features[good], asked)[:, 0]
    return [Hit(float(scores[row]), str(files[good[row]]), "") for row in best(scores, top)], len(problems)


def search_splits(
    matcher: Matcher, splits: Sequence[Pairs], query: str | None, image: str | None, top: int, device: str
) -> list[Hit]:
    """The `top` best answers from some splits of one data set.

    Args:
        matcher: The model.
        splits: Pairs to search.
        query: A text: finds images.
        image: An image of the data set, or a file: finds texts.
        top: How many.
        device: Where an encoder runs.
    """
    if query is not None:
        encode = _encode(matcher.origin or splits[0].origin, device)
        hits = [hit for pairs in splits for hit in find_images(matcher, pairs, query, top, encode=encode)]
    else:
        assert image is not None
        asked = _image_side(matcher, splits, image, device)
        hits = [hit for pairs in splits for hit in find_texts(matcher, pairs, asked, top)]
    return sorted(hits, key=lambda hit: -hit.score)[:top]


def _image_side(matcher: Matcher, splits: Sequence[Pairs], image: str, device: str) -> Side:
    """The features of an image of the data set, or of a file."""
    refused = None
    for pairs in splits:
        try:
            return select(pairs.left, np.array([find_row(pairs, image)]))
        except DataError as error:
            refused = refused or error
    if not Path(image).is_file():
        assert refused is not None
        raise refused
    features, problems = image_features(known_origin(matcher), [Path(image)], device)
    if problems:
        raise DamagedError(problems[0], where=image, advice="Give another image")
    return Vectors(features) if features.ndim == 2 else Regions(features)


def known_origin(matcher: Matcher) -> Origin:
    """Encoders that make features of new images for a model.

    Raises:
        ConflictError: The model does not know them.
    """
    if matcher.origin is None:
        raise ConflictError(
            "the model does not know which encoder made its training features, so it cannot read new images",
            advice="Train on what `mispair encode` wrote, or on the images themselves: mispair train photos.csv",
        )
    return matcher.origin


def _encode(origin: Origin | None, device: str) -> TextEncoder | None:
    """Encoder of texts for a model that takes vectors; None if it is unknown."""
    if origin is None or origin.text_model is None:
        return None
    encoder = functools.cache(functools.partial(text_encoder, origin.text_model, device))  # once for all splits
    return lambda texts: encoder().encode(texts).astype(np.float32)
