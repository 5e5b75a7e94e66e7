"""Cache encodings by content: no item is encoded twice, even in another file, data set or output.

    CACHE/efficientnet-lite0-1280/NAME.npy        float16 (n, width)
    CACHE/efficientnet-lite0-1280/NAME.keys.npy   hashes of the n items, written last

NAME holds a hash of the vectors; items of files with another hash are encoded again. Files are never changed. Each
process adds files of its own. You may delete the folder when no process runs.
"""

from __future__ import annotations

import bisect
import hashlib
import os
import tempfile
import threading
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import platformdirs

from mispair.errors import DataError, WriteError
from mispair.pairs.npy import Header, chunks, open_array, read_array, read_header
from mispair.pairs.shards import File, SideRows
from mispair.support.arrays import IntArray
from mispair.support.files import is_dead, regular, replacing, unreadable, writer
from mispair.support.formatting import slug

Halves = npt.NDArray[np.float16]
Key = bytes
KEY = "S16"
_MISSING = -1
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
    """Vectors of one encoder, named by its identity."""

    def __init__(self, folder: Path, encoder: str, width: int) -> None:
        name = f"{slug(encoder.partition(' ')[0])[:60]}-{hashlib.sha256(encoder.encode()).hexdigest()[:8]}-{width}"
        self._folder, self._width = folder / name, width
        self._files: list[File] = []
        self._starts: list[int] = []  # number of the first vector of each file
        self._whole: dict[int, bool] = {}  # of the files read so far
        self._looking = threading.Lock()
        self._count = 0
        self._new: dict[Key, int] = {}  # added by this process
        self._delete_leftovers()
        known = np.concatenate([np.empty(0, KEY), *map(self._open, sorted(self._folder.glob("*.keys.npy")))])
        self._order = np.argsort(known, kind="stable")
        self._sorted = known[self._order]

    def __len__(self) -> int:
        return self._count

    def _delete_leftovers(self) -> None:
        """Delete vectors of processes that were killed before they wrote the keys."""
        for path in list(self._folder.glob("*-*.npy")):
            if not path.with_name(f"{path.stem}.keys.npy").exists() and is_dead(path.stem.rpartition("-")[2]):
                path.unlink(missing_ok=True)

    def _open(self, path: Path) -> npt.NDArray[Any]:
        """Open a file and return its keys; none if a file is damaged."""
        vectors = path.with_name(path.name.replace(".keys.npy", ".npy"))
        try:
            header = read_header(vectors, ndim=2, kind="vector")
            with regular(path).open("rb") as file:
                keys = read_array(file, path)
        except (DataError, OSError):
            return np.empty(0, KEY)
        if keys.dtype != KEY or header.shape != (*keys.shape, self._width):
            return np.empty(0, KEY)
        self._append(vectors, header)
        return keys

    def _append(self, vectors: Path, header: Header) -> None:
        self._files.append(File(vectors, header))
        self._starts.append(self._count)
        self._count += header.shape[0]

    def find(self, key: Key) -> int:
        """Return the number of the vector of an item, or -1; several threads may call this."""
        place = self._new.get(key, _MISSING)
        if place >= 0 or not len(self._sorted):
            return place
        wanted = np.array(key, KEY)
        first, last = (int(np.searchsorted(self._sorted, wanted, side)) for side in ("left", "right"))
        return next((int(number) for number in self._order[first:last] if self._is_whole(int(number))), _MISSING)

    def _is_whole(self, number: int) -> bool:
        """Whether the file of a vector is undamaged; each file is read once."""
        place = bisect.bisect_right(self._starts, number) - 1
        with self._looking:
            if place not in self._whole:
                path = self._files[place].path
                try:
                    digest = _digest(open_array(path, ndim=2, kind="vector"))
                    self._whole[place] = path.stem.split("-")[1:2] == [digest]
                except DataError:
                    self._whole[place] = False
            return self._whole[place]

    def add(self, vectors: dict[Key, Halves]) -> None:
        """Store vectors, whole or not at all."""
        if not vectors:
            return
        values = np.stack(list(vectors.values()))
        name = f"{uuid.uuid4().hex}-{_digest(values)}-{writer()}"
        path = self._folder / f"{name}.npy"
        for place, array in ((path, values), (self._folder / f"{name}.keys.npy", np.array(list(vectors), KEY))):
            with replacing(place) as file:
                np.save(file, array, allow_pickle=False)
        self._new |= {key: self._count + place for place, key in enumerate(vectors)}
        self._append(path, read_header(path, ndim=2, kind="vector"))

    def rows(self, numbers: IntArray) -> CachedRows:
        """Return the vectors with these numbers as a shard (n, width); zeros for -1."""
        return CachedRows(SideRows.of(self._files) if self._files else None, numbers, self._width)


def _digest(vectors: npt.NDArray[Any]) -> str:
    digest = hashlib.sha256()
    for _, chunk in chunks(vectors):
        digest.update(np.ascontiguousarray(chunk).data)
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class CachedRows:
    """Vectors of the cache, one a row."""

    vectors: SideRows | None
    numbers: IntArray
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.numbers), self.width

    def read(self, rows: slice | IntArray) -> Halves:
        numbers = self.numbers[rows]
        found = np.zeros((len(numbers), self.width), dtype=np.float16)
        there = numbers >= 0
        if self.vectors is not None and there.any():
            try:
                found[there] = self.vectors.gather(numbers[there], np.float16)
            except OSError as error:
                raise unreadable(error.filename, error, advice="Run the same command again.") from None
        return found
