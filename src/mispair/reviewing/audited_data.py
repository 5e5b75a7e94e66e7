"""The audited data set of a review: its images, and its use of new captions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from mispair.auditing.request import local_place, read_audit_mark
from mispair.config import BEST
from mispair.errors import DataError, MispairError, NotFoundError
from mispair.pairs.source import find_image
from mispair.support.files import Json, read_regular

if TYPE_CHECKING:
    from mispair.pairs.source import Source

ARCHIVES, EMBEDDINGS = {".tar", ".parquet", ".pq"}, {".npy", ".npz"}


class AuditedData:
    """The data set of an audit. It is opened only for images inside its files, as opening takes time.

    `is_audited` says whether opened pairs are still those of the audit.
    """

    def __init__(
        self, audit: Path, images: Path | None = None, is_audited: Callable[[Source], bool] = lambda _: True
    ) -> None:
        if images is not None and not images.is_dir():
            expected = "the folder that the image paths start from"
            raise NotFoundError("no such folder", where=images, expected=expected)
        self._audit, self._images, self._is_audited = audit, images, is_audited
        self._lock = threading.Lock()

    @cached_property
    def _request(self) -> Mapping[str, Json]:
        mark = read_audit_mark(self._audit)
        return {} if mark is None else mark.request

    @cached_property
    def _source(self) -> Path | None:
        """The source of the audit; None if unknown."""
        try:
            return local_place(self._request.get("source"))
        except DataError:  # a copy of what was at a URL, which was deleted
            return None

    @cached_property
    def image_folder(self) -> Path | None:
        """The root of image names; None if unknown."""
        place = self._source
        given = self._images or self._request.get("images") or (place.parent if place and place.is_file() else place)
        return None if given is None else Path(str(given)).resolve()

    def has_image(self, row: int, name: str) -> bool:
        """Whether a row names an image or has one inside the files of the data set."""
        return bool(name) or (self._archive is not None and self._archive.has_image(row))

    def read_image(self, row: int, name: str) -> bytes | None:
        """The image of a row; None without one, or outside the folder of the images."""
        try:
            folder = self.image_folder
            path = None if folder is None or not name else find_image([folder], name)
            if path is not None:
                return read_regular(path)
            return None if self._archive is None else self._archive.read_image(row)
        except (OSError, ValueError):  # a name that is no path is none either
            return None

    @property
    def _archive(self) -> Source | None:
        with self._lock:
            return self._opened

    @cached_property
    def _opened(self) -> Source | None:
        """The data set itself, if its images are inside its files."""
        try:
            if self._source is None or not _holds_archives(self._source):
                return None
            from mispair.auditing.folder import read_input  # takes a second, and most data sets do without it

            data = read_input(self._audit)
            pairs = data.open(device="cpu") if data.is_raw else None
        except (MispairError, OSError):  # the data is not there any more
            return None
        # In other data the image of a row would be that of another pair.
        return pairs if pairs is not None and pairs.inside and self._is_audited(pairs) else None

    @cached_property
    def takes_captions(self) -> bool:
        """Whether an export can write new captions; vectors would have to be encoded again.

        True also where it is not known, since the data set is not there any more.
        """
        if self._request.get("left"):
            return False
        try:
            return self._source is None or not self._source.is_dir() or not _holds_vectors(self._source.resolve())
        except OSError:
            return True


def _holds_archives(place: Path) -> bool:
    """Whether images can be inside the files. Data sets of embeddings have none."""
    if not place.is_dir():
        return place.suffix.lower() in ARCHIVES
    endings = {file.suffix.lower() for file in place.rglob("*")}
    return not endings.isdisjoint(ARCHIVES) and endings.isdisjoint(EMBEDDINGS)


def _holds_vectors(folder: Path) -> bool:
    """Whether these are pairs of vectors: of a training run, of DataComp, or of clip-retrieval."""
    if (folder / BEST).is_file():  # `from_training.is_run` without importing torch
        return True
    from mispair.pairs.layouts.datacomp import find_datacomp
    from mispair.pairs.layouts.opening import recognised

    return bool(find_datacomp(folder)) or recognised(folder) == "vectors"
