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

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from mispair.errors import ConflictError, DamagedError, NotFoundError, TooFewError
from mispair.pairs.layouts import loading
from mispair.pairs.layouts.arrays import image_places
from mispair.pairs.layouts.captions_json import open_json
from mispair.pairs.layouts.clip_retrieval import is_embedding_folder
from mispair.pairs.layouts.copies import MANIFEST
from mispair.pairs.layouts.datacomp import find_datacomp, open_datacomp
from mispair.pairs.layouts.image_folder import METADATA, JsonLines, TextFiles
from mispair.pairs.layouts.table import open_files
from mispair.pairs.layouts.tars import Tars, check_unpacked
from mispair.pairs.source import Source
from mispair.pairs.tables import IMAGE_SUFFIXES, SETTINGS, Roles
from mispair.support.files import unreadable


class Layout(NamedTuple):
    """A way to store images and captions."""

    # Takes files, the folder they were found in (None for a single file), the folder of the images (None for the same),
    # and columns without usual names.
    open: Callable[[list[Path], Path | None, Path | None, Roles], Source]
    suffixes: tuple[str, ...]
    found: tuple[str, ...] = ()  # patterns that find the files in a folder; by default it may have a single file
    has_columns: bool = True  # whether columns can be named


LAYOUTS = (
    Layout(JsonLines, (".jsonl", ".ndjson"), (f"**/{METADATA}",)),
    Layout(lambda files, root, *_: Tars(files, root), (".tar",), ("*.tar", "**/*.tar"), has_columns=False),
    Layout(open_files, (".parquet", ".pq"), ("**/*.parquet",)),
    Layout(open_files, (".csv", ".tsv", ".psv", ".txt")),
    Layout(lambda files, _, images, __: open_json(files[0], images), (".json",), has_columns=False),
)
TEXTS = Layout(lambda files, _, images, __: TextFiles(files[0], images), (), has_columns=False)
_BY_SUFFIX = {suffix: layout for layout in LAYOUTS for suffix in layout.suffixes}
_ALONE = (".csv", ".tsv", ".psv", ".json", ".jsonl", ".ndjson")  # may be the one table of a folder
_INSIDE = (".txt", ".tar", ".parquet", ".jsonl", ".ndjson", *IMAGE_SUFFIXES)


def open_raw(
    path: Path, images: Path | None = None, columns: Roles | None = None, *, allow_outside: bool = False
) -> Source:
    """Open images and captions of a file or folder, in its order; see the table above.

    Args:
        path: The file or folder.
        images: Folder that the image paths start from; by default that of the file.
        columns: Columns of a table that have no usual names.
        allow_outside: Read images outside that folder too.
    """
    if not path.exists():
        raise NotFoundError("no such file or folder", where=path)
    if images is not None and not images.is_dir():
        expected = "`images`, the folder that the image paths start from"
        raise NotFoundError("no such folder", where=images, expected=expected)
    try:
        layout, files, root = _recognise(path)
        if columns and not layout.has_columns:
            what = f"{' and '.join(SETTINGS[role] for role in columns)} cannot be used: not a table"
            raise ConflictError(what, where=path, advice="Leave them out.")
        pairs = layout.open(files, root, images, columns or {})
    except OSError as error:
        raise unreadable(error.filename or path, error) from None
    if not any(pairs.texts()):
        raise TooFewError("all captions are blank", where=pairs.name, expected="texts to compare the images with")
    pairs.allow_outside, pairs.folder = allow_outside, path if path.is_dir() else None
    return pairs


def is_raw(path: Path) -> bool:
    """Whether these are images and captions rather than vectors or features."""
    if not path.is_dir():
        return str(path) != loading.SHAPES
    if find_datacomp(path) or loading.recognised(path) or any(path.glob("*.npy")):
        return False
    return any(file.suffix.lower() in _INSIDE for file in path.rglob("*")) or _only_table(path) is not None


def _recognise(path: Path) -> tuple[Layout, list[Path], Path | None]:
    """The layout, its files and their folder; None for a single file."""
    if path.is_dir():
        for layout in LAYOUTS:
            if files := next(filter(None, (sorted(path.glob(pattern)) for pattern in layout.found)), None):
                return layout, files, path
        table = _only_table(path)
        return (TEXTS, [path], path) if table is None else _recognise(table)
    if not path.is_file():
        raise DamagedError("neither a file nor a folder", where=path)
    if not path.stat().st_size:
        raise DamagedError("the file is empty", where=path, expected="pairs of an image and a caption")
    check_unpacked(path)
    if (known := _BY_SUFFIX.get(path.suffix.lower())) is None:
        raise DamagedError(
            "a file of an unknown kind",
            where=path,
            expected="a table (.csv, .tsv, .txt or .parquet), a COCO or Karpathy .json, lines in JSON (.jsonl), a "
            ".tar, or a folder of these or of images and text files",
        )
    return known, [path], None


def _only_table(folder: Path) -> Path | None:
    """The one table in a folder without text files; the manifest of an export is none."""
    files = (path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    tables = [path for path in files if path.suffix.lower() in _ALONE and path.name != MANIFEST]
    return tables[0] if len(tables) == 1 and not any(folder.rglob("*.txt")) else None


def open_source(
    folder: str | Path, images: str | Path | None = None, split: str | None = None, vectors: str | None = None
) -> Source:
    """Open a folder of vectors or features to be audited.

    Args:
        folder: In the layout of clip-retrieval, SCAN or DataComp, or "shapes".
        images: Folder that the image paths start from; by default `images` in the folder, the folder itself or the
            working directory.
        split: Split of a folder that has several; train by default.
        vectors: Model of DataComp's vectors; by default the better one.
    """
    if find_datacomp(Path(folder)):
        return open_datacomp(Path(folder), vectors)
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
    return replace(loading.READERS[kind].open(root, split), images=places, folder=root, split=split)
