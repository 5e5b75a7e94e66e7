"""Memory of this process."""

from __future__ import annotations

import pytest

from mispair.support.memory import is_out_of_memory


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
