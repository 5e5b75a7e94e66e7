"""The id and the group of each pair, and whether its table calls it bad.

Ten million rows need no Python object for each: ids are one pyarrow array, and rows are compared by 64-bit
hashes of their texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mispair.errors import NotFoundError, ShapeError
from mispair.pairs.pairs import IntArray
from mispair.pairs.tables import BATCH, Role, Table
from mispair.support.formatting import plain

MISSING, DUPLICATE = "missing id", "duplicate id"
_FINE = ("", "ok", "success")  # the last is what img2dataset writes
_SHOWN = 5


@dataclass(frozen=True)
class RowIds:
    """Ids, groups and known faults of all rows.

    Attributes:
        ids: One text a row (`pyarrow.LargeStringArray`); None where the number of the row is its id.
        groups: Number of the group of each row (N,), by first appearance; None where all differ.
        known: Rows that are bad by the table alone, and why.
    """

    ids: Any = None
    groups: IntArray | None = None
    known: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Texts:
    """Looks up texts that are in memory, as a `pyarrow.LargeStringArray`."""

    array: Any

    def __call__(self, rows: IntArray) -> list[str]:
        return look_up(self.array, rows)


def from_table(table: Table) -> RowIds:
    """Names by the columns of a table, read once.

    Without a column of ids the image paths serve: as they are where they differ, else with the number of the caption
    (`a.jpg#0`, `a.jpg#1`) as Flickr8k writes them.
    """
    roles: tuple[Role, ...] = ("id", "image_path", "group", "status")
    columns = {role: name for role in roles if (name := table.find(role)) is not None}
    by = "group" if "group" in columns else "image_path"
    named = columns.get("id") or columns.get("image_path")
    texts: list[Any] = []
    hashes = np.zeros(len(table) if by in columns else 0, dtype=np.int64)
    known: dict[int, str] = {}
    row = 0
    used = list(dict.fromkeys(columns.values()))
    for batch in table.batches(used) if used else ():
        cells = dict(zip(used, batch, strict=True))
        if named:
            texts.append(cells[named])
        if by in columns:
            hashes[row : row + len(batch[0])] = _hashes(cells[columns[by]])
        if "status" in columns:
            known |= _faults(cells[columns["status"]], row)
        row += len(batch[0])
    ids = _joined(texts) if texts else None
    groups = number(first_equal(hashes)) if by in columns else None
    del hashes
    if ids is None:
        return RowIds(None, groups, known)
    if "id" in columns:
        return RowIds(ids, groups, _bad_ids(ids) | known)
    return RowIds(_numbered(ids), groups, known)


def from_lists(ids: Any, groups: Any, n: int) -> RowIds:
    """Names given as flat lists, arrays or tensors, one value a row.

    Raises:
        ShapeError: They are something else, or more or fewer than the rows.
    """
    array = None if ids is None else as_texts(flat(ids, "ids", n))
    numbers = None if groups is None else number(first_equal(_hash_texts(map(_text, flat(groups, "groups", n)), n)))
    return RowIds(array, numbers, {} if array is None else _bad_ids(array))


def flat(values: Any, what: str, n: int) -> list[Any]:
    """The values as a list of `n`.

    Raises:
        ShapeError: They are something else.
    """
    shape = tuple(getattr(values, "shape", (len(values),) if isinstance(values, Sequence) else ()))
    if shape != (n,) or isinstance(values, str):
        raise ShapeError(f"the shape {shape} for {n:,} pairs", where=what, expected="one for each pair")
    return list(values.tolist() if hasattr(values, "tolist") else values)


def from_images(images: Sequence[str]) -> RowIds:
    """Names by the image of each row, which several rows may share."""
    texts = as_texts(images)
    return RowIds(_numbered(texts), number(first_equal(_hashes(texts))))


def as_texts(values: Iterable[object]) -> Any:
    """One pyarrow array of texts; None and NaN are empty ones."""
    import pyarrow

    return pyarrow.array([plain(_text(value)) for value in values], pyarrow.large_string())


def look_up(texts: Any, rows: IntArray) -> list[str]:
    """The texts at some rows."""
    import pyarrow

    found: list[str] = texts.take(pyarrow.array(rows)).to_pylist()
    return found


def find(ids: Any, wanted: Sequence[str], n: int, name: str) -> IntArray:
    """The first row with each of the wanted ids.

    Raises:
        NotFoundError: Some are not there; the message names up to five of them.
    """
    wanted = [plain(text) for text in wanted]  # as the ids themselves are
    place = {text: position for position, text in reversed(list(enumerate(wanted)))}
    rows = np.full(len(wanted), -1, dtype=np.int64)
    if ids is None:
        for text in place:
            if text.isascii() and text.isdecimal() and len(text) <= len(str(n)) and str(row := int(text)) == text:
                rows[place[text]] = row if row < n else -1
    else:
        import pyarrow
        import pyarrow.compute

        # The few wanted ones are made into a hash table, not the many that are there.
        values = [text for text in place if text]
        positions = pyarrow.compute.index_in(ids, value_set=pyarrow.array(values, ids.type))
        hits = np.flatnonzero(positions.is_valid().to_numpy(zero_copy_only=False))
        for row, position in zip(hits[::-1], positions.take(pyarrow.array(hits[::-1])).to_pylist(), strict=True):
            rows[place[values[position]]] = row
    rows = rows[[place[text] for text in wanted]]
    unknown = [text for text, row in zip(wanted, rows, strict=True) if row < 0]
    if unknown:
        more = f" and {len(unknown) - _SHOWN:,} more" if len(unknown) > _SHOWN else ""
        what = f"no pair has the id {', '.join(map(repr, unknown[:_SHOWN]))}{more}"
        raise NotFoundError(what, where=name, advice="Use ids as the audit's table shows them")
    return rows


def first_equal(hashes: npt.NDArray[np.int64]) -> IntArray:
    """The first row with the same hash as each row; a row without a text (hash 0) is alone.

    >>> first_equal(np.array([7, 0, 7, 0]))
    array([0, 1, 0, 3])
    """
    # What np.unique does, with half of its memory.
    order = np.argsort(hashes, kind="stable")
    ascending = hashes[order]
    new = np.empty(len(hashes), dtype=bool)
    new[:1] = True
    np.not_equal(ascending[1:], ascending[:-1], out=new[1:])
    new |= ascending == 0
    del ascending
    run = np.cumsum(new)
    run -= 1
    first = np.empty_like(order)
    first[order] = order[new][run]
    return first


def number(first: IntArray) -> IntArray | None:
    """Group numbers 0, 1, ... by first appearance; None where every row is its own first.

    >>> number(np.array([0, 1, 0, 3]))
    array([0, 1, 0, 2])
    """
    own = first == np.arange(len(first))
    return None if own.all() else (np.cumsum(own) - 1)[first]


def _text(value: object) -> str:
    missing = value is None or (isinstance(value, float) and value != value)  # NaN is how pandas writes a gap
    return "" if missing else str(value)


def _hash_texts(texts: Iterable[str], n: int) -> npt.NDArray[np.int64]:
    return np.fromiter((hash(text) or 1 if text else 0 for text in texts), dtype=np.int64, count=n)


def _hashes(texts: Any) -> npt.NDArray[np.int64]:
    """64-bit hash of each text, 0 for an empty one. Two of ten million agree by accident once in 400,000 data sets."""
    hashes = np.empty(len(texts), dtype=np.int64)
    for start in range(0, len(texts), BATCH):  # a Python string for some rows at a time
        part = texts[start : start + BATCH].to_numpy(zero_copy_only=False)
        hashes[start : start + BATCH] = _hash_texts(part, len(part))
    return hashes


def _joined(texts: list[Any]) -> Any:
    """One array of many, which are freed."""
    import pyarrow

    joined = pyarrow.concat_arrays(texts)
    texts.clear()
    pyarrow.default_memory_pool().release_unused()
    return joined


def _faults(statuses: Any, start: int) -> dict[int, str]:
    values = statuses.to_numpy(zero_copy_only=False)
    return {start + row: text for row, text in enumerate(values) if text.strip().lower() not in _FINE}


def _bad_ids(ids: Any) -> dict[int, str]:
    hashes = _hashes(ids)
    first = first_equal(hashes)
    later = np.flatnonzero(first != np.arange(len(first)))
    same = np.array([one == two for one, two in zip(look_up(ids, later), look_up(ids, first[later]), strict=True)])
    bad = dict.fromkeys(np.flatnonzero(hashes == 0).tolist(), MISSING)
    return bad | dict.fromkeys(later[same.astype(bool)].tolist(), DUPLICATE)


def _numbered(images: Any) -> Any:
    """Ids from the image of each row: itself where all differ, else with the number of the row of its image."""
    import pyarrow
    import pyarrow.compute

    hashes = _hashes(images)
    first = first_equal(hashes)
    ids = images
    if number(first) is not None:
        order = np.argsort(first, kind="stable")
        starts = np.flatnonzero(np.diff(first[order], prepend=-1))
        place = np.empty(len(first), dtype=np.int64)
        place[order] = np.arange(len(first)) - np.repeat(starts, np.diff(starts, append=len(first)))
        sign = pyarrow.scalar("#", images.type)
        ids = pyarrow.compute.binary_join_element_wise(images, pyarrow.array(place).cast(images.type), sign)
    if hashes.all():
        return ids
    rows = pyarrow.array(np.arange(len(first))).cast(images.type)
    return pyarrow.compute.if_else(pyarrow.array(hashes == 0), rows, ids)
