"""Photos that workers encode; a stand-in for Ray calls what the workers do in this process."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

import mispair
from layouts import write_tar
from mispair.auditing import blocks, ray_cluster, ray_encoding, ray_engine
from mispair.auditing.audit import Settings, audit_source
from mispair.auditing.blocks import find_blocks
from mispair.auditing.folder import audit_path
from mispair.auditing.inputs import AuditInput
from mispair.auditing.output_store import encoded_folder
from mispair.auditing.ray_encoding import Encoding, encode_blocks
from mispair.cli.main import main
from mispair.encoders import encode
from mispair.encoders.encode import Encoders, Outcome, encode_to_folder
from mispair.errors import ChangedError, MissingPackageError, NotFoundError
from mispair.pairs.layouts.clip_retrieval import SIDE_FOLDERS
from mispair.pairs.shards import views_of
from mispair.pairs.source import Source
from ray_stand_in import StandIn
from refusals import refused

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
fsspec = pytest.importorskip("fsspec")

ROWS, CUTS = 200, (0, 70, 130, 200)
CPU = Settings(device="cpu", workers=2)


class Pixels:
    """Small pictures as vectors."""

    width = 12
    pixels = 1024

    def __init__(self, name: str) -> None:
        self.name = name

    def prepare(self, image: Image.Image) -> npt.NDArray[np.float32]:
        colours = np.array(image.resize((2, 2)), dtype=np.float32).reshape(-1)
        return colours / np.float32(255 if self.name == "a" else 51)

    def encode(self, items: Sequence[Any], /) -> npt.NDArray[np.float32]:
        return np.stack(items)


class Letters:
    """Counts of letters."""

    width = 26

    def __init__(self, name: str) -> None:
        self.name = name

    def encode(self, items: Sequence[str], /) -> npt.NDArray[np.float32]:
        return np.array([[text.count(chr(97 + n)) for n in range(26)] for text in items], dtype=np.float32)


@pytest.fixture(autouse=True)
def loads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each encoder was loaded."""
    found: Counter[str] = Counter()

    def load(kind: Any) -> Any:
        return lambda name, _device: found.update([name]) or kind(name)

    monkeypatch.setattr(encode, "image_encoder", load(Pixels))
    monkeypatch.setattr(encode, "text_encoder", load(Letters))
    ray_encoding._loaded.cache_clear()
    return found


def photo(row: int) -> bytes:
    rng, file = np.random.default_rng(row), io.BytesIO()
    Image.fromarray(rng.integers(0, 255, (4, 4, 3), dtype=np.uint8)).save(file, "PNG")
    return b"broken" if row == 5 else file.getvalue()


