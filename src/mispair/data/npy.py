"""Opening .npy files safely and scanning them in chunks."""

from __future__ import annotations

import math
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from mispair.errors import DataError
from mispair.support.files import regular

_CHUNK_BYTES = 1 << 24  # stays in the cache of the processor, and is long enough to hide the loop
# What numpy's parser of headers raises for text that is no header.
_DAMAGED = (ValueError, KeyError, TypeError, SyntaxError, RecursionError, MemoryError, tokenize.TokenError)
_AXES = {1: "a number each", 2: "rows, width", 3: "images, regions, width"}


def open_array(
    path: str | Path, ndim: int | None = None, *, kind: Literal["float", "integer", "vector"] = "float"
) -> npt.NDArray[Any]:
    """Memory-map an .npy file after a check of its header and size.

    Args:
        path: The file.
        ndim: How many dimensions it must have; any number by default.
        kind: What it must hold; a "vector" may also be int8, as quantised embeddings are.

    Raises:
        DataError: The file is missing, damaged, truncated, pickled, or holds something else.
    """
    shape, dtype = _read_header(Path(path))
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
    array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False).view(MappedArray)
    return array


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


def _read_header(path: Path) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of the header; the file must be long enough for them."""
    try:
        size = regular(path).stat().st_size
        with path.open("rb") as file:
            start = file.read(6)
            if not size:
                raise DataError(f"{path}: the file is empty; copy or write it again.")
            if start != b"\x93NUMPY":
                raise DataError(f"{path}: {_what_it_is(start)}; expected one array written by numpy.save.")
            file.seek(0)
            shape, _, dtype = parse_header(file, path)
            expected = file.tell() + math.prod(shape) * dtype.itemsize
    except FileNotFoundError:
        raise DataError(f"{path}: no such file.") from None
    except OSError as error:
        raise DataError(f"{path}: the file cannot be read ({error.strerror}).") from None
    if dtype.hasobject:
        raise DataError(
            f"{path}: the file holds pickled Python objects, which could run code and are never loaded; "
            "save a plain array of numbers."
        )
    if size < expected:
        raise DataError(
            f"{path}: the file is truncated, {size:,} bytes where its header promises {expected:,}; copy it again."
        )
    return shape, dtype


def parse_header(file: IO[bytes], name: str | Path) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Reads the header of an array: its shape, whether it is stored by columns, and its dtype.

    Args:
        file: The file, at its start; afterwards at its first number.
        name: What to call it.

    Raises:
        DataError: It is no header.
    """
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    damaged = f"{name}: the header of the array is damaged; copy or write it again."
    try:
        version = np.lib.format.read_magic(file)
        # Version 3 exists only for tables with non-ASCII column names, which no feature file is.
        shape, by_column, dtype = readers[version](file)
    except _DAMAGED:
        raise DataError(damaged) from None
    if any(type(size) is not int or size < 0 for size in shape):
        raise DataError(damaged)
    return tuple(shape), by_column, dtype


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
