import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mispair.errors import ChangedError, DamagedError, NotFoundError, ShapeError
from mispair.pairs import npy
from mispair.pairs.noise import load_noise
from mispair.pairs.npy import absolute_maximum, check_finite, open_array
from mispair.support.files import replacing
from mispair.support.memory import peak_memory
from refusals import refused


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_good_file_is_mapped_and_not_read(tmp_path: Path, dtype: Any) -> None:
    np.save(tmp_path / "a.npy", np.ones((3, 2), dtype))
    array = open_array(tmp_path / "a.npy", ndim=2)
    assert isinstance(array, np.memmap)
    assert array.shape == (3, 2)
    assert array.dtype == dtype


def test_vectors_may_be_quantised(tmp_path: Path) -> None:
    for dtype in (np.int8, np.float16, np.uint8):
        np.save(tmp_path / f"{np.dtype(dtype)}.npy", np.ones((3, 2), dtype))
    assert open_array(tmp_path / "int8.npy", kind="vector").dtype == np.int8
    assert open_array(tmp_path / "float16.npy", kind="vector").dtype == np.float16
    with refused(ShapeError, tmp_path / "int8.npy", names="int8"):
        open_array(tmp_path / "int8.npy")
    with refused(ShapeError, tmp_path / "uint8.npy", names="int8"):
        open_array(tmp_path / "uint8.npy", kind="vector")


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (b"", ""),
        (b"hello world", ".npy"),
        (b"PK\x03\x04zip", ".npz"),
        (b"\x80\x04pickle", "pickle"),
        (b"version https://git-lfs.github.com/spec/v1\n", "`git lfs pull`"),
        (b"\x93NUMPY\x01\x00\x08\x00rubbish!", "header"),
        (b"\x93NUMPY\x09\x00\x08\x00rubbish!", "header"),
        (b"\x93NUMPY", "header"),
    ],
)
def test_files_that_are_no_arrays_are_refused(tmp_path: Path, content: bytes, names: str) -> None:
    (tmp_path / "a.npy").write_bytes(content)
    with refused(DamagedError, tmp_path / "a.npy", names):
        open_array(tmp_path / "a.npy")


@pytest.mark.parametrize(
    "header",
    [
        b"(", b"[" * 3000, b"-" * 3000, b"{b'descr': '<f4', 'fortran_order': False, 'shape': (3, 4)}",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (-3, 4)}",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (True, 4)}",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (1.5, 4)}", b"\xff\xfe\x00",
    ],
)  # fmt: skip
def test_headers_that_are_none_are_refused(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "a.npy").write_bytes(
        b"\x93NUMPY\x01\x00" + (len(header) + 1).to_bytes(2, "little") + header + b"\n" + bytes(400)
    )
    with refused(DamagedError, tmp_path / "a.npy"):
        open_array(tmp_path / "a.npy")


@pytest.mark.parametrize("array", [np.ones((2, 3), order="F"), np.array([b"ab\0"], "S3"), np.empty(0), np.array(7)])
def test_a_small_array_is_read_as_numpy_reads_it(tmp_path: Path, array: npt.NDArray[Any]) -> None:
    np.save(tmp_path / "a.npy", array)
    with (tmp_path / "a.npy").open("rb") as file:
        found = npy.read_array(file, "a")
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(found, array)
    (tmp_path / "a.npy").write_bytes((tmp_path / "a.npy").read_bytes() + b"1")
    with (tmp_path / "a.npy").open("rb") as file, refused(DamagedError, "a"):
        npy.read_array(file, "a")


@pytest.mark.parametrize(
    ("array", "ndim", "names"),
    [
        (np.ones((2, 2)), 3, "(2, 2)"),
        (np.ones(2, np.int64), 1, "int64"),
        (np.ones(2, ">f4"), 1, ">f4"),
        (np.ones(2, np.complex64), None, "complex64"),
        (np.ones((0, 3)), 2, "(0, 3)"),
    ],
)
def test_arrays_of_another_kind_are_refused(
    tmp_path: Path, array: npt.NDArray[Any], ndim: int | None, names: str
) -> None:
    np.save(tmp_path / "a.npy", array)
    with refused(ShapeError, tmp_path / "a.npy", names):
        open_array(tmp_path / "a.npy", ndim)


