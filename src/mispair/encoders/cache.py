"""Cache encodings by content: no item is encoded twice, even in another file, data set or output.

    CACHE/efficientnet-lite0-1280/NAME.keys.npy   hashes of n items, written first
    CACHE/efficientnet-lite0-1280/NAME.npy        float16 (n, width)

NAME holds a hash of the vectors; items of files with another hash are encoded again. Files are never changed. Each
process adds files of its own. You may delete the folder when no process runs.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
import uuid
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import platformdirs

from mispair.errors import DataError, WriteError
from mispair.pairs.npy import chunks, open_array, read_array, read_header, write_array
from mispair.pairs.shards import ArrayRows, File, MovedRows, SideRows
from mispair.support.arrays import IntArray
from mispair.support.files import regular
from mispair.support.formatting import slug

Halves = npt.NDArray[np.float16]
Key = bytes
KEY = "S16"
FETCHED = "fetched"  # folder inside the cache, for copies of files at URLs


def cache_folder(given: Path | None = None) -> Path:
    """Return the given folder, else the folder in MISPAIR_CACHE, else the cache folder of the user."""
    named = given or os.environ.get("MISPAIR_CACHE")
    return Path(named).expanduser() if named else Path(platformdirs.user_cache_dir("mispair")) / "encodings"


def writable_cache(given: Path | None = None) -> Path:
    """Return the same folder; raise a `WriteError` if it is empty and cannot be written."""
    folder = cache_folder(given)
    try:
        if not any(folder.glob("*/*.keys.npy")):  # else all encodings may be there
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        what = f"the folder for encodings cannot be written ({error.strerror})"
        advice = "Give another `cache`." if given else "Set MISPAIR_CACHE to one that can be."
        raise WriteError(what, where=folder, advice=advice) from None
    return folder


def key_of(content: bytes) -> Key:
    """Hash an image file or a caption."""
    return hashlib.blake2b(content, digest_size=16).digest()


class EncodingCache:
    """Vectors of one encoder, named by its identity; number 0 is the zero vector of missing items."""

    def __init__(self, folder: Path, encoder: str, width: int) -> None:
        name = f"{slug(encoder.partition(' ')[0])[:60]}-{hashlib.sha256(encoder.encode()).hexdigest()[:8]}-{width}"
        self._folder, self._width = folder / name, width
        found = [one for path in sorted(self._folder.glob("*.keys.npy")) if (one := self._open(path))]
        self._vectors = SideRows.of([ArrayRows(np.zeros((1, width), np.float16)), *(file for file, _ in found)])
        known = np.concatenate([np.empty(0, KEY), *(keys for _, keys in found)])
        self._order = np.argsort(known, kind="stable") + 1
        self._sorted = known[self._order - 1]
        self._new: dict[Key, int] = {}  # added by this process
        self._undamaged: dict[int, bool] = {}  # by file
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._vectors)

    def _open(self, path: Path) -> tuple[File, npt.NDArray[Any]] | None:
        """Open a file of vectors and read their keys; None if a file is damaged."""
        vectors = path.with_name(path.name.replace(".keys.npy", ".npy"))
        try:
            header = read_header(vectors, ndim=2, kind="vector")
            with regular(path).open("rb") as file:
                keys = read_array(file, path)
        except (DataError, OSError):
            return None
        fits = keys.dtype == KEY and header.shape == (*keys.shape, self._width)
        return (File(vectors, header), keys) if fits else None

    def find(self, key: Key) -> int:
        """Return the number of the vector of an item, or 0; several threads may call this."""
        if key in self._new:
            return self._new[key]
        first, last = (int(np.searchsorted(self._sorted, np.array(key, KEY), side)) for side in ("left", "right"))
        return next((int(number) for number in self._order[first:last] if self._is_undamaged(int(number))), 0)

    def _is_undamaged(self, number: int) -> bool:
        """Whether the file of a vector is undamaged; each file is read once."""
        place = int(np.searchsorted(self._vectors.starts, number, side="right")) - 1
        with self._lock:
            if place not in self._undamaged:
                path = cast(File, self._vectors.shards[place]).path
                try:
                    digest = _digest(open_array(path, ndim=2, kind="vector"))
                    self._undamaged[place] = path.stem.endswith(f"-{digest}")
                except DataError:
                    self._undamaged[place] = False
            return self._undamaged[place]

    def add(self, vectors: dict[Key, Halves]) -> None:
        """Store vectors, whole or not at all."""
        if not vectors:
            return
        values = np.stack(list(vectors.values()))
        path = self._folder / f"{uuid.uuid4().hex}-{_digest(values)}.npy"
        write_array(path.with_suffix(".keys.npy"), np.array(list(vectors), KEY))
        write_array(path, values)
        self._new |= {key: len(self) + place for place, key in enumerate(vectors)}
        added = File(path, read_header(path, ndim=2, kind="vector"))
        self._vectors = SideRows.of([*self._vectors.shards, added])

    def rows(self, numbers: IntArray) -> MovedRows:
        """Return the vectors with these numbers as a shard (n, width)."""
        return MovedRows(self._vectors, numbers)


def _digest(vectors: npt.NDArray[Any]) -> str:
    digest = hashlib.sha256()
    for _, chunk in chunks(vectors):
        digest.update(np.ascontiguousarray(chunk).data)
    return digest.hexdigest()[:16]
