"""Files and folders at a URL, fetched once into a folder of this machine: http by ranges, s3 and gs by fsspec.

A file is fetched in ranges. Each is checked against the length that was asked for, so that a connection that ends early
is never taken for a short file. After time-outs, broken connections and answers of busy servers it is tried again, with
longer and longer pauses. A fetch that was stopped goes on behind its last whole range. Object stores have folders as
well: all files whose names begin with that of the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import filelock

from mispair.compute.threads import parallel_each
from mispair.errors import ChangedError, DataError, InvalidValueError, MissingPackageError, NotFoundError, WriteError
from mispair.support.extras import install_command
from mispair.support.files import replacing

RANGE = 1 << 23  # bytes fetched at a time
TIMEOUT = 60.0  # seconds without an answer
ATTEMPTS = 6
_AT_A_TIME = 4  # files of a folder
PAUSE = 0.5  # seconds before the second attempt, doubled before each further one
_URL = re.compile(r"(https?|s3|gs|memory):/+(.+)", re.DOTALL)
_BUSY = (408, 425, 429, 500, 502, 503, 504)  # a later attempt may succeed
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")

Result = TypeVar("Result")


class TemporaryError(Exception):
    """Something that may go well at the next attempt."""


State = tuple[int, str]  # size of a file, and a text that changes when its content does


class RemoteFile(Protocol):
    """A file at a URL."""

    def read(self, start: int, stop: int) -> bytes:
        """Some bytes of it, possibly too few. Raises TemporaryError."""


def url_of(path: Path) -> str | None:
    """The URL that a path was made of, which leaves out one of its slashes; None for paths of this machine.

    >>> url_of(Path("https://host/left.npy"))
    'https://host/left.npy'
    """
    found = _URL.fullmatch(path.as_posix())
    return None if found is None else f"{found[1]}://{found[2]}"


def fetch(url: str, folder: Path) -> Path:
    """The copy of a file or a folder in a folder, fetched now if it is not there or not the same any more.

    Raises:
        DataError: It cannot be fetched.
        ConfigError: A package is missing.
    """
    name = name_of(url)
    place: HttpFile | StoredFile = HttpFile(url) if url.startswith("http") else StoredFile(url)
    found = _persistent(place.find, url)
    if isinstance(found, dict):
        copy = _Copy(folder / short_hash(json.dumps([url, sorted(found.items())])), url)
        states = {f"{name}/{file}": state for file, state in found.items()}
    else:
        # Without the query: it may be a signature that is another one each time.
        copy = _Copy(folder / short_hash(f"{url.partition('?')[0]} {found[0]} {found[1]}"), url)
        states = {name: found}

    def fetch_file(path: str) -> None:
        if path == name:
            copy.fetch(place, url, states[path][0], path)
        else:
            assert isinstance(place, StoredFile)
            inside = path.removeprefix(f"{name}/")
            copy.fetch(place.inside(inside), f"{url}/{inside}", states[path][0], path)

    with copy.writing():
        missing = [path for path in states if not (copy.folder / path).exists()]
        parallel_each(fetch_file, missing, _AT_A_TIME)
        now = _persistent(place.find, url) if missing else found
        after = {f"{name}/{file}": state for file, state in now.items()} if isinstance(now, dict) else {name: now}
        copy.complete(missing, changed=[path for path in missing if after.get(path) != states[path]])
    return copy.folder / name


def name_of(url: str) -> str:
    """The last part of a URL.

    >>> name_of("s3://bucket/a/left.npy"), name_of("s3://bucket")
    ('left.npy', 'bucket')
    """
    return PurePosixPath(urlsplit(url).path).name or urlsplit(url).netloc


def copy_version(path: Path, folder: Path) -> str:
    """What tells a copy that `fetch` has made from those of other URLs and of other contents."""
    return path.relative_to(folder).parts[0]


def find_copy(url: str, version: str, folder: Path) -> Path:
    """The copy that `fetch` has made, with nothing fetched.

    Raises:
        DataError: It is not there any more.
    """
    path = folder / version / name_of(url)
    if not re.fullmatch("[0-9a-f]{16}", version) or not path.exists():
        raise NotFoundError(
            f"its copy is no longer in {folder}",
            where=url,
            advice="Set MISPAIR_CACHE to the cache that has it, or repeat the command that fetched it.",
        )
    return path


@dataclass(frozen=True)
class _Copy:
    """A folder that gets files from a URL, each when it is whole."""

    folder: Path
    url: str

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Keeps other processes out."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(self.folder / ".lock"):
                yield
        except OSError as error:
            what = f"the copy of {self.url} cannot be written ({error.strerror or error})"
            raise WriteError(what, where=self.folder) from None

    def fetch(self, remote: RemoteFile, url: str, size: int, name: str) -> None:
        """Fetches what is missing of a file."""
        part = self._part(name)
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab") as file:
            if file.tell() > size:
                file.truncate(0)
            for start in range(file.tell(), size, RANGE):
                stop = min(start + RANGE, size)
                file.write(_persistent(lambda start=start, stop=stop: _range(remote, start, stop), url))  # type: ignore[misc]
                file.flush()
            os.fsync(file.fileno())

    def complete(self, names: list[str], *, changed: list[str]) -> None:
        """Puts fetched files in their places, unless some have changed meanwhile, which are fetched again later."""
        for name in changed:
            self._part(name).unlink()
        if changed:
            raise _changed(self.url)
        for name in names:
            # The same times on all machines: an audit is recognised by the times of its files.
            os.utime(self._part(name), (0, 0))
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            self._part(name).replace(self.folder / name)

    def _part(self, name: str) -> Path:
        return self.folder / ".parts" / f"{name}.part"


def _changed(url: str) -> ChangedError:
    return ChangedError("the data changed while it was fetched", where=url, advice="Run the same command again.")


def short_hash(text: str) -> str:
    """A name for what a text describes."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _range(remote: RemoteFile, start: int, stop: int) -> bytes:
    found = remote.read(start, stop)
    if len(found) != stop - start:
        raise TemporaryError(f"{len(found):,} bytes came where {stop - start:,} were asked for")
    return found


