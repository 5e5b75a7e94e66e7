"""Opening .npy files safely and scanning them in chunks."""

from __future__ import annotations

import io
import math
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from mispair.errors import DataError
from mispair.support.files import LARGEST, size_of

Kind = Literal["float", "integer", "vector"]
_CHUNK_BYTES = 1 << 24  # stays in the cache of the processor, and is long enough to hide the loop
# What numpy's parser of headers raises for text that is no header.
_DAMAGED = (ValueError, KeyError, TypeError, SyntaxError, RecursionError, MemoryError, tokenize.TokenError)
LONGEST_HEADER = 1 << 14  # bytes: numpy refuses longer ones
_AXES = {1: "a number each", 2: "rows, width", 3: "images, regions, width"}


def open_array(path: str | Path, ndim: int | None = None, *, kind: Kind = "float") -> npt.NDArray[Any]:
    """Memory-map an .npy file after a check of its header and size.

    Args:
        path: The file.
        ndim: How many dimensions it must have; any number by default.
        kind: What it must hold; a "vector" may also be int8, as quantised embeddings are.

    Raises:
        DataError: The file is missing, damaged, truncated, pickled, or holds something else.
    """
    header = read_header(path, ndim, kind=kind)
    with Path(path).open("rb") as file:  # by its name numpy would look up every folder above it
        array = np.memmap(file, header.dtype, "r", header.offset, header.shape, "F" if header.by_column else "C")
    return array.view(MappedArray)


def read_header(path: str | Path, ndim: int | None = None, *, kind: Kind = "float") -> Header:
    """The header of an .npy file, checked as `open_array` does."""
    header = _read_header(Path(path))
    check_header(header, path, ndim, kind)
    return header


def check_header(header: Header, path: str | Path, ndim: int | None, kind: Kind) -> None:
    """Refuses arrays of other dimensions, or that hold something else.

    Raises:
        DataError: It is such a one.
    """
    shape, dtype = header.shape, header.dtype
    if ndim is not None and len(shape) != ndim:
        raise DataError(
            f"{path}: found an array of shape {shape}; expected {ndim} dimension{'s' * (ndim > 1)} ({_AXES[ndim]})."
        )
    if 0 in shape:
        raise DataError(f"{path}: the array of shape {shape} holds nothing; write the file again with its rows.")
    real = dtype.kind == "f" and dtype.itemsize <= 8 and dtype.isnative
    if (kind == "float" and not real) or (kind == "vector" and not (real or dtype == np.int8)):
        raise DataError(
            f"{path}: found numbers of type {dtype.str if not dtype.isnative else dtype}; features must be float16, "
            "float32 or float64. Convert them with array.astype(numpy.float32)."
        )
    if kind == "integer" and dtype.kind not in "iu":
        raise DataError(f"{path}: found numbers of type {dtype}; expected whole numbers such as int64.")


class MappedArray(np.memmap[Any, Any]):
    """An array in a file that looks, each time it is read, whether the file is still whole.

    Reading a mapping behind the end of its file ends the process without a word (SIGBUS).
    """

    def __getitem__(self, rows: Any) -> Any:
        mapping = self._mmap  # type: ignore[attr-defined]  # None for what was copied out of the file
        if mapping is not None and mapping.size() < len(mapping):
            raise DataError(
                f"{self.filename}: the file was cut to {mapping.size():,} bytes while it was in use, it had "
                f"{len(mapping):,}; copy it again, then start the same command once more."
            )
        return super().__getitem__(rows)


@dataclass(frozen=True)
class Header:
    """What the header of an .npy file says."""

    shape: tuple[int, ...]
    by_column: bool
    dtype: np.dtype[Any]
    start: bytes  # the header itself

    @property
    def offset(self) -> int:
        """Where the numbers begin."""
        return len(self.start)

    @property
    def nbytes(self) -> int:
        """Size of the numbers."""
        return math.prod(self.shape) * self.dtype.itemsize

    def array(self, content: bytes) -> npt.NDArray[Any]:
        """The array of a file with this content, which it shares."""
        flat = np.frombuffer(content, self.dtype, math.prod(self.shape), self.offset)
        return flat.reshape(self.shape, order="F" if self.by_column else "C")


def _read_header(path: Path) -> Header:
    """The header of a file, which must be long enough for what it promises."""
    return header_of(*read_start(path, LONGEST_HEADER), path)


def read_start(path: Path, most: int) -> tuple[bytes, int]:
    """The first bytes of a file, at most so many, and its size.

    Raises:
        DataError: It cannot be read.
    """
    try:
        size = size_of(path)
        with path.open("rb") as file:
            return file.read(most), size
    except FileNotFoundError:
        raise DataError(f"{path}: no such file.") from None
    except OSError as error:
        raise DataError(f"{path}: the file cannot be read ({error.strerror}).") from None


