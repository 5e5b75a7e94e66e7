"""Recognises the layout of images and captions, and opens it.

| source | layout |
|---|---|
| .csv, .tsv, .txt, .psv, .parquet | table of image paths, or of images, and captions |
| .json | COCO's or Karpathy's captions |
| .jsonl, .ndjson; a folder with `metadata.jsonl` | lines in JSON |
| .tar; a folder with tars | WebDataset, img2dataset |
| a folder with .parquet | Hugging Face's datasets |
| a folder with one other table and no .txt | that table, as an export of it |
| any other folder | images, each with a text file of the same name |
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from mispair.errors import ConfigError, DataError
from mispair.pairs import row_ids
from mispair.pairs.layouts import clip_retrieval, loading, precomp
from mispair.pairs.layouts.captions_json import open_json
from mispair.pairs.layouts.copies import MANIFEST
from mispair.pairs.layouts.image_folder import METADATA, JsonLines, TextFiles
from mispair.pairs.layouts.table import open_pairs
from mispair.pairs.layouts.tars import Tars, check_unpacked
from mispair.pairs.npy import chunks, open_array
from mispair.pairs.raw import RawLayout
from mispair.pairs.row_ids import RowIds
from mispair.pairs.shards import ArrayRows, Side, open_files
from mispair.pairs.source import Source, described_by, image_places
from mispair.pairs.tables import IMAGE_SUFFIXES, Roles, open_table
from mispair.support.formatting import listed

_TABLES = (".csv", ".tsv", ".txt", ".psv", ".parquet", ".pq")
_LINES = (".jsonl", ".ndjson")
_ALONE = (".csv", ".tsv", ".psv", ".json", *_LINES)  # may be the one table of a folder


def open_raw(
    path: Path, images: Path | None = None, columns: Roles | None = None, *, allow_outside: bool = False
) -> RawLayout:
    """Open images and captions of a file or folder, in its order.

    Args:
        path: See the table above.
        images: Folder that the image paths start from; the one of the file by default.
        columns: Columns of a table that have no usual names.
        allow_outside: Read images outside that folder too.

    Raises:
        DataError: The source cannot be read, holds no pairs, or none of its images is where it should be.
        ConfigError: A column is named for a source that has none.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file or folder.")
    if images is not None and not images.is_dir():
        raise DataError(f"{images}: no such folder; --images must be the folder that the image paths start from.")
    try:
        pairs = _open_folder(path, images, columns or {}) if path.is_dir() else _open_file(path, images, columns or {})
    except OSError as error:
        raise DataError(f"{error.filename or path}: the file cannot be read ({error.strerror or error}).") from None
    if not any(caption.as_py() for caption in pairs.captions):
        raise DataError(f"{pairs.name}: all captions are blank, so there is nothing to compare the images with.")
    pairs.allow_outside = allow_outside
    return pairs


def is_raw_folder(folder: Path) -> bool:
    """Whether a folder in no other layout holds images and captions."""
    if any(folder.glob("*.npy")):
        return False
    known = (".txt", ".tar", ".parquet", *_LINES, *IMAGE_SUFFIXES)
    return any(path.suffix.lower() in known for path in folder.rglob("*")) or _only_table(folder) is not None


def _open_file(path: Path, images: Path | None, columns: Roles) -> RawLayout:
    if not path.is_file():
        raise DataError(f"{path}: this is neither a file nor a folder.")
    if not path.stat().st_size:
        raise DataError(f"{path}: the file is empty; expected pairs of an image and a caption.")
    folder = images or path.parent
    check_unpacked(path)
    match path.suffix.lower():
        case ".json":
            _check_no_columns(path, columns)
            return open_json(path, folder)
        case ".tar":
            _check_no_columns(path, columns)
            return Tars([path], None)
        case suffix if suffix in _LINES:
            return JsonLines([path], None, folder, columns)
        case suffix if suffix in _TABLES:
            return open_pairs(open_table(path, columns=columns, lenient=True), folder)
    raise DataError(
        f"{path}: this kind of file is not known; expected a table (.csv, .tsv, .txt or .parquet), a COCO or "
        "Karpathy .json, lines in JSON (.jsonl), a .tar, or a folder of these or of images and text files."
    )


def _open_folder(path: Path, images: Path | None, columns: Roles) -> RawLayout:
    lines = sorted(path.rglob(METADATA))
    if lines:
        return JsonLines(lines, path, images, columns)
    tars = sorted(path.glob("*.tar")) or sorted(path.rglob("*.tar"))
    if tars:
        _check_no_columns(path, columns)
        return Tars(tars, path)
    tables = sorted(path.rglob("*.parquet"))
    if tables:
        return open_pairs(open_table(*tables, columns=columns), images or path, path)
    table = _only_table(path)
    if table is not None:
        return _open_file(table, images, columns)
    _check_no_columns(path, columns)
    return TextFiles(path, images)


