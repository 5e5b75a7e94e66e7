"""The clip-retrieval layout: one vector per image and per text, in numbered shards, with a table of paths and captions.

    img_emb/img_emb_0.npy   text_emb/text_emb_0.npy   metadata/metadata_0.parquet or .csv (image_path, caption)

A folder with `train/`, `dev/` and `test/` subfolders in this layout is used as it stands. Without them the rows are
cut by position into 80, 10 and 10 per cent (dev and test at most 5,000 rows each), and all rows of one image go where
its first row goes.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.parquet

from mispair.errors import DataError
from mispair.pairs.npy import check_finite, open_array
from mispair.pairs.origin import Origin, data_name
from mispair.pairs.pairs import HELD_OUT, IntArray, Pairs, Vectors
from mispair.support.files import regular

SPLITS = ("train", "dev", "test")
COLUMNS = ("image_path", "caption")
_CUTS = ((0.8, 2), (0.9, 1))  # share of the rows before each cut, and how many splits are behind it
_COMPARED = 4096  # rows at a time
Shards = list[npt.NDArray[Any]]


def is_embedding_folder(folder: Path) -> bool:
    """Whether a folder has embeddings of both sides."""
    return (folder / "img_emb").is_dir() and (folder / "text_emb").is_dir()


def found_splits(folder: Path) -> list[str]:
    """The splits of the folder: its subfolders in this layout, else the three that the rows are cut into."""
    if is_embedding_folder(folder):
        return list(SPLITS)
    inside = [path.name for path in sorted(folder.iterdir()) if path.is_dir() and is_embedding_folder(path)]
    # Subfolders that are not named like splits are data sets of their own.
    return inside if set(inside) & set(SPLITS) else []


@dataclass(frozen=True)
class EmbeddingTable:
    """All rows of one folder, still on disk, with the image path and the caption of each where known."""

    images: Shards
    texts: Shards
    paths: list[str]
    captions: list[str]

    def __len__(self) -> int:
        return sum(map(len, self.images))


def read_table(folder: Path) -> EmbeddingTable:
    """Open all shards of a folder and read its metadata.

    Raises:
        DataError: The shards of the two sides, or of the metadata, do not belong together.
    """
    images, texts = _open_shards(folder, "img_emb"), _open_shards(folder, "text_emb")
    if [len(shard) for shard in images] != [len(shard) for shard in texts]:
        raise DataError(
            f"{folder}: img_emb has {_shard_rows(images)} and text_emb {_shard_rows(texts)}; "
            "row i of both must be one pair, shard by shard."
        )
    _check_numbers(*(shard_paths(folder, stem) for stem in ("img_emb", "text_emb")))
    tables = _metadata_paths(folder / "metadata")
    if len(tables) == len(images):  # else they are cut in another way, and their numbers mean nothing
        _check_numbers(shard_paths(folder, "img_emb"), tables)
    table = EmbeddingTable(images, texts, *_read_metadata(tables))
    for column, values in (("image_path", table.paths), ("caption", table.captions)):
        if values and len(values) != len(table):
            raise DataError(
                f"{folder}: the metadata has {len(values):,} values of {column} for {len(table):,} pairs of vectors; "
                "it needs one row a pair."
            )
    return table


def _check_numbers(ones: list[Path], others: list[Path]) -> None:
    """Refuses files that would be joined by position although their numbers differ."""
    for one, other in zip(ones, others, strict=True):
        if _number(one) != _number(other):
            raise DataError(
                f"{one} and {other} would be joined, but their numbers differ, so each lacks its partner; copy the "
                "missing files, or number them alike."
            )


def _number(path: Path) -> int:
    return int(path.stem.rpartition("_")[2])


def _shard_rows(shards: Shards) -> str:
    return f"{sum(map(len, shards)):,} rows in {len(shards)} file{'s' * (len(shards) > 1)}"


def numbered(folder: Path, stem: str, suffix: str) -> list[Path]:
    """Files such as img_emb_0.npy in the order of their numbers: 10 comes after 9."""
    numbers = [(path.stem.removeprefix(f"{stem}_"), path) for path in folder.glob(f"{stem}_*{suffix}")]
    return [path for _, path in sorted((int(number), path) for number, path in numbers if number.isdecimal())]


def shard_paths(folder: Path, stem: str) -> list[Path]:
    """The shards of one side in their order.

    Raises:
        DataError: There is none.
    """
    paths = numbered(folder / stem, stem, ".npy")
    if not paths:
        raise DataError(f"{folder / stem}: no {stem}_0.npy here; expected the output of `clip-retrieval inference`.")
    return paths


def _open_shards(folder: Path, stem: str) -> Shards:
    paths = shard_paths(folder, stem)
    shards = [open_array(path, ndim=2) for path in paths]
    for path, shard in zip(paths, shards, strict=True):
        if shard.shape[1] != shards[0].shape[1]:
            raise DataError(
                f"{path}: vectors of width {shard.shape[1]}, but {paths[0].name} has {shards[0].shape[1]}; "
                "all shards must come from one encoder."
            )
    return shards


def _metadata_paths(folder: Path) -> list[Path]:
    """The tables in their order; Parquet is preferred."""
    return numbered(folder, "metadata", ".parquet") or numbered(folder, "metadata", ".csv")


def _read_metadata(files: list[Path]) -> tuple[list[str], list[str]]:
    """Image paths and captions of all rows; empty where there is no table or no such column."""
    tables = [_read_parquet(path) if path.suffix == ".parquet" else _read_csv(path) for path in files]
    paths, captions = (list(chain.from_iterable(table.get(name, ()) for table in tables)) for name in COLUMNS)
    return paths, captions


def _read_parquet(path: Path) -> dict[str, list[str]]:
    try:
        present = [name for name in COLUMNS if name in pyarrow.parquet.read_schema(regular(path)).names]
        columns: dict[str, list[Any]] = pyarrow.parquet.read_table(path, columns=present).to_pydict()
    except UnicodeEncodeError:
        raise DataError(
            f"{path}: the name is not UTF-8, and tables with such names cannot be opened; rename it."
        ) from None
    except (OSError, UnicodeError, pyarrow.ArrowException) as error:
        reason = " ".join(str(error).split()).removesuffix(".")  # it may have several lines
        raise DataError(f"{path}: the table cannot be read ({reason}); write it again.") from None
    return {name: ["" if value is None else str(value) for value in values] for name, values in columns.items()}


def _read_csv(path: Path) -> dict[str, list[str]]:
    try:
        with regular(path).open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, restval="")
            rows = list(reader)
            present = [name for name in COLUMNS if name in (reader.fieldnames or ())]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: the table cannot be read ({error}); expected UTF-8 with a header line.") from None
    return {name: [row[name] for row in rows] for name in present}


def first_rows(paths: list[str], n: int) -> IntArray:
    """First row of the image of each row; a row without a known path is an image of its own.

    >>> first_rows(["a", "b", "a", ""], 4)
    array([0, 1, 0, 3])
    """
    if not paths:
        return np.arange(n)
    first: dict[str, int] = {}
    rows = (first.setdefault(path, row) if path else row for row, path in enumerate(paths))
    return np.fromiter(rows, dtype=np.int64, count=n)


def cut(first: IntArray, split: str) -> IntArray:
    """Rows of a split: 80, 10 and 10 per cent, of which at most 5,000, by the position of each image's first row."""
    cuts = [max(int(share * len(first)), len(first) - held * HELD_OUT) for share, held in _CUTS]
    return np.flatnonzero(np.searchsorted(cuts, first, side="right") == SPLITS.index(split))


