"""Columns of scores from tables, folders and arrays, and the evidence about their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mispair.auditing.folder import read_answer, read_checked
from mispair.auditing.output_files import SUMMARY
from mispair.auditing.summary import AuditSummary
from mispair.errors import ConflictError, NotFoundError, ShapeError, TooFewError
from mispair.functional.logistic import FloatArray
from mispair.pairs import row_ids
from mispair.pairs.audited import AuditColumns, read_audit_table
from mispair.pairs.layouts.datacomp import find_datacomp
from mispair.pairs.npy import open_array
from mispair.pairs.other_libraries import as_table, as_vectors
from mispair.pairs.row_ids import RowIds
from mispair.pairs.tables import Table, open_table
from mispair.reviewing.decisions import FILE, Mode, read_current
from mispair.support.arrays import IntArray
from mispair.support.formatting import listed

if TYPE_CHECKING:
    from mispair.auditing.audit import Audit

SCORE = "score"  # name of the column of an array


@dataclass(frozen=True)
class Scores:
    """Scores of N pairs."""

    columns: tuple[str, ...]  # their names
    values: FloatArray  # (N, columns); NaN where there is none
    table: Table | None = None  # the table that they are from; None for an array
    names: RowIds = field(default_factory=RowIds)  # ids of the rows
    path: Path | None = None  # file or folder of the table

    def __len__(self) -> int:
        return len(self.values)

    @property
    def name(self) -> str:
        return "the given scores" if self.path is None else str(self.path)

    @property
    def ids(self) -> Any:
        """The id of each row (pyarrow): by its table, or its number."""
        import pyarrow

        return pyarrow.array(np.arange(len(self))).cast(pyarrow.string()) if self.names.ids is None else self.names.ids

    def find(self, ids: Sequence[str]) -> IntArray:
        """The first rows with these ids."""
        return row_ids.find(self.names.ids, ids, len(self), self.name)


def open_scores(given: Any, columns: Sequence[str]) -> Scores:
    """Columns of a table, of a path or of an array."""
    path = Path(given) if isinstance(given, str | Path) else None
    if path is not None:
        table = open_score_table(path)
    elif (content := as_table(given)) is not None:
        table = Table.of(content, "the given table")
    else:
        values = np.asarray(as_vectors(given.tolist() if type(given).__name__ == "Series" else given))
        values = values[:, None] if values.ndim == 1 else values
        if values.ndim != 2 or values.dtype.kind not in "fiu":
            expected = "numbers (N,) or (N, columns), a table or a path"
            raise ShapeError(f"an array of {values.dtype} and shape {values.shape}", where="scores", expected=expected)
        unnamed = [SCORE] if values.shape[1] == 1 else [f"{SCORE}_{place + 1}" for place in range(values.shape[1])]
        names = tuple(columns) if len(columns) == values.shape[1] else tuple(unnamed)
        return Scores(names, _finite(values.astype(np.float64)))
    if not columns:
        raise ConflictError("no column of scores is named", where="score", expected=f"one of {listed(table.columns)}")
    found = np.column_stack([numbers(table, name) for name in columns])
    return Scores(tuple(columns), found, table, row_ids.from_table(table), path)


def open_score_table(path: Path) -> Table:
    """The table of a file, or of the parquet files in a folder."""
    if not path.is_dir():
        return open_table(path, lenient=True)
    files = find_datacomp(path) or sorted(path.rglob("*.parquet"))
    if not files:
        expected = "a table (parquet, CSV), or a folder of parquet files as of Hugging Face or DataComp"
        raise NotFoundError("no parquet files in here", where=path, expected=expected)
    return open_table(*files)


def numbers(table: Table, column: str) -> FloatArray:
    """(N,) a column as numbers; NaN for an empty cell or an infinite number."""
    import pyarrow
    import pyarrow.compute as compute

    where = table.parts[0].path
    if column not in table.columns:
        raise NotFoundError(f'no column "{column}"', where=where, expected=f"one of {listed(table.columns)}")
    found = [np.empty(0)]
    for part in table.parts:
        for batch in part.records([column]):
            cells = batch.column(0)
            try:
                if pyarrow.types.is_string(cells.type) or pyarrow.types.is_large_string(cells.type):
                    cells = compute.utf8_trim_whitespace(cells)
                    cells = compute.if_else(compute.equal(cells, ""), pyarrow.scalar(None, cells.type), cells)
                found.append(cells.cast(pyarrow.float64()).to_numpy(zero_copy_only=False))
            except pyarrow.ArrowException as error:
                what = f'the column "{column}" is not of numbers ({str(error).splitlines()[0]})'
                raise ShapeError(what, where=where, expected="a number a row, or an empty cell") from None
    return _finite(np.concatenate(found))


def _finite(values: FloatArray) -> FloatArray:
    return np.where(np.isfinite(values), values, np.nan)


def open_vectors(given: Any, name: str, rows: int) -> npt.NDArray[Any]:
    """Vectors (N, D) of an .npy file or in memory."""
    path = isinstance(given, str | Path)
    vectors = open_array(given, 2, kind="vector") if path else np.asarray(as_vectors(given))
    if vectors.ndim != 2 or len(vectors) != rows:
        where = given if path else name
        raise ShapeError(
            f"an array of shape {vectors.shape}", where=where, expected=f"a vector for each of {rows:,} rows"
        )
    return vectors


def of_audit(audit: Audit | str | Path, source: Scores) -> tuple[FloatArray, tuple[float, float, float], float]:
    """(N,) match scores of an audit by row, its noise rate with both ends of its interval, and its `at_most`."""
    if isinstance(audit, str | Path):
        folder = Path(audit)
        summary, match = AuditSummary.read(folder / SUMMARY), AuditColumns.read(folder).match_score
        table = read_audit_table(folder, ("id", "match_score"))
        ids = None if source.names.ids is None else table["id"].to_pylist()
    else:
        summary, match, folder = audit.summary, audit.match_score, Path(audit.source.name)
        ids = None if source.names.ids is None or audit.source.names.ids is None else audit.source.ids()
    found = np.full(len(source), np.nan)
    if ids is not None:
        found[source.find(ids)] = match
    elif len(match) == len(source):
        found[:] = match
    else:
        expected = f"an audit of the {len(source):,} rows of the scores"
        raise ShapeError(f"an audit of {len(match):,} pairs", where=folder, expected=expected)
    return found, (summary.noise_rate, summary.noise_rate_low, summary.noise_rate_high), summary.at_most


@dataclass(frozen=True)
class Checked:
    """Rows checked by people."""

    rows: IntArray  # (k,)
    matched: npt.NDArray[np.bool_]  # (k,)
    stands_for: FloatArray | None = None  # (k,) number of rows that each stands for, up to a factor; None if equal

    def among(self, readable: npt.NDArray[np.bool_]) -> Checked:
        """The same with places among the readable rows, without others."""
        kept, places = readable[self.rows], np.cumsum(readable) - 1
        stands_for = None if self.stands_for is None else self.stands_for[kept]
        return Checked(places[self.rows[kept]], self.matched[kept], stands_for)


def checked_rows(source: Scores, checked: Mapping[str, bool] | npt.ArrayLike | str | Path) -> Checked:
    """The checked rows of a column, a CSV, a review, a mapping or an array."""
    if isinstance(checked, str | Path):
        if source.table is not None and str(checked) in source.table.columns:
            where = source.table.parts[0].path
            cells = [cell for (batch,) in source.table.batches([str(checked)]) for cell in batch.to_pylist()]
            answers = [read_answer(cell, "right", where) if cell.strip() else np.nan for cell in cells]
            return _answered(np.array(answers, dtype=np.float64))
        if Path(checked).is_dir():
            return _decided(source, Path(checked))
        checked = read_checked(Path(checked))
    if isinstance(checked, Mapping):
        return Checked(source.find(list(checked)), np.array(list(checked.values()), dtype=np.bool_))
    values = np.asarray(checked, dtype=np.float64)
    if values.shape != (len(source),):
        expected = f"one for each of {len(source):,} rows"
        raise ShapeError(f"an array of shape {values.shape}", where="checked", expected=expected)
    return _answered(values)


def _answered(answers: FloatArray) -> Checked:
    rows = np.flatnonzero(~np.isnan(answers))
    return Checked(rows, answers[rows] > 0)


def _decided(source: Scores, audit: Path) -> Checked:
    """Decisions of a review on pairs drawn for the noise rate.

    The review notes with which probability a pair was among the first j drawn ones, as it was the j-th. That is
    proportional to j in expectation, so that the pair stands for j / probability pairs, up to a factor.
    """
    decisions = sorted(read_current(audit / FILE).values(), key=lambda one: one.number)
    drawn = [one for one in decisions if one.mode == Mode.RATE and one.inclusion]
    known = [
        (one.id, one.verdict.matched, place / one.inclusion)
        for place, one in enumerate(drawn, start=1)
        if one.verdict.matched is not None and one.inclusion
    ]
    if not known:
        advice = "Decide on pairs under Estimate the noise rate in the review. Only these are drawn at random."
        raise TooFewError("no decision on a drawn pair", where=audit, advice=advice)
    ids, matched, stands_for = zip(*known, strict=True)
    return Checked(source.find(ids), np.array(matched, dtype=np.bool_), np.array(stands_for))
