"""Lists and the tables of pandas, polars, pyarrow and datasets, as arrays and Arrow tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

from mispair.errors import ConflictError, ShapeError
from mispair.pairs.npy import refuse_masked


def as_vectors(values: Any) -> Any:
    """Convert lists and the tables of other libraries to numpy arrays; keep arrays and tensors."""
    for array in values if isinstance(values, list | tuple) else [values]:
        refuse_masked(array)
    library = type(values).__module__.partition(".")[0]
    if library == "pyarrow":
        return _arrow_vectors(values)
    if library in ("pandas", "polars"):
        values = values.to_numpy()
        if values.dtype == object:  # a column of lists
            values = list(values)
    if library == "datasets":  # a column
        values = list(values)
    if isinstance(values, list | tuple):
        try:
            return np.array(_with_blanks(values), dtype=np.float32)
        except (TypeError, ValueError):
            raise ShapeError("rows of different lengths, or no numbers", expected="vectors (N, D)") from None
    return values


def as_views(values: Any) -> list[Any]:
    """The vectors of one encoder, or of several in a list, as `as_vectors` has them."""
    several = isinstance(values, list | tuple) and all(len(getattr(view, "shape", ())) == 2 for view in values)
    return [as_vectors(view) for view in (values if several and len(values) else [values])]


def _arrow_vectors(values: Any) -> Any:
    if isinstance(values, pyarrow.Table | pyarrow.RecordBatch):
        return np.stack([column.to_numpy() for column in values.columns], axis=1)
    if isinstance(values, pyarrow.ChunkedArray):
        values = values.combine_chunks()
    if pyarrow.types.is_fixed_size_list(values.type) and not values.null_count:  # flatten leaves out empty rows
        return values.flatten().to_numpy(zero_copy_only=False).reshape(len(values), -1)
    return as_vectors(values.to_pylist())


def _with_blanks(rows: Sequence[Any]) -> Sequence[Any]:
    """Rows of vectors, with NaN where a table has none."""
    width = next((len(row) for row in rows if hasattr(row, "__len__")), 0)
    if not width:
        return rows
    return [[math.nan] * width if row is None or isinstance(row, float) else row for row in rows]


def as_table(values: Any) -> Any:
    """A table of another library as a `pyarrow.Table`; None for other objects."""
    library, kind = type(values).__module__.partition(".")[0], type(values).__name__
    if library == "pandas" and kind == "DataFrame":
        return pyarrow.Table.from_pandas(values, preserve_index=False)
    if library == "polars" and kind == "DataFrame":
        return values.to_arrow()
    if library == "datasets" and kind == "Dataset":
        return values.with_format("arrow")[:]
    if library == "datasets":
        raise ConflictError(f"a {kind} of datasets", expected='one split that is not streamed, as in data["train"]')
    if isinstance(values, pyarrow.RecordBatch):
        return pyarrow.Table.from_batches([values])
    return values if isinstance(values, pyarrow.Table) else None


def as_pairs(left: Any, right: Any, ids: Any) -> Any:
    """Image paths and captions in two lists as a `pyarrow.Table`; None if they are not texts."""
    sides = [values.to_pylist() if hasattr(values, "to_pylist") else values for values in (left, right)]
    if not all(_are_texts(values) for values in sides):
        return None
    columns = {"image": list(map(str, sides[0])), "caption": list(map(str, sides[1]))}
    if ids is not None:
        columns["id"] = list(map(str, ids))
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{count:,} of {name}" for name, count in lengths.items())
        raise ShapeError(f"lists of different lengths: {found}", expected="one of each for each pair")
    return pyarrow.table(columns)


def _are_texts(values: Any) -> bool:
    try:
        return len(values) > 0 and isinstance(next(iter(values)), str | Path)
    except TypeError:
        return False