@pytest.mark.parametrize("lost", [1, 8, 40])
def test_a_truncated_file_is_refused_with_both_sizes(tmp_path: Path, lost: int) -> None:
    np.save(tmp_path / "a.npy", np.ones((5, 2)))
    whole = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "a.npy").write_bytes(whole[:-lost])
    with refused(DamagedError, tmp_path / "a.npy", f"{len(whole)}"):
        open_array(tmp_path / "a.npy")


@pytest.mark.posix
@pytest.mark.parametrize("read", [lambda a: a[5], lambda a: a[::2][1], lambda a: a[np.array([0, 7])], lambda a: a[1:]])
def test_a_file_that_is_cut_while_it_is_mapped_is_a_sentence(tmp_path: Path, read: Any) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.arange(80_000, dtype=np.float32).reshape(8, 10_000))
    array = open_array(path)
    copied, part = array[np.array([1, 2])], array[2:]
    os.truncate(path, 4096)
    for mapped in (array, part):
        with refused(ChangedError, path, names="4,096"):
            read(mapped)
    assert copied[1][0] == 20_000


def test_pickled_objects_never_run(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([print], dtype=object), allow_pickle=True)
    with refused(DamagedError, tmp_path / "a.npy"):
        open_array(tmp_path / "a.npy")


def test_a_missing_file_and_a_folder_are_sentences(tmp_path: Path) -> None:
    with refused(NotFoundError, tmp_path / "a.npy"):
        open_array(tmp_path / "a.npy")
    with refused(DamagedError, tmp_path):
        open_array(tmp_path)


@given(
    hnp.arrays(
        st.sampled_from([np.float16, np.float32, np.float64]),
        st.tuples(st.integers(1, 12), st.integers(1, 3), st.integers(1, 3)),
        elements=st.floats(allow_nan=True, allow_infinity=True, width=16),
    ),
    st.integers(1, 200),
)
def test_the_scans_agree_with_numpy_whatever_the_chunk(array: npt.NDArray[Any], chunk_bytes: int) -> None:
    bad = ~np.isfinite(array).all(axis=(1, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(npy, "_CHUNK_BYTES", chunk_bytes)
        np.testing.assert_equal(absolute_maximum(array), float(np.abs(array).max()))
        if bad.any():
            with refused(DamagedError, "x", f"row {bad.argmax()}"):
                check_finite(array, "x")
        else:
            check_finite(array, "x")


def test_a_sum_that_overflows_is_not_a_bad_value() -> None:
    for kind in (np.float32, np.float16):
        array = np.full((4, 8), np.finfo(kind).max, kind)
        with np.errstate(over="ignore"):
            assert np.isinf(array.sum())  # so the sum alone would call it bad
        check_finite(array, "x")


def test_what_is_too_large_for_float32_is_refused() -> None:
    array = np.ones((4, 8))
    check_finite(array, "x")
    array[2, 3] = 1e39
    with refused(DamagedError, "x", names="float32"):
        check_finite(array, "x")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")

    def fail() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.posix
def test_eighty_gigabytes_of_nothing_take_no_memory(tmp_path: Path) -> None:
    for name, dtype, shape in (("features", "<f4", (10_000_000, 1, 2000)), ("noise", "<i8", (10_000_000_000,))):
        with (tmp_path / f"{name}.npy").open("wb") as file:
            np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
            file.truncate(file.tell() + 80_000_000_000)  # sparse: takes no room on the disk either
    before = peak_memory()
    features = open_array(tmp_path / "features.npy", ndim=3)
    assert features.shape == (10_000_000, 1, 2000)
    assert not features[9_999_999].any()
    with refused(ShapeError, tmp_path / "noise.npy", names="10,000,000,000"):
        load_noise(tmp_path / "noise.npy", np.arange(20), 4)
    assert before is not None
    assert (peak_memory() or 0) - before < 100e6
