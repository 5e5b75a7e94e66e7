"""What `Pairs.from_arrays`, `Pairs.from_table` and `Pairs.from_files` do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mispair.errors import ShapeError
from mispair.pairs.layouts import loading
from mispair.pairs.layouts.arrays import from_memory
from mispair.pairs.layouts.opening import open_raw
from mispair.pairs.layouts.table import open_pairs
from mispair.pairs.other_libraries import as_table, as_vectors
from mispair.pairs.pairs import Pairs, Vectors
from mispair.pairs.source import Source
from mispair.pairs.tables import Roles, Table


def from_arrays(left: Any, right: Any, ids: Any, captions: Sequence[str] | None, groups: Any, name: str) -> Pairs:
    sides = as_vectors(left), as_vectors(right)
    source = from_memory(*sides, ids=ids, groups=groups, texts=captions)
    arrays = [side.detach().cpu().numpy() if hasattr(side, "detach") else side for side in sides]
    return Pairs(
        Vectors(arrays[0]),
        Vectors(arrays[1]),
        np.arange(len(source)),
        groups=source.groups,
        left_ids=() if ids is None else source.ids(),
        right_ids=() if captions is None else source.texts(),
        name=name,
        source=source,
    )


def from_table(table: Any, images: str | Path | None, columns: Roles) -> Pairs:
    if isinstance(table, str | Path):
        return from_files(Path(table), images, columns, None)
    content = as_table(table)
    if content is None:
        expected = "a table of pandas, polars, pyarrow or datasets, or the path of one"
        raise ShapeError(f"a {type(table).__name__}", where="the table", expected=expected)
    source = open_pairs(Table.of(content, "the given table", columns), Path(images or ""))
    source.allow_outside = True  # the program that calls names them itself
    return _unencoded(source)


def from_files(path: Path, images: str | Path | None, columns: Roles, split: str | None) -> Pairs:
    if str(path) == loading.SHAPES or (path.is_dir() and loading.recognised(path)):
        return loading.load(path, split or "train")
    return _unencoded(open_raw(path, None if images is None else Path(images), columns))


def _unencoded(source: Source) -> Pairs:
    """Pairs whose vectors have no numbers yet."""
    images = np.arange(len(source)) if source.groups is None else source.groups
    left, right = (Vectors(np.empty((count, 0), np.float32)) for count in (int(images.max()) + 1, len(source)))
    return Pairs(left, right, images, name=source.name, source=source)
