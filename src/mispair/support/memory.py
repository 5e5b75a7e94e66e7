"""Memory of this process."""

from __future__ import annotations

import ctypes
import re
import sys

# torch has no exception of its own for the memory of the CPU and for that which cuBLAS and others take of a GPU, and
# Python none for threads; those of C++ say EAGAIN.
_TORCH = re.compile(
    "out of memory|(can't|[Cc]annot) allocate memory|bad_alloc|STATUS_ALLOC_FAILED|can't start new thread|Resource "
    "temporarily unavailable"
)
_GPU = re.compile("CUDA|CU[A-Z]+_STATUS|MPS")
_ARENA_MAX, _ARENAS = -8, 2  # option of glibc, which otherwise has up to 8 heaps for each core


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python, NumPy, Arrow or torch says: out of memory."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(_TORCH.search(str(error))))


def out_of_memory(error: BaseException) -> str:
    """Advice for the user after such an error."""
    where = " on the GPU" if _GPU.search(str(error)) else ""
    return (
        f"there was not enough memory{where}. End other programs, or lower `batch_size`, `workers` or `jobs`. "
        "Run the command again to resume."
    )


def peak_memory() -> int | None:
    """Peak resident memory of this process in bytes; None on Windows."""
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def spare_memory() -> None:
    """Keep less freed memory in a long-lived process; call it before it has threads."""
    import pyarrow

    pyarrow.set_memory_pool(pyarrow.system_memory_pool())
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(_ARENA_MAX, _ARENAS)
