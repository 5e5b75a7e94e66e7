"""Pairs after edits, of which nothing is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mispair.pairs import row_ids
from mispair.pairs.edits import Edits, LookUp
from mispair.pairs.pairs import IntArray
from mispair.pairs.raw import RawPairs
from mispair.pairs.row_ids import RowIds
from mispair.pairs.shards import Side
from mispair.pairs.source import Source


class EditedPairs(RawPairs):
    """The rows of images and captions that are kept, with the image and the caption that each gets."""

    def __init__(self, pairs: RawPairs, edits: Edits) -> None:
        rows = edits.rows
        self._pairs, self._rows, self._images = pairs, rows, edits.image_from[rows]
        self.name, self.files, self.image_folder = pairs.name, pairs.files, pairs.image_folder
        self.allow_outside = pairs.allow_outside
        self.ids = pairs.ids.take(rows)
        self.image_names = pairs.image_names.take(self._images)
        self.captions = row_ids.as_texts(pairs.final_captions(edits, rows))
        self.groups = _groups(pairs.groups, self._images)

    @property
    def splits(self) -> Sequence[str] | None:
        found = self._pairs.splits
        return None if found is None else [found[row] for row in self._rows]

    def read_image(self, row: int) -> bytes:
        return self._pairs.read_image(int(self._images[row]))

    def image_file(self, row: int) -> Path | None:
        return self._pairs.image_file(int(self._images[row]))

    def has_image(self, row: int) -> bool:
        return self._pairs.has_image(int(self._images[row]))


@dataclass(frozen=True)
class _MovedRows:
    """Some rows of a side, in any order."""

    side: Side
    rows: IntArray

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self.side.width

    def read(self, rows: slice | IntArray) -> npt.NDArray[Any]:
        return self.side.gather(self.rows[rows], self.side.dtype)


def edited_source(source: Source, edits: Edits) -> Source:
    """The rows of vectors that are kept, with the vectors that each gets; edits that rewrite captions have none."""
    rows, images, captions = edits.part(0, len(edits))
    places = np.full(len(edits), -1)
    places[rows] = np.arange(len(rows))
    changed = set(edits.repaired.tolist())
    known = {int(places[row]): why for row, why in source.known.items() if edits.keep[row] and row not in changed}
    return replace(
        source,
        left=Side.of([_MovedRows(source.left, images)]),
        right=Side.of([_MovedRows(source.right, captions)]),
        names=RowIds(row_ids.as_texts(source.ids(rows)), _groups(source.groups, images), known),
        captions=_moved(source.captions, captions),
        image_names=_moved(source.image_names, images),
        table=None,
        shards=(),
    )


def _moved(look_up: LookUp | None, rows: IntArray) -> LookUp | None:
    return None if look_up is None else lambda wanted: look_up(rows[wanted])


def _groups(groups: IntArray | None, images: IntArray) -> IntArray | None:
    """Number of the image of each row, by first appearance; None where all differ."""
    same = images if groups is None else groups[images]
    return row_ids.number(row_ids.first_equal(same + 1))  # 0 would be no image
