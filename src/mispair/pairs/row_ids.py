"""The id and the group of each pair, and whether its table calls it bad.

Ids are one pyarrow array: ten million rows need no Python object for each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute

from mispair.errors import NotFoundError, ShapeError
from mispair.pairs.tables import Role, Table
from mispair.support.arrays import IntArray
from mispair.support.formatting import plain

MISSING, DUPLICATE = "missing id", "duplicate id"
_FINE = ("", "ok", "success")  # the last is what img2dataset writes
_SHOWN = 5


@dataclass(frozen=True)
class RowIds:
    """Ids, groups and known faults of all rows."""

    ids: Any = None  # `pyarrow.LargeStringArray`; None if the number of the row is its id
    groups: IntArray | None = None  # (N,) group of each row, by first appearance; None if all differ
    known: dict[int, str] = field(default_factory=dict)  # rows that are bad by the table alone, and why


@dataclass(frozen=True)
class Texts:
    """Looks up texts in memory (`pyarrow.LargeStringArray`)."""

    array: Any

    @classmethod
    def of(cls, values: Iterable[object]) -> Texts:
        return cls(as_texts(values))

    def __call__(self, rows: IntArray) -> list[str]:
        found: list[str] = self.array.take(pyarrow.array(rows)).to_pylist()
        return found


def from_table(table: Table) -> RowIds:
    """Names by the columns of a table.

    Without a column of ids the image paths are the ids: unchanged if all differ, else with the number of the caption
    (`a.jpg#0`, `a.jpg#1`) as Flickr8k writes them.
    """
    roles: tuple[Role, ...] = ("id", "image_path", "group", "status")
    named, image, group, status = (table.find(role) for role in roles)
    known, by = {}, group or image
    if status is not None:
        words = enumerate(table.texts(status).to_pylist())
        known = {row: text for row, text in words if text.strip().lower() not in _FINE}
    groups = None if by is None else numbers(table.texts(by))
    if named is not None:
        ids = table.texts(named)
        return RowIds(ids, groups, _bad_ids(ids) | known)
    return RowIds(None if image is None else _of_images(table.texts(image)), groups, known)


def from_lists(ids: Any, groups: Any, n: int) -> RowIds:
    """Names given as flat lists, arrays or tensors, one value a row."""
    array = None if ids is None else as_texts(flat(ids, "ids", n))
    grouped = None if groups is None else numbers(as_texts(flat(groups, "groups", n)))
    return RowIds(array, grouped, {} if array is None else _bad_ids(array))


def flat(values: Any, what: str, n: int) -> list[Any]:
    """The values as a list of `n`."""
    shape = tuple(getattr(values, "shape", (len(values),) if isinstance(values, Sequence) else ()))
    if shape != (n,) or isinstance(values, str):
        raise ShapeError(f"the shape {shape} for {n:,} pairs", where=what, expected="one for each pair")
    return list(values.tolist() if hasattr(values, "tolist") else values)


def from_images(images: Sequence[str]) -> RowIds:
    """Names by the image of each row; several rows may share an image."""
    texts = as_texts(images)
    return RowIds(_of_images(texts), numbers(texts))


def as_texts(values: Iterable[object]) -> Any:
    """One pyarrow array of texts; None and NaN (a gap in pandas) become empty."""
    texts = ("" if value is None or value != value else plain(str(value)) for value in values)
    return pyarrow.array(texts, pyarrow.large_string())


def find(ids: Any, wanted: Sequence[str], n: int, name: str) -> IntArray:
    """The first row with each of the wanted ids."""
    wanted = [plain(text) for text in wanted]  # as the ids themselves are
    if not wanted:
        return np.empty(0, dtype=np.int64)
    if ids is None:
        ids = pyarrow.array(np.arange(n)).cast(pyarrow.large_string())
    # The few wanted ones are made into a hash table, not the many that are there.
    values = pyarrow.array(dict.fromkeys(filter(None, wanted)), ids.type)
    places = pyarrow.compute.index_in(ids, value_set=values)
    hits = np.flatnonzero(places.is_valid())
    place, first = np.unique(places.take(pyarrow.array(hits)), return_index=True)
    rows = dict(zip(values.take(pyarrow.array(place)).to_pylist(), hits[first].tolist(), strict=True))
    unknown = [text for text in wanted if text not in rows]
    if unknown:
        more = f" and {len(unknown) - _SHOWN:,} more" if len(unknown) > _SHOWN else ""
        what = f"no pair has the id {', '.join(map(repr, unknown[:_SHOWN]))}{more}"
        raise NotFoundError(what, where=name, advice="Use ids as the audit's table shows them")
    return np.array([rows[text] for text in wanted], dtype=np.int64)


def numbers(values: Any) -> IntArray | None:
    """Number of each value of a pyarrow array, 0, 1, ... by first appearance; None if all differ.

    An empty text is equal to no other.

    >>> import pyarrow
    >>> numbers(pyarrow.array(["a", "", "a", ""]))
    array([0, 1, 0, 2])
    """
    codes = _codes(values)
    empty = () if pyarrow.types.is_integer(values.type) else np.flatnonzero(pyarrow.compute.equal(values, ""))
    if len(empty) > 1:
        codes[empty] = len(codes) + np.arange(len(empty))
        codes = _codes(pyarrow.array(codes))
    return None if codes.max(initial=-1) + 1 == len(codes) else codes


def _codes(values: Any) -> IntArray:
    return np.array(values.dictionary_encode().indices, dtype=np.int64)


def _bad_ids(ids: Any) -> dict[int, str]:
    groups = numbers(ids)
    later = () if groups is None else np.delete(np.arange(len(ids)), np.unique(groups, return_index=True)[1])
    missing = np.flatnonzero(pyarrow.compute.equal(ids, ""))
    return dict.fromkeys(missing.tolist(), MISSING) | dict.fromkeys(map(int, later), DUPLICATE)


def _of_images(images: Any) -> Any:
    """Ids from the image of each row: itself where all differ, else with the number of the row of its image."""
    ids, groups = images, numbers(images)
    if groups is not None:
        order, sizes = np.argsort(groups, kind="stable"), np.bincount(groups)
        place = np.empty(len(groups), dtype=np.int64)
        place[order] = np.arange(len(groups)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        sign = pyarrow.scalar("#", images.type)
        ids = pyarrow.compute.binary_join_element_wise(images, pyarrow.array(place).cast(images.type), sign)
    rows = pyarrow.array(np.arange(len(images))).cast(images.type)
    return pyarrow.compute.if_else(pyarrow.compute.equal(images, ""), rows, ids)


def id_column(names: Any, images: Any) -> Any:
    """One unique id a row, from pyarrow arrays: the names, if all are there and differ.

    Millions of names are not taken apart for that; see `unique_ids` for the others.
    """
    if numbers(names) is None and not pyarrow.compute.any(pyarrow.compute.equal(names, "")).as_py():
        return names
    return as_texts(unique_ids(names.to_pylist(), images.to_pylist()))


def unique_ids(ids: Iterable[str], images: Sequence[str]) -> Iterator[str]:
    """One unique id a row.

    >>> list(unique_ids(["7", "", "7", ""], ["a.jpg", "b.jpg", "a.jpg", "b.jpg"]))
    ['7', 'b.jpg#0', '7#1', 'b.jpg#1']
    """
    captions: Counter[str] = Counter()
    repeats: Counter[str] = Counter()
    taken: set[str] = set()
    for name, image in zip(ids, images, strict=True):
        wanted = name or f"{plain(Path(image).as_posix()) if image else 'row'}#{captions[image]}"
        captions[image] += 1
        unique = wanted
        while unique in taken:
            repeats[wanted] += 1
            unique = f"{wanted}#{repeats[wanted]}"
        taken.add(unique)
        yield unique
