"""Captions of a file, for measurements at the size of a real data set."""

from __future__ import annotations

import functools
import gzip
import zlib
from pathlib import Path

import numpy as np

from mispair.errors import DamagedError
from mispair.pairs.pairs import Pairs, Tokens
from mispair.pairs.vocabulary import Vocabulary
from mispair.support.files import LARGEST_TEXT, regular
from synthetic import CAPTIONS, synthetic_pairs, synthetic_vectors


def pairs_of(captions: Path | None, images: int, *, seed: int = 0) -> Pairs:
    """Synthetic images with captions of a file, with one a line (.gz or not); by default random ones."""
    texts = None if captions is None else read_captions(captions, CAPTIONS * images, seed)
    return synthetic_pairs(images, seed=seed, texts=texts)


def stand_in(vectors: bool, captions: Path | None, images: int, *, seed: int = 0) -> Pairs:
    """Vectors with one pair an image, or regions with five captions each."""
    return synthetic_vectors(images, seed=seed) if vectors else pairs_of(captions, images, seed=seed)


def read_captions(path: Path, count: int, seed: int) -> Tokens:
    """Consecutive captions of a file; the seed chooses where they start."""
    lines, vocabulary = _words(path)
    start = seed * count % len(lines)
    chosen = [vocabulary.encode_tokens(lines[(start + number) % len(lines)]) for number in range(count)]
    offsets = np.concatenate([[0], np.cumsum([len(text) for text in chosen])]).astype(np.int64)
    return Tokens(np.concatenate(chosen).astype(np.int32), offsets, vocabulary)


@functools.cache
def _words(path: Path) -> tuple[list[list[str]], Vocabulary]:
    """The words of each line, and the vocabulary of all lines."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(regular(path), "rb") as file:
            content = file.read(LARGEST_TEXT + 1)
        if len(content) > LARGEST_TEXT:
            raise OSError(f"it has more than the {LARGEST_TEXT / 1e6:,.0f} MB that are read")
        lines = [line.split() for line in content.decode("utf-8").splitlines() if line.strip()]
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise DamagedError(f"cannot be read: {error}", where=path, expected="captions, one a line") from error
    if not lines:
        raise DamagedError("no captions", where=path, expected="one a line")
    return lines, Vocabulary.build(" ".join(line) for line in lines)
