"""Audits of files at URLs."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from audit_cases import make_case
from faulty_server import FAULTS, serve
from mispair.cli.main import main
from mispair.data import remote

pytest.importorskip("pyarrow")


def npy(array: npt.NDArray[np.float32]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.usefixtures("hurried")
def test_the_tables_are_those_of_local_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    for name in ("pairs.parquet", "pairs.csv", "suggestions.csv"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "local" / name).read_bytes()
