"""The audited data set of a review: its images, and its use of new captions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from mispair.auditing.request import local_place, read_audit_mark
from mispair.config import BEST
from mispair.errors import DataError, MispairError, NotFoundError
from mispair.pairs.source import find_image
from mispair.support.files import read_regular

if TYPE_CHECKING:
    from mispair.pairs.source import Source

ARCHIVES, EMBEDDINGS = {".tar", ".parquet", ".pq"}, {".npy", ".npz"}


class AuditedData:
    """The data set of an audit. It is opened only for images inside its files, as opening takes time.

    Attributes:
        image_folder: The root of image names; None if unknown.
    """

    def __init__(
        self, audit: Path, images: Path | None = None, is_audited: Callable[[Source], bool] = lambda _: True
    ) -> None:
        """
        Args:
            audit: The folder of the audit.
            images: The folder that the image paths start from; by default as in the audit.
            is_audited: Whether opened pairs are still those of the audit.
        """
        if images is not None and not images.is_dir():
            expected = "the folder that the image paths start from"
            raise NotFoundError("no such folder", where=images, expected=expected)
        mark = read_audit_mark(audit)
        request = {} if mark is None else mark.request
        try:
            place = local_place(request.get("source"))
        except DataError:  # a copy of what was at a URL, which was deleted
            place = None
        given = images or request.get("images") or (place.parent if place and place.is_file() else place)
        self.image_folder = None if given is None else Path(str(given)).resolve()
        self._audit, self._place, self._is_audited = audit, place, is_audited
        self._has_vectors = bool(request.get("left"))

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

    @cached_property
    def _archive(self) -> Source | None:
        """The data set itself, if its images are inside its files."""
        try:
            if self._place is None or not _holds_archives(self._place):
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
        from mispair.pairs.layouts.datacomp import find_datacomp
        from mispair.pairs.layouts.opening import recognised

        place = self._place
        if self._has_vectors or place is None or not place.is_dir():
            return not self._has_vectors
        is_run = (place / BEST).is_file()  # `from_training.is_run` without importing torch
        return not (is_run or find_datacomp(place) or recognised(place.resolve()) == "vectors")


def _holds_archives(place: Path) -> bool:
    """Whether images can be inside the files. Data sets of embeddings have none."""
    if not place.is_dir():
        return place.suffix.lower() in ARCHIVES
    endings = {file.suffix.lower() for file in place.rglob("*")}
    return not endings.isdisjoint(ARCHIVES) and endings.isdisjoint(EMBEDDINGS)
