"""The output of an audit in an object store, with no file system that machines share.

The audit is made in a folder of this machine, its working folder in the cache. What is in the store comes first: it is
fetched before, and all is written there when the audit has ended, with the mark last. So the mark says there, too,
whether an audit is whole. Shards of an audit leave what they have measured in the store.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

import filelock

from mispair.auditing.output_files import AUDIT
from mispair.encoders.cache import cache_folder
from mispair.errors import ChangedError, DamagedError, DataError, ExistsError, MispairError
from mispair.pairs.remote import Store, name_of, url_of
from mispair.support.files import Json, sha256_of, short_hash, write_atomically
from mispair.support.owned_folder import LOCK, WORK, Mark, acquire, read_mark

OUTPUTS = "outputs"  # folder in that of encodings, for audits whose output is a URL


@contextmanager
def working_folder(
    out: Path, request: Mapping[str, Json], cache: Path | None = None, *, overwrite: bool = False
) -> Iterator[Path]:
    """The folder in which an audit is made: `out` itself, or where it is a URL one that is written there at the end.

    Raises:
        DataError: The store cannot be read or written, or holds something else.
    """
    url = url_of(out)
    if url is None:
        yield out
        return
    store = OutputStore(url, cache)
    with store.owned():
        store.fetch(request, overwrite=overwrite)
        try:
            yield store.folder
        except MispairError:
            store.abandon()
            raise
        store.write(overwrite=overwrite)


class OutputStore:
    """The output of an audit at a URL.

    Args:
        url: A folder of an object store.
        cache: Folder of encodings; that of the user by default.
    """

    def __init__(self, url: str, cache: Path | None = None) -> None:
        self.url, self._store, self._begun = url, Store(url), False
        self.folder = cache_folder(cache).absolute() / OUTPUTS / short_hash(url) / name_of(url)

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Keep other processes of this machine out; errors name the URL, not the working folder."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(self.folder.parent / LOCK)
        acquire(lock, self.url)
        try:
            yield
        except MispairError as error:
            error.what = error.what.replace(str(self.folder), self.url)
            error.where = None if error.where is None else str(error.where).replace(str(self.folder), self.url)
            raise
        finally:
            lock.release()

    def mark(self) -> Mark | None:
        """The mark in the store; None if there is none.

        Raises:
            DataError: There are files, but no mark.
        """
        names = self._store.files()
        if AUDIT.mark not in names:
            if names:
                what = f"the folder is not empty and holds no {AUDIT.mark}"
                raise ExistsError(what, where=self.url, advice="Give another `out`.")
            return None
        with self._fetched(AUDIT.mark) as path:
            found = read_mark(path.parent, AUDIT)
        if found is None:
            raise DamagedError("not a mark of an audit", where=f"{self.url}/{AUDIT.mark}", advice="Give another `out`.")
        return found

    def fetch(self, request: Mapping[str, Json], *, overwrite: bool = False) -> None:
        """Fetches what the store has of a finished audit, and marks it as begun where there is nothing.

        Args:
            request: What the audit depends on.
            overwrite: Whether an audit with another request is of no interest.
        """
        request = json.loads(json.dumps(request))
        there, here = self.mark(), read_mark(self.folder, AUDIT)
        if here is not None and here.request != (request if there is None or overwrite else there.request):
            shutil.rmtree(self.folder)
            here = None
        if there is None:
            self._write_mark(request)
            self._begun = True
        elif there.request != request:
            if not overwrite:  # the working folder is refused by its mark
                self._take(AUDIT.mark)
        elif there.finished:
            for name in self._store.files():  # safe to be names of files here, which those in a mark may not be
                path, written = self.folder / name, there.files.get(name)
                if written is not None and not (path.exists() and sha256_of(path) == written):
                    self._take(name)
            self._take(AUDIT.mark)

    def write(self, *, overwrite: bool = False) -> None:
        """Writes the finished audit of the working folder, which is then deleted.

        Raises:
            DataError: Another audit was written there meanwhile.
        """
        here, there = read_mark(self.folder, AUDIT), self.mark()
        assert here is not None
        assert here.finished
        is_other = there is not None and there.request != here.request
        if is_other and not overwrite:
            what = "another audit was written there meanwhile"
            raise ChangedError(what, where=self.url, advice="Give another `out`.")
        names = self._store.files()
        files = [path.relative_to(self.folder).as_posix() for path in AUDIT.files_in(self.folder)]
        if there == here:
            files = [name for name in files if name not in here.files or name not in names]
        else:
            if is_other:  # before the new mark, so that it never stands beside intermediate results of another request
                self._delete(name for name in names if name.startswith(f"{WORK}/"))
            self._write_mark(here.request)
        for name in files:
            self._store.put(self.folder / name, name)
        if there != here:
            self._delete(name for name in self._store.files() if name not in files and _is_ours(name))
            self._store.put(self.folder / AUDIT.mark, AUDIT.mark)
        self.delete()

    def delete(self) -> None:
        """Deletes the working folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def abandon(self) -> None:
        """Removes the mark of an audit that was refused before it had begun."""
        if self._begun and read_mark(self.folder, AUDIT) is None:
            with contextlib.suppress(DataError):
                self._store.delete(AUDIT.mark)

    def _write_mark(self, request: Mapping[str, Json]) -> None:
        path = self.folder.with_name("begun.json")
        write_atomically(path, f"{json.dumps({'request': dict(request), 'finished': False}, indent=2)}\n".encode())
        self._store.put(path, AUDIT.mark)
        path.unlink()

    def _take(self, name: str) -> None:
        self._store.get(name, self.folder / name)

    def _delete(self, names: Iterable[str]) -> None:
        for name in names:
            self._store.delete(name)

    @contextmanager
    def _fetched(self, name: str) -> Iterator[Path]:
        """A file of the store for a moment, beside the working folder."""
        folder = self.folder.with_name("fetched")
        try:
            self._store.get(name, folder / PurePosixPath(name).name)
            yield folder / PurePosixPath(name).name
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _is_ours(name: str) -> bool:
    folder, _, file = name.rpartition("/")
    patterns = [pattern.rpartition("/") for pattern in (*AUDIT.files, *AUDIT.optional)]
    in_work = name.startswith(f"{WORK}/")
    return in_work or any(folder == place and fnmatchcase(file, pattern) for place, _, pattern in patterns)
