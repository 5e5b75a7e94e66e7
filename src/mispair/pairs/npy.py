"""Open .npy files safely, scan them in chunks, and write them."""

from __future__ import annotations

import io
import math
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from mispair.errors import ChangedError, DamagedError, ShapeError
from mispair.support.arrays import IntArray
from mispair.support.files import LARGEST, replacing, size_of, unreadable

Numbers = Literal["float", "integer", "vector"]
LONGEST_HEADER = 1 << 14  # bytes: numpy refuses longer ones
_CHUNK_BYTES = 1 << 24  # stays in the cache of the processor, and is long enough to hide the loop
# Errors of numpy's parser for text that is not a header.
_DAMAGED = (ValueError, KeyError, TypeError, SyntaxError, RecursionError, MemoryError, tokenize.TokenError)
_AXES = {1: "a number each", 2: "rows, width", 3: "images, regions, width"}
_AGAIN = "Copy or write the file again."


def open_array(path: str | Path, ndim: int | None = None, *, kind: Numbers = "float") -> npt.NDArray[Any]:
    """Memory-map an .npy file after checking its header and size.

    Numbers of the kind "vector" are floats or int8, as quantised embeddings are.
    """
    header = read_header(path, ndim, kind=kind)
    with Path(path).open("rb") as file:  # by its name numpy would look up every folder above it
        array = np.memmap(file, header.dtype, "r", header.offset, header.shape, "F" if header.by_column else "C")
    return array.view(MappedArray)


def read_header(path: str | Path, ndim: int | None = None, *, kind: Numbers = "float") -> Header:
    """Read the header of an .npy file and check it as `open_array` does."""
    header, _ = read_start(Path(path))
    check_header(header, path, ndim, kind)
    return header


def check_header(header: Header | npt.NDArray[Any], path: str | Path, ndim: int | None, kind: Numbers) -> None:
    """Raise if an array has other dimensions or numbers of another type."""
    shape, dtype = header.shape, header.dtype
    if ndim is not None and len(shape) != ndim:
        expected = f"{ndim} dimension{'s' * (ndim > 1)} ({_AXES[ndim]})"
        raise ShapeError(f"found an array of shape {shape}", where=path, expected=expected)
    if 0 in shape:
        raise ShapeError(f"the array of shape {shape} is empty", where=path, advice="Give at least one row.")
    real = dtype.kind == "f" and dtype.itemsize <= 8 and dtype.isnative
    found = f"found numbers of type {dtype.str if not dtype.isnative else dtype}"
    if (kind == "float" and not real) or (kind == "vector" and not (real or dtype == np.int8)):
        raise ShapeError(
            found,
            where=path,
            expected="numbers of type float16, float32" + (", float64 or int8" if kind == "vector" else " or float64"),
            advice="Convert them with array.astype(numpy.float32).",
        )
    if kind == "integer" and dtype.kind not in "iu":
        raise ShapeError(found, where=path, expected="whole numbers such as int64")


def refuse_masked(values: object, where: str | Path | None = None) -> None:
    """Raise for a masked array: its masked numbers would count like all others."""
    if isinstance(values, np.ma.MaskedArray):
        advice = "Fill it, as by array.filled(numpy.nan), or leave out the masked rows."
        raise ShapeError("a masked array", where=where, expected="a plain array", advice=advice)


class MappedArray(np.memmap[Any, Any]):
    """A memory-mapped array; each reading checks the length of its file.

    Reading a mapping behind the end of its file ends the process without a word (SIGBUS).
    """

    def __getitem__(self, rows: Any) -> Any:
        mapping = self._mmap  # type: ignore[attr-defined]  # None for what was copied out of the file
        if mapping is not None and mapping.size() < len(mapping):
            raise ChangedError(
                f"the file was cut to {mapping.size():,} bytes while it was in use",
                where=self.filename,
                expected=f"{len(mapping):,} bytes",
                advice="Copy it again, then run the same command again.",
            )
        return super().__getitem__(rows)


@dataclass(frozen=True)
class Header:
    """The header of an array in .npy."""

    shape: tuple[int, ...]
    by_column: bool
    dtype: np.dtype[Any]
    start: bytes  # the header itself

    @property
    def offset(self) -> int:
        """Offset of the numbers in the file."""
        return len(self.start)

    @property
    def nbytes(self) -> int:
        """Size of the numbers."""
        return math.prod(self.shape) * self.dtype.itemsize

    def unpacked(self, content: bytes) -> npt.NDArray[Any]:
        """The array of a file with this content, without a copy."""
        flat = np.frombuffer(content, self.dtype, math.prod(self.shape), self.offset)
        return flat.reshape(self.shape, order="F" if self.by_column else "C")


