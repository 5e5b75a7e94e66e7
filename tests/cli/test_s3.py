"""Audits of data in S3, from a server of this machine that makes mistakes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from audit_cases import make_case
from faulty_server import FAULTS
from layouts import img2dataset, triples
from mispair.cli.main import main
from mispair.errors import DataError, NotFoundError
from mispair.pairs import remote
from mispair.pairs.layouts.opening import open_raw
from mispair.pairs.remote import fetch
from refusals import refused
from s3_store import BUCKET, S3Store, s3_store

pytestmark = pytest.mark.slow
TABLES = ("pairs.parquet", "pairs.csv", "suggestions.csv", "suggestions.parquet")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Store]:
    with s3_store(monkeypatch) as running:
        yield running


def clip_retrieval(folder: Path) -> None:
    case = make_case(400, 0.3)
    for number, rows in enumerate(np.array_split(np.arange(len(case)), 3)):
        for stem, vectors in (("img_emb", case.left), ("text_emb", case.right)):
            (folder / stem).mkdir(parents=True, exist_ok=True)
            np.save(folder / stem / f"{stem}_{number}.npy", vectors[rows])
        (folder / "metadata").mkdir(exist_ok=True)
        table = pyarrow.table(
            {"image_path": [f"{row}.jpg" for row in rows], "caption": [f"text {row}" for row in rows]}
        )
        pyarrow.parquet.write_table(table, folder / "metadata" / f"metadata_{number}.parquet")


def datacomp(folder: Path) -> None:
    case = make_case(400, 0.3, widths=(16, 16))
    folder.mkdir()
    for number, rows in enumerate(np.array_split(np.arange(len(case)), 2)):
        np.savez(folder / f"{number:08d}.npz", l14_img=case.left[rows], l14_txt=case.right[rows])
        columns = {"uid": [f"{row:032x}" for row in rows], "text": [f"text {row}" for row in rows]}
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / f"{number:08d}.parquet")


def audit(tmp_path: Path, *args: str) -> int:
    return main(["audit", *args, "--device", "cpu", "--cache", str(tmp_path / "cache")])


@pytest.mark.parametrize("layout", [clip_retrieval, datacomp])
def test_the_tables_are_those_of_local_folders(
    store: S3Store, tmp_path: Path, layout: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "RANGE", 4_000)
    layout(tmp_path / "data")
    url = store.upload(tmp_path / "data", "a/data")
    store.proxy.every = 3
    assert audit(tmp_path, str(tmp_path / "data"), "--out", str(tmp_path / "local")) == 0
    assert audit(tmp_path, url, "--out", str(tmp_path / "out")) == 0
    assert store.proxy.injected >= len(FAULTS)
    for path in [tmp_path / "local" / name for name in TABLES] + list((tmp_path / "local/shards").glob("*")):
        assert (tmp_path / "out" / path.relative_to(tmp_path / "local")).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("fault", FAULTS)
def test_what_never_comes_is_given_up(store: S3Store, tmp_path: Path, fault: str) -> None:
    store.put("a/left.npy", np.random.default_rng(0).bytes(1_000))
    whole = fetch(f"s3://{BUCKET}/a/left.npy", tmp_path / "whole")
    store.proxy.requests = 0
    store.proxy.faults = ["", *[fault] * 1_000]
    with pytest.raises(DataError, match=f"{remote.ATTEMPTS} times"):
        fetch(f"s3://{BUCKET}/a", tmp_path / "cache")
    assert store.proxy.requests <= 3 * remote.ATTEMPTS
    store.proxy.faults = []
    assert (fetch(f"s3://{BUCKET}/a", tmp_path / "cache") / "left.npy").read_bytes() == whole.read_bytes()


def test_tars(store: S3Store, tmp_path: Path) -> None:
    folder = img2dataset(tmp_path / "tars")
    store.proxy.every = 4
    copy = fetch(store.upload(folder, "tars"), tmp_path / "cache")
    assert triples(open_raw(copy)) == triples(open_raw(folder))


def test_missing_buckets_and_names(store: S3Store, tmp_path: Path) -> None:
    store.put("a/left.npy", b"1")
    for url in ("s3://other/a", "s3://other", f"s3://{BUCKET}/b", f"s3://{BUCKET}/a/left"):
        with refused(NotFoundError, url):
            fetch(url, tmp_path)


@pytest.mark.usefixtures("store")
def test_missing_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(DataError, match="AWS_ACCESS_KEY_ID"):
        fetch(f"s3://{BUCKET}/a", tmp_path)


def test_a_store_that_refuses(store: S3Store, tmp_path: Path) -> None:
    store.put("a/left.npy", b"1")
    store.proxy.faults = ["403"] * 9
    with pytest.raises(DataError):
        fetch(f"s3://{BUCKET}/a/left.npy", tmp_path)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Embeddings, and their audit in the folder local beside them."""
    clip_retrieval(tmp_path / "data")
    assert audit(tmp_path, str(tmp_path / "data"), "--out", str(tmp_path / "local")) == 0
    return tmp_path / "data"


def check_output(store: S3Store, tmp_path: Path, prefix: str = "audits/mine") -> None:
    """All files are there, and the tables are those of the local audit."""
    found, local = store.files(prefix), tmp_path / "local"
    assert set(found) == {path.relative_to(local).as_posix() for path in local.rglob("*") if path.name[0] != "."}
    assert json.loads(found["audit.json"])["finished"] is True
    for name in TABLES:
        assert found[name] == (local / name).read_bytes()