def take(shards: Shards, rows: IntArray) -> npt.NDArray[Any]:
    """The vectors at ascending `rows`: still memory-mapped where they are neighbours in one shard, else read."""
    starts = np.cumsum([0, *map(len, shards)])
    parts = []
    for shard, start, stop in zip(shards, starts, starts[1:], strict=False):
        inside = rows[np.searchsorted(rows, start) : np.searchsorted(rows, stop)] - start
        if len(inside):
            together = inside[-1] - inside[0] + 1 == len(inside)
            parts.append(shard[inside[0] : inside[-1] + 1] if together else shard[inside])
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def load(folder: Path, split: str, *, finite: bool = True) -> Pairs:
    """Read one split; see `mispair.pairs.layouts.loading.load`."""
    name = f"{data_name(folder)} {split}"
    whole = is_embedding_folder(folder)
    table = read_table(folder if whole else folder / split)
    first = first_rows(table.paths, len(table))
    rows = cut(first, split) if whole else np.arange(len(table))
    if not len(rows):
        raise DataError(
            f"{folder}: no rows are left for {split} when {len(table):,} pairs are cut into 80, 10 and 10 per cent; "
            "make train, dev and test subfolders."
        )
    left, right = take(table.images, rows), take(table.texts, rows)
    if finite:
        check_finite(left, f"{name} images")
        check_finite(right, f"{name} texts")
    groups = np.searchsorted(rows, first[rows])  # the first row of an image is in the same split
    images = np.unique(groups)
    link = np.arange(len(rows))
    names = [table.paths[row] for row in rows] if table.paths else ()
    if len(images) < len(rows) and _repeated(left, groups):  # one left item an image, as in the SCAN layout
        left, link = left[images], np.searchsorted(images, groups)
        groups, names = np.arange(len(images)), [names[row] for row in images]
    return Pairs(
        Vectors(left),
        Vectors(right),
        link,
        groups=groups if len(np.unique(groups)) < len(groups) else None,
        left_ids=names,
        right_ids=[table.captions[row] for row in rows] if table.captions else (),
        name=name,
        origin=Origin.read(folder),
    )


def _repeated(vectors: npt.NDArray[Any], groups: IntArray) -> bool:
    """Whether all rows of an image have the same vector."""
    return all(
        bool((vectors[start : start + _COMPARED] == vectors[groups[start : start + _COMPARED]]).all())
        for start in range(0, len(vectors), _COMPARED)
    )
