"""Audits of files at URLs."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from audit_cases import make_case
from faulty_server import FAULTS, serve
from mispair.auditing.folder import read_input
from mispair.cli.main import main
from mispair.errors import NotFoundError
from mispair.pairs import remote
from mispair.pairs.remote import fetch

pytest.importorskip("pyarrow")


def npy(array: npt.NDArray[np.float32]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def test_the_tables_are_those_of_local_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(remote, "RANGE", 2_000)
    monkeypatch.setattr(remote, "PAUSE", 0.0)
    monkeypatch.setattr(remote, "TIMEOUT", 0.3)
    case = make_case(100, 0.3)
    files = [npy(case.left), npy(case.right)]
    for name, content in zip(("left.npy", "right.npy"), files, strict=True):
        (tmp_path / name).write_bytes(content)
    local = ["--left", str(tmp_path / "left.npy"), "--right", str(tmp_path / "right.npy")]
    assert main(["audit", *local, "--out", str(tmp_path / "local"), "--device", "cpu"]) == 0
    with serve(files[0]) as left, serve(files[1]) as right:
        left.faults = ["", *FAULTS]
        urls = ["--left", left.url, "--right", right.url, "--cache", str(tmp_path / "cache")]
        assert main(["audit", *urls, "--out", str(tmp_path / "out"), "--device", "cpu"]) == 0
        assert f"Fetching {left.url}" in capsys.readouterr().err
    for name in ("pairs.parquet", "pairs.csv", "suggestions.csv"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "local" / name).read_bytes()


def test_input_and_output_in_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = pytest.importorskip("fsspec").filesystem("memory")
    case = make_case(100, 0.3)
    for stem, vectors in (("img_emb", case.left), ("text_emb", case.right)):
        (tmp_path / "data" / stem).mkdir(parents=True)
        (tmp_path / "data" / stem / f"{stem}_0.npy").write_bytes(npy(vectors))
        store.pipe(f"/stored/data/{stem}/{stem}_0.npy", npy(vectors))
    monkeypatch.setenv("MISPAIR_CACHE", str(tmp_path / "cache"))
    out = "memory://stored/audit"
    assert main(["audit", str(tmp_path / "data"), "--out", str(tmp_path / "local"), "--device", "cpu"]) == 0
    assert main(["audit", "memory://stored/data", "--out", out, "--device", "cpu"]) == 0
    assert sorted(store.find("/stored/audit")) == sorted(
        f"/stored/audit/{path.name}" for path in (tmp_path / "local").iterdir() if path.name[0] != "."
    )
    for name in ("pairs.parquet", "pairs.csv", "suggestions.csv"):
        assert store.cat(f"/stored/audit/{name}") == (tmp_path / "local" / name).read_bytes()
    store.get("/stored/audit", str(tmp_path / "copied"), recursive=True)
    assert read_input(tmp_path / "copied").source == fetch("memory://stored/data", tmp_path / "cache" / "fetched")
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(NotFoundError):
        read_input(tmp_path / "copied")
