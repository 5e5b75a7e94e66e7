"""Files, whole or absent."""

from __future__ import annotations

import codecs
import contextlib
import csv
import errno
import hashlib
import json
import os
import platform
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from mispair.errors import DamagedError, DataError, NotFoundError, WriteError

_HOST = zlib.crc32(platform.node().encode())  # other machines may write to the same folder
_LOOKED_AT: set[str] = set()
LARGEST = 1 << 28  # bytes of one file that is read as a whole
LARGEST_JSON = 1 << 30  # of one with all captions, which takes several times as much memory
LARGEST_TEXT = 1 << 31  # of one with a caption a line
LARGEST_CELL = 1 << 24  # characters of a cell of a table
Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


@contextmanager
def replacing(path: str | Path, *, durable: bool = True) -> Iterator[IO[bytes]]:
    """Open a binary file; it replaces `path` if the block succeeds and vanishes if it fails.

    Args:
        path: The file.
        durable: Sync it to the disk. Without it a power cut may leave a damaged file.

    Raises:
        WriteError: The file cannot be written; an earlier file at `path` is kept.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{writer()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _delete_leftovers(path.parent)
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise WriteError(f"the file cannot be written ({error.strerror})", where=path) from None
    if durable:
        _sync_folder(path.parent)


def writer() -> str:
    """Name of this process for its temporary files; see `is_dead`."""
    return f"{_HOST}{os.getpid():08d}"


def is_dead(name: str) -> bool:
    """Whether `name` is the `writer` of an ended process of this machine."""
    process = name.removeprefix(str(_HOST))
    # Windows has no harmless signal.
    return os.name != "nt" and name != process and process.isdecimal() and not _is_alive(int(process))


def _delete_leftovers(folder: Path) -> None:
    """Delete temporary files of killed processes of this machine; once a folder, as it may be large."""
    if str(folder) in _LOOKED_AT:
        return
    _LOOKED_AT.add(str(folder))
    for entry in list(folder.glob(f".*.{_HOST}????????.tmp")):
        if entry.is_file() and is_dead(entry.name.split(".")[-2]):
            entry.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return not _is_zombie(process)


def _is_zombie(process: int) -> bool:
    """Whether the process has ended but its parent has not waited for it, as in some containers."""
    try:
        state = Path(f"/proc/{process}/stat").read_bytes()
    except OSError:  # not on Linux, or gone in between
        return False
    return state.rpartition(b")")[2].split()[:1] == [b"Z"]


def write_atomically(path: str | Path, content: bytes) -> None:
    """Write a file; an interruption leaves the old or the new one."""
    with replacing(path) as file:
        file.write(content)


def check_name(path: Path) -> None:
    """Refuse a name outside UTF-8: safetensors, parquet and SQLite cannot open such files."""
    try:
        problem = "contains a NUL" if b"\0" in os.fspath(path).encode() else ""
    except UnicodeEncodeError:
        problem = "is not UTF-8"
    if problem:
        raise WriteError(f"the name {problem}", where=path, advice="Give another `out`")


def read_json(path: str | Path) -> Json:
    """Content of a JSON file; None if it is missing, no JSON or above `LARGEST` bytes."""
    try:
        found: Json = json.loads(read_regular(Path(path)))
    except (OSError, ValueError, RecursionError):
        return None
    return found


def take_long_cells() -> None:
    """Let Python's reader of CSV take cells of more than 131,072 characters.

    The limit is one of the process. It is never lowered again, as other threads may be reading.
    """
    csv.field_size_limit(max(LARGEST_CELL, csv.field_size_limit()))


def sha256_of(path: str | Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with regular(Path(path)).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def short_hash(text: str) -> str:
    """A short name for a described thing."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _sync_folder(folder: Path) -> None:
    """Make a rename durable, where the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def unreadable(path: str | Path, error: Exception, *, expected: str = "", advice: str = "") -> DataError:
    """The error for a file that cannot be opened or understood.

    >>> print(unreadable("a.npy", FileNotFoundError()))
    a.npy: no such file.
    """
    if isinstance(error, FileNotFoundError):
        return NotFoundError("no such file", where=path, expected=expected)
    if isinstance(error, UnicodeEncodeError):
        return DamagedError("the name is not UTF-8, and such files cannot be opened", where=path, advice="Rename it.")
    if isinstance(error, UnicodeDecodeError):
        encoding = "utf-16" if error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "latin1"
        advice = f"Convert the file with `iconv -f {encoding} -t utf-8`."
        return DamagedError(f"byte {error.start:,} is not UTF-8", where=path, expected=expected, advice=advice)
    reason = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    reason = reason.splitlines()[0].removesuffix(".")
    return DamagedError(f"the file cannot be read ({reason})", where=path, expected=expected, advice=advice)


def regular(path: Path) -> Path:
    """Return the path of a regular file: a pipe would block, and a device may have no end.

    Raises:
        OSError: It is something else, or missing.
    """
    size_of(path)
    return path


def size_of(path: Path) -> int:
    """Size of a regular file in bytes."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return found.st_size


def read_regular(path: Path, most: int = LARGEST) -> bytes:
    """Content of a regular file of at most `most` bytes.

    Raises:
        OSError: It is something else, larger, or unreadable.
    """
    return at_most(path, most).read_bytes()


def at_most(path: Path, most: int) -> Path:
    """Return the path of a regular file of at most `most` bytes."""
    size = size_of(path)
    if size > most:
        found = f"a file of {size / 1e6:,.0f} MB, and at most {most / 1e6:,.0f} MB are read"
        raise OSError(errno.EFBIG, found, str(path))
    return path
