"""The files of published data sets, and where to get them: `catalogue.toml`, typed."""

from __future__ import annotations

import difflib
import math
import tomllib
from importlib.resources import files
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, computed_field

from mispair.errors import UnknownNameError

FileKind = Literal["features", "captions", "ids", "vocabulary", "noise"]

BUILT_IN = "shapes"
NO_DOWNLOADS = (
    "mispair downloads nothing: images and captions come under their publishers' terms, which everyone who fetches "
    "them accepts for themselves."
)
_ITEM_BYTES = {"float32": 4, "int64": 8}
_ALIASES = {"f30k": "flickr30k", "f30k_precomp": "flickr30k", "mscoco": "coco", "coco_precomp": "coco"}


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Publisher(_Entry):
    """A current source of the files."""

    name: str
    address: str
    about: str


class Split(_Entry):
    """How many images and captions a split has, and in how many rows the images are published."""

    name: str
    images: int
    captions: int
    rows: int


class PublishedFile(_Entry):
    """One published file; None is unknown or does not apply."""

    name: str  # path in the folder of the data set
    kind: FileKind
    source: str  # name of the `Publisher`
    needed: bool = True  # whether a comparison needs it
    holds: str
    shape: tuple[int, ...] | None = None
    dtype: Literal["float32", "int64"] | None = None
    lines: int | None = None
    words: int | None = None
    file_bytes: int | None = None
    sha256: str | None = None
    other_places: tuple[str, ...] = ()  # other paths in the folder
    split: Split | None = Field(default=None, exclude=True)
    repacked: bool = Field(default=False, exclude=True)  # whether size and checksum are of another copy
    without: str = Field(default="", exclude=True)  # what mispair does where an optional file is missing

    @computed_field(alias="bytes")  # type: ignore[prop-decorator]
    @property
    def n_bytes(self) -> int | None:
        """Bytes of an array without its header, because numpy's versions differ in it; else of the whole file."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype] if self.shape and self.dtype else self.file_bytes


class DataSet(_Entry):
    """A published data set; `folder` is its usual name on disk, and the needed files come first."""

    name: str
    title: str
    folder: str
    about: str
    downloads: str = NO_DOWNLOADS
    files: tuple[PublishedFile, ...]
    sources: tuple[Publisher, ...]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def needed_bytes(self) -> int:
        """Known bytes of the needed files, nearly all for features."""
        return sum(file.n_bytes or 0 for file in self.files if file.needed)


def _read() -> dict[str, DataSet]:
    content = tomllib.loads((files(__package__) / "catalogue.toml").read_text(encoding="utf-8"))
    sources = {source["name"]: source for source in content["sources"]}
    found = {}
    for one in content["data_sets"]:
        splits = {name: {"name": name, **sizes} for name, sizes in one.pop("splits", {}).items()}
        for file in one["files"]:  # which name their splits
            file["split"] = splits.get(file.get("split"))
        names = dict.fromkeys(file["source"] for file in one["files"])
        found[one["name"]] = DataSet.model_validate({**one, "sources": [sources[name] for name in names]})
    return found


DATA_SETS = _read()


def find_data_set(name: str) -> DataSet:
    """The data set of a name."""
    if name in DATA_SETS:
        return DATA_SETS[name]
    known = {**{one: one for one in (*DATA_SETS, BUILT_IN)}, **_ALIASES}
    near = difflib.get_close_matches(name.lower(), known, n=1)
    raise UnknownNameError(
        f'there is no data set "{name}"',
        expected=f"{', '.join(DATA_SETS)} or {BUILT_IN}",
        advice=f'Did you mean "{known[near[0]]}"?' if near else "",
    )
