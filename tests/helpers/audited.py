"""A small output of an audit, written without one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet

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