def test_the_output_is_whole_or_marked_as_unfinished(store: S3Store, tmp_path: Path, data: Path) -> None:
    url, out = store.upload(data, "data"), f"s3://{BUCKET}/audits/mine"
    store.proxy.every = 5
    assert audit(tmp_path, url, "--out", out) == 0
    assert store.proxy.injected >= len(FAULTS)
    check_output(store, tmp_path)
    assert not list((tmp_path / "cache" / "outputs").rglob("pairs.parquet"))


def test_a_finished_output_is_not_repeated(
    store: S3Store, tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = f"s3://{BUCKET}/audits/mine"
    assert audit(tmp_path, str(data), "--out", out) == 0
    before = store.files("audits/mine")
    assert f"Report: {out}/report.html" in capsys.readouterr().out
    assert audit(tmp_path, str(data), "--out", out, "--for", "fiftyone") == 0
    assert "nothing was computed again" in "".join(capsys.readouterr())
    after = store.files("audits/mine")
    assert after.pop("fiftyone.csv")
    assert after == before
    assert audit(tmp_path, str(data), "--out", out, "--flag-below", "0.4") == 2
    assert {out, "--flag-below"} <= set(re.findall(r"s3://[\w/]+|--[a-z-]+", capsys.readouterr().err))
    assert store.files("audits/mine").keys() == {*before, "fiftyone.csv"}
    assert audit(tmp_path, str(data), "--out", out, "--flag-below", "0.4", "--overwrite") == 0
    assert store.files("audits/mine").keys() == before.keys()


@pytest.mark.parametrize("after", [1, 4, 7])  # of 8: two marks and six files
def test_a_failed_write_is_never_taken_for_an_audit(
    store: S3Store, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    out = f"s3://{BUCKET}/audits/mine"
    put, writes = remote.Store.put, iter(range(100))

    def failing(self: remote.Store, path: Path, name: str) -> None:
        if next(writes) >= after:
            raise DataError("the store is gone")
        put(self, path, name)

    with monkeypatch.context() as patch:
        patch.setattr(remote.Store, "put", failing)
        assert audit(tmp_path, str(data), "--out", out) == 2
    assert json.loads(store.files("audits/mine")["audit.json"])["finished"] is False
    assert audit(tmp_path, str(data), "--out", out) == 0
    check_output(store, tmp_path)


@pytest.mark.posix
@pytest.mark.parametrize("layout", [clip_retrieval, datacomp])
def test_workers_of_ray_read_and_write_the_store(
    store: S3Store, tmp_path: Path, layout: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr("mispair.auditing.ray_engine.ALONE", 0)
    layout(tmp_path / "data")
    url = store.upload(tmp_path / "data", "a/data")
    store.proxy.every = 5
    assert audit(tmp_path, url, "--out", f"s3://{BUCKET}/audits/mine", "--engine", "ray", "--workers", "2") == 0
    assert store.proxy.injected >= len(FAULTS)
    store.proxy.every = 0
    assert audit(tmp_path, str(tmp_path / "data"), "--out", str(tmp_path / "local"), "--engine", "ray") == 0
    found = store.files("audits/mine")
    assert json.loads(found["audit.json"])["finished"] is True
    tables = {name: content for name, content in found.items() if name.endswith(".parquet")}
    assert len(tables) == (2 if layout is clip_retrieval else 4)  # all pairs, suggestions, and shards of DataComp
    local = tmp_path / "local"
    assert tables == {path.relative_to(local).as_posix(): path.read_bytes() for path in local.rglob("*.parquet")}


def test_files_of_others_are_kept_and_lost_ones_written_again(store: S3Store, tmp_path: Path, data: Path) -> None:
    out = f"s3://{BUCKET}/audits/mine"
    assert audit(tmp_path, str(data), "--out", out) == 0
    store.put("audits/mine/own/pairs.csv", b"1")
    store.delete("audits/mine/pairs.csv")
    assert audit(tmp_path, str(data), "--out", out) == 0
    assert store.files("audits/mine")["pairs.csv"] == (tmp_path / "local/pairs.csv").read_bytes()
    assert audit(tmp_path, str(data), "--out", out, "--joint", "--overwrite") == 2  # the widths differ
    assert audit(tmp_path, str(data), "--out", out, "--flag-below", "0.4", "--overwrite") == 0
    assert store.files("audits/mine")["own/pairs.csv"] == b"1"


def test_a_mark_leads_to_no_file_outside(store: S3Store, tmp_path: Path, data: Path) -> None:
    out = f"s3://{BUCKET}/audits/mine"
    assert audit(tmp_path, str(data), "--out", out) == 0
    mark = json.loads(store.files("audits/mine")["audit.json"])
    mark["files"]["../../../../outside"] = "0"
    store.put("audits/mine/audit.json", json.dumps(mark).encode())
    store.put("outside", b"1")
    assert audit(tmp_path, str(data), "--out", out) == 0
    assert not list(tmp_path.rglob("outside"))


def test_outputs_that_cannot_be(store: S3Store, tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store.put("full/a.txt", b"1")
    url = store.upload(data, "data")
    for args, expected in (
        (["--out", "s3://other/audit"], "s3://other/audit: "),
        (["--out", f"s3://{BUCKET}/full"], "audit.json"),
        (["--out", f"{url}/audit"], f"{url}/audit"),
        (["--out", "https://host/audit"], "--out: https://host/audit"),
        (["--out", f"s3://{BUCKET}/new", "--review"], "--review"),
        (["--clean", f"s3://{BUCKET}/new"], "--clean: s3://"),
        (["--out", f"s3://{BUCKET}/new", "--by", "nothing"], "nothing"),
    ):
        assert audit(tmp_path, url, *args) == 2
        assert expected in capsys.readouterr().err
    assert not store.files("new")
    assert store.files("full") == {"a.txt": b"1"}
