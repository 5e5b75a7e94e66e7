"""The vectors of one side: rows of several files or arrays, as if they were one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mispair.data.npy import open_array
from mispair.data.pairs import IntArray
from mispair.errors import DataError

Matrix = npt.NDArray[np.float32]
_TOGETHER = 64  # consecutive rows that are read at once


class Shard(Protocol):
    """Some consecutive rows of a side."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def read(self, rows: slice | IntArray) -> npt.NDArray[Any]:
        """These rows, in the type in which they are stored."""


@dataclass(frozen=True)
class File:
    """An .npy file (n, D), mapped into memory only while a block of it is read.

    A map that stayed open would count what was read of it as memory of this process, and take one of its file handles.
    Scattered rows are read one by one: of a map the system takes up to a megabyte around each of them.
    """

    path: Path
    shape: tuple[int, int]

    def read(self, rows: slice | IntArray) -> npt.NDArray[Any]:
        array = open_array(self.path, ndim=2, kind="vector")
        if not isinstance(rows, slice) and len(rows) >= _TOGETHER and (np.diff(rows) == 1).all():
            rows = slice(int(rows[0]), int(rows[-1]) + 1)
        if isinstance(rows, slice) or not array.flags.c_contiguous:
            return np.array(array[rows])
        assert isinstance(array, np.memmap)
        found = np.empty((len(rows), array.shape[1]), dtype=array.dtype)
        # Not the stride, which is another one where a single row is stored as columns.
        size = array.shape[1] * array.itemsize
        start, places = array.offset, found.reshape(-1).view(np.uint8).data
        with self.path.open("rb", buffering=0) as file:
            for place, row in enumerate(rows.tolist()):
                file.seek(start + row * size)
                if file.readinto(places[place * size : (place + 1) * size]) != size:
                    raise DataError(f"{self.path}: the file has become shorter while it was read; write it again.")
        return found


@dataclass(frozen=True)
class ArrayRows:
    """Rows of an array (n, D) in memory: those that `link` names, one after the other, or all."""

    array: npt.NDArray[Any]
    link: IntArray | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.array) if self.link is None else len(self.link), self.array.shape[1]

    def read(self, rows: slice | IntArray) -> npt.NDArray[Any]:
        return self.array[rows if self.link is None else self.link[rows]]


@dataclass(frozen=True)
class TensorRows:
    """A torch tensor (n, D), wherever it lies; only the rows that are read come to the processor."""

    tensor: Any

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.tensor.shape[0]), int(self.tensor.shape[1])

    def read(self, rows: slice | IntArray) -> npt.NDArray[Any]:
        import torch

        part = self.tensor.detach()[rows if isinstance(rows, slice) else torch.from_numpy(rows).to(self.tensor.device)]
        values: npt.NDArray[Any] = part.to("cpu", torch.float32).numpy()
        return values


@dataclass(frozen=True)
class Side:
    """All rows of one side (N, D)."""

    shards: tuple[Shard, ...]
    starts: IntArray  # first row of each shard, and N

    @classmethod
    def of(cls, shards: Sequence[Shard]) -> Side:
        return cls(tuple(shards), np.cumsum([0, *(shard.shape[0] for shard in shards)]))

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def width(self) -> int:
        return self.shards[0].shape[1]

    def block(self, start: int, stop: int) -> Matrix:
        """Rows start to stop (n, D)."""
        start, stop = max(0, start), min(stop, len(self))
        found = np.empty((max(0, stop - start), self.width), dtype=np.float32)
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        for shard, begin, end in zip(self.shards[first:], self.starts[first:], self.starts[first + 1 :], strict=False):
            if begin >= stop:
                break
            low, high = max(start, int(begin)), min(stop, int(end))
            with np.errstate(over="ignore"):  # too large for float32 becomes infinite, which is a status later
                found[low - start : high - start] = shard.read(slice(low - int(begin), high - int(begin)))
        return found

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type in which the vectors are stored."""
        return self.shards[0].read(slice(0, 1)).dtype

    def gather(self, rows: IntArray, dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
        """The vectors at any rows (n, D), in their order."""
        if len(rows) and not (rows.min() >= 0 and rows.max() < len(self)):
            raise IndexError(f"rows {rows.min()} to {rows.max()} of a side with {len(self)}")
        found = np.empty((len(rows), self.width), dtype=dtype)
        order = np.argsort(rows, kind="stable")  # a file is read from its start to its end
        ascending = rows[order]
        for shard, begin, end in zip(self.shards, self.starts, self.starts[1:], strict=False):
            low, high = np.searchsorted(ascending, [begin, end])
            if high > low:
                with np.errstate(over="ignore"):
                    found[order[low:high]] = shard.read(ascending[low:high] - begin)
        return found


def open_files(paths: Sequence[Path]) -> Side:
    """The rows of several .npy files one after the other.

    Raises:
        DataError: A file is damaged, holds no vectors, or vectors of another width than the first.
    """
    shapes = [open_array(path, ndim=2, kind="vector").shape for path in paths]
    for path, shape in zip(paths, shapes, strict=True):
        if shape[1] != shapes[0][1]:
            raise DataError(
                f"{path}: vectors of width {shape[1]}, but {paths[0].name} has {shapes[0][1]}; "
                "all shards must come from one encoder."
            )
    return Side.of([File(path, (shape[0], shape[1])) for path, shape in zip(paths, shapes, strict=True)])
