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

import codecs
import csv
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from mispair.errors import ConfigError, DataError
from mispair.support.formatting import plain

IMAGE_NAMES = (
    "image", "image_path", "filepath", "file_path", "path", "file", "filename", "file_name", "img", "img_path",
    "image_name", "image_file", "image_filename", "photo", "picture",
)  # fmt: skip
CAPTION_NAMES = ("caption", "text", "title", "description", "sentence", "comment", "alt_text", "alt")
ID_NAMES = ("id", "pair_id", "caption_id", "key", "uid")
IMAGE_SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"))
_TABLES = (".csv", ".tsv", ".txt", ".psv")
_SEPARATORS = ",;\t|"
_UNQUOTED = "\t|"  # a caption may begin with a quotation mark in these, where many programs write no quotes at all
_LOOK_AT = 1000  # images that are looked for before hours are spent on the wrong folder
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
        records = _read(path, base, _Columns(path, image_column, caption_column))
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


def _read(path: Path, images: Path, columns: _Columns) -> list[Record]:
    if path.is_dir():
        return list(_from_folder(path, images))
    if not path.stat().st_size:
        raise DataError(f"{path}: the file is empty; expected pairs of an image and a caption.")
    match path.suffix.lower():
        case ".parquet" | ".pq":
            records = _from_parquet(path, columns)
        case ".json":
            records = list(_from_json(path))
        case suffix if suffix in _TABLES:
            records = _from_table(path, columns)
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
    named = list(islice((row.image for row in rows if row.image), _LOOK_AT))
    if not any(map(os.path.exists, named)):
        looked = f"looked for {plain(named[0])}" if named else "no row names one"
        raise DataError(
            f"{base}: none of the {'first ' * (len(rows) > _LOOK_AT)}{min(len(rows), _LOOK_AT):,} images is here "
            f"({looked}); give the folder that the image paths start from with --images."
        )


class _Columns:
    """Which columns of a table hold what."""

    def __init__(self, path: Path, image: str | None, caption: str | None) -> None:
        self.path = path
        self._kinds = (
            ("images", "--image-column", image, IMAGE_NAMES),
            ("captions", "--caption-column", caption, CAPTION_NAMES),
        )

    def recognised(self, columns: Sequence[str]) -> int:
        """How many of the two needed columns are there."""
        return sum(_pick(columns, named, usual) is not None for _, _, named, usual in self._kinds)

    def find(self, columns: Sequence[str]) -> tuple[int | None, int, int]:
        """Positions of the ids, if there are any, of the images and of the captions."""
        found = [_pick(columns, named, usual) for _, _, named, usual in self._kinds]
        for (what, flag, named, _), place in zip(self._kinds, found, strict=True):
            if place is None:
                present = ", ".join(f'"{column}"' for column in columns)
                problem = f'no column "{named}"' if named else f"no column with a usual name for {what}"
                raise DataError(f"{self.path}: {problem}; the columns are {present}. Name one of them with {flag}.")
        image, caption = (place for place in found if place is not None)
        return _pick(columns, None, ID_NAMES), image, caption


def _pick(columns: Sequence[str], named: str | None, usual: Sequence[str]) -> int | None:
    """Position of the column that was named, or of the first usual name that is there."""
    if named is not None:
        return columns.index(named) if named in columns else None
    simple = [column.strip().lower().replace(" ", "_").replace("-", "_") for column in columns]
    return next((simple.index(name) for name in usual if name in simple), None)


def _from_table(path: Path, columns: _Columns) -> list[Record]:
    encoding = _encoding(path)
    try:
        with path.open(encoding=encoding) as file:
            line = next((line.rstrip("\r\n") for line in file if line.strip()), "")
        if not line:
            raise DataError(f"{path}: the file holds blank lines only; expected a header line and pairs.")
        headers = {mark: _split(line, mark) for mark in _SEPARATORS}
        mark = max(headers, key=lambda mark: (columns.recognised(headers[mark]), len(headers[mark])))
        places = columns.find(headers[mark])
        try:
            return list(_table_records(path, encoding, mark, csv.QUOTE_MINIMAL, places))
        except csv.Error:
            if mark not in _UNQUOTED:
                raise
            return list(_table_records(path, encoding, mark, csv.QUOTE_NONE, places))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: the text is not UTF-8 ({error.reason}); save the file again as UTF-8.") from None
    except csv.Error as error:
        raise DataError(
            f"{path}: the table cannot be read ({error}); a field that holds a quotation mark, the separator or a line "
            'break must stand in quotes, with "" for each quotation mark inside.'
        ) from None


def _encoding(path: Path) -> str:
    with path.open("rb") as file:
        start = file.read(2)
    return "utf-16" if start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"


def _split(line: str, mark: str) -> list[str]:
    return [name.strip() for name in next(csv.reader([line], delimiter=mark, skipinitialspace=True))]


def _table_records(
    path: Path, encoding: str, mark: str, quoting: Any, places: tuple[int | None, int, int]
) -> Iterator[Record]:
    with path.open(encoding=encoding, newline="") as file:
        # Strict: a quote that is never closed would otherwise swallow all rows after it.
        reader = csv.reader(file, delimiter=mark, quoting=quoting, skipinitialspace=True, strict=True)
        lines = (fields for fields in reader if any(map(str.strip, fields)))
        width = 0
        try:
            width = len(next(lines))
            for fields in lines:
                if any(map(str.strip, fields[width:])):
                    raise DataError(
                        f"{path}: line {reader.line_num:,} has {len(fields)} fields and the header {width}; put a "
                        f'caption that holds "{mark}" in quotes.'
                    )
                name, image, caption = (
                    "" if place is None or place >= len(fields) else fields[place] for place in places
                )
                yield name, image, caption
        except csv.Error as error:
            raise csv.Error(f"line {reader.line_num:,}: {error}") from None


def _from_parquet(path: Path, columns: _Columns) -> list[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        names: list[str] = pyarrow.parquet.read_schema(path).names
        places = columns.find(names)
        table = pyarrow.parquet.read_table(path, columns=[names[place] for place in places if place is not None])
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: the table cannot be read ({_first_line(error)}); write it again.") from None
    for place in places[1:]:
        column = table.column(names[place])
        kind = column.type.value_type if pyarrow.types.is_dictionary(column.type) else column.type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind) or pyarrow.types.is_null(kind)):
            raise DataError(
                f'{path}: column "{names[place]}" holds values of type {column.type}; expected text. '
                "Name other columns with --image-column and --caption-column."
            )
    ids, images, captions = (
        [""] * len(table) if place is None else [_text(value) for value in table.column(names[place]).to_pylist()]
        for place in places
    )
    return list(zip(ids, images, captions, strict=True))


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _from_json(path: Path) -> Iterator[Record]:
    try:
        content = json.loads(path.read_bytes().decode(_encoding(path)))
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
        # An image without a sentence stays as a row that says so.
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
            content = text.read_bytes().decode(_encoding(text), "replace")
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