def _persistent(action: Callable[[], Result], url: str) -> Result:
    """The result of an action that is tried again where that may help."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return action()
        except (TemporaryError, TimeoutError, ConnectionError) as error:
            if attempt == ATTEMPTS:
                raise DataError(
                    f"the store or server has failed {ATTEMPTS} times ({str(error) or type(error).__name__})",
                    where=url,
                    advice="Run the same command again to resume.",
                ) from None
            time.sleep(PAUSE * 2 ** (attempt - 1))
    raise AssertionError


class HttpFile:
    """A file of a web server that serves ranges."""

    def __init__(self, url: str) -> None:
        self.url = url

    def find(self) -> State:
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
                    advice = "Fetch the file, and give its path."
                    raise DataError("the server sends whole files only", where=self.url, advice=advice)
                version = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
                return answer.read(), int(served[3]), version
        except urllib.error.HTTPError as error:
            if error.code in _BUSY:
                raise TemporaryError(f"the server answered {error.code}") from None
            raise NotFoundError(f"the server answered {error.code}", where=self.url) from None
        except http.client.IncompleteRead as error:
            raise TemporaryError(f"only {len(error.partial):,} bytes of a range came") from None
        except (urllib.error.URLError, http.client.HTTPException) as error:
            raise TemporaryError(str(getattr(error, "reason", error))) from None


class StoredFile:
    """A file or a folder of an object store."""

    def __init__(self, url: str) -> None:
        self._store, self._path = _open_store(url)
        self.url = url

    def inside(self, name: str) -> StoredFile:
        """A file of this folder."""
        return StoredFile(f"{self.url.rstrip('/')}/{name}")

    def find(self) -> State | dict[str, State]:
        """The state of a file; of a folder, those of all files in it by name."""
        found = self._info()
        if found["type"] == "file":
            return _state(found)
        infos = self._try(lambda: self._store.find(self._path, detail=True))
        start = len(self._path.rstrip("/")) + 1
        files = {name[start:]: _state(info) for name, info in infos.items() if info["type"] == "file"}
        files = {name: state for name, state in files.items() if name and not name.endswith("/")}
        for name in files:
            if {"", ".", ".."} & set(name.split("/")) or "\\" in name:
                what = f"{name!r} cannot be the name of a file here"
                raise InvalidValueError(what, where=self.url, advice="Rename it.")
        if not files:
            raise NotFoundError("no such file or folder", where=self.url)
        return files

    def state(self) -> State:
        found = self._info()
        if found["type"] != "file":
            raise DataError("a folder", where=self.url, expected="the URL of a file")
        return _state(found)

    def read(self, start: int, stop: int) -> bytes:
        return bytes(self._try(lambda: self._store.cat_file(self._path, start=start, end=stop)))

    def write(self, path: Path, **options: Any) -> None:
        """Writes the content of a file of this machine."""
        size = path.stat().st_size
        if self.url.startswith("s3:"):  # it waits for ever for a store that does not say whether it takes the file
            options["timeout"] = TIMEOUT * (1 + size // RANGE)
        try:
            self._try(lambda: self._store.put_file(str(path), self._path, **options))
        except NotFoundError:
            raise WriteError("there is no such bucket", where=self.url, advice="Make it first.") from None
        if self.state()[0] != size:
            raise TemporaryError("the file is shorter than what was written")

    def create(self, path: Path) -> bool:
        """As `write`, unless there is a file; whether there was none."""
        try:
            self.state()
        except NotFoundError:
            self.write(path, mode="create")
            return True
        return False

    def delete(self) -> None:
        """Deletes the file; it need not be there."""
        with contextlib.suppress(NotFoundError):
            self._try(lambda: self._store.rm_file(self._path))

    def _info(self) -> dict[str, Any]:
        self._store.invalidate_cache()
        found: dict[str, Any] = self._try(lambda: self._store.info(self._path))
        return found

    def _try(self, action: Callable[[], Result]) -> Result:
        try:
            return action()
        except FileNotFoundError:
            raise NotFoundError("no such file or folder", where=self.url) from None
        except PermissionError as error:
            what = f"the store refuses access ({error})"
            raise DataError(what, where=self.url, advice="Check your credentials.") from None
        except Exception as error:  # the packages of the stores have errors of their own for broken connections
            if "Credentials" in type(error).__name__:
                advice = "Give the credentials of the store, as by AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
                raise DataError(str(error), where=self.url, advice=advice) from None
            raise TemporaryError(str(error) or type(error).__name__) from None


class StoredFolder:
    """A folder of an object store that is written to. All that fails is tried again, where that may help."""

    def __init__(self, url: str) -> None:
        self.url, self._place = url.rstrip("/"), StoredFile(url)

    def files(self) -> dict[str, State]:
        """All files in it by name."""

        def find() -> dict[str, State]:
            try:
                found = self._place.find()
            except NotFoundError:
                return {}
            if not isinstance(found, dict):
                raise DataError("a file", where=self.url, expected="the URL of a folder")
            return found

        return _persistent(find, self.url)

    def get(self, name: str, path: Path) -> None:
        """Fetches a file to a path, which is there when the file is whole."""
        file, url = self._place.inside(name), f"{self.url}/{name}"
        state = _persistent(file.state, url)
        with replacing(path) as written:
            for start in range(0, state[0], RANGE):
                stop = min(start + RANGE, state[0])
                written.write(_persistent(lambda start=start, stop=stop: _range(file, start, stop), url))  # type: ignore[misc]
            if _persistent(file.state, url) != state:
                raise _changed(url)

    def put(self, path: Path, name: str) -> None:
        """Writes a file, which is there when it is whole."""
        file = self._place.inside(name)
        _persistent(lambda: file.write(path), f"{self.url}/{name}")

    def create(self, path: Path, name: str) -> bool:
        """As `put`, unless there is such a file, which is kept; whether there was none."""
        file = self._place.inside(name)
        return _persistent(lambda: file.create(path), f"{self.url}/{name}")

    def delete(self, name: str) -> None:
        """Deletes a file; it need not be there."""
        _persistent(self._place.inside(name).delete, f"{self.url}/{name}")


def _open_store(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    options: dict[str, Any] = {}
    if url.startswith("s3:"):
        # The same time-outs as of web servers. It is tried again here, not there as well.
        config = {"connect_timeout": TIMEOUT, "read_timeout": TIMEOUT, "retries": {"total_max_attempts": 1}}
        options = {"config_kwargs": config, "max_concurrency": 2}
    try:
        from fsspec.core import url_to_fs

        store, path = url_to_fs(url, **options)
    except ImportError as error:
        packages = {"s3": ["s3fs"], "gs": ["gcsfs"]}.get(url.partition(":")[0], [])
        advice = f"Install it: {install_command('remote', *packages)}"
        raise MissingPackageError(f"a package is missing ({error})", where=url, advice=advice) from None
    if options:
        store.retries = 1
    return store, path


def _state(found: Mapping[str, Any]) -> State:
    known = (found.get(name) for name in ("ETag", "etag", "LastModified", "mtime", "created"))
    return int(found["size"]), str(next((value for value in known if value), ""))
