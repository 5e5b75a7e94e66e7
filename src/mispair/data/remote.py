"""Files at a URL, fetched once into a folder of this machine: http and https by ranges, s3 and gs by fsspec.

A file is fetched in ranges. Each is checked against the length that was asked for, so that a connection that ends early
is never taken for a short file. After time-outs, broken connections and answers of busy servers it is tried again, with
longer and longer pauses. A fetch that was stopped goes on behind its last whole range.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import filelock

from mispair.errors import ConfigError, DataError

RANGE = 1 << 23  # bytes fetched at a time
TIMEOUT = 60.0  # seconds without an answer
ATTEMPTS = 6
PAUSE = 0.5  # seconds before the second attempt, doubled before each further one
_URL = re.compile(r"(https?|s3|gs|memory):/+(.+)", re.DOTALL)
_BUSY = (408, 425, 429, 500, 502, 503, 504)  # a later attempt may succeed
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")

Result = TypeVar("Result")


class TemporaryError(Exception):
    """Something that may go well at the next attempt."""


class RemoteFile(Protocol):
    """A file at a URL."""

    def state(self) -> tuple[int, str]:
        """Its size, and a text that changes when its content does."""

    def read(self, start: int, stop: int) -> bytes:
        """Some bytes of it, possibly too few. Raises TemporaryError."""


def url_of(path: Path) -> str | None:
    """The URL that a path was made of, which leaves out one of its slashes; None for paths of this machine.

    >>> url_of(Path("https://host/left.npy"))
    'https://host/left.npy'
    """
    found = _URL.fullmatch(path.as_posix())
    return None if found is None else f"{found[1]}://{found[2]}"


def local(path: Path | None, folder: Path) -> Path | None:
    """The path itself, or where it is a URL its copy in the folder; see `fetch`."""
    url = None if path is None else url_of(path)
    return path if url is None else fetch(url, folder)


def fetch(url: str, folder: Path) -> Path:
    """The copy of a file in a folder, fetched now if it is not there or not the same any more.

    Raises:
        DataError: It cannot be fetched.
        ConfigError: A package is missing.
    """
    remote: RemoteFile = HttpFile(url) if url.startswith("http") else StoredFile(url)
    size, version = _persistent(remote.state, url)
    # Without the query: it may be a signature that is another one each time.
    key = hashlib.sha256(f"{url.partition('?')[0]} {size} {version}".encode()).hexdigest()[:16]
    path = folder / key / (PurePosixPath(urlsplit(url).path).name or "file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(path.parent / ".lock"):
            if not path.exists():
                _fetch(remote, url, size, version, path)
    except OSError as error:
        raise DataError(f"{path}: the copy of {url} cannot be written ({error.strerror or error}).") from None
    return path


def _fetch(remote: RemoteFile, url: str, size: int, version: str, path: Path) -> None:
    part = path.with_name(f"{path.name}.part")

    def read(start: int, stop: int) -> bytes:
        found = remote.read(start, stop)
        if len(found) != stop - start:
            raise TemporaryError(f"{len(found):,} bytes came where {stop - start:,} were asked for")
        return found

    with part.open("ab") as file:
        for start in range(file.tell(), size, RANGE):
            stop = min(start + RANGE, size)
            file.write(_persistent(lambda start=start, stop=stop: read(start, stop), url))  # type: ignore[misc]
            file.flush()
        os.fsync(file.fileno())
    if _persistent(remote.state, url) != (size, version) or part.stat().st_size != size:
        part.unlink()
        raise DataError(f"{url}: the file has changed while it was fetched; start the same command again.")
    os.utime(part, (0, 0))  # the same on all machines: an audit is recognised by the times of its files
    part.replace(path)


def _persistent(action: Callable[[], Result], url: str) -> Result:
    """The result of an action that is tried again where that may help."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return action()
        except (TemporaryError, TimeoutError, ConnectionError) as error:
            if attempt == ATTEMPTS:
                raise DataError(
                    f"{url}: the file cannot be fetched, {ATTEMPTS} times ({error or type(error).__name__}); the same "
                    "command goes on where it was."
                ) from None
            time.sleep(PAUSE * 2 ** (attempt - 1))
    raise AssertionError


class HttpFile:
    """A file of a web server that serves ranges."""

    def __init__(self, url: str) -> None:
        self.url = url

    def state(self) -> tuple[int, str]:
        _, size, version = self._get(0, 1)
        return size, version

    def read(self, start: int, stop: int) -> bytes:
        return self._get(start, stop)[0]

    def _get(self, start: int, stop: int) -> tuple[bytes, int, str]:
        request = urllib.request.Request(
            self.url, headers={"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                served = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
                if answer.status != 206 or served is None or int(served[1]) != start:
                    raise DataError(
                        f"{self.url}: the server sends whole files only; fetch the file, and give its path."
                    )
                version = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
                return answer.read(), int(served[3]), version
        except urllib.error.HTTPError as error:
            if error.code in _BUSY:
                raise TemporaryError(f"the server answered {error.code}") from None
            raise DataError(f"{self.url}: the file cannot be fetched (the server answered {error.code}).") from None
        except http.client.IncompleteRead as error:
            raise TemporaryError(f"only {len(error.partial):,} bytes of a range came") from None
        except (urllib.error.URLError, http.client.HTTPException) as error:
            raise TemporaryError(str(getattr(error, "reason", error))) from None


class StoredFile:
    """A file of an object store."""

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs

            self._store, self._path = url_to_fs(url)
        except ImportError as error:
            raise ConfigError(f"{url} needs a package ({error}): pip install fsspec, and s3fs or gcsfs.") from None
        self.url = url

    def state(self) -> tuple[int, str]:
        self._store.invalidate_cache()
        found: dict[str, Any] = self._try(lambda: self._store.info(self._path))
        if found.get("type") != "file":
            raise DataError(f"{self.url}: this is a folder; give the URL of a file.")
        known = (found.get(name) for name in ("ETag", "etag", "LastModified", "mtime", "created"))
        return int(found["size"]), str(next((value for value in known if value), ""))

    def read(self, start: int, stop: int) -> bytes:
        return bytes(self._try(lambda: self._store.cat_file(self._path, start, stop)))

    def _try(self, action: Callable[[], Result]) -> Result:
        try:
            return action()
        except FileNotFoundError:
            raise DataError(f"{self.url}: no such file.") from None
        except PermissionError as error:
            raise DataError(f"{self.url}: the file may not be read ({error}).") from None
        except OSError as error:
            raise TemporaryError(str(error)) from None
