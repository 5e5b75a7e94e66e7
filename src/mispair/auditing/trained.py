"""Pairs that mispair holds itself as what an audit reads: as they are, or as a trained model sees them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mispair.api import with_noise
from mispair.auditing import names
from mispair.auditing.source import Source, from_memory
from mispair.auditing.words import word_vectors
from mispair.data import formats
from mispair.data.arrays import chunks
from mispair.data.pairs import Pairs, Regions, Side, Tokens
from mispair.matcher import Matcher

Array = npt.NDArray[np.floating]


def is_run(folder: Path) -> bool:
    """Whether this is what `mispair train` leaves behind."""
    return (folder / "best.safetensors").is_file()


def from_run(run: Path, device: str = "auto", images: Path | None = None) -> Source:
    """The training pairs of a run, noise and all, by the vectors of its networks; the two sides share a space."""
    matcher = Matcher.load(run, device)
    config = matcher.config
    pairs = formats.load(config.data, "train", vocabulary=matcher.vocabulary, dev_protocol=config.dev_protocol)
    pairs = with_noise(config, pairs)
    left, right = matcher.encode(pairs.left, "left"), matcher.encode(pairs.right, "right")
    return _described(pairs, left, right, images or formats.find_folder(config.data) / "images")


def from_pairs(pairs: Pairs, images: Path | None = None) -> Source:
    """Pairs as they are: the mean of an item's regions, its vector, or a vector of its words."""
    return _described(pairs, _vectors(pairs.left), _vectors(pairs.right), images)


def _vectors(side: Side) -> Array:
    if isinstance(side, Tokens):
        return word_vectors(side.texts or side)
    if isinstance(side, Regions):
        return np.concatenate([part.mean(axis=1, dtype=np.float32) for _, part in chunks(side.features)])
    return np.asarray(side.features)


def _described(pairs: Pairs, left: Array, right: Array, images: Path | None) -> Source:
    """With ids, captions and pictures, where they are known."""
    shared = len(np.unique(pairs.link)) < len(pairs)
    texts = pairs.right.texts if isinstance(pairs.right, Tokens) else pairs.right_ids
    source = from_memory(left[pairs.link], right, groups=pairs.link if shared else None, texts=texts or None)
    source = replace(source, name=pairs.name)
    if not pairs.left_ids:
        return source
    pictures = names.as_texts(pairs.left_ids)
    return replace(
        source,
        image_names=lambda rows: names.look_up(pictures, pairs.link[rows]),
        images=() if images is None else (images,),
        names=replace(source.names, ids=_ids(pairs)),
    )


def _ids(pairs: Pairs) -> object:
    """The name of the picture and the number of the pair, such as `photo.jpg#17`: both can be looked up."""
    return names.as_texts(f"{pairs.left_ids[row]}#{number}" for number, row in enumerate(pairs.link))
