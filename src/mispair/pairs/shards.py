"""The vectors of one side: rows of several files or arrays, as if they were one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from mispair.errors import ChangedError, ShapeError
from mispair.pairs.npy import LONGEST_HEADER, Header, check_header, open_array, read_start
from mispair.support.arrays import IntArray
from mispair.support.files import unreadable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Matrix = npt.NDArray[np.float32]

_SMALL, _MOST_KEPT = 1 << 16, 1 << 28  # bytes of a file that is kept in memory, and of all such files of a side
_SMALLEST = 1e-6  # usual size of the largest number of a vector, from which on its square is precise
_TOGETHER = 64  # consecutive rows that are read at once
_LOADED = 1 << 15  # rows that are brought to a GPU at a time
_SENT_AS_STORED = (np.float16, np.float32)  # others become float32


class Shard(Protocol):
    """Some consecutive rows of a side."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def read(self, rows: slice | IntArray) -> npt.NDArray[Any]:
        """Read these rows in their stored type."""


@dataclass(frozen=True)
class File:
    """An .npy file (n, D), open only during a read: there may be thousands of files.

    Only files that are stored by columns are mapped into memory: pages of a map count as memory of this process, and
    the system reads up to a megabyte around each of scattered rows.
    """

    path: Path
    header: Header
    kept: npt.NDArray[Any] | None = None  # its content, if it is small: opening it again takes longer than reading it

    @property
    def shape(self) -> tuple[int, int]:
        return self.header.shape[0], self.header.shape[1]

    def read(self, rows: slice | IntArray) -> npt.NDArray[Any]:
        if self.kept is not None:
            return np.array(self.kept[rows])
        if not isinstance(rows, slice) and len(rows) >= _TOGETHER and (np.diff(rows) == 1).all():
            rows = slice(int(rows[0]), int(rows[-1]) + 1)
        # A single row may be stored as columns, or a single number a row: that is no difference.
        if self.header.by_column and min(self.shape) > 1:
            return np.array(open_array(self.path, ndim=2, kind="vector")[rows])
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(self.shape[0])
            runs = [(start, max(0, stop - start))]
        else:
            runs = [(row, 1) for row in rows.tolist()]
        return self._runs(runs)

    def _runs(self, runs: list[tuple[int, int]]) -> npt.NDArray[Any]:
        """Read runs of rows: the first row of each, and how many there are."""
        header, width = self.header, self.shape[1]
        found = np.empty((sum(count for _, count in runs), width), dtype=header.dtype)
        size, place = width * header.dtype.itemsize, 0
        content = found.reshape(-1).view(np.uint8).data
        try:
            with self.path.open("rb", buffering=0) as file:
                if file.read(header.offset) != header.start:
                    advice = "Run the same command again."
                    raise ChangedError("the file was replaced while it was in use", where=self.path, advice=advice)
                for row, count in runs:
                    file.seek(header.offset + row * size)
                    end = place + count * size
                    while place < end:  # the system may give less than was asked for
                        read = file.readinto(content[place:end])
                        if not read:
                            what = "the file became shorter while it was read"
                            raise ChangedError(what, where=self.path, advice="Write it again.")
                        place += read
        except OSError as error:
            raise unreadable(self.path, error) from None
        return found


@dataclass(frozen=True)
class ArrayRows:
    """An array (n, D) in memory."""

    array: npt.NDArray[Any]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.array), self.array.shape[1]

    def read(self, rows: slice | IntArray) -> npt.NDArray[Any]:
        return self.array[rows]


@dataclass(frozen=True)
class ScaledRows:
    """Rows of a shard, each number times a factor."""

    shard: Shard
    factor: float

    @property
    def shape(self) -> tuple[int, int]:
        return self.shard.shape

    def read(self, rows: slice | IntArray) -> npt.NDArray[Any]:
        values = self.shard.read(rows)
        return np.asarray(values.astype(np.result_type(values.dtype, np.float32)) * self.factor)


@dataclass(frozen=True)
class TensorRows:
    """A torch tensor (n, D) on any device."""

    tensor: Tensor
    factor: float = 1.0  # of its numbers to those of the data

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.tensor.shape[0]), int(self.tensor.shape[1])

    def read(self, rows: slice | IntArray) -> npt.NDArray[Any]:
        values: npt.NDArray[Any] = self.there(rows).cpu().numpy()
        return values

    def there(self, rows: slice | IntArray) -> Tensor:
        """Return these rows in single precision, on their own device."""
        import torch

        where = rows if isinstance(rows, slice) else torch.from_numpy(rows).to(self.tensor.device)
        return self.tensor.detach()[where].float()


