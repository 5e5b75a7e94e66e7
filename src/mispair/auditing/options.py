"""The input and the settings of an audit: the same fields in Python and on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypedDict

import tyro

from mispair.encoders.options import FileOptions
from mispair.support.flags import OrNone


@dataclass(frozen=True, kw_only=True)
class InputOptions(FileOptions):
    """Options of the data."""

    left: tuple[Path, ...] = ()
    """Vectors of one side as .npy, instead of a source; of several encoders as several files."""
    right: tuple[Path, ...] = ()
    """Vectors of the other side, likewise."""
    ids: OrNone[Path] = None
    """Table (CSV, TSV, parquet) with a row for each vector: id, caption, image_path, group."""
    split: OrNone[str] = None
    """Part of the data set; train by default, where it has parts."""
    vectors: OrNone[str] = None
    """Which vectors of a DataComp folder: l14 (the default) or b32."""


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """Settings of the audit."""

    joint: bool = False
    """The vectors come from encoders that share a space, as CLIP's do."""
    flag_below: OrNone[float] = None
    """Flag pairs with a match score below this; 0.5 by default."""
    keep_best: Annotated[OrNone[str | float], tyro.conf.arg(metavar="STR", help_behavior_hint="")] = None
    """Flag all but the best of the pairs instead: 80% or 0.8."""
    by: OrNone[str] = None
    """Column of the input, or shard for its files: a noise rate for each of its values."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    workers: OrNone[int] = None
    """Threads, or processes of Ray; as many as there are cores (for Ray on GPUs: GPUs) by default."""


class Options(TypedDict, total=False):
    """Keyword arguments of `mispair.audit`, also flags of the command; see the classes above."""

    images: str | Path | None
    allow_outside: bool
    image_column: str | None
    caption_column: str | None
    id_column: str | None
    encoder: str | None
    image_model: str
    text_model: str
    cache: str | Path | None
    split: str | None
    vectors: str | None
    joint: bool
    flag_below: float | None
    keep_best: str | float | None
    by: str | None
    device: str
    workers: int | None
