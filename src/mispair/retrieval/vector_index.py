"""Search among the vectors of many items: exactly, or by an approximate index where usearch is installed.

An index on disk is a folder with the vectors, which are mapped into memory, and the graph of usearch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mispair.data.npy import check_finite, open_array
from mispair.data.pairs import FloatArray, IntArray
from mispair.errors import ConfigError, DataError
from mispair.support.files import replacing

VECTORS, GRAPH = "vectors.npy", "graph.usearch"
CHUNK = 1 << 16  # vectors compared at a time
EXACT_UP_TO = 20_000  # items among which an exact search takes a few milliseconds


class VectorIndex:
    """The nearest of N unit vectors by their dot product.

    Attributes:
        vectors: (N, D) in half precision, in memory or mapped from a file.
        approximate: Whether usearch answers; else all vectors are compared.
    """

    def __init__(self, vectors: FloatArray, encode: Callable[[Any], FloatArray], *, graph: Any | None = None) -> None:
        self.vectors, self._encode, self._graph = vectors, encode, graph

    @property
    def approximate(self) -> bool:
        return self._graph is not None

    def __len__(self) -> int:
        return len(self.vectors)

    def __repr__(self) -> str:
        how = "approximate (usearch)" if self.approximate else "exact"
        return f"<VectorIndex: {len(self):,} items of width {self.vectors.shape[1]}, {how} search>"

    def search(self, query: str | FloatArray, top: int = 10, *, exact: bool = False) -> tuple[IntArray, FloatArray]:
        """Rows of the best items and their scores, best first.

        Args:
            query: A text, or the features of one item of the other side than the one that is indexed.
            top: How many.
            exact: Compare all items, even if there is an approximate index.
        """
        if top < 1:
            raise ConfigError(f"top is {top}; it must be at least 1.")
        item: Any = [query] if isinstance(query, str) else query[None]
        vector = self._encode(item)[0]
        return self.nearest(vector, top, exact=exact)

    def nearest(self, vector: FloatArray, top: int, *, exact: bool = False) -> tuple[IntArray, FloatArray]:
        """The same for a vector (D,) of the common space."""
        if vector.shape != self.vectors.shape[1:]:
            raise DataError(
                f"The query has the shape {vector.shape}; this index has vectors of {self.vectors.shape[1]}."
            )
        vector, top = vector.astype(np.float32), min(top, len(self))
        if self._graph is None or exact:
            return self._compare(vector, top)
        found = np.asarray(self._graph.search(vector, top).keys, dtype=np.int64)
        scores = self.vectors[found].astype(np.float32) @ vector  # those of the stored vectors, as the exact search
        order = np.lexsort((found, -scores))
        return found[order], scores[order]

    def _compare(self, vector: FloatArray, top: int) -> tuple[IntArray, FloatArray]:
        scores = np.concatenate([
            self.vectors[start : start + CHUNK].astype(np.float32) @ vector for start in range(0, len(self), CHUNK)
        ])  # fmt: skip
        rows = np.argpartition(-scores, top - 1)[:top]
        order = np.lexsort((rows, -scores[rows]))
        return rows[order].astype(np.int64), scores[rows][order]


def build_index(
    vectors: FloatArray,
    encode: Callable[[Any], FloatArray],
    out: Path | None,
    approximate: bool | None,
) -> VectorIndex:
    """An index of unit vectors (N, D).

    Args:
        vectors: Of the items.
        encode: Vectors of queries.
        out: New folder to keep it in; None keeps it in memory.
        approximate: Whether to use usearch; by default for more than 20,000 items, where it is installed.
    """
    check_finite(vectors, "The indexed items")
    if not len(vectors):
        raise DataError("There are no items to index.")
    usearch = _usearch() if approximate or (approximate is None and len(vectors) > EXACT_UP_TO) else None
    if approximate and usearch is None:
        raise ConfigError("An approximate index needs usearch; install it: pip install 'mispair[index]'.")
    half, graph = vectors.astype(np.float16), None
    if usearch is not None:
        graph = usearch.Index(ndim=half.shape[1], metric="ip", dtype="f16")
        graph.add(np.arange(len(half)), half)
    if out is not None:
        if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
            raise DataError(f"{out} exists already; choose another folder for the index, or remove it first.")
        out.mkdir(parents=True, exist_ok=True)
        if graph is not None:
            graph.save(str(out / GRAPH))
        with replacing(out / VECTORS) as file:  # the last: without it there is no index
            np.save(file, half)
        return open_index(out, encode)
    return VectorIndex(half, encode, graph=graph)


def open_index(folder: str | Path, encode: Callable[[Any], FloatArray]) -> VectorIndex:
    """An index that was written to a folder, mapped into memory."""
    path = Path(folder)
    try:
        vectors = open_array(path / VECTORS, ndim=2)
    except DataError as error:
        raise DataError(f"{path} holds no index; make one with matcher.index(items, out=...). {error}") from None
    usearch, graph = _usearch(), None
    if usearch is not None and (path / GRAPH).is_file():
        graph = usearch.Index.restore(str(path / GRAPH), view=True)
        if graph is None or (len(graph), graph.ndim) != vectors.shape:
            raise DataError(f"{path / GRAPH} is damaged or of other vectors; make the index again.")
    return VectorIndex(vectors, encode, graph=graph)


def _usearch() -> Any | None:
    try:
        return importlib.import_module("usearch.index")
    except ImportError:
        return None
