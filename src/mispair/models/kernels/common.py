"""What all Triton kernels need: Triton itself where it is, a trial run, the right GPU."""

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


def works(device: torch.device, trial: Callable[[], object], slow: str) -> bool:
    """Whether kernels run on this device: tries them, for Triton also needs a C compiler and a recent GPU.

    Args:
        device: Any; only CUDA devices have Triton.
        trial: Runs the kernels once, with gradients.
        slow: What takes longer without them, for the warning.
    """
    if not HAS_TRITON or device.type != "cuda":
        return False
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            trial()
    except Exception as error:  # whatever went wrong, torch does the same work
        warnings.warn(f"Triton does not work here, so {slow} takes longer: {error}", stacklevel=3)
        return False
    return True


def on(tensor: Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's GPU the current one, where Triton launches; the CPU is for Triton's interpreter."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def jit(*changing: str) -> Callable[[Callable[..., Any]], Any]:
    """`triton.jit` where there is Triton. Sizes that are `changing` from batch to batch must not compile a kernel each."""

    def decorate(kernel: Callable[..., Any]) -> Any:
        return triton.jit(kernel, do_not_specialize=list(changing)) if HAS_TRITON else kernel

    return decorate
