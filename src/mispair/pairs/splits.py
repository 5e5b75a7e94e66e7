"""Split the images of a data set into training, validation and test."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mispair.errors import DamagedError, InvalidValueError, TooFewError
from mispair.pairs.npy import open_array, write_array
from mispair.pairs.pairs import HELD_OUT
from mispair.pairs.source import Source
from mispair.support.arrays import IntArray
from mispair.support.files import Json

_NAMES = {"train": "train", "restval": "train", "dev": "dev", "val": "dev", "validation": "dev", "test": "test"}
_SHARE = 0.1  # of the images for validation, and for testing


@dataclass(frozen=True)
class SplitRule:
    """Choose the images for training, validation and testing."""

    dev: float | None = None  # fraction of the images that validate, or their number; None: a tenth, at most 5,000
    test: float | None = None  # the same of the images that test
    only: str | None = None  # one split for all pairs

    def __post_init__(self) -> None:
        for name, value in (("dev", self.dev), ("test", self.test)):
            if value is not None and (not value >= 0 or (value >= 1 and value != int(value))):
                raise InvalidValueError(f"{value:g}", where=name, expected="a share of the images below 1, or how many")
        if self.only is not None and (not self.only or self.only != Path(self.only).name):
            raise InvalidValueError(f'"{self.only}"', where="split", expected="a name such as train or test")

    def request(self) -> dict[str, Json]:
        dev, test = (_SHARE if value is None else value for value in (self.dev, self.test))
        return {"dev": dev, "test": test, "split": self.only}

    def of(self, pairs: Source) -> list[str]:
        """Return the split of each row: by the data set, else at random by the names of the images."""
        if self.only is not None:
            return [self.only] * len(pairs)
        if (given := pairs.splits) is not None:
            named = [name.strip().lower() for name in given]
            for name, as_given in zip(named, given, strict=True):
                if name not in _NAMES:
                    advice = "Correct it, or name the column differently."
                    what = f'a row has the split "{as_given}"'
                    raise DamagedError(what, where=pairs.name, expected="train, dev (or val) or test", advice=advice)
            return [_NAMES[name] for name in named]
        first = pairs.first_rows
        images = np.unique(first)
        names = pairs.image_texts(images)
        if len(set(names)) < len(names):  # images inside other files may share names
            names = pairs.ids(images)
        return self.random(first, names, pairs.name)

    def random(self, first: IntArray, names: Sequence[str], what: str) -> list[str]:
        """Return a random split of each row, by the `first` row with its image (N,) and the names of the images.

        Only the names choose the split, as far as the fractions allow.
        """
        images = np.unique(first)

        def size(value: float | None) -> int:
            if value is None:
                return min(round(_SHARE * len(images)), HELD_OUT)
            return round(value * len(images)) if value < 1 else int(value)

        test, dev = size(self.test), size(self.dev)
        if test + dev >= len(images):
            raise TooFewError(
                f"{len(images):,} images: {dev:,} validate, {test:,} test, and none is left to train",
                where=what,
                advice="Give a smaller `dev` and `test`.",
            )

        def key(place: int) -> bytes:
            return hashlib.blake2b((names[place] or str(place)).encode("utf-8", "replace"), digest_size=16).digest()

        order = images[sorted(range(len(images)), key=key)].tolist()
        splits = ["test"] * test + ["dev"] * dev + ["train"] * (len(images) - test - dev)
        of_image = dict(zip(order, splits, strict=True))
        return [of_image[row] for row in first.tolist()]


def save_rows(out: Path, split: str, rows: IntArray) -> None:
    """Write the row in the data set of each pair of a split."""
    write_array(out / f"{split}_rows.npy", rows)


def read_rows(folder: Path) -> dict[str, IntArray]:
    """Read the files of `save_rows`, by split."""
    return {
        path.name.removesuffix("_rows.npy"): np.asarray(open_array(path, ndim=1, kind="integer"))
        for path in folder.glob("*_rows.npy")
    }
