"""Rows of pandas: mispair takes them by position, and an index may say another order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mispair.errors import DataError


def labels_of(values: Any) -> Sequence[Any] | None:
    """The index of a Series or DataFrame of pandas; None for anything else."""
    is_pandas = type(values).__module__.partition(".")[0] == "pandas" and hasattr(values, "index")
    return values.index if is_pandas else None


def check_order(labels: Mapping[str, Sequence[Any] | None]) -> None:
    """Refuses rows that have the labels of the first ones in another order: they may have been sorted since.

    Args:
        labels: By what they are of; None where there are none.

    Raises:
        DataError: They have.
    """
    known = [(name, found) for name, found in labels.items() if found is not None]
    for name, own in known[1:]:
        first, others = known[0]
        if len(own) != len(others) or np.array_equal(own, others) or set(own) != set(others):
            continue
        both = enumerate(zip(own, others, strict=True))
        row, label, wanted = next((row, label, wanted) for row, (label, wanted) in both if label != wanted)
        raise DataError(
            f"{name} has the index of {first} in another order: row {row} is {label!r} instead of {wanted!r}. "
            "Rows belong together by position: if they were sorted or shuffled by mistake, undo it by .sort_index(); "
            "if they are right as they are, add .reset_index(drop=True)."
        )