def caption(row: int) -> str:
    rng = np.random.default_rng(row if row % 5 else row + 1)
    colours = rng.integers(0, 255, (4, 4, 3), dtype=np.uint8).reshape(-1)[:12]
    return "x " + "".join(chr(97 + n) * int(colour // 32) for n, colour in enumerate(colours))


def tars(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for number, (start, stop) in enumerate(pairwise(CUTS)):
        rows = range(start, stop)
        samples = [{f"{row:05d}.png": photo(row), f"{row:05d}.txt": caption(row).encode()} for row in rows]
        write_tar(folder / f"{number:05d}.tar", samples)
    return folder


def table(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for row in range(ROWS):
        (folder / f"{row}.png").write_bytes(photo(row))
    lines = [f"{row}.png,{caption(row)},{row % 3}" for row in range(ROWS)]
    (folder / "pairs.csv").write_text("\n".join(["image_path,caption,third", *lines]), encoding="utf-8")
    return folder / "pairs.csv"


def by_ray(source: Path, out: Path, ray: StandIn | None = None) -> Outcome:
    data = AuditInput(source, image_model="a", text_model="l")
    with encoded_folder(out, {"source": str(source)}) as place:
        return encode_blocks(ray or StandIn(), Encoding(data, find_blocks(data), place, data.models))


def by_itself(source: Path, out: Path) -> Outcome:
    encoders = Encoders("a", "l", "cpu").views()
    return encode_to_folder(AuditInput(source).open("cpu"), out, encoders, out.with_name("cache"))


def content(out: Path) -> tuple[bytes, bytes, dict[str, list[Any]]]:
    sides = (np.concatenate([np.load(path) for path in sorted((out / name).iterdir())]) for name in SIDE_FOLDERS)
    left, right = (side.tobytes() for side in sides)
    return left, right, parquet.read_table(out / "metadata").to_pydict()


def audited(out: Path) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = parquet.read_table(out / "pairs.parquet").to_pydict()
    return found


@pytest.mark.parametrize("layout", [tars, table, lambda folder: tars(folder) / "00001.tar"])
def test_the_vectors_are_those_of_the_local_engine(
    tmp_path: Path, layout: Any, monkeypatch: pytest.MonkeyPatch, loads: Counter[str]
) -> None:
    monkeypatch.setattr(blocks, "SHARD", 60)
    source = layout(tmp_path / "in")
    found = by_ray(source, tmp_path / "ray")
    assert loads == {"a": 1, "l": 1}  # for all blocks
    assert found == by_itself(source, tmp_path / "local")
    assert content(tmp_path / "ray") == content(tmp_path / "local")
    again = StandIn()
    assert by_ray(source, tmp_path / "ray", again).kept == found.rows
    assert loads == {"a": 2, "l": 2}  # by the local engine: nothing is encoded again


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    def killed(_: str, number: int) -> None:
        if number == 2:
            raise KeyboardInterrupt

    source = tars(tmp_path / "in")
    with pytest.raises(KeyboardInterrupt):
        by_ray(source, tmp_path / "ray", StandIn(killed))
    shards = list((tmp_path / "ray/img_emb").iterdir())
    before = {path: path.stat().st_ino for path in shards}
    assert len(before) == 2
    assert json.loads((tmp_path / "ray/encode.json").read_text())["finished"] is False
    assert by_ray(source, tmp_path / "ray").kept == CUTS[2]
    assert {path: path.stat().st_ino for path in shards} == before
    by_itself(source, tmp_path / "local")
    assert content(tmp_path / "ray") == content(tmp_path / "local")


@pytest.mark.parametrize(("layout", "image_model", "by"), [(tars, "a", "shard"), (table, "a+b", "third")])
def test_an_audit_of_photos(
    tmp_path: Path, layout: Any, image_model: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "SHARD", 60)
    data = AuditInput(layout(tmp_path / "in"), image_model=image_model, text_model="l", cache=tmp_path / "cache")
    settings, opened = replace(CPU, by=by), []

    def noted(pairs: Source, *rest: Any, **more: Any) -> mispair.Audit:
        opened.append(pairs)
        return audit_source(pairs, *rest, **more)

    theirs = audit_path(data, tmp_path / "local", settings)
    with monkeypatch.context() as patch:  # so few pairs are audited as by the local engine
        patch.setattr(ray_engine, "audit_source", noted)
        few = audit_path(data, tmp_path / "few", settings, cluster=StandIn())
    expected = data.encoded(data.open("cpu"), "cpu").hashes
    assert expected is not None
    assert expected.any()
    np.testing.assert_array_equal(opened[0].hashes, expected)
    assert few.model_dump(exclude={"seconds", "stages"}) == theirs.model_dump(exclude={"seconds", "stages"})
    assert audited(tmp_path / "few") == audited(tmp_path / "local")

    monkeypatch.setattr(ray_engine, "ALONE", 0)
    ours = audit_path(data, tmp_path / "ray", settings, cluster=StandIn(), clean=tmp_path / "clean")
    assert [(part.value, part.pairs) for part in ours.parts] == [(part.value, part.pairs) for part in theirs.parts]
    found, local = audited(tmp_path / "ray"), audited(tmp_path / "local")
    for name in ("id", "image", "caption", "status"):
        assert found[name] == local[name]
    assert (ours.pairs, ours.unreadable) == (theirs.pairs, theirs.unreadable)
    source = data.encoded(data.open("cpu"), "cpu")
    auditor = mispair.Auditor.load(tmp_path / "ray/auditor.safetensors", "cpu")
    sides = ([view.block(0, ROWS) for view in views_of(side)] for side in (source.left, source.right))
    wanted = auditor.score(*sides)
    score = np.array(found["match_score"], dtype=np.float32)
    good = np.flatnonzero(~np.isnan(score))
    assert len(good) == ROWS - 1
    assert np.mean(score[good] == wanted[good]) > 0.9
    assert (score[good] <= wanted[good]).all()  # lower for near-duplicates
    report = (tmp_path / "ray/report.html").read_text()
    assert report.count("data:image/jpeg") > 5
    kept = AuditInput(tmp_path / "clean", images=tmp_path / "in").open("cpu")
    assert len(kept) == sum(flag is False for flag in found["is_mismatch"])
    assert (tmp_path / "ray/shards").exists() == (tmp_path / "local/shards").exists()


def texts(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for row in range(ROWS):
        (folder / f"{row:03d}.png").write_bytes(photo(row))
        (folder / f"{row:03d}.txt").write_text("\n".join([caption(row), "x two"][: 1 + (row == 7)]))
    return folder


def in_parquet(folder: Path) -> Path:
    folder.mkdir(parents=True)
    images = [{"bytes": photo(row), "path": f"{row}.png"} for row in range(ROWS)]
    columns = {"image": images, "caption": [caption(row) for row in range(ROWS)]}
    parquet.write_table(pyarrow.table(columns), folder / "all.parquet")
    return folder


@pytest.mark.parametrize("layout", [lambda folder: table(folder).parent, texts, in_parquet])
def test_photos_in_a_store_with_a_table_or_texts(tmp_path: Path, layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "SHARD", 60)
    folder = layout(tmp_path / "in")
    if layout is not in_parquet:
        (folder / "3.png" if (folder / "3.png").exists() else folder / "003.png").write_bytes(b"")
    fsspec.filesystem("memory").put(str(folder), f"/{tmp_path.name}/", recursive=True)
    models: Any = {"image_model": "a", "text_model": "l", "cache": tmp_path / "cache"}
    audit_path(AuditInput(folder, **models), tmp_path / "local", CPU)
    local, url = audited(tmp_path / "local"), Path(f"memory://{tmp_path.name}/in")
    few = [(ROWS + 1, tmp_path / "few")] if layout is texts else []  # audited by the local engine, whatever the layout
    for alone, out in (*few, (0, tmp_path / "many")):
        monkeypatch.setattr(ray_engine, "ALONE", alone)
        ray = StandIn()
        audit_path(AuditInput(url, **models), out, CPU, cluster=ray)
        assert ray.calls["encode_block"] == 4
        found = audited(out)
        for name in local if alone else ("id", "image", "caption", "status"):
            assert found[name] == local[name]


def test_a_table_in_a_store_names_files_outside_and_missing_ones(tmp_path: Path) -> None:
    folder = table(tmp_path / "in").parent
    lines = (folder / "pairs.csv").read_text().splitlines()
    lines[1:4] = ["../secret.png,a secret,0", f"{tmp_path}/secret.png,another,1", "nothing.png,no photo,2"]
    (folder / "pairs.csv").write_text("\n".join(lines))
    (tmp_path / "secret.png").write_bytes(photo(1))
    files = fsspec.filesystem("memory")
    files.put(str(folder), f"/{tmp_path.name}/", recursive=True)
    files.pipe(f"/{tmp_path.name}/secret.png", photo(1))
    data = AuditInput(Path(f"memory://{tmp_path.name}/in"), image_model="a", text_model="l", cache=tmp_path / "cache")
    audit_path(data, tmp_path / "ray", CPU, cluster=StandIn())
    status = audited(tmp_path / "ray")["status"]
    assert [words.startswith("image ") for words in status[:4]] == [True, True, True, False]


def test_a_tar_that_cannot_be_read_is_a_row_with_a_status(tmp_path: Path) -> None:
    source = tars(tmp_path / "in")
    (source / "00001.tar").write_bytes(b"nothing" * 300)
    found = by_ray(source, tmp_path / "ray")
    assert (found.rows, found.bad) == (CUTS[1] + CUTS[3] - CUTS[2] + 1, 2)
    status = content(tmp_path / "ray")[2]
    assert status["id"][CUTS[1]] == "00001"
    assert "00001.tar" in status["status"][CUTS[1]]
    assert str(source) in status["status"][CUTS[1]]


def test_errors_of_workers_are_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = AuditInput(tars(tmp_path / "in"), image_model="a", text_model="l")
    with refused(NotFoundError, str(tmp_path / "out")):  # as where another machine does not see it
        encode_blocks(StandIn(), Encoding(data, find_blocks(data), str(tmp_path / "out"), data.models))
    found = find_blocks(data)
    with encoded_folder(tmp_path / "out", {}) as place:
        (tmp_path / "in").rename(tmp_path / "moved")
        with refused(NotFoundError, str(tmp_path / "in")):
            encode_blocks(StandIn(), Encoding(data, found, place, data.models))
        (tmp_path / "moved").rename(tmp_path / "in")

        def missing(*_: str) -> None:
            raise MissingPackageError("a package is missing", where="timm")

        monkeypatch.setattr(encode, "image_encoder", missing)
        with refused(MissingPackageError, "timm"):
            encode_blocks(StandIn(), Encoding(data, found, place, data.models))
    assert not (tmp_path / "out/img_emb").exists()


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ray_cluster, "connect", lambda _: nullcontext(StandIn()))
    source, models = tars(tmp_path / "in"), ["--image-model", "a", "--text-model", "l", "--device", "cpu"]

    def run(*given: str) -> tuple[int, str]:
        code = main(["encode", *given, *models])
        return code, "".join(capsys.readouterr())

    out = tmp_path / "out"
    assert run(str(source), "--out", str(out), "--engine", "ray") == (0, run_lines(out))
    by_itself(source, tmp_path / "local")
    assert content(out) == content(tmp_path / "local")
    code, said = run(str(source), "--out", "memory://bucket/out", "--engine", "ray", "--json")
    assert (code, json.loads(said)["out"], json.loads(said)["kept"]) == (0, "memory://bucket/out", 0)
    assert json.loads(run(str(source), "--out", "memory://bucket/out", "--engine", "ray", "--json")[1])["kept"] == ROWS
    kept = audit_path(AuditInput(Path("memory://bucket/out")), tmp_path / "audit", CPU, cluster=StandIn())
    assert kept.pairs == ROWS
    (source / "00002.tar").unlink()
    for given, words in (
        ([str(source), "--out", str(out), "--engine", "ray"], "--overwrite"),
        ([str(source), "--out", "memory://bucket/out", "--engine", "ray"], "--overwrite"),
        ([str(source), "--out", "memory://bucket/new"], "--engine"),
        ([str(source), "--out", str(tmp_path / "new"), "--engine", "ray", "--grid", "6"], "--grid"),
        ([str(source), "--out", str(tmp_path / "new"), "--address", "auto"], "--engine"),
        ([str(tmp_path / "local"), "--out", str(tmp_path / "new"), "--engine", "ray"], "images and captions"),
        (["memory://bucket/nothing", "--out", str(tmp_path / "new"), "--engine", "ray"], "WebDataset"),
    ):
        code, said = run(*given)
        assert code == 2
        assert words in said
    assert not (tmp_path / "new").exists()
    assert run(str(source), "--out", "memory://bucket/out", "--engine", "ray", "--overwrite")[0] == 0
    with (
        refused(ChangedError, "memory://bucket/out"),
        encoded_folder(Path("memory://bucket/out"), {"source": "another"}),
    ):
        pass


def run_lines(out: Path) -> str:
    bad = "1 of them (0.5%) could not be encoded and stay with a status: 1 for their image, 0 for their caption."
    why = "First: 00005: image cannot be read: not an image that Pillow knows."
    return f"{ROWS} pairs.\n{bad} {why}\nEmbeddings: {out}\n"
