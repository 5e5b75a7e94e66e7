"""Pairs in memory as what an audit reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mispair.pairs import row_ids
from mispair.pairs.item_vectors import item_vectors
from mispair.pairs.pairs import Pairs, Tokens
from mispair.pairs.row_ids import Texts
from mispair.pairs.shards import ArrayRows, Side
from mispair.pairs.source import Source

Array = npt.NDArray[np.floating]


def from_pairs(pairs: Pairs, images: Path | None = None) -> Source:
    """Pairs by their own features: the mean of an item's regions, its vector, or the TF-IDF vector of its words."""
    return from_vectors(pairs, item_vectors(pairs.left), item_vectors(pairs.right), images)


def from_vectors(pairs: Pairs, left: Array, right: Array, images: Path | None) -> Source:
    """Pairs by one vector for each left and each right item, with the ids, captions and image names that are known."""
    groups = pairs.left_groups[pairs.link]
    shared = len(np.unique(groups)) < len(pairs)
    texts = captions(pairs)
    known = row_ids.from_lists(None, groups if shared else None, len(pairs))
    source = Source(Side.of([ArrayRows(left, pairs.link)]), Side.of([ArrayRows(right)]), "memory", pairs.name, known)
    if texts:
        source = replace(source, captions=Texts.of(texts))
    if not pairs.left_ids:
        return source
    image_names = Texts.of(pairs.left_ids)
    return replace(
        source,
        image_names=lambda rows: image_names(pairs.link[rows]),
        images=() if images is None else (images,),
        names=replace(source.names, ids=pair_ids(pairs)),
    )


def captions(pairs: Pairs) -> Sequence[str]:
    """The texts of the right items; empty where there are none."""
    return pairs.right.texts if isinstance(pairs.right, Tokens) else pairs.right_ids


def pair_ids(pairs: Pairs) -> Any:
    """As an audit of the folder gives them: `photo.jpg`, or `photo.jpg#0`, `photo.jpg#1` where it has several pairs.

    Pairs with injected noise are not those of the folder: the number of the pair follows the name of the image that it
    has now, such as `photo.jpg#17`. None where the left items have no names.
    """
    if not pairs.left_ids:
        return None
    images = [pairs.left_ids[row] for row in pairs.link]
    if pairs.mismatched is None or not pairs.mismatched.any():
        return row_ids.from_images(images).ids
    return row_ids.as_texts(f"{image}#{number}" for number, image in enumerate(images))
