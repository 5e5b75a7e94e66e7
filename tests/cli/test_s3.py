"""Audits of data in S3, from a server of this machine that makes mistakes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from audit_cases import make_case
from faulty_server import FAULTS
from layouts import img2dataset, triples
from mispair.auditing.layouts.opening import open_raw
from mispair.cli.main import main
from mispair.data import remote
from mispair.data.remote import fetch
from mispair.errors import DataError
from s3_store import BUCKET, S3Store, s3_store

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("hurried")]
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
    with pytest.raises(DataError, match=f"failed {remote.ATTEMPTS} times"):
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
        with pytest.raises(DataError, match=f"{url}: no such file or folder"):
            fetch(url, tmp_path)


@pytest.mark.usefixtures("store")
def test_missing_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(DataError, match="credentials; give those of the store"):
        fetch(f"s3://{BUCKET}/a", tmp_path)


def test_a_store_that_refuses(store: S3Store, tmp_path: Path) -> None:
    store.put("a/left.npy", b"1")
    store.proxy.faults = ["403"] * 9
    with pytest.raises(DataError, match="the store refuses access"):
        fetch(f"s3://{BUCKET}/a/left.npy", tmp_path)
