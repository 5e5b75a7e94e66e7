"""Options to read and encode images and captions: the same fields in Python and on the command line."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mispair.encoders.profiles import IMAGE_MODEL, TEXT_MODEL, choose
from mispair.errors import ConflictError
from mispair.support.flags import OrNone

if TYPE_CHECKING:
    from mispair.pairs.tables import Roles


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """Options to read and encode images and captions."""

    images: OrNone[Path] = None
    """Folder of the image paths; by default the folder of the source."""
    allow_outside: bool = False
    """Also read images outside that folder; the report may then contain them."""
    image_column: OrNone[str] = None
    """Column of images, if its name is unusual; its number in a table without a header."""
    caption_column: OrNone[str] = None
    """Column of captions, likewise."""
    id_column: OrNone[str] = None
    """Column of ids, likewise."""
    encoder: OrNone[str] = None
    """Encoders of both sides: fast (the default), best, multilingual or clip, see `mispair encoders`; or one encoder
    with a common space: open_clip:MODEL/WEIGHTS, or transformers:FOLDER of a CLIP or SigLIP."""
    image_model: str = IMAGE_MODEL
    """Encoder of the images: efficientnet-lite0, efficientnet-lite2, open_clip:MODEL/WEIGHTS, timm:NAME, or
    transformers:NAME_OR_FOLDER; several as A+B."""
    text_model: str = TEXT_MODEL
    """Encoder of the captions: all-minilm-l6-v2, use-multilingual, transformers:NAME_OR_FOLDER, or
    open_clip:MODEL/WEIGHTS; several as A+B."""
    cache: OrNone[Path] = None
    """Folder of encodings; by default MISPAIR_CACHE, or the cache folder of the user."""

    def __post_init__(self) -> None:
        if self.encoder is None:
            return
        image, text, note = choose(self.encoder)
        if note:
            warnings.warn(f"{note}, so `encoder` {self.encoder} is {image} and {text}", stacklevel=3)
        chosen = (("image_model", image, IMAGE_MODEL), ("text_model", text, TEXT_MODEL))
        for name, model, usual in chosen:
            if getattr(self, name) not in (model, usual):
                raise ConflictError(f"`encoder` and `{name}`", expected="one of them")
            object.__setattr__(self, name, model)
        object.__setattr__(self, "encoder", None)  # the two models hold the choice

    @property
    def shares_a_space(self) -> bool:
        """Whether one encoder makes the vectors of both sides."""
        return ":" in self.image_model and self.image_model == self.text_model

    @property
    def columns(self) -> Roles:
        """The named columns by their roles."""
        named: Roles = {
            "image_path": self.image_column or "",
            "caption": self.caption_column or "",
            "id": self.id_column or "",
        }
        return {role: column for role, column in named.items() if column}


@dataclass(frozen=True, kw_only=True)
class Files(FileOptions):
    """Options to make training features from images and captions."""

    grid: OrNone[int] = None
    """Cells a side of region features, with words; instead of vectors."""
    pca: OrNone[int] = None
    """With --grid, numbers a cell."""
    dev: OrNone[float] = None
    """Fraction or number of the images that validate; by default a tenth, at most 5,000. A column split comes first."""
    test: OrNone[float] = None
    """Fraction or number of the images that test, likewise."""
