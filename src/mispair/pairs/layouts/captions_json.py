"""Captions in one JSON file: COCO's and Karpathy's."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mispair.errors import DamagedError
from mispair.pairs.edits import Edits
from mispair.pairs.source import ImageFiles
from mispair.pairs.tables import text_encoding
from mispair.support.files import LARGEST_JSON, read_regular, unreadable, write_atomically

Entry = dict[str, Any]
_EXPECTED = (
    'COCO captions, {"images": [...], "annotations": [{"image_id", "caption"}]}, '
    'or Karpathy\'s {"images": [{"filename", "sentences"}]}'
)


def open_json(paths: Sequence[Path], _: Path | None, images: Path | None, *__: object) -> ImageFiles:
    """The pairs of all splits of a JSON file; images beside it by default.

    Either `{"images": [{"id", "file_name"}], "annotations": [{"id", "image_id", "caption"}]}`, or
    `{"images": [{"filename", "filepath", "sentences": [{"raw", "sentid"}]}]}`.
    """
    (path,) = paths
    content, images = _read(path), images or path.parent
    if "annotations" in content:
        return CocoCaptions(path, content, images)
    if not any("sentences" in image for image in _entries(path, content, "images")):
        raise DamagedError('no "annotations", and no "sentences" of the images', where=path, expected=_EXPECTED)
    return KarpathyCaptions(path, content, images)


class _CaptionsFile(ImageFiles):
    """One JSON file, held in memory."""

    def __init__(self, path: Path, content: Entry, records: list[tuple[str, str, str]], images: Path) -> None:
        self.path, self.content, self.outside = path, content, images
        super().__init__(str(path), [path], records, images)

    def _write(self, out: Path, changed: Mapping[str, Any]) -> None:
        content = {name: changed.get(name, value) for name, value in self.content.items()}
        write_atomically(out / self.path.name, json.dumps(content, ensure_ascii=False).encode("utf-8", "replace"))


class CocoCaptions(_CaptionsFile):
    """COCO's captions: a row for each annotation."""

    def __init__(self, path: Path, content: Entry, images: Path) -> None:
        self._images, self._annotations = (_entries(path, content, name) for name in ("images", "annotations"))
        if self._annotations and not any("caption" in annotation for annotation in self._annotations):
            raise DamagedError('the annotations have no "caption"', where=path, expected=_EXPECTED)
        names = {str(image.get("id")): _text(image.get("file_name")) for image in self._images}
        records = [
            (_text(entry.get("id")), names.get(str(entry.get("image_id")), ""), _text(entry.get("caption")))
            for entry in self._annotations
        ]
        super().__init__(path, content, records, images)

    def write(self, edits: Edits, out: Path) -> None:
        rows = edits.rows
        captions = self.final_captions(edits, rows)
        written: list[Entry] = []
        for row, image, source, caption in zip(
            rows, edits.image_from[rows], edits.caption_from[rows], captions, strict=True
        ):
            entry = dict(self._annotations[row])
            if image != row:
                entry["image_id"] = self._annotations[image].get("image_id")
            if source != row or int(row) in edits.rewritten:
                entry["caption"] = caption
            written.append(entry)
        before, after = ({str(entry.get("image_id")) for entry in part} for part in (self._annotations, written))
        left_out = before - after
        images = [image for image in self._images if str(image.get("id")) not in left_out]
        self._write(out, {"images": images, "annotations": written})


class KarpathyCaptions(_CaptionsFile):
    """Karpathy's captions: a row for each sentence; an image without one is a row with an empty caption."""

    def __init__(self, path: Path, content: Entry, images: Path) -> None:
        self._images = _entries(path, content, "images")
        self._rows: list[tuple[int, Entry]] = []  # number of the image, and the sentence
        records = []
        for number, image in enumerate(self._images):
            name = os.path.join(_text(image.get("filepath")), _text(image.get("filename")))
            for sentence in _entries(path, image, "sentences") if image.get("sentences") else [{}]:
                self._rows.append((number, sentence))
                records.append((_text(sentence.get("sentid")), name, _text(sentence.get("raw"))))
        super().__init__(path, content, records, images)

    @property
    def splits(self) -> Sequence[str] | None:
        if not all(isinstance(image.get("split"), str) for image in self._images):
            return None
        return [self._images[number]["split"] for number, _ in self._rows]

    def write(self, edits: Edits, out: Path) -> None:
        rows = edits.rows
        sentences: dict[int, list[Entry]] = {}
        for row, image, source in zip(rows, edits.image_from[rows], edits.caption_from[rows], strict=True):
            own = self._rows[row][1]
            entry = {**self._rows[source][1], **{key: own[key] for key in ("sentid", "imgid") if key in own}}
            number = self._rows[image][0]
            if image != row and "imgid" in entry:
                entry["imgid"] = self._images[number].get("imgid", entry["imgid"])
            if int(row) in edits.rewritten:
                entry["raw"] = edits.rewritten[int(row)]
                entry["tokens"] = re.findall(r"\w+", entry["raw"].lower())
            sentences.setdefault(number, []).append(entry)
        images = []
        for number, image in enumerate(self._images):
            if number in sentences:
                ids = {"sentids": [entry.get("sentid") for entry in sentences[number]]} if "sentids" in image else {}
                images.append({**image, **ids, "sentences": sentences[number]})
        self._write(out, {"images": images})


def _read(path: Path) -> Entry:
    try:
        text = read_regular(path, LARGEST_JSON)
        content = json.loads(text.decode(text_encoding(path)))
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from None
    except (ValueError, RecursionError) as error:
        raise unreadable(path, error, expected="JSON", advice="Copy or write it again.") from None
    if not isinstance(content, dict) or "images" not in content:
        found = f"the names {', '.join(list(content)[:8])}" if isinstance(content, dict) else type(content).__name__
        raise DamagedError(f"found {found}", where=path, expected=_EXPECTED)
    return content


def _entries(path: Path, content: Mapping[str, Any], name: str) -> list[Entry]:
    entries = content.get(name)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise DamagedError(f'"{name}" is not a list of {{...}}', where=path, advice="Copy or write the file again.")
    return entries


def _text(value: object) -> str:
    return "" if value is None else str(value)
