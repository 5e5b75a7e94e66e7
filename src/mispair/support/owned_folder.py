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
from types import TracebackType
from typing import Self

import filelock

from mispair.errors import DataError
from mispair.support.files import Json, check_name, read_json, sha256_of, write_atomically
from mispair.support.formatting import listed

LOCK = ".lock"
WORK = "unfinished"
_LEFTOVER = re.compile(r"\..+\.\d+\.tmp")  # see `files.replacing`


class FolderInUseError(DataError):
    """Another process is working in the folder."""


@dataclass(frozen=True)
class FolderKind:
    """What a kind of folder consists of.

    Attributes:
        what: Its name in messages, such as "an audit".
        mark: File name of the mark.
        files: Patterns of its files. A finished folder has at least one file of each; all are deleted when the folder
            is used for another request.
        option: The command-line option that names the folder.
        optional: Patterns of files that a finished folder may lack.
        says_place: Whether the mark says where the folder is, as its request names other places.
    """

    what: str
    mark: str
    files: Sequence[str]
    option: str = "--out"
    optional: Sequence[str] = ()
    says_place: bool = False


@dataclass(frozen=True)
class Mark:
    """The content of the mark.

    Attributes:
        request: What the content of the folder depends on, by names that a user knows. A change of a text, a number or
            a boolean is reported with both values; of anything else only that it changed.
        finished: Whether all of it was written.
        files: SHA-256 of each file of a finished folder.
        place: Where the folder was when the mark was written; empty where it does not say so.
    """

    request: Mapping[str, Json]
    finished: bool
    files: Mapping[str, str] = field(default_factory=dict)
    place: str = ""


def read_mark(path: Path, kind: FolderKind) -> Mark | None:
    """The mark of a folder; None if it has none, or a damaged one. Takes no lock."""
    found = read_json(path / kind.mark)
    if isinstance(found, dict) and isinstance(request := found.get("request"), dict):
        files = found.get("files")
        hashes = {name: str(value) for name, value in files.items()} if isinstance(files, dict) else {}
        return Mark(request, found.get("finished") is True, hashes, str(found.get("place") or ""))
    return None


def check_unchanged(path: Path, kind: FolderKind, names: Iterable[str]) -> None:
    """Refuses files of a finished folder that are not as they were written.

    Args:
        path: The folder.
        kind: What it consists of.
        names: The files that will be read; those that its mark does not know are not checked.

    Raises:
        DataError: One is gone, cannot be read, or has changed.
    """
    mark = read_mark(path, kind)
    written = {} if mark is None else mark.files
    for name in names:
        expected = written.get(name)
        try:
            if expected is None or sha256_of(path / name) == expected:
                continue
            found = "the file is not as it was written"
        except OSError as error:
            found = f"the file cannot be read ({error.strerror})"
        raise DataError(f"{path / name}: {found}; copy it again if you can, or make {kind.what} anew with --overwrite.")


