"""Files and folders at URLs, by fsspec: fetched once into a folder of this machine, or written from there.

A file is fetched in ranges. The length of each is checked, so a connection that ends early never makes a short file.
Time-outs, broken connections and busy servers are tried again, after longer and longer pauses. A stopped fetch resumes
behind its last whole range. A folder of an object store is all files whose names begin with its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import IO, TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import filelock

from mispair.compute.threads import parallel_each
from mispair.errors import (
    ChangedError,
    DataError,
    InvalidValueError,
    MispairError,
    MissingPackageError,
    NotFoundError,
    WriteError,
)
from mispair.support.extras import install_command
from mispair.support.files import replacing, short_hash

if TYPE_CHECKING:
    import pyarrow

RANGE = 1 << 23  # bytes fetched at a time
TIMEOUT = 60.0  # seconds without an answer
ATTEMPTS = 6
PAUSE = 0.5  # seconds before the second attempt, doubled before each further one
_AT_A_TIME = 4  # files of a folder
_URL = re.compile(r"(https?|s3|gs|hf|memory):/+(.+)", re.DOTALL)
_PACKAGES = {"s3": ["s3fs"], "gs": ["gcsfs"], "hf": ["huggingface_hub"]}  # beside the extra `remote`
_BUSY = (408, 425, 429, 500, 502, 503, 504)  # a later attempt may succeed

Result = TypeVar("Result")
State = tuple[int, str]  # size of a file, and a text that changes when its content does


def url_of(path: Path) -> str | None:
    """Return the URL of a path, with both its slashes; None for paths of this machine.

    >>> url_of(Path("https://host/left.npy"))
    'https://host/left.npy'
    """
    found = _URL.fullmatch(path.as_posix())
    return None if found is None else f"{found[1]}://{found[2]}"


def fetch(url: str, folder: Path) -> Path:
    """Return the copy FOLDER/VERSION/NAME of a file or a folder; fetch it if it is missing or has changed.

    Raises:
        DataError: It cannot be fetched.
        ConfigError: A package is missing.
    """
    store = Store(url)
    states = store.files()
    if not states:
        raise NotFoundError("no such file or folder", where=url)
    copy = folder / version_of(url, states) / name_of(url)

    def part_of(name: str) -> Path:
        return copy.parent / ".parts" / f"{name}.part"

    def fetch_part(name: str) -> None:
        part_of(name).parent.mkdir(parents=True, exist_ok=True)
        with part_of(name).open("ab") as file:
            store.copy_to(file, name, states[name][0])
            os.fsync(file.fileno())

    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(copy.parent / ".lock"):
            missing = [name for name in states if not (copy / name).exists()]
            parallel_each(fetch_part, missing, _AT_A_TIME)
            now = store.files() if missing else states
            changed = [name for name in missing if now.get(name) != states[name]]
            for name in changed:
                part_of(name).unlink()
            if changed:
                raise _changed(url)
            for name in missing:
                # The same times on all machines: an audit is recognised by the times of its files.
                os.utime(part_of(name), (0, 0))
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                part_of(name).replace(copy / name)
    except OSError as error:
        what = f"the copy of {url} cannot be written ({error.strerror or error})"
        raise WriteError(what, where=copy.parent) from None
    return copy


def version_of(url: str, states: Mapping[str, State]) -> str:
    """Return a hash of the states of all files at a URL."""
    # Without the query, because it may be a signature that changes each time.
    return short_hash(json.dumps([url.partition("?")[0], sorted(states.items())]))


def name_of(url: str) -> str:
    """Return the last part of a URL.

    >>> name_of("s3://bucket/a/left.npy"), name_of("s3://bucket")
    ('left.npy', 'bucket')
    """
    return PurePosixPath(urlsplit(url).path).name or urlsplit(url).netloc


def find_copy(url: str, version: str, folder: Path) -> Path:
    """Return a copy by `fetch`.

    Raises:
        NotFoundError: The copy was deleted.
    """
    path = folder / version / name_of(url)
    if not re.fullmatch("[0-9a-f]{16}", version) or not path.exists():
        advice = "Set MISPAIR_CACHE to the cache with the copy, or repeat the command that fetched it."
        raise NotFoundError(f"its copy is no longer in {folder}", where=url, advice=advice)
    return path


def _changed(url: str) -> ChangedError:
    return ChangedError("the data changed while it was fetched", where=url, advice="Run the same command again.")


class Store:
    """A folder or a file at a URL, or of this machine; the name of the file itself is empty.

    All methods raise a DataError after the last attempt.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._is_http, self._is_local = url.startswith("http"), "://" not in url
        self._system, self._path = _file_system(self.url)
        self._noted = False  # whether a failed attempt was noted: one is enough

    def files(self) -> dict[str, State]:
        """Return the states of all files by name."""

        def find() -> dict[str, dict[str, Any]]:
            info = self._info("")
            return {self._path: info} if info["type"] == "file" else self._system.find(self._path, detail=True)

        try:
            infos = self._try("", find)
        except NotFoundError:
            return {}
        root = self._path.rstrip("/")
        found = {path[len(root) + 1 :]: _state(info) for path, info in infos.items() if info["type"] == "file"}
        if root in infos:
            return found
        found = {name: state for name, state in found.items() if name and not name.endswith("/")}
        for name in found:
            if {"", ".", ".."} & set(name.split("/")) or "\\" in name:
                what = f"{name!r} cannot be the name of a file here"
                raise InvalidValueError(what, where=self.url, advice="Rename it.")
        return found

    def copy_to(self, file: IO[bytes], name: str, size: int) -> None:
        """Append the missing rest of a file of this size."""
        for start in range(file.tell(), size, RANGE):
            file.write(self._range(name, start, min(start + RANGE, size), size))
            file.flush()

    def get(self, name: str, path: Path) -> None:
        """Fetch a file; the path exists once the file is whole."""

        with replacing(path) as file:
            self._copy_unchanged(file, name)

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        file = io.BytesIO()
        self._copy_unchanged(file, name)
        return file.getvalue()

    def _copy_unchanged(self, file: IO[bytes], name: str) -> None:
        before = _state(self._try(name, lambda: self._info(name)))
        self.copy_to(file, name, before[0])
        if _state(self._try(name, lambda: self._info(name))) != before:
            raise _changed(f"{self.url}/{name}")

    def write(self, name: str, content: bytes) -> None:
        """Write a file with this content."""
        with TemporaryDirectory() as folder:
            Path(folder, "made").write_bytes(content)
            self.put(Path(folder, "made"), name)

    def table(self, name: str, columns: list[str] | None = None) -> pyarrow.Table:
        """Read a parquet file, or some of its columns."""
        import pyarrow.parquet

        return pyarrow.parquet.read_table(pyarrow.BufferReader(self.read(name)), columns=columns)

    def write_table(self, name: str, table: pyarrow.Table) -> None:
        """Write a parquet file."""
        import pyarrow.parquet

        file = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(table, file)
        self.write(name, file.getvalue().to_pybytes())

    def open(self, name: str) -> Any:
        """Open a file to read some bytes of it."""
        return self._try(name, lambda: self._system.open(self._at(name), "rb", block_size=1 << 16))

    def put(self, path: Path, name: str) -> None:
        """Write a file; it appears when it is whole."""
        try:
            self._try(name, lambda: self._write(path, name))
        except NotFoundError:
            raise WriteError("there is no such bucket", where=self.url, advice="Make it first.") from None

    def delete(self, name: str) -> None:
        """Delete a file if it exists."""
        with contextlib.suppress(NotFoundError):
            self._try(name, lambda: self._system.rm_file(self._at(name)))

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}" if name else self._path

    def _info(self, name: str) -> dict[str, Any]:
        self._system.invalidate_cache()
        found: dict[str, Any] = self._system.info(self._at(name))
        return found

    def _range(self, name: str, start: int, stop: int, size: int) -> bytes:
        def read() -> bytes:
            if self._is_http:  # `cat_file` would take the whole file from a server that serves no ranges
                with self._system.open(self._path, size=size, cache_type="none") as file:
                    file.seek(start)
                    found = file.read(stop - start)
            else:
                found = self._system.cat_file(self._at(name), start=start, end=stop)
            if len(found) != stop - start:
                raise OSError(f"{len(found):,} bytes came where {stop - start:,} were asked for")
            return bytes(found)

        return self._try(name, read)

    def _write(self, path: Path, name: str, **options: Any) -> None:
        size = path.stat().st_size
        if self.url.startswith("s3:"):  # it waits for ever for a store that does not say whether it takes the file
            options["timeout"] = TIMEOUT * (1 + size // RANGE)
        if self._is_local:
            Path(self._at(name)).parent.mkdir(parents=True, exist_ok=True)
            with replacing(self._at(name)) as file, path.open("rb") as content:
                shutil.copyfileobj(content, file)
            return
        self._system.put_file(str(path), self._at(name), **options)
        if self._info(name)["size"] != size:
            raise OSError("the file is shorter than what was written")

    def _try(self, name: str, action: Callable[[], Result]) -> Result:
        """Return the result of an action; repeat it after temporary errors."""
        url = f"{self.url}/{name}" if name else self.url
        for attempt in range(ATTEMPTS):
            time.sleep(PAUSE * 2 ** (attempt - 1) if attempt else 0)
            try:
                return action()
            except Exception as error:  # the packages of the stores have errors of their own
                reason = self._final(error, url)
                if reason is not None:
                    raise reason from None
                last = _reason(error)
                if not self._noted:
                    self._noted = True
                    warnings.warn(f"{url}: {last}; trying up to {ATTEMPTS - 1} more times", stacklevel=2)
        what = f"the store or server has failed {ATTEMPTS} times ({last})"
        raise DataError(what, where=url, advice="Run the same command again to resume.")

    def _final(self, error: Exception, url: str) -> MispairError | None:
        """Translate an error; None for a temporary one."""
        answers = (getattr(cause, "status", None) for cause in (error, error.__cause__))
        status = next((answer for answer in answers if isinstance(answer, int)), None)
        # fsspec raises FileNotFoundError for web servers that are busy or do not answer, too.
        is_silent = self._is_http and error.__cause__ is not None and status is None
        if status in _BUSY or (isinstance(error, FileNotFoundError) and is_silent):
            return None
        if isinstance(error, PermissionError) or status in (401, 403):
            what = f"the store refuses access ({status or error})"
            return DataError(what, where=url, advice="Check your credentials.")
        if isinstance(error, FileNotFoundError):
            return NotFoundError("no such file or folder", where=url)
        if status is not None:
            return DataError(f"the server answered {status}", where=url)
        if isinstance(error, ValueError) and self._is_http:
            return DataError("the server sends whole files only", where=url, advice="Fetch it, and give its path.")
        if "Credentials" in type(error).__name__:
            advice = "Give the credentials of the store, as by AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
            return DataError(str(error), where=url, advice=advice)
        return None


def _reason(error: Exception) -> str:
    """What failed; fsspec's FileNotFoundError has only the URL, and the reason as its cause."""
    cause = error.__cause__ or error
    return str(cause) or type(cause).__name__


def _file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it."""
    options: dict[str, Any] = {}
    try:
        from fsspec.core import url_to_fs

        if url.startswith("s3:"):
            # The same time-outs as for web servers; `_try` repeats, so the package does not.
            config = {"connect_timeout": TIMEOUT, "read_timeout": TIMEOUT, "retries": {"total_max_attempts": 1}}
            options = {"config_kwargs": config, "max_concurrency": 2}
        elif url.startswith("http"):
            import aiohttp

            timeout = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT, sock_read=TIMEOUT)
            client = {"timeout": timeout, "trust_env": True}  # proxies
            options = {"headers": {"Accept-Encoding": "identity"}, "client_kwargs": client}
        system, path = url_to_fs(url, **options)
    except ImportError as error:
        advice = f"Install it: {install_command('remote', *_PACKAGES.get(url.partition(':')[0], []))}"
        raise MissingPackageError(f"a package is missing ({error})", where=url, advice=advice) from None
    if url.startswith("s3:"):
        system.retries = 1
    return system, path


def _state(info: Mapping[str, Any]) -> State:
    """Extract size and version from the entry of a file system."""
    names = ("ETag", "etag", "blob_id", "LastModified", "Last-Modified", "mtime", "created")
    return int(info["size"]), str(next((info[name] for name in names if info.get(name)), ""))
