"""Images and captions as data sets store them."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from mispair.errors import DataError
from mispair.pairs import row_ids
from mispair.pairs.edits import Layout
from mispair.pairs.image_files import is_inside
from mispair.pairs.pairs import IntArray
from mispair.pairs.row_ids import RowIds, Texts
from mispair.pairs.source import Rows, Source
from mispair.support.files import Json, read_regular
from mispair.support.formatting import plain

_PROBED = 1000  # image files that must not all be missing, before hours are spent on the wrong folder


class RawLayout(Source, Layout, ABC):
    """Images and captions as a data set stores them, of which copies can be written in the same layout.

    Attributes:
        outside: Folder of the images that a copy refers to, but does not contain; None where it contains them.
        allow_outside: Whether images outside their folder are read, which a table may name to learn what is in them.
    """

    outside: Path | None = None
    allow_outside: bool = False

    def image_file(self, row: int) -> Path | None:  # noqa: ARG002
        """The path of the image of a row, which may be missing; None where it is not a file of its own."""
        return None

    def image_files(self, rows: Rows = None) -> list[Path | None]:
        files = [self.image_file(row) for row in self._numbers(rows).tolist()]
        return [path if path is not None and path.is_file() else None for path in files]

    def image_reader(self, rows: IntArray) -> Callable[[int], bytes | None]:  # noqa: ARG002
        return self.image

    def image_key(self, row: int) -> Hashable:
        return self.image_number(row)

    def image_is_there(self, row: int) -> bool:
        path = self.image_file(row)
        return self.has_image(row) and (path is None or path.is_file())

    @abstractmethod
    def read_image(self, row: int) -> bytes: ...

    def has_image(self, row: int) -> bool:  # noqa: ARG002
        return True

    def state(self) -> list[Json]:
        """Changes when a file of the data set does."""
        return [digest(self.files)]


class ImageFiles(RawLayout):
    """Images that are files of their own, and captions.

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
        self.name, self.files, self.image_root, self.images = name, tuple(files), folder, (folder,)
        ids, images, captions = zip(*records, strict=True)
        self._paths = [image.strip() for image in images]  # as the file system has them: perhaps no text
        self.image_names = Texts.of(self._paths)
        self.captions = Texts.of(text.strip() for text in captions)
        unique = row_ids.as_texts(row_ids.unique_ids([plain(text).strip() for text in ids], self._paths))
        self.names = RowIds(unique, row_ids.from_images(self._paths).groups)
        self._check_images()

    def image_file(self, row: int) -> Path | None:
        return self.image_root / self._paths[row] if self._paths[row] else None

    def has_image(self, row: int) -> bool:
        return bool(self._paths[row])

    def read_image(self, row: int) -> bytes:
        path = self.image_file(row)
        if path is None:
            raise FileNotFoundError("no image is named")
        if not self.allow_outside and os.path.exists(path) and not is_inside(self.image_root, path):
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
        if not any(os.path.exists(self.image_root / image) for image in named):
            searched = f"looked for {plain(str(self.image_root / named[0]))}" if named else "no row names one"
            count = min(len(self._paths), _PROBED)
            raise DataError(
                f"{self.image_root}: none of the {'first ' * (len(self._paths) > _PROBED)}{count:,} images is here "
                f"({searched}); give the folder that the image paths start from with --images."
            )


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
