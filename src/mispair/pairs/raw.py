"""Images and captions before anything is encoded."""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from mispair.errors import DataError
from mispair.pairs import row_ids
from mispair.pairs.edits import Edits, Layout
from mispair.pairs.image_files import is_inside
from mispair.pairs.pairs import IntArray
from mispair.pairs.tables import Table
from mispair.support.files import Json, read_regular
from mispair.support.formatting import plain

SPLIT = "split"  # column of a table
_PROBED = 1000  # image files that must not all be missing, before hours are spent on the wrong folder


class RawPairs(ABC):
    """Pairs of an image and a caption, in the order of the data set, to be read.

    A row is never left out: one without an image or a caption has an empty text in that place.

    Attributes:
        name: Where they come from, for messages and the report.
        files: The files that were read.
        ids: A unique text a row (`pyarrow.LargeStringArray`), as are the next two.
        image_names: The image of each row, as the data set names it.
        captions: Without spaces around them.
        groups: Number of the image of each row (N,), by first appearance; None where all differ.
        image_folder: Folder that the image names start from; None where the images are in other files.
        allow_outside: Whether images outside that folder are read, which a table may name to learn what is in them.
        notes: What the reader should know, such as files that are not read.
    """

    name: str
    files: tuple[Path, ...]
    ids: Any
    image_names: Any
    captions: Any
    groups: IntArray | None = None
    image_folder: Path | None = None
    allow_outside: bool = False
    notes: tuple[str, ...] = ()

    @property
    def shards(self) -> tuple[tuple[str, int], ...]:
        """The names and sizes of the files that the rows are in, one after the other; none where it is a single one."""
        return ()

    @property
    def table(self) -> Table | None:
        """The table that the rows are in; None where they are in none."""
        return None

    @property
    def splits(self) -> Sequence[str] | None:
        """The split of each row, such as train or val; None where the data set has none."""
        table = self.table
        column = None if table is None else next((name for name in table.columns if name.lower() == SPLIT), None)
        if table is None or column is None:
            return None
        return [value for batch in table.batches([column]) for value in batch[0].to_pylist()]

    def __len__(self) -> int:
        return len(self.captions)

    @abstractmethod
    def read_image(self, row: int) -> bytes:
        """The image file of a row; several threads may call it at once.

        Raises:
            OSError: It cannot be read.
        """

    def image_file(self, row: int) -> Path | None:  # noqa: ARG002
        """The path of the image of a row; None where it is not a file of its own."""
        return None

    def has_image(self, row: int) -> bool:  # noqa: ARG002
        """Whether the data set names an image for a row; it may be missing."""
        return True

    def state(self) -> list[Json]:
        """Changes when a file of the data set does."""
        return [digest(self.files)]

    def fingerprint(self) -> str:
        """A hash of all ids, image names and captions."""
        known = hashlib.sha256()
        for start in range(0, len(self), _PROBED):
            part = [
                column[start : start + _PROBED].to_pylist() for column in (self.ids, self.image_names, self.captions)
            ]
            known.update(json.dumps(part).encode())  # escapes what could make two lists equal
        return known.hexdigest()

    def find(self, ids: Sequence[str]) -> IntArray:
        """The rows with these ids.

        Raises:
            DataError: Some are not there; the message names up to five of them.
        """
        return row_ids.find(self.ids, ids, len(self), self.name)

    def image_number(self, row: int) -> int:
        """Equal for rows that share their image."""
        return row if self.groups is None else int(self.groups[row])

    def final_captions(self, edits: Edits, rows: IntArray) -> list[str]:
        """The captions of rows after the edits."""
        texts = row_ids.look_up(self.captions, edits.caption_from[rows])
        return [edits.rewritten.get(int(row), text) for row, text in zip(rows, texts, strict=True)]


class RawLayout(RawPairs, Layout, ABC):
    """Pairs as a data set stores them, of which copies can be written in the same layout.

    Attributes:
        outside: Folder of the images that a copy refers to, but does not contain; None where it contains them.
    """

    outside: Path | None = None


