"""Search among the vectors of many items: exactly, or by an approximate index where usearch is installed.

An index on disk is a folder with the vectors, which are mapped into memory, the graph of usearch, and the SHA-256 of
both. Whichever of the two is damaged is made again from the other one.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mispair.errors import ConfigError, DataError
from mispair.pairs.npy import check_finite, open_array
from mispair.pairs.pairs import FloatArray, IntArray, described
from mispair.support.extras import install_command
from mispair.support.files import read_json, replacing, sha256_of, write_atomically
from mispair.support.owned_folder import delete_beside, replacing_folder

VECTORS, GRAPH, MARK = "vectors.npy", "graph.usearch", "index.json"
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
        if not isinstance(query, str | np.ndarray):
            raise DataError(f"A query is one text, or an array of the features of one item; got {described(query)}.")
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
    made_by: str = "",
) -> VectorIndex:
    """An index of unit vectors (N, D).

    Args:
        vectors: Of the items.
        encode: Vectors of queries.
        out: Folder to keep it in: a new one, or one that holds this index already; None keeps it in memory.
        approximate: Whether to use usearch; by default for more than 20,000 items, where it is installed.
        made_by: Digest of the model and the side, which `open_index` compares.
    """
    check_finite(vectors, "The indexed items")
    if not len(vectors):
        raise DataError("There are no items to index.")
    usearch = _usearch() if approximate or (approximate is None and len(vectors) > EXACT_UP_TO) else None
    if approximate and usearch is None:
        raise ConfigError(f"An approximate index needs usearch; install it: {install_command('index')}.")
    half: FloatArray = np.ascontiguousarray(vectors, dtype=np.float16)
    if out is None:
        return VectorIndex(half, encode, graph=None if usearch is None else _graph(usearch, half))
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        written = _read_mark(out)
        if written is None or written.get(VECTORS) != _npy_sha256(half) or (GRAPH in written) != (usearch is not None):
            raise DataError(f"{out} exists already; choose another folder for the index, or remove it first.")
        if not _damaged(out, written):
            delete_beside(out)
            return open_index(out, encode, verify=False)
    _write(out, half, None if usearch is None else _graph(usearch, half), made_by)
    return open_index(out, encode, verify=False)


def open_index(
    folder: str | Path, encode: Callable[[Any], FloatArray], *, verify: bool = True, made_by: str = ""
) -> VectorIndex:
    """An index that was written to a folder, mapped into memory.

    Args:
        folder: Where it is.
        encode: Vectors of queries.
        verify: Read both files once, to see whether they are as they were written.
        made_by: Digest of the model and the side that the index must be of.

    Raises:
        DataError: There is none, it is of another model, or it is damaged and cannot be made again.
    """
    path = Path(folder)
    written, usearch = _read_mark(path), _usearch()
    if written is None:
        raise DataError(f"{path} holds no index, or a damaged {MARK}; make one with matcher.index(items, out=...).")
    if made_by and _made_by(path) not in ("", made_by):
        raise DataError(
            f"{path} was made by another model, or of the other side, so its vectors cannot be compared with those of "
            "this one; open it with the model and the side that made it, or make another one with matcher.index."
        )
    if usearch is None:  # then the graph is not read
        written = {VECTORS: written[VECTORS]}
    if verify and (damaged := _damaged(path, written)):
        _repair(path, written, damaged, usearch)
    vectors, graph = open_array(path / VECTORS, ndim=2), None
    if GRAPH in written:
        graph = _open_graph(usearch, path, vectors.shape)
    return VectorIndex(vectors, encode, graph=graph)


def _open_graph(usearch: Any, path: Path, shape: tuple[int, ...] | None = None) -> Any:
    graph = usearch.Index.restore(str(path / GRAPH), view=True) if (path / GRAPH).is_file() else None
    if graph is None or (shape is not None and (len(graph), graph.ndim) != shape):
        raise DataError(f"{path / GRAPH} is damaged or of other vectors; make the index again in another folder.")
    return graph


def _graph(usearch: Any, half: FloatArray) -> Any:
    graph = usearch.Index(ndim=half.shape[1], metric="ip", dtype="f16")
    # By one thread: two that add at the same time lose one item in a thousand, which no search finds any more.
    graph.add(np.arange(len(half)), half, threads=1)
    return graph


def _write(out: Path, half: FloatArray, graph: Any | None, made_by: str) -> None:
    """Writes a whole index beside its folder, then renames it."""
    with replacing_folder(out) as new:
        with replacing(new / VECTORS) as file:
            np.save(file, half)
        files = {VECTORS: sha256_of(new / VECTORS)}
        if graph is not None:
            graph.save(str(new / GRAPH))
            with (new / GRAPH).open("rb+") as saved:
                os.fsync(saved.fileno())
            files[GRAPH] = sha256_of(new / GRAPH)
        mark = {"files": files, "made_by": made_by}
        write_atomically(new / MARK, f"{json.dumps(mark, indent=1)}\n".encode())


def _read_mark(path: Path) -> dict[str, str] | None:
    """The SHA-256 of each file of an index; None if there is no index."""
    found = read_json(path / MARK)
    files = found.get("files") if isinstance(found, dict) else None
    if not isinstance(files, dict) or VECTORS not in files or not files.keys() <= {VECTORS, GRAPH}:
        return None
    return {name: str(value) for name, value in files.items()}


def _made_by(path: Path) -> str:
    """The digest of the model and the side; empty where it is not known: earlier versions did not write it."""
    found = read_json(path / MARK)
    made_by = found.get("made_by") if isinstance(found, dict) else None
    return made_by if isinstance(made_by, str) else ""


def _npy_sha256(array: FloatArray) -> str:
    """Of the file that `numpy.save` writes of an array in C order."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    digest = hashlib.sha256(header.getvalue())
    digest.update(array.data)
    return digest.hexdigest()


def _damaged(path: Path, written: Mapping[str, str]) -> list[str]:
    """The files of an index that are not as they were written, or cannot be read."""
    return [name for name, expected in written.items() if _sha256(path / name) != expected]


def _sha256(path: Path) -> str | None:
    try:
        return sha256_of(path)
    except OSError:
        return None


def _repair(path: Path, written: Mapping[str, str], damaged: list[str], usearch: Any | None) -> None:
    """Makes a damaged file again from the other one.

    Raises:
        DataError: Both are damaged, or there is no other one.
    """
    names = " and ".join(str(path / name) for name in damaged)
    half = None
    if damaged == [GRAPH]:
        half = np.array(open_array(path / VECTORS, ndim=2))
    elif damaged == [VECTORS] and GRAPH in written:
        graph = _open_graph(usearch, path)
        half = np.stack(graph.get(np.arange(len(graph)), np.float16))  # as they were added
    if half is None or _npy_sha256(half) != written[VECTORS]:
        raise DataError(
            f"{names}: not as it was written; copy the folder again if you can, or remove it and make the index again "
            "with matcher.index(items, out=...)."
        )
    warnings.warn(f"{names}: not as it was written; it is made again from the rest of the index.", stacklevel=4)
    if damaged == [GRAPH]:
        _write(path, half, _graph(usearch, half), _made_by(path))
    else:
        with replacing(path / VECTORS) as file:
            np.save(file, half)


def _usearch() -> Any | None:
    try:
        return importlib.import_module("usearch.index")
    except ImportError:
        return None
