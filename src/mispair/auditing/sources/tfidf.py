"""Vectors of texts from their words alone, so that texts without an encoder can be audited.

Words are weighted by TF-IDF (sublinear term frequency, smooth inverse document frequency, rows of unit length) and
reduced to their main directions by a randomised singular value decomposition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mispair.data.pairs import IntArray, Tokens
from mispair.data.vocabulary import SPECIAL_WORDS, tokenize

WIDTH = 1024
_AT_LEAST = 2  # texts: a word of a single text says nothing about its likeness to others
_SPARE = 64  # more directions than asked for, dropped at the end, make the kept ones exact sooner
_ROUNDS = 6
_ROWS = 1 << 15  # texts worked on at a time


def word_vectors(texts: Sequence[str] | Tokens, width: int = WIDTH) -> npt.NDArray[np.float32]:
    """One vector a text (N, width): its weighted words in the main directions of all texts.

    The same texts give the same vectors. A text without a word that another text has, too, is a zero vector.

    Args:
        texts: Texts, or texts as token ids (of which unknown words are left out).
        width: Number of directions; there are no more than different words, but always one.
    """
    weights = _Weights(*_tokens_of(texts) if isinstance(texts, Tokens) else _split(texts), n=len(texts))
    if not weights.words:
        return np.zeros((len(texts), 1), dtype=np.float32)
    directions = _main_directions(weights, width)
    vectors = np.empty((len(texts), directions.shape[1]), dtype=np.float32)
    for start, block in weights.blocks():
        vectors[start : start + block.shape[0]] = torch.sparse.mm(block, directions).numpy()
    return vectors


def _split(texts: Sequence[str]) -> tuple[IntArray, IntArray]:
    """Text and word number of every word."""
    index: dict[str, int] = {}
    words: list[int] = []
    lengths = np.zeros(len(texts), dtype=np.int64)
    for row, text in enumerate(texts):
        tokens = tokenize(text)
        lengths[row] = len(tokens)
        words.extend(index.setdefault(token, len(index)) for token in tokens)
    return np.repeat(np.arange(len(texts)), lengths), np.asarray(words, dtype=np.int64)


def _tokens_of(texts: Tokens) -> tuple[IntArray, IntArray]:
    rows = np.repeat(np.arange(len(texts)), texts.lengths)
    words = texts.ids[texts.offsets[0] : texts.offsets[-1]].astype(np.int64)
    real = words >= len(SPECIAL_WORDS)
    return rows[real], words[real]


class _Weights:
    """The TF-IDF matrix (N, V), sparse, row by row."""

    def __init__(self, rows: IntArray, words: IntArray, n: int) -> None:
        different = int(words.max(initial=-1)) + 1
        cells, counts = np.unique(rows * max(1, different) + words, return_counts=True)
        rows, words = cells // max(1, different), cells % max(1, different)
        texts_with = np.bincount(words, minlength=different)
        kept = texts_with >= _AT_LEAST
        self.n, self.words = n, int(kept.sum())
        inside = kept[words]
        self._columns = (np.cumsum(kept) - 1)[words[inside]]
        rows = rows[inside]
        rarity = np.log((1 + n) / (1 + texts_with)) + 1
        values = (1 + np.log(counts[inside])) * rarity[words[inside]]
        lengths = np.sqrt(np.bincount(rows, weights=values**2, minlength=n))
        self._rows, self._values = rows, values / lengths[rows]

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Some consecutive rows at a time, with the number of the first."""
        for start in range(0, self.n, _ROWS):
            stop = min(start + _ROWS, self.n)
            low, high = np.searchsorted(self._rows, [start, stop])
            places = torch.from_numpy(np.stack([self._rows[low:high] - start, self._columns[low:high]]))
            values = torch.from_numpy(self._values[low:high])
            size = (stop - start, self.words)
            yield start, torch.sparse_coo_tensor(places, values, size, is_coalesced=True, check_invariants=False)


def _main_directions(weights: _Weights, width: int) -> Tensor:
    """Right singular vectors of the largest singular values (V, at most width), by subspace iteration.

    Only V x (width + spare) numbers and one block of rows are held, however many texts there are.
    """
    size = min(width + _SPARE, weights.words)
    if size == weights.words:
        basis = torch.eye(size, dtype=torch.float64)  # all directions there are: nothing to search for
    else:
        generator = torch.Generator().manual_seed(0)
        basis = torch.randn(weights.words, size, dtype=torch.float64, generator=generator)
        for _ in range(_ROUNDS):
            basis = torch.linalg.qr(basis)[0]
            basis = sum((torch.sparse.mm(block.t(), torch.sparse.mm(block, basis)) for _, block in weights.blocks()),
                        start=torch.zeros_like(basis))  # fmt: skip
        basis = torch.linalg.qr(basis)[0]
    gram = torch.zeros(size, size, dtype=torch.float64)
    for _, block in weights.blocks():
        projected = torch.sparse.mm(block, basis)
        gram += projected.T @ projected
    turned = basis @ torch.linalg.eigh(gram)[1].flip(1)[:, :width]
    # A direction and its opposite are equally right; the largest entry decides, so that all machines agree.
    largest = turned.gather(0, turned.abs().argmax(dim=0, keepdim=True))
    signed: Tensor = turned * torch.where(largest < 0, -1.0, 1.0)
    return signed
