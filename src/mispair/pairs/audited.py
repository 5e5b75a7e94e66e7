"""An audit's columns: match scores, flags, shared items and suggested partners.

This is the only place that reads them from an audit's table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.compute as compute
import pyarrow.csv

from mispair.errors import DamagedError, DataError, NotFoundError, ShapeError
from mispair.pairs.pairs import MATCH_THRESHOLD, Pairs, described
from mispair.pairs.result_tables import TABLE, write_table
from mispair.pairs.row_ids import numbers
from mispair.pairs.tables import read_parquet
from mispair.support.arrays import FloatArray, IntArray, Mask
from mispair.support.files import regular, unreadable

SCORE, FLAGGED = "match_score", "is_mismatch"
SIDES = ("left", "right")
EXPECTED = "an audit, its pairs.parquet, Pairs with match scores, or one number between 0 and 1 for each pair"
_ITEMS = ("image", "caption")  # columns of the left and the right items
_COLUMNS = (
    SCORE,
    FLAGGED,
    "id",
    "status",
    *_ITEMS,
    *(f"suggested_{side}{n}" for side in SIDES for n in ("", "_score")),
)


@dataclass(frozen=True)
class Suggestions:
    """Better partners for one item of each of R flagged pairs."""

    rows: IntArray  # (R,)
    partners: IntArray  # (R, K) pairs whose item may replace the other one; -1 for none
    scores: FloatArray  # (R, K) how likely each of them is right


@dataclass(frozen=True)
class AuditColumns:
    """Match scores, flags, shared items and suggestions for N pairs."""

    match_score: FloatArray  # (N,) probability that each pair matches; NaN where it could not be read
    flagged: Mask  # (N,) whether each pair is flagged; False where it could not be read
    left_items: IntArray  # (N,) number of its left item; pairs that share one are not negatives of each other
    right_items: IntArray  # (N,) the same for right items
    new_lefts: Suggestions | None = None  # suggested left items; None where none are known
    new_rights: Suggestions | None = None  # suggested right items

    def __len__(self) -> int:
        return len(self.match_score)

    @classmethod
    def of_scores(cls, match_score: FloatArray, flagged: Mask | None = None) -> AuditColumns:
        """Columns of match scores alone; without `flagged`, pairs below 0.5 are flagged."""
        own = np.arange(len(match_score))
        return cls(match_score, match_score < MATCH_THRESHOLD if flagged is None else flagged, own, own)

    @classmethod
    def of_pairs(cls, pairs: Pairs) -> AuditColumns:
        """The columns of pairs with match scores."""
        if pairs.match_score is None or pairs.flagged is None:
            raise DataError(
                "these pairs have no match scores",
                where=pairs.name,
                advice="Attach those of an audit: `mispair.audit(...).attach_to(pairs)`",
            )
        score = _checked(pairs.match_score, pairs.name)
        return cls(score, pairs.flagged, pairs.left_groups[pairs.link], np.arange(len(pairs)))

    @classmethod
    def of_numbers(cls, values: Any) -> AuditColumns:
        """Columns of a flat list, array, tensor or series of match scores."""
        values = values.detach().cpu().numpy() if hasattr(values, "detach") else values
        try:
            score = np.asarray(values)
        except ValueError:  # lists of different lengths
            score = np.empty(0, dtype=object)
        if score.ndim != 1 or score.dtype.kind not in "fiub":
            raise ShapeError(described(values), where="the match scores", expected=EXPECTED)
        return cls.of_scores(_checked(score, "the match scores"))

    @classmethod
    def of_table(cls, table: pyarrow.Table, name: str = "the table") -> AuditColumns:
        """The columns of an audit's table; only `match_score` is required."""
        if SCORE not in table.column_names:
            found = ", ".join(table.column_names) or "no columns"
            raise NotFoundError(f'there is no column "{SCORE}", only {found}', where=name, expected=EXPECTED)
        score = np.asarray(compute.cast(table[SCORE], "float32").to_numpy(zero_copy_only=False))
        readable = ~np.isnan(score)
        if "status" in table.column_names:
            status = compute.cast(table["status"], "string")  # polars has another type of texts
            readable &= np.asarray(compute.equal(status, "ok").to_numpy(zero_copy_only=False), dtype=bool)
        score = np.where(readable, _checked(np.where(readable, score, 0), name), np.float32(np.nan))
        flagged = None
        if FLAGGED in table.column_names:
            marked = compute.fill_null(table[FLAGGED], True).to_numpy(zero_copy_only=False)
            flagged = readable & np.asarray(marked, dtype=bool)
        left, right = (
            _numbered(table[column]) if column in table.column_names else np.arange(len(score)) for column in _ITEMS
        )
        new_lefts, new_rights = (_suggested(table, side) for side in SIDES)
        flagged = score < MATCH_THRESHOLD if flagged is None else flagged
        return cls(score, flagged, left, right, new_lefts, new_rights)

    @classmethod
    def read(cls, path: Path) -> AuditColumns:
        """The columns of the table of an audit, or of the one in its folder."""
        table = read_audit_table(path)
        try:
            return cls.of_table(table, str(path))
        except (pyarrow.ArrowException, TypeError, ValueError) as error:  # columns of other types
            raise DamagedError(f"the table cannot be read ({error})", where=path, expected=EXPECTED) from None

    @property
    def readable(self) -> Mask:
        return ~np.isnan(self.match_score)

    @property
    def kept(self) -> Mask:
        """(N,) whether each pair is readable and not flagged."""
        return self.readable & ~self.flagged

    def flagged_below(self, cut: float | None) -> AuditColumns:
        """The same with another cut; None leaves it."""
        return self if cut is None else replace(self, flagged=np.asarray(self.match_score < cut))

    def take(self, rows: IntArray) -> AuditColumns:
        """The match scores and flags of some pairs."""
        return AuditColumns.of_scores(self.match_score[rows], self.flagged[rows])

    def attached_to(self, pairs: Pairs) -> Pairs:
        """The pairs with these match scores and flags."""
        return pairs.with_audit(self.match_score, self.flagged)

    def save(self, path: Path) -> None:
        """Write the match scores and flags as a table for `read`."""
        columns = {SCORE: self.match_score.astype(np.float32), FLAGGED: self.flagged}
        write_table(path, [pyarrow.table(columns)], overwrite=True)


