"""The clip-retrieval layout: one vector per image and per text, in numbered shards, with a table of paths and captions.

    img_emb/img_emb_0.npy   text_emb/text_emb_0.npy   metadata/metadata_0.parquet or .csv (image_path, caption)

A folder with `train/`, `dev/` and `test/` subfolders in this layout is used as it stands. Without them the rows are
cut by position into 80, 10 and 10 per cent (dev and test at most 5,000 rows each), and all rows of one image go where
its first row goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow

from mispair.errors import NotFoundError, ShapeError, TooFewError
from mispair.pairs.edits import Edits
from mispair.pairs.npy import check_finite, open_array, write_rows
from mispair.pairs.origin import Origin, data_name
from mispair.pairs.pairs import HELD_OUT, Pairs, Vectors
from mispair.pairs.result_tables import write_table
from mispair.pairs.shards import File, SideRows, open_files
from mispair.pairs.source import Source
from mispair.pairs.tables import Table, open_table
from mispair.support.arrays import IntArray
from mispair.support.formatting import listed

SPLITS = ("train", "dev", "test")
SIDE_FOLDERS = ("img_emb", "text_emb")
PARTS = (*SIDE_FOLDERS, "metadata")
_CUTS = ((0.8, 2), (0.9, 1))  # share of the rows before each cut, and how many splits are behind it
_COMPARED = 4096  # rows at a time


def is_embedding_folder(folder: Path) -> bool:
    """Whether a folder has embeddings of both sides."""
    return (folder / "img_emb").is_dir() and (folder / "text_emb").is_dir()


def found_splits(folder: Path) -> dict[str, list[Path]]:
    """The splits of the folder, all complete: its subfolders in this layout, else the three parts of its rows."""
    if is_embedding_folder(folder):
        return {split: [] for split in SPLITS}
    inside = [path.name for path in sorted(folder.iterdir()) if path.is_dir() and is_embedding_folder(path)]
    # Subfolders that are not named like splits are data sets of their own.
    return {split: [] for split in inside} if set(inside) & set(SPLITS) else {}


def _open_metadata(folder: Path, sizes: list[int], text_sizes: list[int]) -> Table | None:
    """The table of a folder, if it has one, with a row for each vector; `sizes` are the rows of the shards."""
    paths = {stem: shard_paths(folder, stem) for stem in SIDE_FOLDERS}
    _check_numbers((paths["img_emb"], sizes), (paths["text_emb"], text_sizes))
    tables = _table_paths(folder)
    if not tables:
        return None
    table = open_table(*tables)
    _check_numbers((paths["img_emb"], sizes), (tables, [len(part) for part in table.parts]))
    if len(table) != sum(sizes):
        what = f"the metadata has {len(table):,} rows for {sum(sizes):,} pairs of vectors"
        raise ShapeError(what, where=folder, expected="one row a pair")
    return table


def _check_numbers(one: tuple[list[Path], list[int]], other: tuple[list[Path], list[int]]) -> None:
    """Raise if the numbers of files show a missing partner on each side, as files are paired by place.

    Files of other sizes than their partners' are cut elsewhere, and then their numbers mean nothing.
    """
    (paths, sizes), (others, other_sizes) = one, other
    numbers, other_numbers = ({int(path.stem.rpartition("_")[2]): path for path in side} for side in (paths, others))
    if sizes != other_sizes or numbers.keys() == other_numbers.keys():
        return
    odd = [str(path) for number, path in numbers.items() if number not in other_numbers]
    other_odd = [str(path) for number, path in other_numbers.items() if number not in numbers]
    raise NotFoundError(
        f"{listed(odd)} and {listed(other_odd)} have no partner with the same number",
        where=paths[0].parent.parent,
        expected="the same numbers on both sides, as rows are paired file by file",
        advice="Bring the missing files back, or take these away.",
    )


def numbered(folder: Path, stem: str, suffix: str) -> list[Path]:
    """Files such as img_emb_0.npy in the order of their numbers: 10 comes after 9."""
    numbers = [(path.stem.removeprefix(f"{stem}_"), path) for path in folder.glob(f"{stem}_*{suffix}")]
    return [path for _, path in sorted((int(number), path) for number, path in numbers if number.isdecimal())]


def shard_paths(folder: Path, stem: str) -> list[Path]:
    """The shards of one side in their order."""
    paths = numbered(folder / stem, stem, ".npy")
    if not paths:
        expected = "the output of `clip-retrieval inference`"
        raise NotFoundError(f"no {stem}_0.npy", where=folder / stem, expected=expected)
    return paths


def _table_paths(folder: Path) -> list[Path]:
    """The tables in their order; Parquet is preferred."""
    place = folder / "metadata"
    return numbered(place, "metadata", ".parquet") or numbered(place, "metadata", ".csv")


def cut(first: IntArray, split: str) -> IntArray:
    """Rows of a split: 80, 10 and 10 per cent (at most 5,000), by the position of each image's first row."""
    cuts = [max(int(share * len(first)), len(first) - held * HELD_OUT) for share, held in _CUTS]
    return np.flatnonzero(np.searchsorted(cuts, first, side="right") == SPLITS.index(split))


