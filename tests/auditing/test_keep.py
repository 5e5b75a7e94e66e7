"""`mispair.keep`: a look-up of the pairs that an audit keeps."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mispair
from layouts import write_tar
from mispair.auditing import keep as module
from mispair.cli.main import main
from mispair.errors import DamagedError, InvalidValueError, NotFoundError
from mispair.pairs.layouts.datacomp import uid_subset

ROWS = 60


def table(path: Path, ids: list[str], flagged: list[bool | None], **columns: Any) -> Path:
    score = [None if flag is None else 0.2 if flag else 0.9 for flag in flagged]
    columns = {"id": ids, "match_score": pyarrow.array(score, "float32"), "is_mismatch": flagged, **columns}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def test_flagged_and_unreadable_pairs_are_not_kept(tmp_path: Path) -> None:
    keep = mispair.keep(table(tmp_path / "pairs.parquet", ["a", "b", "c", "d"], [False, True, None, False]))
    assert [name in keep for name in ("a", "b", "c", "d", "e")] == [True, False, False, True, False]
    assert keep.rows.tolist() == [True, False, False, True]
    assert len(keep) == 2


def test_another_cut_and_another_column(tmp_path: Path) -> None:
    images = ["x", "x", "y", "z"]
    path = table(tmp_path / "pairs.parquet", ["a", "b", "c", "d"], [False, True, True, None], image=images)
    keep = mispair.keep(path, by="image")
    assert [name in keep for name in ("x", "y", "z", "a")] == [True, False, False, False]
    assert mispair.keep(path, flag_below=0.1).rows.tolist() == [True, True, True, False]
    with pytest.raises(NotFoundError):
        mispair.keep(path, by="uid")
    with pytest.raises(InvalidValueError):
        mispair.keep(path, flag_below=2)
    with pytest.raises(NotFoundError):
        mispair.keep(tmp_path / "nothing")


def test_a_new_audit_replaces_what_was_kept(tmp_path: Path) -> None:
    path = table(tmp_path / "pairs.parquet", ["a", "b"], [False, True])
    assert "a" in mispair.keep(path)
    table(path, ["a", "b", "c"], [True, False, False])
    assert [name in mispair.keep(path) for name in "abc"] == [False, True, True]


def test_a_damaged_table(tmp_path: Path) -> None:
    (tmp_path / "pairs.parquet").write_bytes(b"PAR1")
    with pytest.raises(DamagedError):
        mispair.keep(tmp_path)


@given(st.lists(st.text(), unique=True, max_size=50), st.lists(st.text(), max_size=50))
def test_the_hash_table_is_a_set(inside: list[str], others: list[str]) -> None:
    def hashed(keys: list[str]) -> list[int]:
        return [module._hash_of(key) for key in keys if key.isprintable()]

    table: Any = module._table(np.unique(np.array(hashed(inside), dtype=np.uint64)), len(inside))
    keep = object.__new__(module.Keep)
    keep._table, keep._shift = memoryview(table), module._shift(len(inside))
    printable = [key for key in inside if key.isprintable()]
    assert [key in keep for key in [*printable, *others] if key.isprintable()] == [
        key in printable for key in [*printable, *others] if key.isprintable()
    ]


@pytest.mark.parametrize("form", ["{:09d}", "{:032x}", "img_{}.jpg#0"])
def test_keys_of_a_kind_have_different_hashes(form: str) -> None:
    hashes = {module._hash_of(form.format(number)) for number in range(200_000)}
    assert len(hashes) == 200_000
    assert len({found >> 48 for found in hashes}) > 30_000  # and are spread over the table


def test_webdataset_with_two_workers(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    torch_data = pytest.importorskip("torch.utils.data")
    numbers = np.arange(ROWS)
    for shard, rows in enumerate(np.split(numbers, 4)):
        samples = [
            {f"{n:09d}.txt": b"a dog", f"{n:09d}.json": json.dumps({"uid": f"{n:032x}"}).encode()}
            for n in rows.tolist()
        ]
        write_tar(tmp_path / f"{shard:05d}.tar", samples)
    flagged = [bool(flag) for flag in np.random.default_rng(0).random(ROWS) < 0.4]
    uids, keys = [f"{n:032x}" for n in range(ROWS)], [f"{n:09d}" for n in range(ROWS)]
    audit = table(tmp_path / "pairs.parquet", uids, list(flagged), image=keys)
    keep = mispair.keep(audit, by="image")
    tars = [str(path) for path in sorted(tmp_path.glob("*.tar"))]
    data = webdataset.WebDataset(tars, shardshuffle=False).select(lambda sample: sample["__key__"] in keep)
    found = [sample["__key__"] for sample in torch_data.DataLoader(data, num_workers=2, batch_size=None)]
    assert sorted(found) == [key for key, flag in zip(keys, flagged, strict=True) if not flag]
    by_uid = mispair.keep(audit)
    data = webdataset.WebDataset(tars, shardshuffle=False).decode().select(lambda one: one["json"]["uid"] in by_uid)
    assert [sample["__key__"] for sample in data] == sorted(found)


def test_workers_that_are_started_anew_map_the_same_files(tmp_path: Path) -> None:
    keep = mispair.keep(table(tmp_path / "pairs.parquet", ["a", "b"], [False, True]))
    other = pickle.loads(pickle.dumps(keep))
    assert ("a" in other, "b" in other, other.rows.tolist()) == (True, False, [True, False])


def test_the_same_pairs_as_the_subset_of_datacomp(tmp_path: Path) -> None:
    from audit_cases import make_case

    case, place = make_case(ROWS, 0.3, widths=(12, 12)), tmp_path / "data"
    place.mkdir()
    uids = [f"{(n * 0x9E3779B97F4A7C15F39CC0605CEDC835) % 2**128:032x}" for n in range(ROWS)]
    pyarrow.parquet.write_table(pyarrow.table({"uid": uids, "text": ["a"] * ROWS}), place / "a.parquet")
    np.savez(place / "a.npz", l14_img=case.left.astype(np.float16), l14_txt=case.right.astype(np.float16))
    assert main(["audit", str(place), "--out", str(tmp_path / "out"), "--keep-best", "70%", "--device", "cpu"]) == 0
    keep = mispair.keep(tmp_path / "out")
    kept = [uid for uid in uids if uid in keep]
    assert 0 < len(kept) < ROWS
    assert (uid_subset(kept) == np.load(tmp_path / "out/subset.npy")).all()
