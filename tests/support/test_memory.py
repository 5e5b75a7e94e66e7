"""Memory of this process."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest

from mispair.support.memory import is_out_of_memory, release_pages


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("Cannot allocate memory"), True),
        (RuntimeError("Resource temporarily unavailable"), True),  # a thread of gloo that could not start
        (RuntimeError("can't start new thread"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_means_that_memory_ran_out(error: Exception, is_it: bool) -> None:
    assert is_out_of_memory(error) == is_it


def mapped_kilobytes() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    return int(lines["RssFile"].split()[0])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how many pages of files are resident")
def test_pages_of_a_mapped_file_are_given_back(tmp_path: Path) -> None:
    content = bytes(range(256)) * (1 << 16)  # 16 MB
    (tmp_path / "file").write_bytes(content)
    with (tmp_path / "file").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    assert mapped[:] == content
    before = mapped_kilobytes()
    release_pages(mapped)
    assert mapped_kilobytes() < before - 8_000
    assert mapped[:] == content
