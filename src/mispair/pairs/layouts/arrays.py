"""Vectors of both sides: two .npy files with a table, or arrays and `Pairs` in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mispair.errors import NotFoundError, ShapeError
from mispair.pairs import row_ids
from mispair.pairs.npy import check_header, chunks
from mispair.pairs.other_libraries import as_views
from mispair.pairs.pairs import Pairs, Regions, Side, Tokens
from mispair.pairs.row_ids import Texts
from mispair.pairs.shards import ArrayRows, Shard, SideRows, TensorRows, join_views, moved, open_files
from mispair.pairs.source import Source
from mispair.pairs.tables import USUAL_NAMES, Roles, open_table
from mispair.pairs.tfidf import WIDTH, word_vectors

Array = npt.NDArray[np.floating]


def image_places(images: str | Path | None) -> tuple[Path, ...]:
    """The folder of the images, if it is given and exists."""
    if images is not None and not Path(images).is_dir():
        raise NotFoundError(
            "no such folder", where=images, expected="`images`, the folder that the image paths start from"
        )
    return () if images is None else (Path(images),)


def open_arrays(
    left: str | Path | Sequence[Path],
    right: str | Path | Sequence[Path],
    ids: str | Path | None = None,
    images: str | Path | None = None,
    columns: Roles | None = None,
) -> Source:
    """Open .npy files of vectors (N, D) and (N, E), one a side or one for each encoder of a side.

    The table `ids` has a row for each pair; its image paths start from `images`, by default from its own folder.
    """
    places = [[Path(side)] if isinstance(side, str | Path) else list(side) for side in (left, right)]
    sides = [join_views([open_files([path]) for path in paths], f"the files {paths}") for paths in places]
    files = tuple(chain(*places))
    name = " and ".join(map(str, files))
    folders = image_places(images)
    source = Source(sides[0], sides[1], "arrays", name, files=files)
    if ids is None:
        return source
    path = Path(ids)
    table = open_table(path, columns=columns)
    if not any(table.find(role) for role in USUAL_NAMES):
        raise NotFoundError(
            table.found(),
            where=path,
            expected="a header line with id, caption or text, image_path, image or path, or group",
        )
    folders = folders or (path.parent / "images", path.parent, Path())
    return replace(source, images=folders, files=(*files, path), table=table).described_by(table)


def from_memory(
    left: Any,
    right: Any,
    ids: Any = None,
    groups: Any = None,
    texts: Sequence[str] | None = None,
) -> Source:
    """Open vectors (N, D) and (N, E) of any library, or lists of the vectors of several encoders.

    Pairs of one group are not wrong for each other; texts are for people.
    """
    sides = [
        join_views([SideRows.of([_checked(view, what)]) for view in as_views(values)], f"the {what} side")
        for values, what in ((left, "left"), (right, "right"))
    ]
    source = Source(sides[0], sides[1], "memory", "the given arrays")
    captions = None if texts is None else Texts.of(row_ids.flat(texts, "texts", len(source)))
    return replace(source, names=row_ids.from_lists(ids, groups, len(source)), captions=captions)


def in_memory(side: SideRows) -> npt.NDArray[Any]:
    """The vectors of a side of `from_memory` as one array, without a copy where it is one."""
    import torch

    rows = side.shards[0]
    if isinstance(rows, ArrayRows):
        return rows.array
    if isinstance(rows, TensorRows) and rows.tensor.dtype != torch.bfloat16:  # numpy has no such type
        return rows.tensor.detach().cpu().numpy()
    return side.block(0, len(side))


def from_pairs(pairs: Pairs, images: Path | None = None) -> Source:
    """Pairs by their own features: the mean of an item's regions, its vector, or the TF-IDF vector of its words."""
    return from_vectors(pairs, item_vectors(pairs.left), item_vectors(pairs.right), images)


def from_vectors(pairs: Pairs, left: Array, right: Array, images: Path | None) -> Source:
    """Pairs by one vector for each left and each right item, with the known ids, captions and image names."""
    groups = pairs.left_groups[pairs.link]
    shared = len(np.unique(groups)) < len(pairs)
    texts = pairs.texts
    known = row_ids.from_lists(None, groups if shared else None, len(pairs))
    lefts, rights = (SideRows.of([ArrayRows(items)]) for items in (left, right))
    source = Source(moved(lefts, pairs.link), rights, "memory", pairs.name, known)
    if texts:
        source = replace(source, captions=Texts.of(texts))
    if not pairs.left_ids:
        return source
    image_names = Texts.of(pairs.left_ids)
    return replace(
        source,
        image_names=lambda rows: image_names(pairs.link[rows]),
        images=() if images is None else (images,),
        names=replace(source.names, ids=pair_ids(pairs)),
    )


def pair_ids(pairs: Pairs) -> Any:
    """Ids as in an audit of the folder: `photo.jpg`, or `photo.jpg#0`, `photo.jpg#1` where it has several pairs.

    Pairs with injected noise are not those of the folder: the number of the pair follows the name of the image that it
    has now, such as `photo.jpg#17`. None if the left items have no names.
    """
    if not pairs.left_ids:
        return None
    images = [pairs.left_ids[row] for row in pairs.link]
    if pairs.mismatched is None or not pairs.mismatched.any():
        return row_ids.from_images(images).ids
    return row_ids.as_texts(f"{image}#{number}" for number, image in enumerate(images))


def item_vectors(side: Side, width: int = WIDTH) -> npt.NDArray[np.floating]:
    """(N, D): the mean of an item's regions, its vector, or the TF-IDF vector of its words (D at most `width`)."""
    if isinstance(side, Tokens):
        return word_vectors(side.texts or side, width)
    if isinstance(side, Regions):
        return np.concatenate([part.mean(axis=1, dtype=np.float32) for _, part in chunks(side.features)])
    return np.asarray(side.features)


def _checked(values: Any, what: str) -> Shard:
    import torch

    where = f"the {what} side"
    if isinstance(values, np.ndarray):
        check_header(values, where, 2, "vector")
        return ArrayRows(values)
    if not isinstance(values, torch.Tensor):
        raise ShapeError(f"a {type(values).__name__}", where=where, expected="a numpy array or a torch tensor")
    real = values.is_floating_point() or values.dtype == torch.int8
    if values.ndim != 2 or 0 in values.shape or not real or values.layout != torch.strided:
        found = f"{values.dtype} ({values.layout}) with shape {tuple(values.shape)}"
        raise ShapeError(found, where=where, expected="dense floats or int8 (N, D), one vector a row, at least one")
    return TensorRows(values)
