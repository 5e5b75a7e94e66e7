"""Search the vectors of many items: exactly, or by an approximate index of usearch.

An index on disk is a folder with the vectors, mapped into memory, and the graph of usearch.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from mispair.errors import ChangedError, DamagedError, InvalidValueError, NotFoundError, ShapeError, TooFewError
from mispair.pairs.npy import check_finite, open_array
from mispair.pairs.pairs import described
from mispair.support.arrays import FloatArray, IntArray
from mispair.support.extras import missing_package
from mispair.support.files import Json, replacing
from mispair.support.owned_folder import FolderKind, OwnedFolder, check_unchanged, damages, read_mark
from mispair.support.progress import RowProgress

VECTORS, GRAPH = "vectors.npy", "graph.usearch"
INDEX = FolderKind("an index", "index.json", [VECTORS], optional=[GRAPH])
MADE_BY, GRAPHS = "model", "approximate"  # keys in the mark
CHUNK = 1 << 16  # vectors compared at a time
ADDED = 1 << 12  # vectors added to a graph at a time
EXACT_UP_TO = 20_000  # items; an exact search of so many takes a few milliseconds

Encode = Callable[[Any], FloatArray]  # queries to vectors


class VectorIndex:
    """Find the nearest of N unit vectors by their dot product.

    Attributes:
        vectors: (N, D) in half precision, in memory or mapped from a file.
        approximate: Whether usearch answers; otherwise a search compares all vectors.
    """

    def __init__(self, vectors: FloatArray, encode: Encode, *, graph: Any | None = None) -> None:
        self.vectors, self.approximate = vectors, graph is not None
        self._encode, self._graph = encode, graph

    def __len__(self) -> int:
        return len(self.vectors)

    def __repr__(self) -> str:
        how = "approximate (usearch)" if self.approximate else "exact"
        return f"<VectorIndex: {len(self):,} items of width {self.vectors.shape[1]}, {how} search>"

    def search(self, query: str | FloatArray, top: int = 10, *, exact: bool = False) -> tuple[IntArray, FloatArray]:
        """Return rows and scores of the best items, best first.

        Args:
            query: A text, or the features of one item of the other side.
            top: Number of items.
            exact: Compare all items in spite of an approximate index.
        """
        if top < 1:
            raise InvalidValueError(str(top), where="top", expected="at least 1")
        if not isinstance(query, str | np.ndarray):
            raise ShapeError(described(query), where="query", expected="one text, or an array of features of one item")
        item: Any = [query] if isinstance(query, str) else query[None]
        return self.nearest(self._encode(item)[0], top, exact=exact)

    def nearest(self, vector: FloatArray, top: int, *, exact: bool = False) -> tuple[IntArray, FloatArray]:
        """Search by a vector (D,) of the common space."""
        if vector.shape != self.vectors.shape[1:]:
            expected = f"a vector of {self.vectors.shape[1]} numbers"
            raise ShapeError(f"the shape {vector.shape}", where="query", expected=expected)
        vector, top = vector.astype(np.float32), min(top, len(self))
        if self._graph is None or exact:
            chunks = (self.vectors[start : start + CHUNK] for start in range(0, len(self), CHUNK))
            every = np.concatenate([chunk.astype(np.float32) @ vector for chunk in chunks])
            rows = np.argpartition(-every, top - 1)[:top].astype(np.int64)
            scores = every[rows]
        else:
            rows = np.asarray(self._graph.search(vector, top).keys, dtype=np.int64)
            scores = self.vectors[rows].astype(np.float32) @ vector  # of the stored vectors, as in an exact search
        order = np.lexsort((rows, -scores))
        return rows[order], scores[order]


def build_index(
    vectors: FloatArray,
    encode: Encode,
    out: Path | None,
    approximate: bool | None,
    *,
    made_by: str = "",
    overwrite: bool = False,
    console: Console | None = None,
) -> VectorIndex:
    """Index unit vectors (N, D), as `Matcher.index` does; `encode` makes vectors of queries.

    `made_by` is a digest of the model and the side, for `open_index`.
    """
    check_finite(vectors, "The indexed items")
    if not len(vectors):
        raise TooFewError("there are no items to index")
    usearch = _usearch() if approximate or (approximate is None and len(vectors) > EXACT_UP_TO) else None
    if approximate and usearch is None:
        raise missing_package("usearch", "index")
    half: FloatArray = np.ascontiguousarray(vectors, dtype=np.float16)
    if out is None:
        return VectorIndex(half, encode, graph=None if usearch is None else _graph(usearch, half, console))
    vectors_digest = hashlib.sha256(half.data).hexdigest()
    request: dict[str, Json] = {MADE_BY: made_by, VECTORS: [vectors_digest], GRAPHS: usearch is not None}
    with OwnedFolder(out, INDEX, request, overwrite=overwrite) as folder:
        mark = read_mark(out, INDEX)
        if mark is None or not folder.finished or any(damages(out, mark.files, mark.files)):
            folder.begin()
            _write(folder, half, usearch, console)
    return open_index(out, encode, verify=False)


def open_index(folder: str | Path, encode: Encode, *, verify: bool = True, made_by: str = "") -> VectorIndex:
    """Open the index in a folder, as `Matcher.open_index` does; `made_by` is the expected one.

    Raises:
        NotFoundError: The folder holds no finished index.
        ChangedError: The index is of another model or side.
        DamagedError: The index is damaged.
    """
    path, usearch = Path(folder), _usearch()
    mark = read_mark(path, INDEX)
    if mark is None or not mark.finished or VECTORS not in mark.files:
        advice = "Make one with matcher.index(items, out=...)"
        raise NotFoundError("no index, or a damaged one", where=path, advice=advice)
    if made_by and mark.request.get(MADE_BY) != made_by:
        advice = "Open it with the model and the side that made it, or make another one with matcher.index"
        raise ChangedError("the index is of another model, or of the other side", where=path, advice=advice)
    if verify:
        check_unchanged(path, INDEX, [VECTORS] if usearch is None else [VECTORS, GRAPH])
    vectors = open_array(path / VECTORS, ndim=2)
    has_graph = GRAPH in mark.files and usearch is not None
    return VectorIndex(vectors, encode, graph=_open_graph(usearch, path, vectors.shape) if has_graph else None)


def _open_graph(usearch: Any, path: Path, shape: tuple[int, ...]) -> Any:
    graph = usearch.Index.restore(str(path / GRAPH), view=True) if (path / GRAPH).is_file() else None
    if graph is None or (len(graph), graph.ndim) != shape:
        advice = "Make the index again with matcher.index(items, out=...)"
        raise DamagedError("the file is damaged, or belongs to other vectors", where=path / GRAPH, advice=advice)
    return graph


def _graph(usearch: Any, half: FloatArray, console: Console | None) -> Any:
    graph = usearch.Index(ndim=half.shape[1], metric="ip", dtype="f16")
    with RowProgress(console, len(half), "indexing") as show:
        for keys in np.split(np.arange(len(half)), range(ADDED, len(half), ADDED)):
            # Use one thread: two threads adding at the same time lose one item in a thousand.
            graph.add(keys, half[keys], threads=1)
            show.step(len(keys))
    return graph


def _write(folder: OwnedFolder, half: FloatArray, usearch: Any | None, console: Console | None) -> None:
    with replacing(folder.path / VECTORS) as file:
        np.save(file, half)
    if usearch is not None:
        folder.work.mkdir(exist_ok=True)
        _graph(usearch, half, console).save(str(folder.work / GRAPH))
        with (folder.work / GRAPH).open("rb+") as saved:
            os.fsync(saved.fileno())
        (folder.work / GRAPH).replace(folder.path / GRAPH)
    folder.finish()


def _usearch() -> Any | None:
    try:
        return importlib.import_module("usearch.index")
    except ImportError:
        return None
