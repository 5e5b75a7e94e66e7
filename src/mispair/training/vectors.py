"""Vectors of pairs in the clip-retrieval layout, split into train, dev and test."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np

from mispair.errors import TooFewError
from mispair.pairs.npy import write_rows
from mispair.pairs.origin import MARK
from mispair.pairs.source import Source
from mispair.pairs.splits import SplitRule, save_rows
from mispair.support.arrays import IntArray
from mispair.support.files import Json, replacing
from mispair.support.formatting import plain
from mispair.support.owned_folder import FolderKind, OwnedFolder

KIND = FolderKind("features", MARK, ["*_rows.npy", "*/img_emb/*.npy", "*/text_emb/*.npy", "*/metadata/*.parquet"])
BLOCK = 4096  # rows that are read at a time


def write_vectors(source: Source, out: Path, rule: SplitRule, request: Mapping[str, Json]) -> None:
    """Write the vectors of each split, without unreadable rows; they depend on `request`."""
    encoded = source.layout == "raw"
    # Under the names by which `Origin.read` knows the encoders.
    models = {f"{side} model": request[f"{side}_model"] if encoded else None for side in ("image", "text")}
    with OwnedFolder(out, KIND, {**request, **models}) as folder:
        if folder.finished:
            return
        folder.begin()
        names = rule.of(source) if encoded else _random_splits(source, rule)
        good = _readable(source)
        for split in dict.fromkeys(names):
            rows = good[[names[row] == split for row in good]]
            if len(rows):
                for stem, side in (("img_emb", source.left), ("text_emb", source.right)):
                    kind = np.float16 if encoded else np.float32  # as the cache has them
                    write_rows(out / split / stem / f"{stem}_0.npy", partial(side.gather, dtype=kind), rows)
                _write_metadata(out / split / "metadata/metadata_0.parquet", source, rows)
                save_rows(out, split, rows)
        folder.finish()


def _random_splits(source: Source, rule: SplitRule) -> list[str]:
    first = source.first_rows
    return rule.random(first, source.ids(np.unique(first)), source.name)


def _readable(source: Source) -> IntArray:
    """Return the rows with two finite, nonzero vectors."""
    good = np.ones(len(source), dtype=bool)
    good[source.known_rows] = False
    for start in range(0, len(source), BLOCK):
        rows = slice(start, start + BLOCK)
        for side in source.block(start, min(start + BLOCK, len(source))):
            good[rows] &= np.isfinite(side).all(axis=1) & side.any(axis=1)
    if not good.any():
        what = f"none of {len(source):,} pairs can be read"
        raise TooFewError(what, where=source.name, advice="See the report of the audit.")
    return np.flatnonzero(good)


def _image_names(source: Source, rows: IntArray) -> list[str]:
    """Name each image by its own name, or by the first id where names inside other files collide."""
    names = source.image_texts(rows)
    if source.layout != "raw":
        return names
    first = source.first_rows[rows]
    images = set(zip(names, first.tolist(), strict=True))
    return names if len(images) == len(set(names)) == len(np.unique(first)) else source.ids(first)


def _write_metadata(path: Path, source: Source, rows: IntArray) -> None:
    import pyarrow
    import pyarrow.parquet

    columns = {"id": source.ids(rows)}
    if source.has_images:
        columns["image_path"] = [
            str(file.resolve()) if source.layout == "raw" and (file := source.image_file(row)) is not None else name
            for row, name in zip(rows.tolist(), _image_names(source, rows), strict=True)
        ]
    if source.has_texts:
        columns["caption"] = source.texts(rows)
    table = pyarrow.table({name: pyarrow.array(map(plain, texts), pyarrow.string()) for name, texts in columns.items()})
    with replacing(path) as written:
        pyarrow.parquet.write_table(table, written)
