"""Folders of results: claimed by one process, filled, and finished by one atomic write.

A folder is recognised by its mark, a JSON file with the request that it answers, whether it is finished, and then the
SHA-256 of each file. A process that is killed at any point leaves a folder that the same request continues. `.lock` in
the folder keeps out a second process; the system releases it when the first one ends, however it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import filelock

from mispair.errors import ChangedError, DamagedError, DataError, ExistsError, InUseError, WriteError
from mispair.support.files import Json, check_name, read_json, sha256_of, write_atomically
from mispair.support.formatting import listed

LOCK = ".lock"
WORK = "unfinished"
_LEFTOVER = re.compile(r"\..+\.\d+\.tmp")  # see `files.replacing`


@dataclass(frozen=True)
class FolderKind:
    """A kind of folder, by patterns of its files; another request deletes all of them."""

    what: str  # name in messages, such as "an audit"
    mark: str  # file name of the mark
    files: Sequence[str]  # a finished folder has at least one file of each pattern
    optional: Sequence[str] = ()
    says_place: bool = False  # whether the mark has the place of the folder, because the request names other places

    def files_in(self, path: Path) -> list[Path]:
        """Its files in a folder."""
        return [file for pattern in (*self.files, *self.optional) for file in sorted(path.glob(pattern))]


@dataclass(frozen=True)
class Mark:
    """The content of the mark."""

    request: Mapping[str, Json]  # everything that the content depends on, by names that a user knows; see `changes`
    finished: bool  # whether all files were written
    files: Mapping[str, str] = field(default_factory=dict)  # SHA-256 of each file of a finished folder
    place: str = ""  # of the folder when the mark was written, if its kind says it


def read_mark(path: Path, kind: FolderKind) -> Mark | None:
    """Read the mark of a folder without a lock; None if it is missing or damaged."""
    found = read_json(path / kind.mark)
    if isinstance(found, dict) and isinstance(request := found.get("request"), dict):
        files = found.get("files")
        hashes = {name: str(value) for name, value in files.items()} if isinstance(files, dict) else {}
        return Mark(request, found.get("finished") is True, hashes, str(found.get("place") or ""))
    return None


def check_unchanged(path: Path, kind: FolderKind, names: Iterable[str]) -> None:
    """Raise if files of a finished folder differ from the hashes in its mark; files without a hash pass."""
    mark = read_mark(path, kind)
    for name, found in damages(path, {} if mark is None else mark.files, names):
        advice = f"Copy it again if you can, or make {kind.what} anew with `overwrite`"
        raise DamagedError(found, where=path / name, advice=advice)


def damages(path: Path, written: Mapping[str, str], names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Compare files with their hashes in `written`; yield the damaged ones and the problem."""
    for name in names:
        try:
            if name in written and sha256_of(path / name) != written[name]:
                yield name, "the file has changed since it was written"
        except OSError as error:
            yield name, f"the file cannot be read ({error.strerror})"


