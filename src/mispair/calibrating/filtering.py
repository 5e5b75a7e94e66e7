"""Cuts of calibrations and audits, and the subsets they keep."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from mispair.auditing.output_files import AUDIT
from mispair.auditing.summary import AuditSummary, values_by
from mispair.calibrating.calibrate import CALIBRATION, COMBINED, SUMMARY
from mispair.calibrating.cuts import Cut, Ranked, at_rate
from mispair.calibrating.scores import numbers, open_score_table
from mispair.errors import ChangedError, ConflictError, DamagedError, ExistsError, NotFoundError, TooFewError
from mispair.functional.logistic import FloatArray
from mispair.pairs.audited import AuditColumns
from mispair.pairs.edits import Edits
from mispair.pairs.layouts.copies import write_copy
from mispair.pairs.layouts.datacomp import find_datacomp, open_datacomp, uid_subset
from mispair.pairs.layouts.table import TableRows
from mispair.pairs.result_tables import TABLE
from mispair.pairs.source import Source
from mispair.pairs.tables import open_table
from mispair.reviewing.reviewed import Reviewed
from mispair.support.arrays import Mask
from mispair.support.files import read_json, replacing
from mispair.support.owned_folder import check_unchanged, read_mark


@dataclass(frozen=True)
class Scored:
    """Pairs with scores, and their data set."""

    source: Source
    order: FloatArray  # (N,) higher is better; NaN without a score
    match: FloatArray | None = None  # (N,) probability of a match; None without a calibration
    rate: tuple[float, float, float] = (0.5, 0.0, 1.0)  # noise rate, and both ends of its interval


def open_scored(path: Path, score: str | None = None) -> Scored:
    """A calibration or an audit, or a table with a column of scores."""
    if path.is_dir() and (path / CALIBRATION.mark).exists():
        found = _of_calibration(path)
    elif path.is_dir() and (path / AUDIT.mark).exists():
        match = AuditColumns.read(path).match_score.astype(np.float64)
        summary = AuditSummary.read(path / SUMMARY)
        rate = summary.noise_rate, summary.noise_rate_low, summary.noise_rate_high
        measure = max(summary.measures, key=lambda name: summary.measures[name].weight)
        order = _untied(match, numbers(open_table(path / TABLE), measure))
        found = Scored(Reviewed.read(path).open(device="auto"), order, match, rate)
    elif path.exists():
        if score is None:
            expected = "the column to cut, or the folder of a calibration or an audit"
            raise ConflictError(f"{path} is a table", where="score", expected=expected)
        return Scored(_rows(path), numbers(open_score_table(path), score))
    else:
        raise NotFoundError("no such file or folder", where=path)
    if score is not None:
        raise ConflictError(f"{path} knows its scores", where="score", advice="Leave it out, or give the table.")
    return found


def _untied(match: FloatArray, measure: FloatArray) -> FloatArray:
    """Order pairs with the same match score by a measure: in float32 that of many sure pairs is 1."""
    order, ascending = match.copy(), np.lexsort((np.nan_to_num(measure), match))
    order[ascending] += np.linspace(0, 1e-9, len(match))
    return order


def _of_calibration(path: Path) -> Scored:
    mark, summary = read_mark(path, CALIBRATION), read_json(path / SUMMARY)
    check_unchanged(path, CALIBRATION, (TABLE, SUMMARY))
    if mark is None or not mark.finished or not isinstance(summary, dict):
        raise DamagedError("the calibration is not whole", where=path, advice="Calibrate again with `overwrite`.")
    where, content = mark.request.get("table"), cast(Any, summary)
    if not isinstance(where, str):
        advice = "Write its table, calibrate that, and filter this."
        raise ConflictError("a calibration of scores in memory has no data set", where=path, advice=advice)
    table = open_table(path / TABLE)
    columns, evidence = content["columns"], content["evidence"][-1]
    rate = tuple(evidence[name] for name in ("noise_rate", "noise_rate_low", "noise_rate_high"))
    source, order = _rows(Path(where)), numbers(table, columns[0] if len(columns) == 1 else COMBINED)
    if len(source) != len(order):
        what = f"{len(source):,} rows, and {len(order):,} were calibrated"
        raise ChangedError(what, where=where, advice="Calibrate again with `overwrite`.")
    return Scored(source, order, numbers(table, "match_score"), rate)


def _rows(path: Path) -> Source:
    """The rows of a table, or of a folder, to be written in its layout."""
    if path.is_dir() and find_datacomp(path):
        return open_datacomp(path)
    return TableRows(open_score_table(path), path if path.is_dir() else None)


@dataclass(frozen=True)
class Kept:
    """The pairs kept by a cut."""

    mask: Mask  # (N,) whether each pair is kept
    cuts: dict[str, Cut | None]  # by the values of a column, "" without one; None if nothing is kept
    pairs: dict[str, int]  # with each value


def choose(scored: Scored, by: str | None = None, **wish: Any) -> Kept:
    """Apply a cut of `Ranked.cut`, to each source by itself if a column is given.

    A source has its own noise rate, so its probabilities are those of all pairs at that rate (see `at_rate`).
    """
    if scored.match is None and (wish.get("purity") is not None or wish.get("probability") is not None):
        advice = "Calibrate the scores first (mispair calibrate)."
        raise ConflictError("scores alone have no probabilities", where="score", advice=advice)
    readable = np.flatnonzero(~np.isnan(scored.order))
    match = np.full(len(scored.order), 0.5) if scored.match is None else scored.match
    values = [""] * len(match) if by is None else values_by(scored.source, by)
    names, place = np.unique(np.array(values, dtype=object)[readable].astype(str), return_inverse=True)
    mask = np.zeros(len(match), dtype=bool)
    cuts: dict[str, Cut | None] = {}
    for number, name in enumerate(names.tolist()):
        rows, rate = readable[place == number], scored.rate
        chances = match[rows]
        if by is not None and scored.match is not None:
            chances = at_rate(chances, rate[0])
            rate = (float(1 - chances.mean()),) * 3
        ranked = Ranked(scored.order[rows], chances, *rate)
        try:
            cuts[name] = cut = ranked.cut(**wish)
        except ConflictError:
            if by is None:
                raise
            cuts[name] = None
            continue
        mask[rows[scored.order[rows] >= cut.least]] = True
    if not mask.any():
        raise TooFewError("no pair is kept", where=scored.source.name, advice="Lower the cut.")
    return Kept(mask, cuts, dict(zip(names.tolist(), np.bincount(place).tolist(), strict=True)))


def write_kept(
    source: Source,
    mask: Mask,
    to: Path | None = None,
    mask_file: Path | None = None,
    uids: Path | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Write the kept pairs: a copy in the layout of the data, a mask, or the uids as DataComp reads them."""
    arrays: dict[Path, npt.NDArray[Any]] = {} if mask_file is None else {mask_file: mask}
    if uids is not None:
        named = source.table is not None and source.table.find("id") is not None  # numbers of rows would be uids, too
        subset = uid_subset(source.ids(np.flatnonzero(mask))) if named else None
        if subset is None:
            expected = "uids of up to 32 hexadecimal digits, in a column uid"
            raise ConflictError(f"the ids of {source.name} are no uids of DataComp", where="uids", expected=expected)
        arrays[uids] = subset
    if to is None and not arrays:
        raise ConflictError("no place for the result", expected="`to`, `mask` or `uids`")
    for path in arrays:
        if path.exists() and not overwrite:
            raise ExistsError("the file is there already", where=path, advice="Replace it with `overwrite`.")
    if to is not None:
        write_copy(source, Edits.keeping(mask), to, overwrite)
    for path, array in arrays.items():
        with replacing(path) as file:
            np.save(file, array, allow_pickle=False)
