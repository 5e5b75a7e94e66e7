"""Vectors of texts from their words alone, to audit texts without an encoder.

Words are weighted by TF-IDF (sublinear term frequency, smooth inverse document frequency, rows of unit length) and
reduced to their main directions by a randomised singular value decomposition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mispair.pairs.pairs import Tokens
from mispair.pairs.vocabulary import SPECIAL_WORDS, tokenize
from mispair.support.arrays import IntArray

if TYPE_CHECKING:
    from scipy.sparse import csr_array

FloatArray = npt.NDArray[np.float64]
WIDTH = 1024
_MIN_TEXTS = 2  # a word of a single text makes it similar to no other
_OVERSAMPLES = 64  # further directions, dropped at the end, make the kept ones exact sooner
_ROUNDS = 6
_ROWS = 1 << 15  # texts at a time


def word_vectors(texts: Sequence[str] | Tokens, width: int = WIDTH) -> npt.NDArray[np.float32]:
    """One vector a text (N, D): its TF-IDF weights in the main directions of all texts, at least one, at most `width`.

    The same texts give the same vectors. A text that shares no word with another text is a zero vector. Unknown words
    of token ids are left out.
    """
    weights = tfidf(*_tokens_of(texts) if isinstance(texts, Tokens) else _split(texts), n=len(texts))
    if not weights.shape[1]:
        return np.zeros((len(texts), 1), dtype=np.float32)
    directions = _main_directions(weights, width)
    vectors = np.empty((len(texts), directions.shape[1]), dtype=np.float32)
    for start, block in _blocks(weights):
        vectors[start : start + block.shape[0]] = block @ directions
    return vectors


def tfidf(rows: IntArray, words: IntArray, n: int) -> csr_array:
    """The TF-IDF matrix (n, V) of words in several of n texts, from the text and the number of each word."""
    from scipy.sparse import csr_array
    from sklearn.feature_extraction.text import TfidfTransformer

    size = n, int(words.max(initial=-1)) + 1
    counts = csr_array((np.ones(len(words)), (rows, words)), shape=size)
    counts.sum_duplicates()
    counts = counts[:, np.bincount(counts.indices, minlength=size[1]) >= _MIN_TEXTS]
    if not n or not counts.shape[1]:
        return counts
    return csr_array(TfidfTransformer(sublinear_tf=True).fit_transform(counts))


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


def _blocks(weights: csr_array) -> Iterator[tuple[int, csr_array]]:
    """Some consecutive rows at a time, with the number of the first."""
    return ((start, weights[start : start + _ROWS]) for start in range(0, weights.shape[0], _ROWS))


def _main_directions(weights: csr_array, width: int) -> FloatArray:
    """Right singular vectors of the largest singular values (V, at most width), by subspace iteration.

    Only V x (width + oversamples) numbers and one block of rows are held, however many texts there are; scikit-learn's
    TruncatedSVD holds the projections of all texts and takes three times as long.
    """
    import torch

    count = weights.shape[1]
    size = min(width + _OVERSAMPLES, count)
    if size == count:
        basis = np.eye(size)  # all directions there are: nothing to search for
    else:
        basis = torch.randn(count, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).numpy()
        for _ in range(_ROUNDS):
            basis = np.linalg.qr(basis)[0]
            basis = sum((block.T @ (block @ basis) for _, block in _blocks(weights)), start=np.zeros_like(basis))
        basis = np.linalg.qr(basis)[0]
    gram = np.zeros((size, size))
    for _, block in _blocks(weights):
        projected = block @ basis
        gram += projected.T @ projected
    turned = basis @ np.linalg.eigh(gram)[1][:, ::-1][:, :width]
    # A direction and its opposite are equally right; the largest entry decides, so that all machines agree.
    largest = np.take_along_axis(turned, np.abs(turned).argmax(axis=0)[None], axis=0)
    signed: FloatArray = turned * np.where(largest < 0, -1.0, 1.0)
    return signed
