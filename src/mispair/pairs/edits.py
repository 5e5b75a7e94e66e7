"""Edits of the rows of a data set, for a copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from mispair.pairs.pairs import IntArray

Mask = npt.NDArray[np.bool_]
LookUp = Callable[[IntArray], list[str]]  # texts of rows


@dataclass(frozen=True)
class Edits:
    """The image and caption of each of N rows in a copy."""

    keep: Mask  # (N,) whether the row is written
    image_from: IntArray  # (N,) the row whose image it gets, by default its own
    caption_from: IntArray  # (N,) likewise
    rewritten: Mapping[int, str] = field(default_factory=dict)  # new captions by row, instead of `caption_from`

    def __post_init__(self) -> None:
        if not self.keep.shape == self.image_from.shape == self.caption_from.shape or self.keep.dtype != np.bool_:
            raise ValueError("keep must be N booleans, image_from and caption_from N row numbers")

    def __len__(self) -> int:
        return len(self.keep)

    @classmethod
    def keeping(cls, keep: Mask) -> Edits:
        """Keep some rows as they are, and leave out the others."""
        own = np.arange(len(keep))
        return cls(np.asarray(keep), own, own)

    @property
    def rows(self) -> IntArray:
        """The kept rows, ascending."""
        return np.flatnonzero(self.keep)

    @property
    def repaired(self) -> IntArray:
        """The kept rows with another image or caption."""
        own = np.arange(len(self))
        changed = (self.image_from != own) | (self.caption_from != own)
        changed[list(self.rewritten)] = True
        return np.flatnonzero(changed & self.keep)

    def repeats(self, groups: IntArray | None) -> Mask:
        """(N,) whether a kept row repeats the image and the caption of a kept row before it.

        Two pairs that exchanged their captions become one by re-pairing the image of one and the caption of the other.
        Rows of one group share their image.
        """
        rows = np.setdiff1d(self.rows, list(self.rewritten))
        images = self.image_from[rows] if groups is None else groups[self.image_from[rows]]
        first = np.unique(images * len(self) + self.caption_from[rows], return_index=True)[1]
        found = np.zeros(len(self), dtype=bool)
        found[np.delete(rows, first)] = True
        return found

    def each_once(self, groups: IntArray | None) -> Edits:
        """Leave out rows after the first with the same image and caption."""
        return replace(self, keep=self.keep & ~self.repeats(groups))

    def with_unmatched(self, groups: IntArray | None) -> Edits:
        """Keep all rows: give unused images and captions to those that were left out."""
        rewritten = np.isin(np.arange(len(self)), list(self.rewritten))
        return replace(
            self,
            keep=np.ones(len(self), dtype=bool),
            image_from=_with_unused(self.image_from, ~self.keep, self.keep, groups),
            caption_from=_with_unused(self.caption_from, ~self.keep, self.keep & ~rewritten, None),
        )

    def part(self, start: int, stop: int) -> tuple[IntArray, IntArray, IntArray]:
        """The written rows from start to stop, and where their images and captions come from."""
        rows = np.flatnonzero(self.keep[start:stop]) + start
        return rows, self.image_from[rows], self.caption_from[rows]


def _with_unused(taken: IntArray, free: Mask, using: Mask, groups: IntArray | None) -> IntArray:
    """Give each free row an unused item: its own, if possible.

    Args:
        taken: (N,) the row whose item each row gets so far.
        free: (N,) rows that may get another one.
        using: (N,) rows that use theirs.
        groups: (N,) rows of one group have the same item; None if all differ.
    """
    own = np.arange(len(taken))
    item = own if groups is None else groups
    used = np.isin(item, item[taken[using]])
    wanting = np.flatnonzero(free & used)
    unused = np.flatnonzero(~used & ~np.isin(item, item[free]))
    unused = unused[np.unique(item[unused], return_index=True)[1]][: len(wanting)]
    taken = np.where(free, own, taken)
    taken[wanting[: len(unused)]] = unused
    return taken