def read_start(path: Path, most: int = LONGEST_HEADER) -> tuple[Header, bytes]:
    """The header of a file, and its first bytes."""
    try:
        size = size_of(path)
        with path.open("rb") as file:
            start = file.read(most)
    except OSError as error:
        raise unreadable(path, error) from None
    if not size:
        raise DamagedError("the file is empty", where=path, advice=_AGAIN)
    if start[:6] != b"\x93NUMPY":
        raise DamagedError(_what_it_is(start[:6]), where=path, expected="one array written by numpy.save")
    header = parse_header(io.BytesIO(start), path)
    expected = header.offset + header.nbytes
    if size < expected:
        raise DamagedError(f"truncated to {size:,} bytes", where=path, expected=f"{expected:,} bytes", advice=_AGAIN)
    return header, start


def parse_header(file: IO[bytes], name: str | Path) -> Header:
    """Read the header of an array; the numbers come next."""
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:
        # Version 3 exists only for tables with non-ASCII column names, which no feature file is.
        shape, by_column, dtype = readers[np.lib.format.read_magic(file)](file)
        if any(type(size) is not int or size < 0 for size in shape):
            raise ValueError
    except _DAMAGED:
        raise DamagedError("the header of the array is damaged", where=name, advice=_AGAIN) from None
    if dtype.hasobject:
        what = "pickled Python objects, which could run code and are never loaded"
        raise DamagedError(what, where=name, expected="a plain array of numbers")
    offset = file.tell()
    file.seek(0)
    return Header(tuple(shape), by_column, dtype, file.read(offset))


def read_array(file: IO[bytes], name: str | Path) -> npt.NDArray[Any]:
    """Read a small array of any type from a file or a member of an .npz archive, at its start."""
    header = parse_header(file, name)
    content = file.read(min(header.nbytes, LARGEST) + 1)
    try:
        if len(content) != header.nbytes:
            raise ValueError
        return np.ndarray(header.shape, header.dtype, content, order="F" if header.by_column else "C")
    except ValueError:
        what = f"the array is damaged, or larger than {LARGEST:,} bytes"
        raise DamagedError(what, where=name, advice=_AGAIN) from None


def _what_it_is(start: bytes) -> str:
    if start.startswith(b"PK"):
        return "an .npz archive"
    if start.startswith(b"\x80"):
        return "a Python pickle, which could run code and is never loaded"
    if start == b"versio":
        return "a Git LFS pointer (fetch the file itself with `git lfs pull`)"
    return "not an .npy file"


def chunks(array: npt.NDArray[Any]) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Consecutive rows of about 16 MB, with the number of the first one."""
    step = max(1, _CHUNK_BYTES // max(1, array[:1].nbytes))
    for first in range(0, len(array), step):
        yield first, np.asarray(array[first : first + step])


def check_finite(array: npt.NDArray[Any], name: str) -> None:
    """Raise if features (N, ...) are not finite in float32, the type of networks."""
    refuse_masked(array, name)
    for first, chunk in chunks(array):
        with np.errstate(over="ignore"):
            bad = ~np.isfinite(chunk.astype(np.float32, copy=False)).all(axis=tuple(range(1, chunk.ndim)))
        if bad.any():
            raise DamagedError(
                f"row {first + int(bad.argmax()):,} has values that are not finite (NaN, infinite or too large for "
                "float32)",
                where=name,
                advice="Compute it again.",
            )


def absolute_maximum(array: npt.NDArray[Any]) -> float:
    """Largest absolute value; NaN or infinite if any value is."""
    highest = 0.0
    for _, chunk in chunks(array):
        if chunk.dtype == np.float16:  # numpy compares half floats one by one
            chunk = chunk.astype(np.float32)
        highest = float(np.maximum(highest, np.abs(chunk).max()))  # np.maximum keeps NaN
    return highest


def write_array(path: Path, array: npt.NDArray[Any]) -> None:
    """Write an array, whole or not at all."""
    with replacing(path) as file:
        np.save(file, array, allow_pickle=False)


def write_rows(
    path: Path, read: Callable[[IntArray], npt.NDArray[Any]], rows: IntArray, times: IntArray | None = None
) -> None:
    """Some rows of an array as one .npy file, a few megabytes at a time; row i `times[i]` times."""
    first = read(rows[:1])
    total = len(rows) if times is None else int(times.sum())
    header = {"descr": first.dtype.str, "fortran_order": False, "shape": (total, *first.shape[1:])}
    step = max(1, _CHUNK_BYTES // max(1, first.nbytes))
    with replacing(path) as file:
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, len(rows), step):
            values = read(rows[start : start + step])
            if times is not None:
                values = np.repeat(values, times[start : start + step], axis=0)
            file.write(np.ascontiguousarray(values).tobytes())
