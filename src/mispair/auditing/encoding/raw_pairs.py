"""Reading pairs of an image and a caption as people have them: tables, COCO and Karpathy files, plain folders.

| source | what is read |
|---|---|
| CSV, TSV, parquet | a column of image paths, one of captions and, if there is one, one of ids |
| COCO captions JSON | `{"images": [{"id", "file_name"}], "annotations": [{"id", "image_id", "caption"}]}` |
| Karpathy JSON | `{"images": [{"filename", "filepath", "sentences": [{"raw", "sentid"}]}]}`, all splits |
| folder | all images in it, each with the captions in the text file of the same name, a caption a line |

A row is never dropped: one without an image or a caption stays, with an empty string in that place.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from mispair.auditing.sources.tables import Table, is_utf_16, open_table
from mispair.errors import ConfigError, DataError
from mispair.support.formatting import plain

IMAGE_SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"))
_TABLES = (".csv", ".tsv", ".txt", ".psv", ".parquet", ".pq")
_PROBED = 1000  # image files that must not all be missing, before hours are spent on the wrong folder
Record = tuple[str, str, str]  # id, image, caption; each may be empty


class Row(NamedTuple):
    """One pair: a unique id, the whole path of its image and its caption, each of the two possibly empty."""

    id: str
    image: str
    caption: str


def read_raw(
    path: Path, images: Path | None = None, *, image_column: str | None = None, caption_column: str | None = None
) -> list[Row]:
    """Read all pairs of a file or folder, in its order.

    Ids are those of the file; else they are made of the image's name and the caption's number, as in dog.jpg#0. An id
    that was there before gets a number as well, so that ids are unique.

    Args:
        path: Table, COCO or Karpathy JSON, or folder of images and text files.
        images: Folder that the image paths start from; the one of the file by default.
        image_column: Column of image paths in a table; found by the usual names by default.
        caption_column: The same for captions.

    Raises:
        DataError: The source cannot be read, holds no pairs, or none of its images is where it should be.
        ConfigError: A column is named for a source that has none.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file or folder.")
    if images is not None and not images.is_dir():
        raise DataError(f"{images}: no such folder; --images must be the folder that the image paths start from.")
    base = images or (path if path.is_dir() else path.parent)
    suffix = path.suffix.lower()
    if (image_column or caption_column) and (path.is_dir() or suffix == ".json"):
        raise ConfigError(f"--image-column and --caption-column are for tables, and {path} is none; leave them out.")
    try:
        records = _read(path, base, image_column, caption_column)
    except OSError as error:
        raise DataError(f"{error.filename or path}: the file cannot be read ({error.strerror or error}).") from None
    if not records:
        raise DataError(f"{path}: no pairs in here; expected at least one image with a caption.")
    folder = os.path.abspath(base)
    rows = [
        Row(name, os.path.join(folder, image) if image else "", caption)
        for name, (_, image, caption) in zip(_unique_ids(records), records, strict=True)
    ]
    _check_images(rows, records, base)
    return rows


def _read(path: Path, images: Path, image_column: str | None, caption_column: str | None) -> list[Record]:
    if path.is_dir():
        return list(_from_folder(path, images))
    if not path.stat().st_size:
        raise DataError(f"{path}: the file is empty; expected pairs of an image and a caption.")
    match path.suffix.lower():
        case ".json":
            records = list(_from_json(path))
        case suffix if suffix in _TABLES:
            records = list(_from_table(path, image_column, caption_column))
        case _:
            raise DataError(
                f"{path}: this kind of file is not known; expected a table (.csv, .tsv, .txt or .parquet), a COCO or "
                "Karpathy .json, or a folder of images and text files."
            )
    return [(plain(name).strip(), image.strip(), plain(caption).strip()) for name, image, caption in records]


def _unique_ids(records: Sequence[Record]) -> Iterator[str]:
    captions: Counter[str] = Counter()
    repeats: Counter[str] = Counter()
    taken: set[str] = set()
    for name, image, _ in records:
        wanted = name or f"{plain(Path(image).as_posix()) if image else 'row'}#{captions[image]}"
        captions[image] += 1
        unique = wanted
        while unique in taken:
            repeats[wanted] += 1
            unique = f"{wanted}#{repeats[wanted]}"
        taken.add(unique)
        yield unique


def _check_images(rows: Sequence[Row], records: Sequence[Record], base: Path) -> None:
    """Refuse web addresses, and a folder that is the wrong one for all images."""
    for _, image, _ in records:
        if image.startswith(("http://", "https://")):
            raise DataError(
                f"{image} is a web address, and mispair downloads nothing; fetch the images first and give their paths."
            )
    named = list(islice((row.image for row in rows if row.image), _PROBED))
    if not any(map(os.path.exists, named)):
        searched = f"looked for {plain(named[0])}" if named else "no row names one"
        raise DataError(
            f"{base}: none of the {'first ' * (len(rows) > _PROBED)}{min(len(rows), _PROBED):,} images is here "
            f"({searched}); give the folder that the image paths start from with --images."
        )


