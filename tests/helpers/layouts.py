"""Six pairs of an image and a caption in every layout."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from mispair.pairs.source import Source

Triple = tuple[bytes, str]  # content of the image, caption
COLOURS = range(6)
CAPTIONS = ["café, red", "a dog; two", "=cmd()", "says “no”", "x\ty", "last"]


def image(colour: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (3, 2), (40 * colour, 7, 9)).save(buffer, "PNG")
    return buffer.getvalue()


def triples(pairs: Source) -> list[Triple]:
    return [(pairs.read_image(row), text) for row, text in enumerate(pairs.texts())]


def photos(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for colour in COLOURS:
        (folder / f"{colour}.png").write_bytes(image(colour))
    return folder


def csv_file(encoding: str, separator: str, header: bool, quoted: bool = False) -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        photos(place / "photos")
        rows = [[f"{colour}.png", text, f"n{colour}"] for colour, text in zip(COLOURS, CAPTIONS, strict=True)]
        if separator == "\t":
            rows[4][1] = "x y"
        with (place / "photos.csv").open("w", encoding=encoding, newline="") as file:
            writer = csv.writer(file, delimiter=separator, quoting=csv.QUOTE_ALL if quoted else csv.QUOTE_MINIMAL)
            writer.writerows([["image", "caption", "note"]] * header + rows)
        return place / "photos.csv"

    return make


def parquet_file(place: Path) -> Path:
    photos(place / "photos")
    columns = {"image": [f"{n}.png" for n in COLOURS], "text": CAPTIONS, "n": list(COLOURS)}
    pyarrow.parquet.write_table(pyarrow.table(columns), place / "t.parquet")
    return place / "t.parquet"


def text_files(place: Path) -> Path:
    folder = photos(place / "photos")
    for colour, text in zip(COLOURS, CAPTIONS, strict=True):
        (folder / f"{colour}.txt").write_text(f"{text}\n", encoding="utf-8")
    return folder


def metadata_lines(place: Path) -> Path:
    folder = photos(place / "data/train")
    lines = [{"file_name": f"{n}.png", "text": text, "n": [n]} for n, text in zip(COLOURS, CAPTIONS, strict=True)]
    content = "".join(f"{json.dumps(line)}\n" for line in lines)
    (folder / "metadata.jsonl").write_text(content)
    return place / "data"


def json_lines(place: Path) -> Path:
    photos(place / "photos")
    lines = [{"image": f"{n}.png", "caption": text} for n, text in zip(COLOURS, CAPTIONS, strict=True)]
    (place / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return place / "t.jsonl"


def coco(place: Path) -> Path:
    photos(place / "photos")
    content = {
        "info": {"year": 2026},
        "images": [{"id": 10 + n, "file_name": f"{n}.png", "width": 3} for n in COLOURS],
        "annotations": [
            {"id": 20 + n, "image_id": 10 + n, "caption": text} for n, text in zip(COLOURS, CAPTIONS, strict=True)
        ],
    }
    (place / "captions.json").write_text(json.dumps(content))
    return place / "captions.json"


def karpathy(place: Path) -> Path:
    photos(place / "photos")
    images = [
        {"filename": f"{n}.png", "imgid": n, "split": "train", "sentids": [n], "sentences": [
            {"raw": text, "tokens": text.split(), "sentid": n, "imgid": n}]}
        for n, text in zip(COLOURS, CAPTIONS, strict=True)
    ]  # fmt: skip
    (place / "dataset.json").write_text(json.dumps({"images": images, "dataset": "x"}))
    return place / "dataset.json"


def write_tar(path: Path, samples: list[dict[str, bytes]]) -> None:
    with tarfile.open(path, "w") as tar:
        for sample in samples:
            for name, content in sample.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


def sample(n: int, known: bool) -> dict[str, bytes]:
    key = f"{n:09d}"
    about = {"uid": f"{n:032x}", "caption": CAPTIONS[n], "url": f"http://a/{n}.png", "key": key, "similarity": n / 8}
    found = {f"{key}.png": image(n), f"{key}.txt": CAPTIONS[n].encode()}
    return {**found, f"{key}.json": json.dumps(about).encode()} if known else found


def one_tar(place: Path) -> Path:
    place.mkdir(exist_ok=True)
    write_tar(place / "a.tar", [sample(n, known=False) for n in COLOURS])
    return place / "a.tar"


def img2dataset(place: Path) -> Path:
    folder = place / "tars"
    folder.mkdir(parents=True)
    for shard, numbers in (("00000", [0, 1, 2, 3]), ("00001", [4, 5])):
        write_tar(folder / f"{shard}.tar", [sample(n, known=True) for n in numbers])
        columns = {
            "url": [f"http://a/{n}.png" for n in numbers] + ["http://gone"],
            "caption": [CAPTIONS[n] for n in numbers] + ["never downloaded"],
            "key": [f"{n:09d}" for n in numbers] + [f"{99:09d}"],
            "similarity": [n / 8 for n in numbers] + [None],
            "status": ["success"] * len(numbers) + ["failed_to_download"],
        }
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / f"{shard}.parquet")
        (folder / f"{shard}_stats.json").write_text("{}")
    return folder


def hugging_face(place: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    (place / "set/data").mkdir(parents=True)
    features = datasets.Features(
        {"image": datasets.Image(), "text": datasets.Value("string"), "n": datasets.Value("int8")}
    )
    for part, numbers in enumerate(([0, 1, 2, 3], [4, 5])):
        columns = {
            "image": [{"bytes": image(n), "path": None} for n in numbers],
            "text": [CAPTIONS[n] for n in numbers],
            "n": numbers,
        }
        made = datasets.Dataset.from_dict(columns, features=features)
        made.to_parquet(place / f"set/data/train-0000{part}-of-00002.parquet")
    return place / "set"


LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "csv": csv_file("utf-8", ",", True),
    "csv of Excel": csv_file("cp1252", ";", True),
    "csv with a mark": csv_file("utf-8-sig", ",", True),
    "tsv in UTF-16": csv_file("utf-16", "\t", True),
    "csv without a header": csv_file("utf-8", ",", False),
    "csv with all cells quoted": csv_file("utf-8-sig", ";", True, quoted=True),
    "parquet": parquet_file,
    "text files": text_files,
    "imagefolder": metadata_lines,
    "JSON lines": json_lines,
    "COCO": coco,
    "Karpathy": karpathy,
    "tar": one_tar,
    "img2dataset": img2dataset,
    "Hugging Face": hugging_face,
}
