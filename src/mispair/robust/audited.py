"""Match scores, flags and other partners of pairs, from any argument of `Robust`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from mispair.auditing.findings import Findings
from mispair.methods.soft_partners import SoftPartners, find_soft_partners
from mispair.pairs.audited import AuditColumns
from mispair.pairs.pairs import Pairs
from mispair.support.arrays import Mask
from mispair.support.row_order import check_order, labels_of


class ArrowTable(Protocol):
    """A table of pandas, polars or pyarrow."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any: ...


Audited = Findings | Pairs | ArrowTable | str | Path | torch.Tensor | npt.ArrayLike


def columns_of(source: Audited) -> AuditColumns:
    """The columns of an audit, of its folder, of a table, of `Pairs`, or of a list of match scores."""
    if isinstance(source, str | Path):
        return AuditColumns.read(Path(source))
    if isinstance(source, Findings):
        return source.columns
    if isinstance(source, Pairs):
        return AuditColumns.of_pairs(source)
    if (labels := labels_of(source)) is not None:
        check_order({"the audited data": range(len(labels)), "Robust: the table": labels})
    is_column = hasattr(source, "to_numpy") and not hasattr(source, "columns")
    if hasattr(source, "__arrow_c_stream__") and not is_column:
        import pyarrow

        return AuditColumns.of_table(pyarrow.table(source))
    return AuditColumns.of_numbers(source)


def other_partners(source: Audited, columns: AuditColumns, trusted: Mask) -> SoftPartners | None:
    """Other partners for items of flagged pairs: suggestions of the audit, or partners of similar trusted items."""
    if isinstance(source, Pairs):
        some = trusted.any() and not trusted.all()
        return find_soft_partners(source, trusted, torch.device("cpu")) if some else None
    own, keeps, lenders, odds = [], [], [], []
    for side, keeps_right in ((columns.new_lefts, True), (columns.new_rights, False)):
        if side is None:
            continue
        worth = np.where((side.partners >= 0) & np.isfinite(side.scores), side.scores, 0).astype(np.float64)
        kept = ~trusted[side.rows] & (worth.sum(axis=1) > 0)
        own.append(side.rows[kept])
        keeps.append(np.full(int(kept.sum()), keeps_right))
        lenders.append(np.maximum(side.partners[kept], 0))
        odds.append(worth[kept] / worth[kept].sum(axis=1, keepdims=True))
    if not sum(map(len, own)):
        return None
    return SoftPartners(*(np.concatenate(part) for part in (own, keeps, lenders, odds)))
