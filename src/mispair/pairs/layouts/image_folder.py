"""Folders of image files: with a text file for each image, or with lines in JSON (Hugging Face's imagefolder)."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mispair.errors import ConflictError, DamagedError, NotFoundError
from mispair.pairs.edits import Edits
from mispair.pairs.source import ImageFiles
from mispair.pairs.tables import IMAGE_SUFFIXES, Role, Roles, decoded, find_column, no_column, text_encoding
from mispair.support.files import read_regular, replacing, write_atomically
from mispair.support.formatting import plain

METADATA = "metadata.jsonl"
_TEXT = ".txt"
# Texts about a folder, which are no captions of a lost image.
_ABOUT = ("readme", "license", "licence", "copying", "notice", "citation", "authors", "changelog")


class CopiedImages(ImageFiles):
    """Pairs with images inside their copies."""

    def size(self, edits: Edits) -> int:
        images = (path for _, path in self._images(edits)) if self.outside is None else ()
        return super().size(edits) + sum(path.stat().st_size for path in images)

    def _images(self, edits: Edits) -> Iterator[tuple[str, Path]]:
        """Names and places of the image files of a copy."""
        rows = edits.image_from[edits.rows]
        rows = rows if self.groups is None else rows[np.unique(self.groups[rows], return_index=True)[1]]
        for row in rows.tolist():
            name = os.path.normpath(self._paths[row])
            if os.path.isabs(name) or name.startswith(os.pardir):
                what, advice = f"a copy cannot contain an image outside {self.image_root}", "Move it into this folder."
                raise ConflictError(what, where=plain(name), advice=advice)
            if os.path.isfile(self.image_root / name):
                yield name, self.image_root / name

    def _copy_images(self, edits: Edits, out: Path) -> None:
        for name, path in self._images(edits):
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, out / name)


class TextFiles(CopiedImages):
    """A folder of images, each with its captions in a text file of the same name, a caption a line.

    The images may be in another folder.
    """

    def __init__(self, folders: Sequence[Path], _: Path | None, images: Path | None, *__: object) -> None:
        (folder,) = folders
        self.outside = images if images is not None and images.resolve() != folder.resolve() else None
        rows, self.notes = _read_texts(folder, images or folder)
        self._place = folder
        self._texts = [row.text for row in rows]
        files = sorted({folder / row.text for row in rows if row.caption or not row.image})
        super().__init__(str(folder), files, [(row.id, row.image, row.caption) for row in rows], images or folder)

    def write(self, edits: Edits, out: Path) -> None:
        rows, changed = edits.rows, self._changed(edits)
        first = self.first_rows
        captions: dict[Path, dict[int, list[str]]] = {}  # by image, as a.jpg and a.png share a.txt
        for row, caption in zip(edits.image_from[rows].tolist(), self.final_captions(edits, rows), strict=True):
            own = captions.setdefault(self._texts[row], {}).setdefault(int(first[row]), [])
            own.append(" ".join(caption.splitlines()))
        for text, by_image in captions.items():
            if text in changed:
                lines: list[str] = []
                for own in by_image.values():
                    there = {"", *lines}
                    lines += [caption for caption in own if caption not in there]
                write_atomically(out / text, "".join(f"{line}\n" for line in lines).encode())
            elif (self._place / text).is_file():
                (out / text).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self._place / text, out / text)
        if self.outside is None:
            self._copy_images(edits, out)

    def _changed(self, edits: Edits) -> set[Path]:
        """Text files with a removed or added caption; the others are not rewritten."""
        repaired = edits.repaired
        rows = np.concatenate([np.flatnonzero(~edits.keep), repaired, edits.image_from[repaired]])
        return {self._texts[row] for row in rows.tolist()}


class JsonLines(CopiedImages):
    """Files with an image path and a caption in each line, such as the `metadata.jsonl` of an imagefolder.

    A copy contains the images if the data set is a folder, `root`.
    """

    def __init__(self, paths: Iterable[Path], root: Path | None, images: Path | None, columns: Roles) -> None:
        self._files, self._root = list(paths), root
        self._keys: list[dict[Role, str]] = []
        records = []
        base = images or root or self._files[0].parent
        for path in self._files:
            keys: dict[Role, str] = {}
            inside = path.parent.relative_to(root) if root is not None and images is None else Path()
            for number, entry in _read_lines(path):
                keys = keys or _find_keys(path, entry, columns)
                image, caption = (_cell(entry, keys[role], path, number) for role in ("image_path", "caption"))
                name = _cell(entry, keys["id"], path, number) if "id" in keys else ""
                records.append((name, (inside / image).as_posix() if image else "", caption))
            self._keys.append(keys)
        self.outside = base if root is None or images is not None else None
        super().__init__(str(root or self._files[0]), self._files, records, base)

    def _place(self, path: Path) -> str:
        return path.name if self._root is None else path.relative_to(self._root).as_posix()

    def write(self, edits: Edits, out: Path) -> None:
        row = 0
        for path, keys in zip(self._files, self._keys, strict=True):
            with replacing(out / self._place(path)) as file:
                for _, entry in _read_lines(path):
                    if edits.keep[row]:
                        self._edit(entry, keys, row, edits, path)
                        file.write(json.dumps(entry, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
                    row += 1
        if self.outside is None:
            self._copy_images(edits, out)

    def _edit(self, entry: dict[str, Any], keys: Roles, row: int, edits: Edits, path: Path) -> None:
        image, source = int(edits.image_from[row]), int(edits.caption_from[row])
        if image != row:
            name = Path(self._paths[image])
            if self.outside is None and self._root is not None:
                name = Path(os.path.relpath(name, path.parent.relative_to(self._root)))
            entry[keys["image_path"]] = name.as_posix()
        if source != row or row in edits.rewritten:
            entry[keys["caption"]] = self.final_captions(edits, np.array([row]))[0]


class _Row(NamedTuple):
    """A caption, the text file it belongs in, and its image; without one, its id says where it is from."""

    text: Path
    image: str
    caption: str
    id: str = ""


def _read_texts(folder: Path, images: Path) -> tuple[list[_Row], tuple[str, ...]]:
    """The captions of all images, and a note on unread texts."""
    found = [path for path in _visible(images) if path.suffix.lower() in IMAGE_SUFFIXES]
    if not found:
        expected = "files such as dog.jpg, each with a dog.txt that holds its captions"
        raise NotFoundError("no images", where=images, expected=expected)
    wanted = {path.with_suffix(_TEXT) for path in found}
    kept = sorted(path for path in _visible(folder) if path.suffix.lower() == _TEXT and (folder / path).is_file())
    texts = {path.with_suffix(_TEXT): path for path in kept}  # a.txt or a.TXT
    own = texts.keys() & wanted
    if not own:
        raise NotFoundError(
            "no image has a text file of the same name",
            where=folder,
            expected="dog.txt, a caption a line, for dog.jpg",
            advice="Or give a table of image paths and captions instead, and the folder as `images`.",
        )
    others = {path for path in texts.keys() - wanted if path.stem.lower() not in _ABOUT}
    lost = others if len(own) > len(others) else set()
    rows = []
    for path in sorted([*found, *lost]):
        name = path.with_suffix(_TEXT)
        text = texts.get(name, name)
        captions = _captions(folder / text) if name in texts else []
        for number, caption in enumerate(captions or [""]):
            if path in lost:
                rows.append(_Row(text, "", caption, f"{text.as_posix()}#{number}"))
            else:
                rows.append(_Row(text, str(path), caption))
    return rows, () if lost or not others else (_unread([texts[path] for path in others], len(own)),)


def _unread(texts: Collection[Path], own: int) -> str:
    several = f"{len(texts):,} text files" if len(texts) > 1 else "A text file"
    return (
        f"{several} without an image, such as {plain(min(texts).as_posix())}, {'are' if len(texts) > 1 else 'is'} not "
        f"read: as only {own:,} have one, they do not seem to be captions. If their images are missing, "
        "put these back."
    )


def _visible(folder: Path) -> Iterator[Path]:
    """Paths relative to the folder; names with a leading dot, such as ._a.jpg, are files of the operating system."""
    paths = (path.relative_to(folder) for path in folder.rglob("*"))
    return (path for path in paths if not any(part.startswith(".") for part in path.parts))


def _captions(text: Path) -> list[str]:
    return [plain(line).strip() for line in decoded(read_regular(text)).splitlines() if line.strip()]


def _read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and content of each line; blank lines are left out."""
    encoding = text_encoding(path)
    try:
        with path.open(encoding=encoding) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _read_line(line, number, path)
    except UnicodeError as error:  # such as half a character at the end
        what = f"the text is not {encoding.upper()} ({error})"
        raise DamagedError(what, where=path, advice="Save the file again as UTF-8.") from None


def _read_line(line: str, number: int, path: Path) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict):
        raise DamagedError(f"line {number:,} is not a JSON object", where=path, expected="{...} in each line")
    return entry


def _find_keys(path: Path, entry: dict[str, Any], columns: Roles) -> dict[Role, str]:
    """The keys of the image, the caption and, if there is one, the id."""
    keys: dict[Role, str] = {}
    names = tuple(entry)
    wanted: dict[Role, str] = {"image_path": "images", "caption": "captions", "id": "ids"}
    for role, what in wanted.items():
        key = columns.get(role) or find_column(names, role)
        if key in names:
            keys[role] = key
        elif role != "id" or key is not None:
            raise no_column(f'no key "{key}"' if key else f"no key with a usual name for {what}", path, names, [role])
    return keys


def _cell(entry: dict[str, Any], key: str, path: Path, number: int) -> str:
    value = entry.get(key)
    if value is None or isinstance(value, str | int | float):
        return "" if value is None else str(value)
    raise DamagedError(f'"{key}" in line {number:,} is a {type(value).__name__}', where=path, expected="a text")