class ImageFiles(RawPairs):
    """Pairs whose images are files of their own.

    Args:
        name: Where they come from.
        files: The files that were read.
        records: Id, image and caption of each row; each may be empty. Ids that are empty or were there before are made
            of the image's name and the caption's number, as in dog.jpg#0.
        folder: Folder that the image names start from.

    Raises:
        DataError: There are no pairs, or none of the images is where it should be.
    """

    def __init__(self, name: str, files: Iterable[Path], records: Sequence[tuple[str, str, str]], folder: Path) -> None:
        if not records:
            raise DataError(f"{name}: no pairs in here; expected at least one image with a caption.")
        self.name, self.files, self.folder = name, tuple(files), folder
        self.image_folder = folder
        ids, images, captions = zip(*records, strict=True)
        self._paths = [image.strip() for image in images]  # as the file system has them: perhaps no text
        self.image_names = row_ids.as_texts(self._paths)
        self.captions = row_ids.as_texts(text.strip() for text in captions)
        self.ids = row_ids.as_texts(unique_ids([plain(text).strip() for text in ids], self._paths))
        self.groups = row_ids.from_images(self._paths).groups
        self._check_images()

    def image_file(self, row: int) -> Path | None:
        return self.folder / self._paths[row] if self._paths[row] else None

    def has_image(self, row: int) -> bool:
        return bool(self._paths[row])

    def read_image(self, row: int) -> bytes:
        path = self.image_file(row)
        if path is None:
            raise FileNotFoundError("no image is named")
        if not self.allow_outside and os.path.exists(path) and not is_inside(self.folder, path):
            raise OSError("it lies outside the folder of the images; --allow-outside reads it")
        return read_regular(path)

    def state(self) -> list[Json]:
        own = range(len(self)) if self.groups is None else np.unique(self.groups, return_index=True)[1].tolist()
        images = (path for row in own if (path := self.image_file(row)) is not None)
        return [*super().state(), digest(images), *(["outside"] if self.allow_outside else [])]

    def _check_images(self) -> None:
        """Refuses web addresses, and a folder that is the wrong one for all images."""
        for image in self._paths:
            if image.startswith(("http://", "https://")):
                raise DataError(
                    f"{plain(image)} is a web address, and mispair downloads nothing; fetch the images first and give "
                    "their paths."
                )
        named = list(islice(filter(None, self._paths), _PROBED))
        if not any(os.path.exists(self.folder / image) for image in named):
            searched = f"looked for {plain(str(self.folder / named[0]))}" if named else "no row names one"
            count = min(len(self._paths), _PROBED)
            raise DataError(
                f"{self.folder}: none of the {'first ' * (len(self._paths) > _PROBED)}{count:,} images is here "
                f"({searched}); give the folder that the image paths start from with --images."
            )


def id_column(names: Any, images: Any) -> Any:
    """One id a row that no other row has, from pyarrow arrays of texts: the names, where all are there and differ.

    Millions of names are not taken apart for that; see `unique_ids` for the others.
    """
    import pyarrow.compute

    there = not pyarrow.compute.any(pyarrow.compute.equal(names, "")).as_py()
    if there and pyarrow.compute.count_distinct(names).as_py() == len(names):
        return names
    return row_ids.as_texts(unique_ids(names.to_pylist(), images.to_pylist()))


def unique_ids(ids: Iterable[str], images: Sequence[str]) -> Iterator[str]:
    """One id a row that no other row has.

    >>> list(unique_ids(["7", "", "7", ""], ["a.jpg", "b.jpg", "a.jpg", "b.jpg"]))
    ['7', 'b.jpg#0', '7#1', 'b.jpg#1']
    """
    captions: Counter[str] = Counter()
    repeats: Counter[str] = Counter()
    taken: set[str] = set()
    for name, image in zip(ids, images, strict=True):
        wanted = name or f"{plain(Path(image).as_posix()) if image else 'row'}#{captions[image]}"
        captions[image] += 1
        unique = wanted
        while unique in taken:
            repeats[wanted] += 1
            unique = f"{wanted}#{repeats[wanted]}"
        taken.add(unique)
        yield unique


def digest(paths: Iterable[Path]) -> str:
    """A hash of the names, sizes and times of files; missing ones count as such."""
    known = hashlib.sha256()
    for path in paths:
        try:
            found = path.stat()
            known.update(repr((os.fspath(path), found.st_size, found.st_mtime_ns)).encode("utf-8", "surrogateescape"))
        except OSError:
            known.update(repr((os.fspath(path), None)).encode("utf-8", "surrogateescape"))
    return known.hexdigest()