def _only_table(folder: Path) -> Path | None:
    """The one table in a folder without text files; the manifest of an export is none."""
    files = (path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    tables = [path for path in files if path.suffix.lower() in _ALONE and path.name != MANIFEST]
    return tables[0] if len(tables) == 1 and not any(folder.rglob("*.txt")) else None


def _check_no_columns(path: Path, columns: Roles) -> None:
    if columns:
        raise ConfigError(
            f"--image-column, --caption-column and --id-column are for tables, and {path} is none; leave them out."
        )


def open_source(folder: str | Path, images: str | Path | None = None, split: str | None = None) -> Source:
    """Open a folder.

    Args:
        folder: In the clip-retrieval layout or in the SCAN layout (then the left vectors are the mean of the regions of
            the image, and the right ones are made from the words of the caption), or "shapes".
        images: Folder that the image paths of the table are relative to. By default they are looked for in the folder
            itself, in its `images` folder and in the working directory.
        split: Which part of a folder that has train, dev and test inside; train by default.

    Raises:
        DataError: It is no such folder, or its files do not belong together.
    """
    root = loading.find_folder(folder)
    kind = loading.layout(root)
    whole = clip_retrieval.is_embedding_folder(root)
    if kind == "vectors" and whole:
        if split is not None:
            raise DataError(
                f"{root}: this folder has no parts such as {split} inside; all its pairs are audited together. Leave "
                "the split out."
            )
    else:
        split = split or "train"
        loading.require_split(root, split)
    # The image folder comes first: a name without ending must not find a text file of the data set.
    places = image_places(images) or (root / "images", *((root / split,) if split else ()), root, Path())
    if kind == "vectors":
        return replace(_open_clip(root / split if split else root), images=places, folder=root, split=split)
    assert split is not None
    return replace(_open_precomp(root, split, places), folder=root, split=split)


def _open_clip(folder: Path) -> Source:
    paths = [clip_retrieval.shard_paths(folder, stem) for stem in ("img_emb", "text_emb")]
    sides = [open_files(shards) for shards in paths]
    metadata = folder / "metadata"
    tables = clip_retrieval.numbered(metadata, "metadata", ".parquet") or clip_retrieval.numbered(
        metadata, "metadata", ".csv"
    )
    table = open_table(*tables) if tables else None
    _check_numbers(*zip(paths, ([shard.shape[0] for shard in side.shards] for side in sides), strict=True))
    if table is not None:
        shards = paths[0], [shard.shape[0] for shard in sides[0].shards]
        _check_numbers(shards, (tables, [len(part) for part in table.parts]))
    files = (*paths[0], *paths[1], *tables)
    source = Source(sides[0], sides[1], "clip", str(folder), RowIds(), files=files, table=table)
    return source if table is None else described_by(source, table)


def _check_numbers(one: tuple[list[Path], list[int]], other: tuple[list[Path], list[int]]) -> None:
    """Refuses files that would be paired by their place although their numbers say that each lacks another one.

    Files of other sizes than their partners' are cut elsewhere, and then their numbers mean nothing.
    """
    (paths, sizes), (others, other_sizes) = one, other
    numbers, other_numbers = ({int(path.stem.rpartition("_")[2]): path for path in side} for side in (paths, others))
    if sizes != other_sizes or numbers.keys() == other_numbers.keys():
        return
    odd = [str(path) for number, path in numbers.items() if number not in other_numbers]
    other_odd = [str(path) for number, path in other_numbers.items() if number not in numbers]
    raise DataError(
        f"{listed(odd)} and {listed(other_odd)} have no partner with the same number; expected the same numbers on "
        "both sides, as rows are paired file by file. Bring the missing files back, or take these away."
    )


def _open_precomp(folder: Path, split: str, places: tuple[Path, ...]) -> Source:
    from mispair.pairs.tfidf import word_vectors  # torch

    features, captions = precomp.features_path(folder, split), precomp.captions_path(folder, split)
    texts, ids = precomp.read_captions(folder, split)
    name = f"{folder.name} {split}"
    parts = precomp.arranged(folder, split, open_array(features, ndim=3), (texts, ids))
    images, link = parts.image_ids, parts.link
    if images:
        known = row_ids.from_images([images[row] for row in link])
    else:
        known = RowIds(groups=link if parts.per_image != 1 else None)
    pooled = np.concatenate([part.mean(axis=1, dtype=np.float32) for _, part in chunks(parts.features)])
    image_names = row_ids.as_texts(images)
    return Source(
        left=Side.of([ArrayRows(pooled, link)]),
        right=Side.of([ArrayRows(word_vectors(texts))]),
        layout="precomp",
        name=name,
        names=known,
        captions=partial(row_ids.look_up, row_ids.as_texts(texts)),
        image_names=(lambda rows: row_ids.look_up(image_names, link[rows])) if images else None,
        images=places,
        files=(features, captions),
    )