def _from_table(path: Path, image_column: str | None, caption_column: str | None) -> Iterator[Record]:
    table = open_table(path, named=[name for name in (image_column, caption_column) if name], lenient=True)
    columns = [
        _column(table, path, "images", "--image-column", image_column, table.find("image_path")),
        _column(table, path, "captions", "--caption-column", caption_column, table.find("caption")),
    ]
    ids = table.find("id")
    for batch in table.batches([*columns, ids] if ids else columns):
        images, captions, *names = (cells.to_pylist() for cells in batch)
        yield from zip(names[0] if names else [""] * len(images), images, captions, strict=True)


def _column(table: Table, path: Path, what: str, flag: str, named: str | None, usual: str | None) -> str:
    """The column that was named, or one with a usual name."""
    found = usual if named is None else named if named in table.columns else None
    if found is None:
        present = ", ".join(f'"{column}"' for column in table.columns)
        problem = f'no column "{named}"' if named else f"no column with a usual name for {what}"
        raise DataError(f"{path}: {problem}; the columns are {present}. Name one of them with {flag}.")
    return found


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _decoded(content: bytes, errors: str = "strict") -> str:
    return content.decode("utf-16" if is_utf_16(content) else "utf-8-sig", errors)


def _from_json(path: Path) -> Iterator[Record]:
    try:
        content = json.loads(_decoded(path.read_bytes()))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: the text is not UTF-8 ({error.reason}); save the file again as UTF-8.") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: this is not valid JSON ({_first_line(error)}); copy or write it again.") from None
    expected = (
        'expected COCO captions, {"images": [...], "annotations": [{"image_id", "caption"}]}, '
        'or Karpathy\'s {"images": [{"filename", "sentences"}]}.'
    )
    if not isinstance(content, dict) or "images" not in content:
        found = f"the names {', '.join(list(content)[:8])}" if isinstance(content, dict) else type(content).__name__
        raise DataError(f"{path}: found {found}; {expected}")
    images = _entries(path, content, "images")
    if "annotations" in content:
        annotations = _entries(path, content, "annotations")
        if annotations and not any("caption" in annotation for annotation in annotations):
            raise DataError(f'{path}: the annotations have no "caption"; {expected}')
        return _from_coco(images, annotations)
    if not any("sentences" in image for image in images):
        raise DataError(f'{path}: the images have no "sentences" and there are no "annotations"; {expected}')
    return _from_karpathy(path, images)


def _entries(path: Path, content: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    entries = content.get(name)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise DataError(f'{path}: "{name}" must be a list of {{...}} entries; copy or write the file again.')
    return entries


def _from_coco(images: Iterable[Mapping[str, Any]], annotations: Iterable[Mapping[str, Any]]) -> Iterator[Record]:
    names = {str(image.get("id")): _text(image.get("file_name")) for image in images}
    for annotation in annotations:
        image = names.get(str(annotation.get("image_id")), "")
        yield _text(annotation.get("id")), image, _text(annotation.get("caption"))


def _from_karpathy(path: Path, images: Iterable[Mapping[str, Any]]) -> Iterator[Record]:
    for image in images:
        name = os.path.join(_text(image.get("filepath")), _text(image.get("filename")))
        # An image without a sentence stays as a row with an empty caption.
        for sentence in _entries(path, image, "sentences") if image.get("sentences") else [{}]:
            yield _text(sentence.get("sentid")), name, _text(sentence.get("raw"))


def _from_folder(folder: Path, images: Path) -> Iterator[Record]:
    found = texts = 0
    for place in sorted(images.rglob("*")):
        inside = place.relative_to(images)
        # Names with a dot in front are notes of the operating system, even where they end in .jpg.
        if place.suffix.lower() not in IMAGE_SUFFIXES or any(part.startswith(".") for part in inside.parts):
            continue
        found += 1
        captions = []
        text = (folder / inside).with_suffix(".txt")
        if text.is_file():
            texts += 1
            content = _decoded(text.read_bytes(), "replace")
            captions = [plain(line).strip() for line in content.splitlines() if line.strip()]
        for caption in captions or [""]:
            yield "", str(inside), caption
    if not found:
        raise DataError(
            f"{images}: no images in here; expected files such as dog.jpg, each with a dog.txt that holds its captions."
        )
    if not texts:
        raise DataError(
            f"{folder}: no image has a text file of the same name; expected dog.txt, a caption a line, for dog.jpg. Or "
            "give a table of image paths and captions instead, and the folder as --images."
        )
