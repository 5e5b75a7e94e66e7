"""Everything that reads a file from outside, with a small valid file each."""

from __future__ import annotations

import importlib.util
import io
import json
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from PIL import Image

import mispair
from audit_cases import make_case
from mispair.auditing.inputs import AuditInput
from mispair.auditing.summary import AuditSummary
from mispair.bench.suite.suite import read_suite
from mispair.config import find_packaged
from mispair.pairs.audited import AuditColumns
from mispair.pairs.layouts.opening import open_raw
from mispair.pairs.noise import load_noise
from mispair.pairs.npy import check_finite, open_array
from mispair.pairs.vocabulary import Vocabulary
from mispair.retrieval.matcher import Matcher
from mispair.retrieval.vector_index import build_index, open_index
from mispair.reviewing.decisions import Decisions
from mispair.reviewing.transfer import read_decisions
from mispair.support.tensor_files import load_tensors, save_tensors
from mispair.support.thumbnails import thumbnail
from mispair.training.run_folder import read_result
from mispair.training.settings import read_recipe
from tiny import tiny_folder, tiny_pairs

HAS_USEARCH = importlib.util.find_spec("usearch") is not None


@dataclass(frozen=True)
class Reader:
    """What reads one file, in a folder that may hold others.

    Attributes:
        file: The name of the file that is damaged.
        make: Writes it, whole, and what belongs to it, to an empty folder.
        read: Reads it; may raise `MispairError` and nothing else.
    """

    file: str
    make: Callable[[Path], object]
    read: Callable[[Path], object]


def _captions(folder: Path, name: str) -> Path:
    """Three images and a table of captions."""
    for number in range(3):
        Image.new("RGB", (40, 40), (80 * number, 0, 0)).save(folder / f"{number}.png")
    rows = [{"image": f"{number}.png", "caption": f"a dog, the {number}th; in snow"} for number in range(3)]
    path = folder / name
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        separator = "\t" if path.suffix == ".tsv" else ","
        lines = [["image", "caption"], *([row["image"], f'"{row["caption"]}"'] for row in rows)]
        path.write_text("".join(separator.join(line) + "\n" for line in lines))
    return path


def _table(name: str) -> Reader:
    return Reader(name, lambda folder: _captions(folder, name), lambda folder: _open_captions(folder / name, folder))


def _coco(folder: Path) -> None:
    _captions(folder, "unused.csv")
    images = [{"id": number, "file_name": f"{number}.png"} for number in range(3)]
    captions = [{"id": number, "image_id": number, "caption": f"a dog {number}"} for number in range(3)]
    (folder / "captions.json").write_text(json.dumps({"images": images, "annotations": captions}))


def _tar(folder: Path) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (40, 40)).save(buffer, "PNG")
    with tarfile.open(folder / "00000.tar", "w") as tar:
        for number in range(3):
            for ending, content in ((".png", buffer.getvalue()), (".txt", b"a dog in the snow")):
                entry = tarfile.TarInfo(f"{number:05d}{ending}")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))


def _open_captions(path: Path, images: Path) -> None:
    raw = open_raw(path, images)
    raw.texts()
    raw.fingerprint()


def _open_input(path: Path) -> None:
    """A folder of vectors, to their values."""
    source = AuditInput(path).open("cpu")
    source.left.gather(np.arange(len(source)))
    source.id_column(0, len(source))


def _vectors(folder: Path) -> None:
    for name in ("img_emb", "text_emb"):
        (folder / name).mkdir()
        np.save(folder / name / f"{name}_0.npy", np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32))
    (folder / "metadata").mkdir()
    columns = {"id": [f"p{row}" for row in range(20)], "caption": ["a dog"] * 20}
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "metadata" / "metadata_0.parquet")


def _model(folder: Path) -> None:
    settings: dict[str, Any] = {"epochs": 1, "warmup_epochs": 0, "embed_size": 4, "word_size": 3, "batch_size": 8}
    mispair.fit(tiny_pairs(4), method="plain", model="vse", device="cpu", **settings).save(folder / "m.safetensors")


def _image(kind: str) -> Callable[[Path], object]:
    pixels = np.random.default_rng(0).integers(0, 255, size=(24, 32, 3), dtype=np.uint8)
    return lambda folder: Image.fromarray(pixels).save(folder / "x", kind)