class OwnedFolder:
    """A folder that is this process's alone inside a `with` block.

        with OwnedFolder(out, AUDIT, request) as folder:
            if not folder.finished:
                folder.begin()
                ...  # write files to folder.path, and intermediate results to folder.work
                folder.finish()

    Entering changes nothing about the content, apart from deleting temporary files of killed processes.

    Args:
        path: The folder; it need not exist.
        kind: What it consists of.
        request: What its content depends on; see `Mark`.
        overwrite: Whether `begin` may replace the answer to another request.

    Raises:
        DataError: On entering: the folder holds something else, another process uses it, or it cannot be written.
    """

    def __init__(self, path: Path, kind: FolderKind, request: Mapping[str, Json], *, overwrite: bool = False) -> None:
        self.path, self.kind, self.overwrite = path, kind, overwrite
        self.request: Mapping[str, Json] = json.loads(json.dumps(request))  # as it is read back: lists for tuples
        self.work = path / WORK  # intermediate results to resume from; `finish` deletes them
        self._lock = filelock.FileLock(path / LOCK)
        self._is_new = False

    def __enter__(self) -> Self:
        check_name(self.path, self.kind.option)
        self._check()
        with _writing(self.path):
            self._is_new = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                self._lock.acquire(timeout=0)
            except filelock.Timeout:
                raise FolderInUseError(
                    f"Another process is working in {self.path}; wait for it or give another {self.kind.option}."
                ) from None
        try:
            self._check()  # again: another process may have changed it in between
            with _writing(self.path):
                self._delete_leftovers()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    @property
    def finished(self) -> bool:
        """Whether the folder holds the whole answer to this request."""
        complete = all(any(self.path.glob(pattern)) for pattern in self.kind.files)
        mark = read_mark(self.path, self.kind)
        return complete and mark is not None and mark.finished and mark.request == self.request

    @property
    def begun(self) -> bool:
        """Whether the folder holds a part of the answer to this request, or all of it."""
        mark = read_mark(self.path, self.kind)
        return mark is not None and mark.request == self.request

    def begin(self) -> None:
        """Marks the folder as unfinished; keeps what there is of the same request and deletes the rest."""
        with _writing(self.path):
            if not self.begun:
                # Before the new mark, so that it never stands beside files of an older request.
                self._delete_files()
            self._write_mark(finished=False)

    def finish(self) -> None:
        """Marks the folder as finished, and deletes intermediate results."""
        with _writing(self.path):
            self._write_mark(finished=True)
            for _ in range(2):  # the second for what the first could not delete; the next start deletes the rest
                shutil.rmtree(self.work, ignore_errors=True)

    def abandon(self) -> None:
        """Deletes what was begun, so that the folder is free for any request."""
        with _writing(self.path):
            self._delete_files()
            (self.path / self.kind.mark).unlink(missing_ok=True)

    def _check(self) -> None:
        path, kind = self.path, self.kind
        if path.exists() and not path.is_dir():
            raise DataError(f"{path}: this is a file; {kind.option} must be a folder.")
        if not (path / kind.mark).exists():
            self._check_unmarked()
            return
        mark = read_mark(path, kind)
        if self.overwrite or (mark is not None and mark.request == self.request):
            return
        how = f"give another {kind.option} to keep it, or --overwrite to replace it."
        if mark is None:
            raise DataError(f"{path / kind.mark} cannot be read, so {kind.what} cannot be continued; {how}")
        state = "holds" if mark.finished else "holds a part of"
        raise DataError(
            f"{path} {state} {kind.what} with other settings ({changes(mark.request, self.request)}); {how}"
        )

    def _check_unmarked(self) -> None:
        path, kind = self.path, self.kind
        there = [entry.name for entry in path.iterdir() if entry.name[0] != "."] if path.exists() else []
        if there and not self.overwrite:
            raise DataError(
                f"{path} is not empty and holds no {kind.mark}; give another {kind.option}, or --overwrite to write "
                "there nevertheless."
            )
        # Without a mark these are not ours to delete.
        names = sorted(str(file.relative_to(path)) for pattern in kind.files for file in path.glob(pattern))
        if names:
            raise DataError(
                f"{path} holds {listed(names)}, but no {kind.mark}, so it is not known to be {kind.what}; delete it or "
                f"give another {kind.option}."
            )

    def _write_mark(self, *, finished: bool) -> None:
        content: dict[str, Json] = {"request": dict(self.request), "finished": finished}
        if self.kind.says_place:
            content["place"] = str(self.path.resolve())
        if finished:
            content["files"] = {
                file.relative_to(self.path).as_posix(): sha256_of(file)
                for pattern in (*self.kind.files, *self.kind.optional)
                for file in sorted(self.path.glob(pattern))
            }
        write_atomically(self.path / self.kind.mark, f"{json.dumps(content, indent=2)}\n".encode())

    def _delete_files(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        for pattern in (*self.kind.files, *self.kind.optional):
            for file in list(self.path.glob(pattern)):
                file.unlink()

    def _delete_leftovers(self) -> None:
        """Deletes what killed processes left: no other process writes here while we have the lock."""
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


def changes(old: Mapping[str, Json], new: Mapping[str, Json]) -> str:
    """How two requests differ.

    >>> changes({"--joint": False, "the source": ["a", "61d0"]}, {"--joint": True, "the source": ["a", "f3b7"]})
    '--joint was False, now True; the source changed since'
    """
    different = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return "; ".join(_change(name, old.get(name), new.get(name)) for name in different)


def _change(name: str, old: Json, new: Json) -> str:
    if isinstance(old, list | dict) or isinstance(new, list | dict):
        return f"{name} changed since"
    return f"{name} was {old}, now {new}"


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A folder that takes the place of `path` when the block ends well, and is deleted when it does not.

    What killed processes left beside `path` is deleted first.

    Raises:
        DataError: Another process writes this folder, or it cannot be written.
    """
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
    """Deletes what `replacing_folder` left beside a whole folder when it was killed; not while another one writes."""
    if _leftovers(path) or _lock_beside(path).exists():
        with contextlib.suppress(DataError, OSError), _locked_beside(path):
            pass


@contextmanager
def _locked_beside(path: Path) -> Iterator[None]:
    """Keeps other processes from writing a folder; what killed ones left is deleted."""
    lock = filelock.FileLock(_lock_beside(path))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise DataError(f"Another process is writing {path}; wait for it or choose another folder.") from None
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
        raise DataError(f"{path}: the folder cannot be written ({error.strerror or error}).") from None