def take(side: SideRows, rows: IntArray) -> npt.NDArray[Any]:
    """The vectors at ascending `rows`: memory-mapped if they are neighbours in one shard, else read."""
    first, last = np.searchsorted(side.starts, rows[[0, -1]], side="right") - 1
    shard = side.shards[first]
    if first < last or rows[-1] - rows[0] + 1 > len(rows) or not isinstance(shard, File):
        return side.gather(rows, side.dtype)
    start = rows[0] - side.starts[first]
    return open_array(shard.path, ndim=2, kind="vector")[start : start + len(rows)]


def load(folder: Path, split: str, *, finite: bool = True) -> Pairs:
    """Read one split; see `mispair.pairs.layouts.opening.load`."""
    name = f"{data_name(folder)} {split}"
    whole = is_embedding_folder(folder)
    place = folder if whole else folder / split
    source = open_split(place)
    first = source.first_rows
    rows = cut(first, split) if whole else np.arange(len(first))
    if not len(rows):
        raise TooFewError(
            f"no rows are left for {split} when {len(first):,} pairs are cut into 80, 10 and 10 per cent",
            where=folder,
            advice="Make train, dev and test subfolders.",
        )
    left, right = (take(side, rows) for side in (source.left, source.right))
    if finite:
        check_finite(left, f"{name} images")
        check_finite(right, f"{name} texts")
    groups = np.searchsorted(rows, first[rows])  # the first row of an image is in the same split
    images = np.unique(groups)
    link = np.arange(len(rows))
    names: Sequence[str] = source.image_texts(rows) if source.has_images else ()
    if len(images) < len(rows) and _repeated(left, groups):  # one left item an image, as in the SCAN layout
        left, link = left[images], np.searchsorted(images, groups)
        groups, names = np.arange(len(images)), [names[row] for row in images] if names else ()
    return Pairs(
        Vectors(left),
        Vectors(right),
        link,
        groups=groups if len(np.unique(groups)) < len(groups) else None,
        left_ids=names,
        right_ids=source.texts(rows) if source.has_texts else (),
        name=name,
        origin=Origin.read(folder),
    )


def _repeated(vectors: npt.NDArray[Any], groups: IntArray) -> bool:
    """Whether all rows of an image have the same vector."""
    return all(
        bool((vectors[start : start + _COMPARED] == vectors[groups[start : start + _COMPARED]]).all())
        for start in range(0, len(vectors), _COMPARED)
    )


def open_split(folder: Path, split: str | None = None) -> ClipRetrieval:
    """Open the vectors of a folder, or of a split in a subfolder, to be audited, still on disk."""
    place = folder / (split or "")
    paths = [shard_paths(place, stem) for stem in SIDE_FOLDERS]
    left, right = (open_files(shards) for shards in paths)
    table = _open_metadata(place, *([shard.shape[0] for shard in side.shards] for side in (left, right)))
    others = [other for other in (found_splits(folder) if split else ()) if other != split]
    source = ClipRetrieval(
        left,
        right,
        "clip",
        str(place),
        files=(*paths[0], *paths[1], *_table_paths(place)),
        table=table,
        folder=folder,
        split=split,
        others=tuple(
            path for other in others for part in PARTS for path in sorted((folder / other / part).glob(f"{part}_*"))
        ),
    )
    return source if table is None else source.described_by(table)


class ClipRetrieval(Source):
    """Numbered shards of vectors and of a table. A copy has no empty shards."""

    def write(self, edits: Edits, out: Path) -> None:
        self.check_no_rewritten(edits)
        assert self.folder is not None
        target = out / (self.split or "")
        self._write_others(out)
        copies = self._table_copies(self.folder / (self.split or ""))
        if copies is not None:
            copies.write(edits, target)
        for side, moved in ((self.left, edits.image_from), (self.right, edits.caption_from)):
            for shard, start in zip(side.shards, side.starts, strict=False):
                assert isinstance(shard, File)
                rows = np.flatnonzero(edits.keep[start : start + shard.shape[0]]) + int(start)
                if not len(rows):
                    continue
                path = target / shard.path.parent.name / shard.path.name
                write_rows(path, partial(side.gather, dtype=side.dtype), moved[rows])
                if copies is None and side is self.left:  # a table of ids, where there was none
                    table = pyarrow.table({"id": self.ids(rows)})
                    name = shard.path.stem.replace(SIDE_FOLDERS[0], "metadata")
                    write_table(target / "metadata" / f"{name}.parquet", [table])
