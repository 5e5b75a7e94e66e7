"""The request of an audit, as in `audit.json`: its input and its settings. Imports nothing heavy."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from mispair import __version__
from mispair.auditing.output_files import AUDIT
from mispair.errors import DamagedError
from mispair.support.files import Json
from mispair.support.owned_folder import Mark, read_mark

PLACES = ("source", "left", "right", "ids")  # that an audit reads, see `Request`; of `left` and `right` several


class Request(BaseModel):
    """The input and the settings of an audit; most are fields of `AuditInput` and `Settings`.

    Attributes:
        source: Path or URL of the data, and a hash or a version of it; empty without one. So are `ids` and each file of
            `left` and `right`.
        checked: Hash of the answers of a person.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    source: list[str] = []
    left: list[list[str]] = []
    right: list[list[str]] = []
    ids: list[str] = []
    images: str | None = None
    split: str | None = None
    vectors: str | None = None
    image_column: str | None = None
    caption_column: str | None = None
    id_column: str | None = None
    image_model: str = ""
    text_model: str = ""
    allow_outside: bool = False
    joint: bool = False
    flag_below: float | None = None
    keep_best: float | None = None
    by: str | None = None
    checked: list[str] = []
    partnered: list[list[str]] = []
    version: str = __version__

    @classmethod
    def of(cls, mark: Mark, folder: Path | str) -> Self:
        """Read the request of an audit in a folder.

        Raises:
            DamagedError: `audit.json` has other values than an audit writes.
        """
        what = "names no data"
        try:
            found = cls.model_validate(dict(mark.request))
            if "\\u0000" in found.model_dump_json():
                what = "names files that cannot exist"
            elif found.source or found.left:
                return found
        except ValidationError as error:
            first = error.errors()[0]
            what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise DamagedError(what, where=f"{folder}/{AUDIT.mark}", advice="Audit again with `overwrite`.")


def read_audit_mark(out: Path) -> Mark | None:
    """Read the mark of an audit; None if it is missing.

    Missing data is searched beside the audit, at its old relative place: both may have moved with a project folder.
    """
    mark = read_mark(out, AUDIT)
    if mark is None or not mark.place:
        return mark
    moved = {name: _moved(mark.request[name], mark.place, out) for name in (*PLACES, "images") if name in mark.request}
    return replace(mark, request={**mark.request, **moved})


def _moved(found: Json, was: str, out: Path) -> Json:
    """Find a path again, also at the start of a list or of several lists."""
    if isinstance(found, list) and found and isinstance(found[0], list):
        return [_moved(one, was, out) for one in found]
    place, *others = found if isinstance(found, list) and found else [found]
    if not isinstance(place, str) or "://" in place:
        return found
    with suppress(OSError, ValueError):  # no path, or on another drive than the audit
        there = os.path.normpath(out.resolve() / os.path.relpath(place, was))
        if not os.path.lexists(place) and os.path.exists(there):
            return [there, *others] if isinstance(found, list) else there
    return found


def local_place(found: object) -> Path | None:
    """Return the audited file or folder by its path, or its copy by URL and version.

    Raises:
        NotFoundError: The copy was deleted.
    """
    if not isinstance(found, list) or not found:
        return None
    place = str(found[0])
    if "://" not in place or len(found) < 2:
        return Path(place)
    from mispair.encoders.cache import FETCHED, cache_folder
    from mispair.pairs.remote import find_copy

    return find_copy(place, str(found[1]), cache_folder() / FETCHED)
