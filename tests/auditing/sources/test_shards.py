"""Files that are read one after the other as the rows of a side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from mispair.auditing.sources.shards import open_files
from mispair.auditing.sources.source import open_source
from mispair.errors import DataError

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
    with pytest.raises(DataError, match=r"img_emb_2\.npy and \S*text_emb_1\.npy have no partner with the same number"):
        open_source(tmp_path / "sides")
    write(tmp_path / "table", (0, 1, 3), (0, 1, 3), (0, 1, 2))
    with pytest.raises(DataError, match=r"img_emb_3\.npy and \S*metadata_2\.parquet have no partner"):
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