def read_audit_table(path: Path, columns: tuple[str, ...] = _COLUMNS) -> pyarrow.Table:
    """Read the named columns of an audit's table, if present; all columns of a CSV file."""
    file = path / TABLE if path.is_dir() else path
    if not file.exists():
        raise NotFoundError("no such file", where=file, expected=EXPECTED)
    if file.suffix.lower() != ".csv":
        return read_parquet(file, (), columns)
    try:
        return pyarrow.csv.read_csv(regular(file))
    except (OSError, UnicodeError, pyarrow.ArrowException) as error:
        raise unreadable(file, error) from None


def _checked(score: npt.NDArray[Any], name: str) -> npt.NDArray[np.float32]:
    score = score.astype(np.float32)
    wrong = np.flatnonzero(~((score >= 0) & (score <= 1)))
    if len(wrong):
        raise DataError(
            f"the match score of pair {wrong[0]:,} is {score[wrong[0]]}, and {len(wrong):,} of {len(score):,} are out "
            "of range",
            where=name,
            expected="numbers between 0 and 1",
            advice="Give 0 to a pair that could not be scored, so that it is left out",
        )
    return score


def _suggested(table: pyarrow.Table, side: str) -> Suggestions | None:
    """The best partner of each pair, if there is one."""
    name = f"suggested_{side}"
    if name not in table.column_names or "id" not in table.column_names:
        return None
    texts, ids = (compute.cast(table[column], "string").combine_chunks() for column in (name, "id"))
    found = compute.fill_null(compute.index_in(texts, value_set=ids), -1)
    partners = found.to_numpy(zero_copy_only=False).astype(np.int64)
    scores = np.ones(len(partners), dtype=np.float32)
    if f"{name}_score" in table.column_names:
        scores = table[f"{name}_score"].to_numpy(zero_copy_only=False).astype(np.float32)
    rows = np.flatnonzero(partners >= 0)
    return Suggestions(rows, partners[rows, None], scores[rows, None])


def _numbered(column: Any) -> IntArray:
    """(N,) one number for each different value; a missing or empty one is a value of its own."""
    texts = compute.fill_null(compute.cast(column, "large_string"), "")
    items = numbers(texts.combine_chunks() if isinstance(texts, pyarrow.ChunkedArray) else texts)
    return np.arange(len(texts)) if items is None else items
