"""Order of the rows of pandas: mispair uses the position and ignores the index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mispair.errors import ShapeError


def labels_of(values: Any) -> Sequence[Any] | None:
    """Index of a pandas Series or DataFrame; None for anything else."""
    is_pandas = type(values).__module__.partition(".")[0] == "pandas" and hasattr(values, "index")
    return values.index if is_pandas else None


def check_order(labels: Mapping[str, Sequence[Any] | None]) -> None:
    """Raise if rows have the labels of others in another order: they may have been sorted since."""
    known = [(name, found) for name, found in labels.items() if found is not None]
    for name, own in known[1:]:
        first, others = known[0]
        if len(own) != len(others) or np.array_equal(own, others) or set(own) != set(others):
            continue
        both = enumerate(zip(own, others, strict=True))
        row, label, wanted = next((row, label, wanted) for row, (label, wanted) in both if label != wanted)
        raise ShapeError(
            f"has the index of {first} in another order: row {row} is {label!r} instead of {wanted!r}",
            where=name,
            advice="Rows belong together by position: if they were sorted or shuffled by mistake, undo it with "
            ".sort_index(); if they are right, add .reset_index(drop=True)",
        )
