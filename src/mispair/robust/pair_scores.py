"""What is known of each pair before training: its match score, which items it shares, and better partners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from mispair.auditing.findings import Findings
from mispair.auditing.output_files import TABLE
from mispair.errors import ConfigError, DataError
from mispair.methods.soft_partners import BoolArray, SoftPartners, find_soft_partners
from mispair.pairs.pairs import MATCH_THRESHOLD, IntArray, Pairs, described
from mispair.support.row_order import check_order, labels_of

if TYPE_CHECKING:
    import pyarrow

SCORE = "match_score"
EXPECTED = "give an audit, its pairs.parquet, Pairs with match scores, or one number between 0 and 1 for each pair"


@dataclass(frozen=True)
class PairScores:
    """N pairs.

    Attributes:
        match_score: (N,) probability that each pair matches; 0 where it could not be read.
        trusted: (N,) whether a pair is readable and not flagged.
        left_items: (N,) number of its left item; pairs that share one are not negatives of each other.
        right_items: (N,) the same for right items.
        partners: Better partners for items of flagged pairs; None where none are known.
    """

    match_score: npt.NDArray[np.float32]
    trusted: BoolArray
    left_items: IntArray
    right_items: IntArray
    partners: SoftPartners | None = None

    def __len__(self) -> int:
        return len(self.match_score)


def read_scores(source: Any, flag_below: float | None, *, partners: bool) -> PairScores:
    """Takes scores from an audit, a table, a file, `Pairs`, or a list of numbers.

    Args:
        source: One of these.
        flag_below: Match score below which pairs are flagged; by default that of the audit, else 0.5.
        partners: Whether to find better partners.

    Raises:
        DataError: It is none of these, or has scores that are not between 0 and 1.
        ConfigError: `flag_below` is out of range.
    """
    if flag_below is not None and not 0 <= flag_below <= 1:
        raise ConfigError(f"flag_below is {flag_below}; it must be between 0 and 1, like match scores.")
    if isinstance(source, str | Path):
        return _from_table(_read_table(Path(source)), str(source), flag_below, partners)
    if isinstance(source, Findings):
        return _from_audit(source, flag_below, partners)
    if isinstance(source, Pairs):
        return _from_pairs(source, flag_below, partners)
    if (labels := labels_of(source)) is not None:
        check_order({"the audited data": range(len(labels)), "Robust: the table": labels})
    is_column = hasattr(source, "to_numpy") and not hasattr(source, "columns")
    if hasattr(source, "__arrow_c_stream__") and not is_column:
        import pyarrow

        return _from_table(pyarrow.table(source), "the table", flag_below, partners)
    return _from_numbers(source, flag_below)


def _from_audit(audit: Findings, flag_below: float | None, partners: bool) -> PairScores:
    cut = audit.threshold if flag_below is None else flag_below
    score = audit.match_score
    trusted = np.asarray(score >= cut)  # NaN is not
    found = None
    if partners:
        flagged = audit.suggested
        sides = (audit.new_lefts, True), (audit.new_rights, False)
        found = _joined([(flagged, keeps, side.rows, side.scores) for side, keeps in sides], trusted)
    return PairScores(np.nan_to_num(score), trusted, audit.items.left, audit.items.right, found)


def _from_table(table: pyarrow.Table, name: str, flag_below: float | None, partners: bool) -> PairScores:
    """A table as an audit writes it; `match_score` is the only column that must be there."""
    import pyarrow.compute as compute

    if SCORE not in table.column_names:
        raise DataError(f'{name} has no column "{SCORE}", only {", ".join(table.column_names) or "none"}; {EXPECTED}.')
    score = np.asarray(compute.cast(table[SCORE], "float32").to_numpy(zero_copy_only=False))
    readable = ~np.isnan(score)
    if "status" in table.column_names:
        status = compute.cast(table["status"], "string")  # polars has another type of texts
        readable &= np.asarray(compute.equal(status, "ok").to_numpy(zero_copy_only=False), dtype=bool)
    score = _checked(np.where(readable, score, 0), name)
    trusted = readable & (score >= (MATCH_THRESHOLD if flag_below is None else flag_below))
    if flag_below is None and "is_mismatch" in table.column_names:
        flagged = compute.fill_null(table["is_mismatch"], True).to_numpy(zero_copy_only=False)
        trusted = readable & ~np.asarray(flagged, dtype=bool)
    left, right = (
        _numbered(table[column]) if column in table.column_names else np.arange(len(score))
        for column in ("image", "caption")
    )
    found = _suggested(table, trusted) if partners and "id" in table.column_names else None
    return PairScores(score, trusted, left, right, found)


def _from_pairs(pairs: Pairs, flag_below: float | None, partners: bool) -> PairScores:
    if pairs.match_score is None:
        raise DataError(
            f"{pairs.name}: these pairs have no match scores; `mispair.audit(...).attach_to(pairs)` gives them."
        )
    score = _checked(pairs.match_score, pairs.name)
    trusted = np.asarray(score >= (MATCH_THRESHOLD if flag_below is None else flag_below))
    found = None
    if partners and trusted.any() and not trusted.all():
        found = find_soft_partners(pairs, trusted, torch.device("cpu"))
    return PairScores(score, trusted, pairs.left_groups[pairs.link], np.arange(len(pairs)), found)


def _from_numbers(source: Any, flag_below: float | None) -> PairScores:
    if isinstance(source, torch.Tensor):
        source = source.detach().cpu().numpy()
    try:
        score = np.asarray(source)
    except ValueError:  # lists of different lengths
        score = np.empty(0, dtype=object)
    if score.ndim != 1 or score.dtype.kind not in "fiub":
        raise DataError(f"Robust got {described(source)}; {EXPECTED}.")
    score = _checked(score, "The match scores")
    rows = np.arange(len(score))
    return PairScores(score, score >= (MATCH_THRESHOLD if flag_below is None else flag_below), rows, rows)


def _checked(score: npt.NDArray[Any], name: str) -> npt.NDArray[np.float32]:
    score = score.astype(np.float32)
    wrong = np.flatnonzero(~((score >= 0) & (score <= 1)))
    if len(wrong):
        raise DataError(
            f"{name}: the match score of pair {wrong[0]:,} is {score[wrong[0]]}; {len(wrong):,} of {len(score):,} are "
            "not between 0 and 1. A pair that could not be scored gets 0, so that it is left out."
        )
    return score


def _read_table(path: Path) -> pyarrow.Table:
    """The file of an audit, or that of its folder."""
    import pyarrow
    import pyarrow.csv
    import pyarrow.parquet

    file = path / TABLE if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"{file} does not exist; {EXPECTED}.")
    try:
        if file.suffix.lower() == ".csv":
            return pyarrow.csv.read_csv(file)
        known = set(pyarrow.parquet.read_schema(file).names)
        wanted = [SCORE, "id", "status", "is_mismatch", "image", "caption"]
        wanted += [f"suggested_{side}{what}" for side in ("left", "right") for what in ("", "_score")]
        columns = [name for name in wanted if name in known]
        return pyarrow.parquet.read_table(file, columns=columns if SCORE in known else None)
    except (OSError, UnicodeError, pyarrow.ArrowException) as error:
        raise DataError(f"{file}: the table cannot be read ({str(error).splitlines()[0]}).") from None


def _suggested(table: pyarrow.Table, trusted: BoolArray) -> SoftPartners | None:
    """The best partner of each flagged pair that a table has, one a side."""
    import pyarrow.compute as compute

    sides = []
    for side, keeps_right in (("left", True), ("right", False)):
        name = f"suggested_{side}"
        if name not in table.column_names:
            continue
        ids = compute.cast(table["id"], "string").combine_chunks()
        rows = compute.index_in(compute.cast(table[name], "string").combine_chunks(), value_set=ids)
        rows = compute.fill_null(rows, -1).to_numpy(zero_copy_only=False).astype(np.int64)
        scores = np.ones(len(rows), dtype=np.float32)
        if f"{name}_score" in table.column_names:
            scores = table[f"{name}_score"].to_numpy(zero_copy_only=False).astype(np.float32)
        own = np.flatnonzero(rows >= 0)
        sides.append((own, keeps_right, rows[own, None], scores[own, None]))
    return _joined(sides, trusted)


def _joined(
    sides: Sequence[tuple[IntArray, bool, IntArray, npt.NDArray[np.floating]]], trusted: BoolArray
) -> SoftPartners | None:
    """Partners of both sides, of flagged pairs only; None where there are none."""
    own, keeps, lenders, odds = [], [], [], []
    for rows, keeps_right, partners, scores in sides:
        worth = np.where((partners >= 0) & np.isfinite(scores), scores, 0).astype(np.float64)
        kept = ~trusted[rows] & (worth.sum(axis=1) > 0)
        own.append(rows[kept])
        keeps.append(np.full(int(kept.sum()), keeps_right))
        lenders.append(np.maximum(partners[kept], 0))
        odds.append(worth[kept] / worth[kept].sum(axis=1, keepdims=True))
    if not sum(map(len, own)):
        return None
    return SoftPartners(*(np.concatenate(part) for part in (own, keeps, lenders, odds)))


def _numbered(column: Any) -> IntArray:
    """(N,) one number for each different value; a missing or empty one is a value of its own."""
    import pyarrow
    import pyarrow.compute as compute

    if isinstance(column, pyarrow.ChunkedArray):
        column = column.combine_chunks()
    codes = compute.fill_null(compute.dictionary_encode(column).indices, -1)
    items = np.array(codes.to_numpy(zero_copy_only=False), dtype=np.int64)
    nothing = np.asarray(compute.fill_null(compute.equal(compute.cast(column, "string"), ""), True))
    nothing = np.flatnonzero(nothing)
    items[nothing] = len(items) + nothing
    return items