def header_of(start: bytes, size: int, path: Path) -> Header:
    """The header of a file of so many bytes that starts like this.

    Raises:
        DataError: It is none, or the file is too short for it.
    """
    if not size:
        raise DataError(f"{path}: the file is empty; copy or write it again.")
    if start[:6] != b"\x93NUMPY":
        raise DataError(f"{path}: {_what_it_is(start[:6])}; expected one array written by numpy.save.")
    length = 2 if start[6:7] == b"\x01" else 4
    end = 8 + length + int.from_bytes(start[8 : 8 + length], "little")
    header = _parsed(start[:end])
    if header is None:
        raise DataError(_damaged_header(path))
    if header.dtype.hasobject:
        raise DataError(
            f"{path}: the file holds pickled Python objects, which could run code and are never loaded; "
            "save a plain array of numbers."
        )
    expected = header.offset + header.nbytes
    if size < expected:
        raise DataError(
            f"{path}: the file is truncated, {size:,} bytes where its header promises {expected:,}; copy it again."
        )
    return header


@lru_cache(64)
def _parsed(start: bytes) -> Header | None:
    """What a header says; those of thousands of shards are mostly the same. None if it is none."""
    file = io.BytesIO(start)
    try:
        shape, by_column, dtype = parse_header(file, "")
    except DataError:
        return None
    return Header(shape, by_column, dtype, start[: file.tell()])


def parse_header(file: IO[bytes], name: str | Path) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Reads the header of an array: its shape, whether it is stored by columns, and its dtype.

    Args:
        file: The file, at its start; afterwards at its first number.
        name: What to call it.

    Raises:
        DataError: It is no header.
    """
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    damaged = _damaged_header(name)
    try:
        version = np.lib.format.read_magic(file)
        # Version 3 exists only for tables with non-ASCII column names, which no feature file is.
        shape, by_column, dtype = readers[version](file)
    except _DAMAGED:
        raise DataError(damaged) from None
    if any(type(size) is not int or size < 0 for size in shape):
        raise DataError(damaged)
    return tuple(shape), by_column, dtype


def _damaged_header(name: str | Path) -> str:
    return f"{name}: the header of the array is damaged; copy or write it again."


def read_array(file: IO[bytes], name: str | Path) -> npt.NDArray[Any]:
    """Reads a small array of any type whose header does not promise more than there is.

    Args:
        file: The file, at its start; or a member of an .npz archive.
        name: What to call it.

    Raises:
        DataError: It is damaged, or holds Python objects.
    """
    shape, by_column, dtype = parse_header(file, name)
    if dtype.hasobject:
        raise DataError(f"{name}: the file holds pickled Python objects, which could run code and are never loaded.")
    size = math.prod(shape) * dtype.itemsize
    content = file.read(min(size, LARGEST) + 1)
    try:
        if len(content) != size:
            raise ValueError
        return np.ndarray(shape, dtype, content, order="F" if by_column else "C")
    except ValueError:
        raise DataError(f"{name}: the array is damaged, or above {LARGEST:,} bytes; copy or write it again.") from None


def _what_it_is(start: bytes) -> str:
    if start.startswith(b"PK"):
        return "this is an .npz archive"
    if start.startswith(b"\x80"):
        return "this is a Python pickle, which could run code and is never loaded"
    if start == b"versio":
        return "this is a Git LFS pointer (fetch the file itself with `git lfs pull`)"
    return "this is not an .npy file"


def chunks(array: npt.NDArray[Any]) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Consecutive rows of about 16 MB, with the number of the first one."""
    row_bytes = max(1, array[:1].nbytes)
    step = max(1, _CHUNK_BYTES // row_bytes)
    for first in range(0, len(array), step):
        yield first, np.asarray(array[first : first + step])


def check_finite(array: npt.NDArray[Any], name: str) -> None:
    """Refuse features that are not finite in float32, in which networks compute, naming the first bad row.

    Args:
        array: Features (N, ...), possibly memory-mapped.
        name: What to call them.

    Raises:
        DataError: A value is NaN, infinite or too large for float32.
    """
    for first, chunk in chunks(array):
        with np.errstate(over="ignore", invalid="ignore"):
            if chunk.dtype.itemsize > 4:
                chunk = chunk.astype(np.float32)
            total = chunk.sum(dtype=np.float32 if chunk.dtype == np.float16 else None)
        if np.isfinite(total):  # one bad value makes the sum bad; the reverse does not hold
            continue
        bad = ~np.isfinite(chunk).all(axis=tuple(range(1, chunk.ndim)))
        if bad.any():
            row = first + int(bad.argmax())
            raise DataError(
                f"{name}: row {row:,} holds values that are not finite (NaN, infinite or too large for float32); "
                "compute it again."
            )


def absolute_maximum(array: npt.NDArray[Any]) -> float:
    """Largest absolute value; NaN or infinite if any value is."""
    highest = 0.0
    for _, chunk in chunks(array):
        if chunk.dtype == np.float16:  # numpy compares half floats one by one; without the sign their bits sort alike
            largest = (chunk.view(np.uint16) & 0x7FFF).max().view(np.float16)
        else:
            largest = abs(np.maximum(chunk.max(), -chunk.min()))  # a zero may be negative
        highest = float(np.maximum(highest, largest))  # np.maximum keeps NaN
    return highest
