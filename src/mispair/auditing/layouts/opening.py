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

from pathlib import Path

from mispair.auditing.layouts.captions_json import open_json
from mispair.auditing.layouts.copies import MANIFEST
from mispair.auditing.layouts.image_folder import METADATA, JsonLines, TextFiles
from mispair.auditing.layouts.table import open_pairs
from mispair.auditing.layouts.tars import Tars, check_unpacked
from mispair.auditing.sources.raw import RawLayout
from mispair.auditing.sources.tables import IMAGE_SUFFIXES, Roles, open_table
from mispair.errors import ConfigError, DataError

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