def _load_noise(path: Path) -> object:
    return load_noise(path, np.arange(20) // 5, 4)


def _read_answers(folder: Path, name: str) -> None:
    decisions = Decisions(folder / "decisions.sqlite")
    try:
        read_decisions(decisions, folder / name)
    finally:
        decisions.close()


def _label_studio(folder: Path) -> None:
    answer = {"result": [{"from_name": "verdict", "type": "choices", "value": {"choices": ["matched"]}}]}
    (folder / "x.json").write_text(json.dumps([{"data": {"id": "p1"}, "annotations": [answer]}]))


def _index(folder: Path) -> None:
    vectors = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
    build_index(vectors, np.asarray, folder / "index", HAS_USEARCH)


def _search(folder: Path) -> None:
    index = open_index(folder / "index", np.asarray)
    index.nearest(np.ones(4, np.float32), 3)


def _summary(folder: Path) -> None:
    case = make_case(60, 0.3)
    (folder / "summary.json").write_text(mispair.audit(case.left, case.right).summary.model_dump_json())


READERS = {
    "npy": Reader(
        "x.npy",
        lambda folder: np.save(folder / "x.npy", np.ones((4, 3, 2), np.float32)),
        lambda folder: check_finite(open_array(folder / "x.npy", ndim=3), "x"),
    ),
    "noise file": Reader(
        "x.npy",
        lambda folder: np.save(folder / "x.npy", np.arange(20) % 4),
        lambda folder: _load_noise(folder / "x.npy"),
    ),
    "vocabulary": Reader(
        "v.json",
        lambda folder: Vocabulary.build(["a dog", "a cat"], threshold=1).save(folder / "v.json"),
        lambda folder: Vocabulary.load(folder / "v.json"),
    ),
    "SCAN captions": Reader(
        "d/train_caps.txt", lambda folder: tiny_folder(folder / "d", 4), lambda folder: mispair.load(folder / "d")
    ),
    "SCAN ids": Reader(
        "d/train_ids.txt", lambda folder: tiny_folder(folder / "d", 4), lambda folder: mispair.load(folder / "d")
    ),
    "SCAN features": Reader(
        "d/train_ims.npy", lambda folder: tiny_folder(folder / "d", 4), lambda folder: mispair.load(folder / "d")
    ),
    **{f"table {ending}": _table(f"x{ending}") for ending in (".csv", ".tsv", ".jsonl", ".parquet")},
    "COCO captions": Reader("captions.json", _coco, lambda folder: _open_captions(folder / "captions.json", folder)),
    "tar": Reader("00000.tar", _tar, lambda folder: _open_captions(folder / "00000.tar", folder)),
    "vectors": Reader("img_emb/img_emb_0.npy", _vectors, _open_input),
    "metadata": Reader("metadata/metadata_0.parquet", _vectors, _open_input),
    "recipe": Reader(
        "r.toml",
        lambda folder: (folder / "r.toml").write_text('method = "repair"\nepochs = 3\nlr = 1e-4\ntau = 0.05\n'),
        lambda folder: read_recipe(folder / "r.toml"),
    ),
    "suite": Reader(
        "s.toml",
        lambda folder: shutil.copy(find_packaged("suite", "shapes"), folder / "s.toml"),
        lambda folder: read_suite(folder / "s.toml"),
    ),
    "result.json": Reader(
        "result.json",
        lambda folder: (folder / "result.json").write_text('{"best": {"rsum": 1.0, "epoch": 2}, "steps": 5}'),
        read_result,
    ),
    "summary.json": Reader(
        "summary.json",
        _summary,
        lambda folder: AuditSummary.read(folder / "summary.json"),
    ),
    "match scores": Reader(
        "pairs.parquet",
        lambda folder: pyarrow.parquet.write_table(
            pyarrow.table({"id": ["a", "b"], "match_score": [0.1, 0.9], "is_mismatch": [True, False]}),
            folder / "pairs.parquet",
        ),
        lambda folder: AuditColumns.read(folder / "pairs.parquet"),
    ),
    "tensors": Reader(
        "x.safetensors",
        lambda folder: save_tensors(folder / "x.safetensors", {"a": torch.ones(3, 2)}, {"b": 1}),
        lambda folder: load_tensors(folder / "x.safetensors"),
    ),
    "model": Reader("m.safetensors", _model, lambda folder: Matcher.load(folder / "m.safetensors", "cpu")),
    "index": Reader("index/vectors.npy", _index, _search),
    "mark of an index": Reader("index/index.json", _index, _search),
    **({"graph of an index": Reader("index/graph.usearch", _index, _search)} if HAS_USEARCH else {}),
    "decisions CSV": Reader(
        "x.csv",
        lambda folder: (folder / "x.csv").write_text("id,verdict,caption\np1,drop,\np2,rewrite,a dog\n"),
        lambda folder: _read_answers(folder, "x.csv"),
    ),
    "decisions JSON": Reader("x.json", _label_studio, lambda folder: _read_answers(folder, "x.json")),
    **{
        f"image {kind}": Reader("x", _image(kind), lambda folder: thumbnail(folder / "x"))
        for kind in ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF")
    },
}