@dataclass(frozen=True)
class SideRows:
    """All rows of one side (N, D)."""

    shards: tuple[Shard, ...]
    starts: IntArray  # first row of each shard, and N

    @classmethod
    def of(cls, shards: Sequence[Shard]) -> SideRows:
        return cls(tuple(shards), np.cumsum([0, *(shard.shape[0] for shard in shards)]))

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def width(self) -> int:
        return self.shards[0].shape[1]

    def block(self, start: int, stop: int, dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
        """Rows start to stop (n, D)."""
        start, stop = max(0, start), min(stop, len(self))
        found = np.empty((max(0, stop - start), self.width), dtype=dtype)
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
        """The stored type of the vectors."""
        return self.shards[0].read(slice(0, 1)).dtype

    def gather(self, rows: IntArray, dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
        """The vectors at any rows (n, D), in their order."""
        if len(rows) and not (rows.min() >= 0 and rows.max() < len(self)):
            raise IndexError(f"rows {rows.min()} to {rows.max()} of a side with {len(self)}")
        found = np.empty((len(rows), self.width), dtype=dtype)
        order = np.argsort(rows, kind="stable")  # a file is read from its start to its end
        for place, values in self._parts(rows[order]):
            with np.errstate(over="ignore"):
                found[order[place]] = values
        return found

    def tensor(self, rows: slice | IntArray, device: torch.device) -> Tensor:
        """Return consecutive or any rows (n, D) in single precision on a device."""
        import torch

        first = self.shards[0]
        if isinstance(first, TensorRows) and self.is_on(device):
            return first.there(rows)
        stored = np.float16 if self.dtype == np.float16 else np.float32  # torch widens faster than numpy
        found = self.block(rows.start, rows.stop, stored) if isinstance(rows, slice) else self.gather(rows, stored)
        return torch.from_numpy(found).to(device, torch.float32)

    def is_on(self, device: torch.device) -> bool:
        """Whether all vectors lie on a device; "cuda" without a number is any GPU."""
        first, *others = self.shards
        if others or not isinstance(first, TensorRows):
            return False
        there = first.tensor.device
        return there.type == device.type and device.index in (None, there.index)

    def loaded(self, device: torch.device, workers: int) -> SideRows:
        """This side with all its vectors on a GPU."""
        import torch

        from mispair.compute.threads import parallel_each

        stored = self.dtype if self.dtype in _SENT_AS_STORED else np.dtype(np.float32)
        kind = torch.from_numpy(np.empty(0, dtype=stored)).dtype
        whole = torch.empty(len(self), self.width, dtype=kind, device=device)

        def load(start: int) -> None:
            part = self.block(start, start + _LOADED, stored)
            whole[start : start + len(part)] = torch.from_numpy(part)

        parallel_each(load, range(0, len(self), _LOADED), workers)
        return SideRows.of([TensorRows(whole, self.factor)])

    @property
    def nbytes(self) -> int:
        """Stored size of all vectors."""
        return len(self) * self.width * self.dtype.itemsize

    def scaled(self, some: IntArray) -> SideRows:
        """Multiply by a power of two if squares of the numbers of `some` ascending rows do not fit in float32."""
        sizes = [np.abs(values.astype(np.float64)).max(axis=1) for _, values in self._parts(some)]
        known = np.concatenate([np.empty(0), *sizes])
        known = known[np.isfinite(known) & (known > 0)]
        usual = float(np.median(known)) if len(known) else 1.0
        if _SMALLEST <= usual <= 1 / _SMALLEST:
            return self
        return self.times(2.0 ** -round(math.log2(usual)))

    def times(self, factor: float) -> SideRows:
        """This side with all numbers times a factor."""
        return self if factor == 1 else SideRows(tuple(ScaledRows(shard, factor) for shard in self.shards), self.starts)

    @property
    def factor(self) -> float:
        """The factor between these numbers and those of the data."""
        first = self.shards[0]
        return first.factor if isinstance(first, ScaledRows | TensorRows) else 1.0

    def _parts(self, ascending: IntArray) -> Iterator[tuple[slice, npt.NDArray[Any]]]:
        """Read ascending rows shard by shard, and say their places."""
        if not len(ascending):
            return
        numbers = np.searchsorted(self.starts, ascending, side="right") - 1
        bounds = np.append(np.flatnonzero(np.diff(numbers, prepend=-1)), len(ascending)).tolist()
        for low, high in pairwise(bounds):
            number = int(numbers[low])
            yield slice(low, high), self.shards[number].read(ascending[low:high] - self.starts[number])


NO_ROWS = SideRows((), np.zeros(1, dtype=np.int64))


@dataclass(frozen=True)
class MovedRows:
    """Some rows of a side, in any order."""

    side: SideRows
    rows: IntArray

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self.side.width

    def read(self, rows: slice | IntArray) -> npt.NDArray[Any]:
        return self.side.gather(self.rows[rows], self.side.dtype)


def unit(vectors: Matrix) -> tuple[Matrix, npt.NDArray[np.bool_]]:
    """Return vectors (n, D) of unit length, and a mask (n,) of finite vectors other than zero."""
    largest = np.abs(vectors).max(axis=1, keepdims=True, initial=0)  # the square of a huge number is no float32
    there = np.isfinite(largest) & (largest > 0)
    found = np.where(there, vectors, 0) / np.where(there, largest, 1)
    lengths = np.where(there, np.linalg.norm(found, axis=1, keepdims=True), 1)
    return (found / lengths).astype(np.float32), there[:, 0]


@dataclass(frozen=True)
class ViewRows:
    """Vectors of the same items by several encoders, the views, as one vector an item."""

    views: tuple[SideRows, ...]
    join: Callable[[Sequence[Matrix]], Matrix] | None = None  # by default side by side, each of unit length

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.views[0]), self._joined([view.block(0, 0) for view in self.views]).shape[1]

    def read(self, rows: slice | IntArray) -> npt.NDArray[Any]:
        if isinstance(rows, slice):
            return self._joined([view.block(*rows.indices(len(view))[:2]) for view in self.views])
        return self._joined([view.gather(rows) for view in self.views])

    def _joined(self, parts: Sequence[Matrix]) -> Matrix:
        return np.concatenate([unit(part)[0] for part in parts], axis=1) if self.join is None else self.join(parts)


def join_views(sides: Sequence[SideRows], where: str) -> SideRows:
    """Join the vectors of one or several encoders to one side."""
    rows = [len(side) for side in sides]
    if len(set(rows)) > 1:
        found = " and ".join(f"{count:,}" for count in rows)
        raise ShapeError(f"views of {found} rows", where=where, expected="the same items in the same order in each")
    return sides[0] if len(sides) == 1 else SideRows.of([ViewRows(tuple(sides))])


def views_of(side: SideRows) -> tuple[SideRows, ...]:
    """The vectors of each encoder of a side."""
    first = side.shards[0]
    return first.views if isinstance(first, ViewRows) else (side,)


def moved(side: SideRows, rows: IntArray) -> SideRows:
    """Some rows of a side, in any order."""
    return join_views([SideRows.of([MovedRows(view, rows)]) for view in views_of(side)], "")


def open_files(paths: Sequence[Path]) -> SideRows:
    """Open several .npy files as one side.

    Raises:
        DataError: A file is damaged, holds no vectors, or vectors of another width than the first.
    """
    shards: list[Shard] = []
    room = _MOST_KEPT
    for path in paths:
        header, content = read_start(path, LONGEST_HEADER + _SMALL)
        check_header(header, path, 2, "vector")
        if shards and header.shape[1] != shards[0].shape[1]:
            expected = f"{shards[0].shape[1]}, as in {paths[0].name}"
            advice = "All shards must come from one encoder."
            raise ShapeError(f"vectors of width {header.shape[1]}", where=path, expected=expected, advice=advice)
        keep = header.nbytes <= min(_SMALL, room) and header.offset + header.nbytes <= len(content)
        room -= keep * header.nbytes
        # A copy, which holds neither the header nor what may follow the numbers.
        shards.append(File(path.absolute(), header, header.unpacked(content).copy("K") if keep else None))
    return SideRows.of(shards)
