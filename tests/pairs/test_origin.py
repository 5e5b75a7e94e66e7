"""How features were made, as `mispair encode` writes it beside them."""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from mispair.errors import DamagedError, DataError, NotFoundError
from mispair.pairs.origin import Projection, check_as_encoded, data_name, note_source
from mispair.support.files import sha256_of
from refusals import refused


def archive(path: Path, mean: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("region_mean.npy", mean)
        file.writestr("region_basis.npy", saved(np.ones((3, 2), np.float32)))
    return path


def saved(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def test_a_projection_comes_back(tmp_path: Path) -> None:
    projection = Projection(np.arange(3, dtype=np.float32), np.ones((3, 2), np.float32))
    projection.save(tmp_path / "basis.npz")
    found = Projection.load(tmp_path / "basis.npz")
    np.testing.assert_array_equal(found.mean, projection.mean)
    np.testing.assert_array_equal(found.basis, projection.basis)


def header(text: bytes) -> bytes:
    return b"\x93NUMPY\x01\x00" + (len(text) + 1).to_bytes(2, "little") + text + b"\n"


@pytest.mark.parametrize(
    "mean",
    [
        b"", b"text", header(b"("), header(b"-" * 3000),
        header(b"{'descr': '|O', 'fortran_order': False, 'shape': (3,)}"),
        header(b"{'descr': '<f4', 'fortran_order': False, 'shape': (900000000000,)}"),
        header(b"{'descr': '|V0', 'fortran_order': False, 'shape': (3,)}"),
        saved(np.array(["a", "b", "c"])), saved(np.ones((3, 3))),
    ],
)  # fmt: skip
def test_what_is_no_projection_is_refused(tmp_path: Path, mean: bytes) -> None:
    with pytest.raises(DataError):
        Projection.load(archive(tmp_path / "basis.npz", mean))


@pytest.mark.posix
def test_files_that_are_no_archives_are_refused(tmp_path: Path) -> None:
    damaged = bytearray(archive(tmp_path / "flipped.npz", saved(np.ones(3, np.float32))).read_bytes())
    damaged[180] ^= 1
    (tmp_path / "flipped.npz").write_bytes(damaged)
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04 and then nothing")
    np.save(tmp_path / "array.npy", np.ones((3, 2)))
    os.mkfifo(tmp_path / "pipe.npz")
    for name in ("flipped.npz", "cut.npz", "array.npy", "pipe.npz", "none.npz", "."):
        with pytest.raises(DataError, match="no projection can be read here"):
            Projection.load(tmp_path / name)


def test_features_are_called_by_what_they_were_made_from(tmp_path: Path) -> None:
    folder = tmp_path / "features"
    folder.mkdir()
    assert data_name(folder) == "features"
    note_source(folder, Path("somewhere/photos.csv"))
    assert data_name(folder) == "photos.csv"
    for damaged in (b"{", b"[]", b'{"source": 3}', b'{"source": ""}'):
        (folder / ".made_from.json").write_bytes(damaged)
        assert data_name(folder) == "features"


def test_encoded_files_are_as_they_were_written(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(b"a")
    check_as_encoded(tmp_path)  # a folder without a mark
    mark = {"request": {}, "finished": True, "files": {"a.npy": sha256_of(tmp_path / "a.npy")}}
    (tmp_path / "encode.json").write_text(json.dumps(mark))
    check_as_encoded(tmp_path)
    (tmp_path / "a.npy").write_bytes(b"bc")
    with refused(DamagedError, tmp_path / "a.npy"):
        check_as_encoded(tmp_path)
    for name in ("gone.npy", "no\0name"):
        (tmp_path / "encode.json").write_text(json.dumps({**mark, "files": {name: ""}}))
        with refused(NotFoundError, tmp_path / name):
            check_as_encoded(tmp_path)
