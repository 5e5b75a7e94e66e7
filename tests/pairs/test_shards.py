"""Files that are read one after the other as the rows of a side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
import torch

from mispair.errors import ChangedError, NotFoundError
from mispair.pairs import shards
from mispair.pairs.layouts.opening import open_source
from mispair.pairs.shards import ArrayRows, SideRows, TensorRows, open_files
from mispair.support.arrays import IntArray
from refusals import refused

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ROWS = 4  # a shard


def write(folder: Path, left: Sequence[int], right: Sequence[int], tables: Sequence[int] = ()) -> Path:
    """A clip-retrieval folder of shards and tables with these numbers."""
    for stem in ("img_emb", "text_emb", "metadata"):
        (folder / stem).mkdir(parents=True)
    for stem, numbers in (("img_emb", left), ("text_emb", right)):
        for number in numbers:
            np.save(folder / stem / f"{stem}_{number}.npy", np.full((ROWS, 2), number, dtype=np.float32))
    for number in tables:
        ids = [f"{number} {row}" for row in range(ROWS)]
        parquet.write_table(arrow.table({"id": ids}), folder / "metadata" / f"metadata_{number}.parquet")
    return folder


def test_shards_that_lack_different_partners_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "sides", (0, 2, 3), (0, 1, 3))
    with refused(NotFoundError, tmp_path / "sides", names="text_emb_1.npy"):
        open_source(tmp_path / "sides")
    write(tmp_path / "table", (0, 1, 3), (0, 1, 3), (0, 1, 2))
    with refused(NotFoundError, tmp_path / "table", names="metadata_2.parquet"):
        open_source(tmp_path / "table")
    fine = open_source(write(tmp_path / "fine", (0, 2), (0, 2), (0, 2)))
    assert fine.ids([0, ROWS]) == ["0 0", "2 0"]


def test_shards_that_are_cut_elsewhere_may_have_other_numbers(tmp_path: Path) -> None:
    folder = write(tmp_path, (0, 7), (0, 1))
    for number, rows in ((0, ROWS - 1), (1, ROWS + 1)):
        np.save(folder / f"text_emb/text_emb_{number}.npy", np.ones((rows, 2), dtype=np.float32))
    assert len(open_source(folder)) == 2 * ROWS


def test_one_row_that_is_stored_as_columns(tmp_path: Path) -> None:
    with (tmp_path / "one.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": True, "shape": (1, 8)})
        file.write(np.arange(8, dtype="<f4").tobytes())
    side = open_files([tmp_path / "one.npy"])
    assert side.gather(np.array([0])).tolist() == side.block(0, 1).tolist() == [[*range(8)]]


def test_many_small_files_are_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = np.random.default_rng(0).standard_normal((40, 3)).astype(np.float32)
    paths = [tmp_path / f"{row}.npy" for row in range(40)]
    for path, row in zip(paths, whole, strict=True):
        np.save(path, row[None])
    side = open_files(paths)
    for path in paths:
        path.unlink()  # what is small is in memory
    rows = np.random.default_rng(1).integers(40, size=100)
    assert (side.gather(rows) == whole[rows]).all()
    assert (side.block(3, 31) == whole[3:31]).all()
    monkeypatch.setattr(shards, "_SMALL", 0)
    for path, row in zip(paths, whole, strict=True):
        np.save(path, row[None])
    assert (open_files(paths).gather(rows) == whole[rows]).all()


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("small", [0, 1 << 16])
def test_rows_of_a_file_in_either_order(
    tmp_path: Path, order: Literal["C", "F"], small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "_SMALL", small)
    whole = np.random.default_rng(0).standard_normal((200, 3)).astype(np.float16)
    np.save(tmp_path / "a.npy", np.asarray(whole, order=order))
    with (tmp_path / "a.npy").open("ab") as file:
        file.write(b"more than the header says")
    (shard,) = open_files([tmp_path / "a.npy"]).shards
    for rows in (slice(0, 200), slice(5, 9), slice(7, 7), np.array([3, 3, 199, 0]), np.arange(20, 120)):
        found = shard.read(rows)
        assert found.dtype == np.float16
        assert (found == whole[rows]).all()
        assert found.flags.owndata


def test_a_file_that_changes_while_it_is_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_SMALL", 0)
    path = tmp_path / "a.npy"
    np.save(path, np.ones((9, 4), dtype=np.float32))
    side = open_files([path])
    np.save(path, np.ones((9, 8), dtype=np.float16))
    with refused(ChangedError, path):
        side.block(0, 9)
    path.unlink()
    with refused(NotFoundError, path):
        side.gather(np.array([3]))


def test_a_gather_reads_only_the_shards_of_its_rows() -> None:
    class Watched(ArrayRows):
        def read(self, rows: slice | IntArray) -> npt.NDArray[Any]:
            reads.append(len(self.array))
            return super().read(rows)

    reads: list[int] = []
    side = SideRows.of([Watched(np.full((size, 2), size, dtype=np.float32)) for size in (1, 2, 3, 4)])
    assert side.gather(np.array([9, 1, 8]))[:, 0].tolist() == [4, 2, 4]
    assert reads == [2, 4]
    assert side.gather(np.empty(0, dtype=np.int64)).shape == (0, 2)


@pytest.mark.parametrize(
    ("size", "kind"), [(1e20, np.float32), (1e-23, np.float32), (1e60, np.float64), (3, np.float16)]
)
def test_scaled_by_a_power_of_two(size: float, kind: type[np.floating[Any]]) -> None:
    values = (np.random.default_rng(0).standard_normal((20, 4)) * size).astype(kind)
    side = SideRows.of([ArrayRows(values[:7]), ArrayRows(values[7:])]).scaled(np.arange(20))
    found = side.block(0, 20)
    exponents = np.log2(np.abs(values.astype(np.float64) / found))
    assert np.allclose(exponents, np.round(exponents[0, 0]), atol=1e-4)
    assert 0.5 < np.median(np.abs(found).max(axis=1)) < (2 if size != 3 else 20)
    assert (side.gather(np.array([9, 2])) == found[[9, 2]]).all()
    loaded = side.loaded(torch.device("cpu"), workers=1)  # as on a GPU
    assert loaded.factor == side.factor == 2.0 ** -np.round(exponents[0, 0])
    np.testing.assert_array_equal(loaded.block(0, 20), found)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.int8, ">f4"])
def test_loaded_vectors_are_the_same(kind: npt.DTypeLike, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_LOADED", 3)
    cpu, rng = torch.device("cpu"), np.random.default_rng(0)
    parts = [(100 * rng.standard_normal((rows, 4))).astype(kind) for rows in (5, 1, 7)]
    side = SideRows.of([ArrayRows(part) for part in parts])
    loaded = side.loaded(cpu, workers=2)
    (held,) = loaded.shards
    assert isinstance(held, TensorRows)
    assert loaded.is_on(cpu)
    assert not loaded.is_on(torch.device("meta"))
    assert not side.is_on(cpu)
    assert held.tensor.dtype == (torch.float16 if kind is np.float16 else torch.float32)
    rows = np.array([12, 0, 5, 5, 3])
    for one in (side, loaded):
        np.testing.assert_array_equal(one.tensor(slice(2, 9), cpu), np.concatenate(parts)[2:9].astype(np.float32))
        np.testing.assert_array_equal(one.tensor(rows, cpu), np.concatenate(parts)[rows].astype(np.float32))
        np.testing.assert_array_equal(one.gather(rows), np.concatenate(parts)[rows].astype(np.float32))


def test_numbers_too_large_for_single_precision_are_infinite_where_they_are_loaded() -> None:
    side = SideRows.of([ArrayRows(np.array([[1e300, 1.0]]))])
    assert side.loaded(torch.device("cpu"), workers=1).gather(np.array([0])).tolist() == [[np.inf, 1.0]]
