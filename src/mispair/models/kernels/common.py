"""Common parts of the Triton kernels: optional import, trial run, choice of the GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

try:
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
except ImportError:  # no dependency of the project: torch brings it where it has CUDA
    HAS_TRITON = False
else:
    HAS_TRITON = True

DTYPES = torch.float32, torch.bfloat16, torch.float16  # that kernels read and write; sums are in float32 all the same

# Rows of the largest block of which one program holds all scores. Float32 has no tensor cores: it would spill.
MOST_ROWS = {torch.float32: 64, torch.bfloat16: 128, torch.float16: 128}


def works(device: torch.device, trial: Callable[[], object], slow: str) -> bool:
    """Whether kernels run on this device: `trial` runs them, as Triton also needs a C compiler and a recent GPU.

    Otherwise warn that `slow` is slow.
    """
    if not HAS_TRITON or device.type != "cuda":
        return False
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            trial()
    except Exception as error:  # whatever went wrong, torch does the same work
        warnings.warn(f"Triton does not work here, which slows {slow} down: {error}", stacklevel=3)
        return False
    return True


def on(tensor: Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's GPU the current one, where Triton launches; the CPU is for Triton's interpreter."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def compact(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to this precision and a contiguous layout, with at most one copy."""
    return tensor.to(dtype, memory_format=torch.contiguous_format).contiguous()


def jit(*changing: str) -> Callable[[Callable[..., Any]], Any]:
    """`triton.jit` where there is Triton. Arguments `changing` from batch to batch must not compile a kernel each."""

    def decorate(kernel: Callable[..., Any]) -> Any:
        return triton.jit(kernel, do_not_specialize=list(changing)) if HAS_TRITON else kernel

    return decorate
