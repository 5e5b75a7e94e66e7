"""Image files by the names that data sets have for them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

ENDINGS = ("", ".jpg", ".jpeg", ".png", ".webp")


def find_image(places: Sequence[Path], name: str) -> Path | None:
    """The image file of this name, with or without its ending; None where there is none.

    A name never leads out of the places, by `..`, as an absolute path or through a link: a report or a page must not
    show other images of the machine.

    Args:
        places: Folders, in which it is searched in their order.
        name: As the data set has it.
    """
    if not name or "\0" in name:
        return None
    # Tables travel: without their old folders, paths from another machine still fit.
    bare = re.split(r"[/\\]", name)[-1]
    tried = ((place, place / f"{part}{ending}") for place in places for part in (name, bare) for ending in ENDINGS)
    return next((path for place, path in tried if os.path.isfile(path) and is_inside(place, path)), None)


def is_inside(place: Path, path: Path) -> bool:
    """Whether a path leads to something in a folder, whatever `..` and links it goes through."""
    return path.resolve().is_relative_to(place.resolve())
