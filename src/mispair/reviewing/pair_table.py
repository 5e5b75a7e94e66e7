"""The table of an audit in memory: filters, searches and single rows. A million pairs take 0.3 GB."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from mispair.auditing.output_files import AUDIT, SUGGESTIONS, TABLE
from mispair.errors import NotFoundError, ShapeError
from mispair.pairs.pairs import MATCH_THRESHOLD
from mispair.pairs.tables import read_parquet
from mispair.support.arrays import Mask
from mispair.support.files import unreadable
from mispair.support.owned_folder import check_unchanged

if TYPE_CHECKING:
    import pyarrow

    from mispair.reviewing.answers import Answer
    from mispair.reviewing.decisions import Decision

TEXTS = ("id", "caption", "image", "status", "reason", "reasons", "source")  # as in `Pair`
NEEDED = ("id", "status", "match_score", "is_mismatch")
SEPARATOR = "; "  # of several reasons in a cell
REMEMBERED = 8  # selections
Sort = Literal["score", "doubt", "row", "-score"]  # doubt: the closest to 0.5 first
Rows = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Filter:
    """Pairs to show, and their order."""

    low: float = 0.0  # match score
    high: float = 1.0
    flagged: bool = True  # only flagged pairs
    reason: str = ""
    source: str = ""
    text: str = ""  # in the caption or the id; case does not matter, nor whether an accent is a character of its own
    sort: Sort = "score"


@dataclass(frozen=True)
class Pair:
    """A pair of an audit, or one that a better partner of another pair is taken from. Missing texts are empty."""

    row: int
    score: float | None  # match score, of a better partner that of the new pair; None if it could not be read
    id: str
    caption: str
    image: str
    status: str
    reason: str
    reasons: str  # several, with `; ` between them
    source: str
    replaced: str = ""  # the side that a better partner replaces, "left" or "right"
    # What the page shows besides; `Review.views` and `Review.view` fill it in.
    has_image: bool = False
    decision: Decision | None = None  # the one that counts now
    opinions: Sequence[Answer] = ()  # of annotators; no decisions until a person accepts them
    suggestions: Sequence[Pair] = ()  # better partners

    @property
    def reasons_once(self) -> list[str]:
        """The main reason against the pair, and its other faults."""
        others = (one for one in self.reasons.split(SEPARATOR) if f"its {one}" != self.reason)
        return [part for part in (self.reason, *others) if part]


class PairTable:
    """The rows of an audit.

    Attributes:
        columns: Names of its columns of texts.
        score: (N,) match scores; NaN where a pair could not be read.
        flagged: (N,) whether each pair is flagged.
    """

    def __init__(self, folder: Path) -> None:
        import pyarrow

        self.folder, self._opened = folder, _version(folder)
        check_unchanged(folder, AUDIT, (TABLE, SUGGESTIONS))
        table = read_audit(folder)
        self.columns = frozenset(TEXTS).intersection(table.column_names)
        missing = pyarrow.nulls(len(table), pyarrow.large_string())
        self._texts = {name: texts(table[name]) if name in self.columns else missing for name in TEXTS}
        self.score = np.asarray(table["match_score"], dtype=np.float32)
        self.flagged = np.asarray(table["is_mismatch"].fill_null(False), dtype=bool)
        self._suggestions = self._read_suggestions(folder / SUGGESTIONS)
        del table
        pyarrow.default_memory_pool().release_unused()
        self.select = lru_cache(REMEMBERED)(self._select)

    def __len__(self) -> int:
        return len(self.score)

    @property
    def is_outdated(self) -> bool:
        """Whether another audit has taken the place of this one since, or begun to."""
        return _version(self.folder) != self._opened

    @cached_property
    def readable(self) -> Rows:
        """Rows with a match score."""
        return np.flatnonzero(~np.isnan(self.score)).astype(np.int32)

    def read(self, rows: Sequence[int] | Rows) -> list[Pair]:
        """The texts and scores of these rows, in their order."""
        wanted = np.asarray(rows, dtype=np.int64)
        scores = [None if np.isnan(score) else score for score in self.score[wanted].tolist()]
        columns = (column.take(wanted).fill_null("").to_pylist() for column in self._texts.values())
        return [Pair(*pair) for pair in zip(wanted.tolist(), scores, *columns, strict=True)]

    def find(self, ids: Iterable[str]) -> dict[str, int]:
        """The rows of these ids, without unknown ones; the first row of a repeated id."""
        import pyarrow
        import pyarrow.compute as compute

        wanted = pyarrow.array(ids, pyarrow.large_string())
        if not len(wanted):
            return {}
        places = compute.index_in(self._texts["id"], value_set=wanted)
        rows = np.flatnonzero(places.is_valid())
        place, first = np.unique(places.take(rows), return_index=True)
        return dict(zip(wanted.take(place).to_pylist(), rows[first].tolist(), strict=True))

    def suggestions(self, row: int) -> list[Pair]:
        """Better partners of a row, the best first; none for a row with a repeated id."""
        low, high = np.searchsorted(self._suggestions["row"], [row, row + 1])
        is_left, others, scores = (self._suggestions[name][low:high] for name in ("is_left", "other", "score"))
        sides = np.where(is_left, "left", "right")
        found = zip(self.read(others), sides.tolist(), scores.tolist(), strict=True)
        return [replace(pair, replaced=side, score=score) for pair, side, score in found]

    def _read_suggestions(self, path: Path) -> Mapping[str, npt.NDArray[Any]]:
        """The suggestions for the first row of each id, by row and score."""
        import pyarrow.compute as compute

        if not path.is_file():
            return dict.fromkeys(("row", "is_left", "other", "score"), np.empty(0))
        table = read_parquet(path, ["id", "replaced", "suggested_id", "score"])
        rows, others = (
            compute.fill_null(compute.index_in(texts(table[name]), value_set=self._texts["id"]), -1).to_numpy()
            for name in ("id", "suggested_id")
        )
        is_left, score = _mask(compute.equal(table["replaced"], "left")), table["score"].to_numpy()
        known = np.flatnonzero((rows >= 0) & (others >= 0))
        order = known[np.lexsort([-score[known], rows[known]])]
        return {"row": rows[order], "is_left": is_left[order], "other": others[order], "score": score[order]}

    def counts(self, *names: str, most: int = 50) -> dict[str, int]:
        """The commonest values of columns, and how many pairs have each; a cell may hold several, separated by `; `."""
        found: Counter[str] = Counter()
        for name in names:
            for cell, count in (entry.values() for entry in self._texts[name].value_counts().to_pylist()):
                if cell:
                    found.update(dict.fromkeys(cell.split(SEPARATOR), count))
        return dict(found.most_common(most))

    def is_of(self, columns: Mapping[str, pyarrow.Array]) -> bool:
        """Whether the table has these texts, as far as it has such columns."""
        return all(self._texts[name].equals(texts(cells)) for name, cells in columns.items() if name in self.columns)

    def _select(self, wanted: Filter) -> Rows:
        """The rows of a filter, in its order."""
        import pyarrow.compute as compute

        mask = self.flagged.copy() if wanted.flagged else np.ones(len(self), dtype=bool)
        if wanted.low > 0 or wanted.high < 1:
            mask &= (self.score >= wanted.low) & (self.score <= wanted.high)
        if wanted.reason:
            mask &= _has(wanted.reason, self._texts["reason"], self._texts["reasons"])
        if wanted.source:
            mask &= _mask(compute.equal(self._texts["source"], wanted.source))
        if wanted.text:
            mask &= _has(_searchable(wanted.text).as_py(), *self._searched)
        rows = np.flatnonzero(mask).astype(np.int32)
        if wanted.sort == "row":
            return rows
        score = self.score[rows]
        key = {"score": score, "-score": -score, "doubt": np.abs(score - MATCH_THRESHOLD)}[wanted.sort]
        return np.asarray(rows[key.argsort(kind="stable")])

    @cached_property
    def _searched(self) -> list[pyarrow.LargeStringArray]:
        import pyarrow

        found = [_searchable(self._texts[name]) for name in ("caption", "id")]
        pyarrow.default_memory_pool().release_unused()
        return found


def read_audit(folder: Path, *columns: str) -> pyarrow.Table:
    """The table of an audit, or some of its columns."""
    import pyarrow

    path = folder / TABLE
    if not path.is_file():
        raise NotFoundError(f"no {TABLE} in here", where=folder, advice="Give the folder that an audit has written")
    table = read_parquet(path, (), tuple(dict.fromkeys((*NEEDED, *(columns or TEXTS)))))
    try:
        table.validate(full=True)
    except pyarrow.ArrowException as error:
        raise unreadable(path, error, advice="Audit again") from None
    if missing := [name for name in NEEDED if name not in table.column_names]:
        raise ShapeError(f"no column {missing[0]}", where=path, expected="the table of an audit")
    return table


def texts(cells: pyarrow.Array | pyarrow.ChunkedArray) -> pyarrow.LargeStringArray:
    """Cells as one array of texts."""
    import pyarrow

    found = cells.cast(pyarrow.large_string())
    return found.combine_chunks() if isinstance(found, pyarrow.ChunkedArray) else found


def _searchable(text: Any) -> Any:
    """Normalise a text or a column of texts for a search."""
    import pyarrow.compute as compute

    return compute.utf8_lower(compute.utf8_normalize(text, "NFC"))


def _has(text: str, *columns: pyarrow.LargeStringArray) -> Mask:
    """(N,) whether a text is in one of the columns."""
    import pyarrow.compute as compute

    return np.asarray(np.any([_mask(compute.match_substring(column, text)) for column in columns], axis=0))


def _mask(values: pyarrow.BooleanArray) -> Mask:
    return np.asarray(values.fill_null(False), dtype=bool)


def _version(folder: Path) -> list[int]:
    """Tells the files of an audit from others of their names."""
    found: list[int] = []
    for path in (folder / TABLE, folder / SUGGESTIONS):
        with suppress(OSError):
            found += [path.stat().st_size, path.stat().st_mtime_ns]
    return found
