"""Small outputs of audits, written without one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from mispair.auditing.inputs import AuditInput
from mispair.auditing.output_files import AUDIT, TABLE
from mispair.auditing.request import Request
from mispair.pairs.audited import AuditColumns
from mispair.reviewing.reviewed import Reviewed
from mispair.support.owned_folder import OwnedFolder

REASONS = ("other items fit either side better", "the two have too little in common")


def write_audit(folder: Path, count: int = 60, *, images: bool = False) -> Path:
    """Writes pairs p0, p1, ... with ascending match scores; the lower half is flagged and has suggestions."""
    folder.mkdir(parents=True, exist_ok=True)
    score = (np.arange(count) / count).astype(np.float32)
    flagged = score < 0.5
    columns = {
        "id": [f"p{row}" for row in range(count)],
        "caption": [f"caption {row} of a {'dog' if row % 3 else 'cat'}" for row in range(count)],
        "image": [f"{row % 4}.jpg" if images else "" for row in range(count)],
        "status": ["ok"] * count,
        "match_score": score,
        "is_mismatch": flagged,
        "reasons": [
            ("" if row % 5 else "image is tiny" if row % 10 else "caption is empty; image is tiny")
            for row in range(count)
        ],
        "reason": [REASONS[row % 2] if flagged[row] else "" for row in range(count)],
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "pairs.parquet", row_group_size=16)
    suggestions: dict[str, list[object]] = {name: [] for name in ("id", "replaced", "rank", "suggested_id", "score")}
    for row in np.flatnonzero(flagged):
        for rank, other in enumerate((row + 1, row + 2)):
            for side in ("right", "left"):
                values = (f"p{row}", side, rank + 1, f"p{other}", 0.9 - 0.3 * rank)
                for name, value in zip(suggestions, values, strict=True):
                    suggestions[name].append(value)
    pyarrow.parquet.write_table(pyarrow.table(suggestions), folder / "suggestions.parquet")
    return folder


def columns_after(audit: Path) -> AuditColumns:
    """What an audit says after the decisions of a review."""
    found = Reviewed.read(audit)
    return found.columns(found.plan(found.open("cpu"))[0])


def write_audit_of(
    out: Path,
    data: AuditInput,
    ids: Sequence[str],
    flagged: Collection[int],
    right: Mapping[int, str] = {},
    left: Mapping[int, str] = {},
) -> Path:
    """Writes an audit of some data that flags these rows, with a sure better partner on the right or the left side."""
    is_flagged = np.isin(np.arange(len(ids)), list(flagged))
    table: dict[str, Any] = {
        "id": ids,
        "status": ["ok"] * len(ids),
        "match_score": np.where(is_flagged, 0.1, 0.9).astype(np.float32),
        "is_mismatch": is_flagged,
    }
    for side, partners in (("right", right), ("left", left)):
        table[f"suggested_{side}"] = pyarrow.array([partners.get(row) for row in range(len(ids))], pyarrow.string())
        scores = [0.95 if row in partners else None for row in range(len(ids))]
        table[f"suggested_{side}_score"] = pyarrow.array(scores, pyarrow.float32())
    if data.is_raw:
        pairs = data.open("cpu")
        table |= pairs.item_columns(0, len(pairs))
    places = {name: [str(path), "0"] for name in ("source", "ids") if (path := getattr(data, name)) is not None}
    sides = {name: [[str(path), "0"] for path in getattr(data, name)] for name in ("left", "right")}
    images = str(data.images) if data.images else None
    request = Request.model_validate({**places, **sides, "images": images, "split": data.split})
    with OwnedFolder(out, AUDIT, request.model_dump()) as folder:
        folder.begin()
        pyarrow.parquet.write_table(pyarrow.table(table), out / TABLE)
        folder.finish()
    return out
