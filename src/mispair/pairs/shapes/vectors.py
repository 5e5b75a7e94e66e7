"""One vector an image and one a text, without any network: the encoders named `shapes`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from mispair.pairs.shapes.captions import grammar_words
from mispair.pairs.vocabulary import SPECIAL_WORDS, Vocabulary

Floats = npt.NDArray[np.float32]


def image_vectors(windows: Floats) -> Floats:
    """(N, 2 F): mean and maximum of the windows (N, 36, F) of `grid_features`."""
    return np.concatenate([windows.mean(axis=1), windows.max(axis=1)], axis=1)


def word_counts(texts: Sequence[str]) -> Floats:
    """(N, V): how often each text has each word of the captions of `shapes`; other words are left out."""
    words = vocabulary()
    ids, offsets = words.encode(text.replace(".", " ") for text in texts)  # of several sentences
    counts = np.zeros((len(texts), len(words)), dtype=np.float32)
    np.add.at(counts, (np.repeat(np.arange(len(texts)), np.diff(offsets)), ids), 1)
    return counts[:, len(SPECIAL_WORDS) :]


@cache
def vocabulary() -> Vocabulary:
    """Every word of the captions of `shapes`."""
    return Vocabulary((*SPECIAL_WORDS, *grammar_words()))
