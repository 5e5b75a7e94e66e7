"""DataComp's metadata: read, written clean and mended, read again."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from audit_cases import make_case
from mispair.cli.main import main
from mispair.errors import DamagedError, NotFoundError, ShapeError
from mispair.pairs.edits import Edits
from mispair.pairs.layouts.copies import write_copy
from mispair.pairs.layouts.datacomp import open_datacomp, uid_subset
from mispair.pairs.pairs import Pairs, Vectors
from refusals import refused

ROWS, CUT = 60, 25


def uid(row: int) -> str:
    return f"{(row * 0x9E3779B97F4A7C15F39CC0605CEDC835) % 2**128:032x}"


def arrays() -> dict[str, npt.NDArray[Any]]:
    found = {}
    for seed, (model, width) in enumerate((("b32", 8), ("l14", 12))):
        case = make_case(ROWS, 0.2, widths=(width, width), seed=seed)
        found[f"{model}_img"], found[f"{model}_txt"] = case.left.astype(np.float16), case.right.astype(np.float16)
    return found


@pytest.fixture(params=["stored", "compressed"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    place = tmp_path / "small/metadata"
    place.mkdir(parents=True)
    save = np.savez if request.param == "stored" else np.savez_compressed
    for name, rows in (("aa", np.arange(CUT)), ("bb", np.arange(CUT, ROWS))):
        columns = {
            "uid": [uid(row) for row in rows.tolist()],
            "url": [f"http://a/{row}" for row in rows],
            "text": [f"caption {row}" for row in rows],
            "original_width": rows,
            "clip_l14_similarity_score": rows / 100,
            "sha256": [f"{row:064x}" for row in rows],
        }
        pyarrow.parquet.write_table(pyarrow.table(columns), place / f"{name}.parquet")
        save(place / f"{name}.npz", **{key: values[rows] for key, values in arrays().items()})  # type: ignore[arg-type]
    return tmp_path / "small"


def test_vectors_and_ids(folder: Path) -> None:
    source = open_datacomp(folder)
    assert source.ids([0, 59]) == [uid(0), uid(59)]
    assert source.texts([3]) == ["caption 3"]
    assert source.joint
    rows = np.array([59, 3, 24, 25, 3])
    np.testing.assert_array_equal(source.left.gather(rows), arrays()["l14_img"][rows].astype(np.float32))
    np.testing.assert_array_equal(source.block(20, 30)[1], arrays()["l14_txt"][20:30].astype(np.float32))
    assert open_datacomp(folder / "metadata", "b32").widths == (8, 8)
    with refused(NotFoundError, folder / "metadata/aa.npz", names="b32_img"):
        open_datacomp(folder, "h14")


def test_copies(folder: Path, tmp_path: Path) -> None:
    source, own = open_datacomp(folder), np.arange(ROWS)
    keep = own != 2
    image_from, caption_from = own.copy(), own.copy()
    image_from[4], caption_from[30] = 50, 7
    write_copy(source, Edits(keep, image_from, caption_from), tmp_path / "out")
    copy = open_datacomp(tmp_path / "out")
    rows = own[keep]
    assert copy.ids(range(ROWS - 1)) == [uid(row) for row in rows.tolist()]
    assert copy.texts(range(ROWS - 1)) == [f"caption {caption_from[row]}" for row in rows]
    for model in ("l14", "b32"):
        copy = open_datacomp(tmp_path / "out", model)
        places = np.arange(ROWS - 1)
        np.testing.assert_array_equal(
            copy.left.gather(places), arrays()[f"{model}_img"][image_from[rows]].astype(np.float32)
        )
        np.testing.assert_array_equal(
            copy.right.gather(places), arrays()[f"{model}_txt"][caption_from[rows]].astype(np.float32)
        )
    parts = [pyarrow.parquet.read_table(path) for path in sorted((tmp_path / "out/metadata").glob("*.parquet"))]
    table = pyarrow.concat_tables(parts).to_pylist()
    assert [row["url"] for row in table] == [f"http://a/{image_from[row]}" for row in rows]
    assert [row["original_width"] for row in table] == image_from[rows].tolist()
    empty = [row for row, entry in zip(rows, table, strict=True) if entry["clip_l14_similarity_score"] is None]
    assert empty == [4, 30]  # the score of a new pair is not known
    subset = np.load(tmp_path / "out/subset.npy")
    assert [f"{high:016x}{low:016x}" for high, low in subset.tolist()] == sorted(uid(row) for row in rows.tolist())


@given(st.lists(st.integers(0, 2**128 - 1), min_size=1))
def test_subsets_are_sorted_as_numbers(numbers: list[int]) -> None:
    subset = uid_subset([f"{number:032x}" for number in numbers])
    assert subset is not None
    assert subset.dtype == np.dtype("u8,u8")
    assert [(high << 64) + low for high, low in subset.tolist()] == sorted(numbers)


def test_other_ids_are_no_subset() -> None:
    assert uid_subset(["photo.jpg"]) is None
    assert uid_subset([]) is None


def test_audit(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["audit", str(folder), "--out", str(out), "--clean", str(tmp_path / "clean"), "--device", "cpu"]) == 0
    whole = pyarrow.parquet.read_table(out / "pairs.parquet")
    parts = [pyarrow.parquet.read_table(out / f"shards/{name}.parquet") for name in ("aa", "bb")]
    assert pyarrow.concat_tables(parts).to_pylist() == whole.to_pylist()
    assert whole["source"].to_pylist() == ["aa"] * CUT + ["bb"] * (ROWS - CUT)
    assert "joint" in whole.column_names
    kept = [row["id"] for row in whole.to_pylist() if not row["is_mismatch"]]
    for place in (out, tmp_path / "clean"):
        assert np.load(place / "subset.npy").tolist() == [
            (int(uid[:16], 16), int(uid[16:], 16)) for uid in sorted(kept)
        ]
    capsys.readouterr()


def test_files_that_do_not_belong_together(folder: Path) -> None:
    path = folder / "metadata/bb.npz"
    path.write_bytes(path.read_bytes()[:-100])
    with refused(DamagedError, path):
        open_datacomp(folder)
    np.savez(path, **{key: values[:3] for key, values in arrays().items()})  # type: ignore[arg-type]
    with refused(ShapeError, folder / "metadata/bb.parquet", names="35"):
        open_datacomp(folder)
    np.savez(path, b32_img=arrays()["b32_img"])
    with refused(ShapeError, path, names="l14_img"):
        open_datacomp(folder)


@pytest.mark.parametrize("claim", ["(9000000000, 4)", "(-1, 4)", "(3, 1000)"])
def test_arrays_that_claim_more_than_they_hold_are_refused(folder: Path, claim: str) -> None:
    path = folder / "metadata/aa.npz"
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {claim}, }}\n".encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("b32_img.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(48))
    with refused(DamagedError):
        open_datacomp(folder)


def test_pairs_of_files_hold_the_vectors(folder: Path) -> None:
    pairs, source = Pairs.from_files(folder), open_datacomp(folder)
    assert isinstance(pairs.left, Vectors)
    np.testing.assert_array_equal(pairs.left.features[pairs.link], source.gather(np.arange(ROWS))[0])
    assert pairs.right_ids == source.texts()
    assert pairs.source is not None
    assert pairs.source.ids([0, 59]) == [uid(0), uid(59)]
