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
from pathlib import Path

from mispair.errors import ConflictError, DamagedError, NotFoundError, TooFewError
from mispair.pairs.layouts import loading
from mispair.pairs.layouts.arrays import image_places
from mispair.pairs.layouts.captions_json import open_json
from mispair.pairs.layouts.clip_retrieval import is_embedding_folder, open_clip
from mispair.pairs.layouts.copies import MANIFEST
from mispair.pairs.layouts.datacomp import find_datacomp
from mispair.pairs.layouts.image_folder import METADATA, JsonLines, TextFiles
from mispair.pairs.layouts.precomp import open_precomp
from mispair.pairs.layouts.table import open_pairs
from mispair.pairs.layouts.tars import Tars, check_unpacked
from mispair.pairs.source import Source
from mispair.pairs.tables import IMAGE_SUFFIXES, SETTINGS, Roles, open_table
from mispair.support.files import unreadable

_TABLES = (".csv", ".tsv", ".txt", ".psv", ".parquet", ".pq")
_LINES = (".jsonl", ".ndjson")
_ALONE = (".csv", ".tsv", ".psv", ".json", *_LINES)  # may be the one table of a folder


def open_raw(
    path: Path, images: Path | None = None, columns: Roles | None = None, *, allow_outside: bool = False
) -> Source:
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
        raise NotFoundError("no such file or folder", where=path)
    if images is not None and not images.is_dir():
        expected = "`images`, the folder that the image paths start from"
        raise NotFoundError("no such folder", where=images, expected=expected)
    try:
        pairs = _open_folder(path, images, columns or {}) if path.is_dir() else _open_file(path, images, columns or {})
    except OSError as error:
        raise unreadable(error.filename or path, error) from None
    if not any(pairs.texts()):
        raise TooFewError("all captions are blank", where=pairs.name, expected="texts to compare the images with")
    pairs.allow_outside, pairs.folder = allow_outside, path if path.is_dir() else None
    return pairs


def is_raw_folder(folder: Path) -> bool:
    """Whether a folder holds images and captions rather than vectors or features."""
    if find_datacomp(folder) or loading.recognised(folder) or any(folder.glob("*.npy")):
        return False
    known = (".txt", ".tar", ".parquet", *_LINES, *IMAGE_SUFFIXES)
    return any(path.suffix.lower() in known for path in folder.rglob("*")) or _only_table(folder) is not None


def _open_file(path: Path, images: Path | None, columns: Roles) -> Source:
    if not path.is_file():
        raise DamagedError("neither a file nor a folder", where=path)
    if not path.stat().st_size:
        raise DamagedError("the file is empty", where=path, expected="pairs of an image and a caption")
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
    raise DamagedError(
        "a file of an unknown kind",
        where=path,
        expected="a table (.csv, .tsv, .txt or .parquet), a COCO or Karpathy .json, lines in JSON (.jsonl), a .tar, or "
        "a folder of these or of images and text files",
    )


def _open_folder(path: Path, images: Path | None, columns: Roles) -> Source:
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
        what = f"{' and '.join(SETTINGS[role] for role in columns)} cannot be used: not a table"
        raise ConflictError(what, where=path, advice="Leave them out.")


def open_source(folder: str | Path, images: str | Path | None = None, split: str | None = None) -> Source:
    """Open a folder to be audited.

    Args:
        folder: In the clip-retrieval or in the SCAN layout, or "shapes".
        images: Folder that the image paths of the table are relative to. By default they are looked for in the folder
            itself, in its `images` folder and in the working directory.
        split: Which part of a folder that has train, dev and test inside; train by default.

    Raises:
        DataError: It is no such folder, or its files do not belong together.
    """
    root = loading.find_folder(folder)
    kind = loading.layout(root)
    whole = is_embedding_folder(root)
    if kind == "vectors" and whole:
        if split is not None:
            what = f"no parts such as {split}; all pairs are audited together"
            raise NotFoundError(what, where=root, advice="Leave out `split`.")
    else:
        split = split or "train"
        loading.require_split(root, split)
    # The image folder comes first: a name without ending must not find a text file of the data set.
    places = image_places(images) or (root / "images", *((root / split,) if split else ()), root, Path())
    if kind == "vectors":
        return replace(open_clip(root / split if split else root), images=places, folder=root, split=split)
    assert split is not None
    return replace(open_precomp(root, split, places), folder=root, split=split)
