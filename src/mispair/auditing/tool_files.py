"""Write the pairs of an audit as files for other tools: FiftyOne, Label Studio and Argilla.

| tool | file | how it is imported |
|---|---|---|
| FiftyOne | `fiftyone.csv` | `fiftyone.types.CSVDataset`, with `labels_path` |
| Label Studio | `label-studio.json`, `label-studio.xml` | the tasks with predictions; the labelling interface |
| Argilla | `argilla.json` | a list of records for `dataset.records.log` |
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from mispair.errors import NotFoundError
from mispair.support.files import Json, replacing, write_atomically

if TYPE_CHECKING:
    import pyarrow

Tool = Literal["fiftyone", "label-studio", "argilla"]
Row = dict[str, Any]
MATCHED, MISMATCHED = "matched", "mismatched"
_SUGGESTED = ("suggested_right", "suggested_left")
_KNOWN = ("id", "image", "caption", "status", "match_score", "is_mismatch", "reason", *_SUGGESTED)
_INTERFACE = f"""<View>
  <Image name="image" value="$image"/>
  <Text name="caption" value="$caption"/>
  <Choices name="verdict" toName="image" choice="single" showInline="true">
    <Choice value="{MATCHED}"/>
    <Choice value="{MISMATCHED}"/>
  </Choices>
</View>
"""


def export(pieces: Iterable[pyarrow.Table], tool: Tool, out: Path, images: Path | None = None) -> list[Path]:
    """Write the table of an audit for a tool; image names start from the folder `images`. Return the paths.

    Raises:
        NotFoundError: The pairs have no names of images.
    """
    rows = _rows(pieces)
    if tool == "fiftyone":
        _write_csv(out / "fiftyone.csv", (_sample(row, images) for row in rows))
        return [out / "fiftyone.csv"]
    if tool == "argilla":
        _write_list(out / "argilla.json", (_record(row, images) for row in rows))
        return [out / "argilla.json"]
    path = out / "label-studio.json"
    _write_list(path, map(_task, rows))
    write_atomically(path.with_suffix(".xml"), _INTERFACE.encode())
    return [path, path.with_suffix(".xml")]


def no_images() -> NotFoundError:
    """The error for pairs without images, which no tool can show."""
    return NotFoundError("the pairs have no names of images", advice="Audit them with their images.")


def _rows(pieces: Iterable[pyarrow.Table]) -> Iterator[Row]:
    for piece in pieces:
        if "image" not in piece.column_names:
            raise no_images()
        yield from piece.select([name for name in _KNOWN if name in piece.column_names]).to_pylist()


def _verdict(row: Row) -> str | None:
    return None if row["is_mismatch"] is None else MISMATCHED if row["is_mismatch"] else MATCHED


def _place(row: Row, images: Path | None) -> str:
    return str((images or Path()).absolute() / row["image"])


def _sample(row: Row, images: Path | None) -> dict[str, Json]:
    """Make a row of FiftyOne's table; its column of media is `filepath`."""
    rest: dict[str, Json] = {name: value for name, value in row.items() if name not in ("image", "is_mismatch")}
    return {"filepath": _place(row, images), **rest, "verdict": _verdict(row)}


def _record(row: Row, images: Path | None) -> dict[str, Json]:
    """Make a record of Argilla; the name of a question, here `verdict`, is a suggestion."""
    return {
        "id": row["id"],
        "image": _place(row, images),
        "caption": row.get("caption") or "",
        "verdict": _verdict(row),
        "match_score": row["match_score"],
        "reason": row["reason"],
        "status": row["status"],
    }


def _task(row: Row) -> dict[str, Json]:
    """Make a task of Label Studio, with the verdict as a prediction; it serves local files below /data."""
    data: dict[str, Json] = {
        **{name: value for name, value in row.items() if name != "is_mismatch"},
        "image": f"/data/local-files/?d={quote(row['image'])}",
        "caption": row.get("caption") or "",
    }
    verdict = _verdict(row)
    if verdict is None:
        return {"data": data}
    value: Json = {"choices": [verdict]}
    choice: dict[str, Json] = {"from_name": "verdict", "to_name": "image", "type": "choices", "value": value}
    sure = row["match_score"] if verdict == MATCHED else 1 - row["match_score"]
    return {"data": data, "predictions": [{"model_version": "mispair", "score": sure, "result": [choice]}]}


def _write_csv(path: Path, rows: Iterable[dict[str, Json]]) -> None:
    with replacing(path) as file:
        text = io.TextIOWrapper(file, "utf-8", newline="", write_through=True)
        writer = csv.writer(text)
        for number, row in enumerate(rows):
            if number == 0:
                writer.writerow(row)
            writer.writerow(row.values())
        text.detach()


def _write_list(path: Path, entries: Iterable[dict[str, Json]]) -> None:
    """Write a JSON list, an entry a line."""
    with replacing(path) as file:
        for number, entry in enumerate(entries):
            line = json.dumps(entry, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
            file.write((b",\n" if number else b"[\n") + line)
        file.write(b"\n]\n")
