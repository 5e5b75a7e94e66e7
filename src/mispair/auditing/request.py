"""What an audit depends on, as `audit.json` has it: its input and its settings."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from mispair import __version__
from mispair.auditing.output_files import AUDIT
from mispair.errors import DamagedError
from mispair.support.files import Json
from mispair.support.owned_folder import Mark

PLACES = ("source", "left", "right", "ids")  # that an audit reads; see `Request`


class Request(BaseModel):
    """The input and the settings of an audit.

    Attributes:
        source: Path or URL of the data, and a hash or a version of what is there; empty without one.
        left: The same for the vectors of one side.
        right: The same for the other side.
        ids: The same for the table of ids.
        fingerprint: Hash of data in memory.
        images: Folder of the images.
        split: Part of the data set.
        vectors: Which vectors of a DataComp folder.
        image_column: Column of images, if its name is not a usual one.
        caption_column: Column of captions, likewise.
        id_column: Column of ids, likewise.
        image_model: Encoder of images that are audited.
        text_model: Encoder of captions that are audited.
        allow_outside: Whether images outside the folder are read.
        joint: Whether both sides come from encoders with a common space.
        flag_below: Match score below which pairs are flagged.
        keep_best: Fraction of the pairs that are not flagged.
        by: Column by which the summary has noise rates.
        checked: Hash of the answers of a person.
        partnered: Ids of pairs whose left item, and whose right item, a person has given another partner.
        version: Version of mispair.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    source: list[str] = []
    left: list[str] = []
    right: list[str] = []
    ids: list[str] = []
    fingerprint: list[str] = []
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
        """The request of an audit in a folder.

        Raises:
            DamagedError: `audit.json` has other values than an audit writes.
        """
        advice = "Audit again with `overwrite`."
        try:
            found = cls.model_validate(dict(mark.request))
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            raise DamagedError(f"{name}: {first['msg']}", where=f"{folder}/{AUDIT.mark}", advice=advice) from None
        if "\\u0000" in found.model_dump_json():
            raise DamagedError("names files that cannot exist", where=f"{folder}/{AUDIT.mark}", advice=advice)
        return found

    def place(self, name: str) -> Path | None:
        """What was read, as one of `PLACES`."""
        found = getattr(self, name)
        return Path(found[0]) if found else None

    def written(self) -> dict[str, Json]:
        """As JSON."""
        values: dict[str, Any] = self.model_dump()
        return values


def hashed(answers: dict[str, bool]) -> list[str]:
    """A hash of the answers of a person."""
    return [hashlib.sha256(json.dumps(sorted(answers.items())).encode()).hexdigest()]
