"""The output of an audit in an object store.

The audit is made in a folder of this machine, its working folder in the cache. Files of the store are fetched before
the audit. The results are written to the store after it, the mark last. So the mark in the store also
tells whether an audit is complete.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory

import filelock

from mispair.auditing.output_files import AUDIT
from mispair.encoders.cache import cache_folder
from mispair.encoders.encode import EMBEDDINGS
from mispair.errors import ChangedError, DamagedError, DataError, ExistsError, MispairError
from mispair.pairs.remote import Store, name_of, url_of
from mispair.support.files import Json, short_hash
from mispair.support.owned_folder import LOCK, WORK, FolderKind, Mark, OwnedFolder, acquire, changes, read_mark

OUTPUTS = "outputs"  # folder in that of encodings, for audits whose output is a URL


@contextmanager
def working_folder(
    out: Path, request: Mapping[str, Json], cache: Path | None = None, *, overwrite: bool = False
) -> Iterator[Path]:
    """Yield the folder of an audit: `out` itself, or for a URL a local folder, uploaded at the end.

    Errors name the URL, not the working folder.

    Raises:
        DataError: The store cannot be read or written, or holds something else.
    """
    url = url_of(out)
    if url is None:
        yield out
        return
    store, request = Store(url), json.loads(json.dumps(request))
    folder = cache_folder(cache).absolute() / OUTPUTS / short_hash(url) / name_of(url)
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder.parent / LOCK)  # keeps other processes of this machine out
    acquire(lock, url)
    try:
        is_new = _fetch(store, folder, request, overwrite)
        try:
            yield folder
        except MispairError:
            if is_new and read_mark(folder, AUDIT) is None:  # refused before it had begun
                with contextlib.suppress(DataError):
                    store.delete(AUDIT.mark)
            raise
        _upload(store, folder, overwrite)
        shutil.rmtree(folder, ignore_errors=True)
    except MispairError as error:
        error.what = error.what.replace(str(folder), url)
        error.where = None if error.where is None else str(error.where).replace(str(folder), url)
        raise
    finally:
        lock.release()


@contextmanager
def encoded_folder(out: Path, request: Mapping[str, Json], *, overwrite: bool = False) -> Iterator[str]:
    """Yield the folder or URL of encodings, marked as begun; mark it as finished at the end.

    Raises:
        DataError: The folder cannot be written, or holds something else.
    """
    url = url_of(out)
    if url is None:
        with OwnedFolder(out, EMBEDDINGS, request, overwrite=overwrite) as folder:
            folder.begin()
            yield str(out.absolute())
            folder.finish()
        return
    store, request = Store(url), json.loads(json.dumps(request))
    there = _mark(store, EMBEDDINGS)
    if there is not None and there.request != request:
        if not overwrite:
            what = f"holds embeddings with other settings ({changes(there.request, request)})"
            raise ChangedError(what, where=url, advice="Give another `out`, or `overwrite`.")
        _delete(store, (name for name in store.files() if _is_of(name, EMBEDDINGS)))
    _write_mark(store, request, EMBEDDINGS)
    yield url
    _write_mark(store, request, EMBEDDINGS, finished=True)


def _mark(store: Store, kind: FolderKind = AUDIT) -> Mark | None:
    """The mark in the store; None if the store is empty."""
    names, advice = store.files(), "Give another `out`."
    if kind.mark not in names:
        if names:
            raise ExistsError(f"the folder is not empty and holds no {kind.mark}", where=store.url, advice=advice)
        return None
    with TemporaryDirectory() as folder:
        store.get(kind.mark, Path(folder, kind.mark))
        found = read_mark(Path(folder), kind)
    if found is None:
        raise DamagedError(f"not a mark of {kind.what}", where=f"{store.url}/{kind.mark}", advice=advice)
    return found


def _fetch(store: Store, folder: Path, request: Mapping[str, Json], overwrite: bool) -> bool:
    """Fetch a finished audit, or mark an empty store as begun; return whether the store was empty."""
    there, here = _mark(store), read_mark(folder, AUDIT)
    if here is not None and here.request != (request if there is None or overwrite else there.request):
        shutil.rmtree(folder)
    if there is None:
        _write_mark(store, request)
    elif there.request != request:
        if not overwrite:  # the working folder is refused by its mark
            store.get(AUDIT.mark, folder / AUDIT.mark)
    elif there.finished:
        for name in store.files():  # safe as names of files here, unlike those in a mark
            if name in there.files:
                store.get(name, folder / name)
        store.get(AUDIT.mark, folder / AUDIT.mark)
    return there is None


def _upload(store: Store, folder: Path, overwrite: bool) -> None:
    """Write the finished audit of the working folder to the store."""
    here, there = read_mark(folder, AUDIT), _mark(store)
    assert here is not None
    assert here.finished
    is_other = there is not None and there.request != here.request
    if is_other and not overwrite:
        what = "another audit was written there meanwhile"
        raise ChangedError(what, where=store.url, advice="Give another `out`.")
    names = store.files()
    files = [path.relative_to(folder).as_posix() for path in AUDIT.files_in(folder)]
    if there == here:
        files = [name for name in files if name not in here.files or name not in names]
    else:
        if is_other:  # before the new mark, so that it never stands beside intermediate results of another request
            _delete(store, (name for name in names if name.startswith(f"{WORK}/")))
        _write_mark(store, here.request)
    for name in files:
        store.put(folder / name, name)
    if there != here:
        _delete(store, (name for name in store.files() if name not in files and _is_of(name)))
        store.put(folder / AUDIT.mark, AUDIT.mark)


def _write_mark(store: Store, request: Mapping[str, Json], kind: FolderKind = AUDIT, *, finished: bool = False) -> None:
    store.write(kind.mark, f"{json.dumps({'request': dict(request), 'finished': finished}, indent=2)}\n".encode())


def _delete(store: Store, names: Iterable[str]) -> None:
    for name in names:
        store.delete(name)


def _is_of(name: str, kind: FolderKind = AUDIT) -> bool:
    patterns = (pattern for pattern in (*kind.files, *kind.optional) if pattern.count("/") == name.count("/"))
    return name.startswith(f"{WORK}/") or any(fnmatchcase(name, pattern) for pattern in patterns)
