"""One vector an item without any training: what a side says before a network has seen it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mispair.pairs.npy import chunks
from mispair.pairs.pairs import Regions, Side, Tokens
from mispair.pairs.tfidf import WIDTH, word_vectors


def item_vectors(side: Side, width: int = WIDTH) -> npt.NDArray[np.floating]:
    """(N, D): the mean of an item's regions, its vector, or the TF-IDF vector of its words.

    Args:
        side: The items.
        width: Largest width of the vectors of texts.
    """
    if isinstance(side, Tokens):
        return word_vectors(side.texts or side, width)
    if isinstance(side, Regions):
        return np.concatenate([part.mean(axis=1, dtype=np.float32) for _, part in chunks(side.features)])
    return np.asarray(side.features)