class OwnedFolder:
    """A folder, owned by this process inside a `with` block.

        with OwnedFolder(out, AUDIT, request) as folder:
            if not folder.finished:
                folder.begin()
                ...  # write files to folder.path, and intermediate results to folder.work
                folder.finish()

    Entering changes no content; it deletes only temporary files of killed processes. The folder need not exist. With
    `overwrite`, `begin` may replace the answer to another request.

    Raises:
        ExistsError: On entering: the folder holds other files.
        ChangedError: On entering: the folder holds the answer to another request.
        DamagedError: On entering: the mark cannot be read.
        InUseError: On entering: another process works in the folder.
        WriteError: The folder cannot be written.
    """

    def __init__(self, path: Path, kind: FolderKind, request: Mapping[str, Json], *, overwrite: bool = False) -> None:
        self.path, self.kind, self.overwrite = path, kind, overwrite
        self.request: Mapping[str, Json] = json.loads(json.dumps(request))  # as it is read back: lists for tuples
        self.work = path / WORK  # intermediate results to resume from; `finish` deletes them
        self._lock = filelock.FileLock(path / LOCK)
        self._is_new = False

    def __enter__(self) -> Self:
        self._check()
        with _writing(self.path):
            self._is_new = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            acquire(self._lock, self.path)
        try:
            self._check()  # again: another process may have changed it in between
            with _writing(self.path):
                self._delete_leftovers()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._release()

    @property
    def finished(self) -> bool:
        """Whether the folder holds the whole answer to this request."""
        complete = all(any(self.path.glob(pattern)) for pattern in self.kind.files)
        mark = read_mark(self.path, self.kind)
        return complete and mark is not None and mark.finished and mark.request == self.request

    @property
    def begun(self) -> bool:
        """Whether the folder holds the answer to this request or a part of it."""
        mark = read_mark(self.path, self.kind)
        return mark is not None and mark.request == self.request

    def begin(self) -> None:
        """Mark the folder as unfinished; delete files of another request."""
        with _writing(self.path):
            if not self.begun:
                # Delete these before the new mark is written, so the mark never stands beside files of an older
                # request.
                self._delete_files()
            self._write_mark(finished=False)

    def finish(self) -> None:
        """Mark the folder as finished, and delete intermediate results."""
        with _writing(self.path):
            self._write_mark(finished=True)
            for _ in range(2):  # the second for what the first could not delete; the next start deletes the rest
                shutil.rmtree(self.work, ignore_errors=True)

    def abandon(self) -> None:
        """Delete all files: the folder is then free for any request."""
        with _writing(self.path):
            self._delete_files()
            (self.path / self.kind.mark).unlink(missing_ok=True)

    def _check(self) -> None:
        path, kind = self.path, self.kind
        check_place(path, kind, overwrite=self.overwrite)
        if not (path / kind.mark).exists():
            return
        mark = read_mark(path, kind)
        if self.overwrite or (mark is not None and mark.request == self.request):
            return
        how = "Give another `out` to keep it, or `overwrite` to replace it"
        if mark is None:
            what = f"the file cannot be read, so {kind.what} cannot be continued"
            raise DamagedError(what, where=path / kind.mark, advice=how)
        state = "holds" if mark.finished else "holds a part of"
        different = changes(mark.request, self.request)
        raise ChangedError(f"{state} {kind.what} with other settings ({different})", where=path, advice=how)

    def _write_mark(self, *, finished: bool) -> None:
        content: dict[str, Json] = {"request": dict(self.request), "finished": finished}
        if self.kind.says_place:
            content["place"] = str(self.path.resolve())
        if finished:
            files = self.kind.files_in(self.path)
            content["files"] = {file.relative_to(self.path).as_posix(): sha256_of(file) for file in files}
        write_atomically(self.path / self.kind.mark, f"{json.dumps(content, indent=2)}\n".encode())

    def _delete_files(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        for file in self.kind.files_in(self.path):
            file.unlink()

    def _delete_leftovers(self) -> None:
        """Delete leftovers of killed processes: no other process writes here while we have the lock."""
        mark = read_mark(self.path, self.kind)
        if mark is not None and mark.finished:
            shutil.rmtree(self.work, ignore_errors=True)
        pattern = ".*.tmp" if mark is None else "**/.*.tmp"  # an unmarked folder may be somebody else's
        for file in list(self.path.glob(pattern)):
            if _LEFTOVER.fullmatch(file.name) and (mark is not None or file.name.startswith(f".{self.kind.mark}.")):
                file.unlink(missing_ok=True)

    def _release(self) -> None:
        if self._is_new and {entry.name for entry in self.path.iterdir()} == {LOCK}:
            with contextlib.suppress(OSError):  # Windows deletes no open file
                (self.path / LOCK).unlink()
        self._lock.release()
        if self._is_new:
            with contextlib.suppress(OSError):  # not empty
                self.path.rmdir()


def check_place(path: Path, kind: FolderKind, *, overwrite: bool) -> None:
    """Raise if a path cannot be a folder of this kind, whatever the request: it is a file, or holds other files."""
    check_name(path)
    if not path.exists():
        return
    if not path.is_dir():
        raise ExistsError("this is a file", where=path, expected="a folder")
    if (path / kind.mark).exists():
        return
    if not overwrite and any(entry.name[0] != "." for entry in path.iterdir()):
        advice = "Give another `out`, or `overwrite` to write there nevertheless"
        raise ExistsError(f"the folder is not empty and holds no {kind.mark}", where=path, advice=advice)
    # Without a mark these files may belong to others.
    names = sorted(str(file.relative_to(path)) for pattern in kind.files for file in path.glob(pattern))
    if names:
        what = f"holds {listed(names)}, but no {kind.mark}, so it is not known to be {kind.what}"
        raise ExistsError(what, where=path, advice="Delete it, or give another `out`")


def changes(old: Mapping[str, Json], new: Mapping[str, Json]) -> str:
    """How two requests differ; settings are in backticks.

    >>> changes({"joint": False, "the source": ["a", "61d0"]}, {"joint": True, "the source": ["a", "f3b7"]})
    '`joint` was False, now True; the source changed since'
    """
    found = []
    for name in {**old, **new}:
        before, now = old.get(name), new.get(name)
        shown = f"`{name}`" if name.isidentifier() else name
        if isinstance(before, list | dict) or isinstance(now, list | dict):
            found += [f"{shown} changed since"] * (before != now)
        elif before != now:
            found.append(f"{shown} was {before}, now {now}")
    return "; ".join(found)


def acquire(lock: filelock.BaseFileLock, folder: Path | str) -> None:
    """Take the lock of a folder, or of one at a URL; raise InUseError if another process has it."""
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        advice = "Wait for it, or give another `out`"
        raise InUseError("another process is working in this folder", where=folder, advice=advice) from None


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Replace the folder `path` by a new one if the block succeeds; first delete leftovers of killed processes."""
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked_beside(path):
            scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            try:
                new = scratch / "new"
                new.mkdir(parents=True)
                yield new
                if path.exists():
                    path.replace(scratch / "old")
                new.replace(path)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)


def delete_beside(path: Path) -> None:
    """Delete leftovers of a killed `replacing_folder`, unless another process writes the folder now."""
    if _leftovers(path) or _lock_beside(path).exists():
        with contextlib.suppress(DataError, OSError), _locked_beside(path):
            pass


@contextmanager
def _locked_beside(path: Path) -> Iterator[None]:
    """Keep other processes from writing a folder; delete leftovers of killed ones."""
    lock = filelock.FileLock(_lock_beside(path))
    acquire(lock, path)
    try:
        for left in _leftovers(path):
            if not path.exists() and (left / "old").exists():  # killed between the two renames
                (left / "old").replace(path)
            shutil.rmtree(left)
        yield
    finally:
        with contextlib.suppress(OSError):  # Windows deletes no open file
            Path(lock.lock_file).unlink()
        lock.release()


def _lock_beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def _leftovers(path: Path) -> list[Path]:
    there = path.parent.glob(".*.tmp")
    start = f".{path.name}."
    return [left for left in there if _LEFTOVER.fullmatch(left.name) and left.name.startswith(start) and left.is_dir()]


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WriteError(f"the folder cannot be written ({error.strerror or error})", where=path) from None
