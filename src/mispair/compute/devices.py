"""Devices and the precision on them."""

from __future__ import annotations

import gc
import os

import torch
from torch import Tensor

from mispair.compute.distributed import local_device
from mispair.errors import InvalidValueError

EPSILON = 1e-8  # added to lengths before something is divided by them
KNOWN = "auto, cpu, cuda, cuda:1 or mps"
# Settings of torch's GPU memory. Without expandable segments each recorded step of a new shape takes memory of its own,
# and a training of SGR that needs 6 GB holds 61.
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"


def pick_device(name: str) -> torch.device:
    """The device of this name; `auto` takes a GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InvalidValueError(name, where="device", expected=KNOWN) from None
    if device.type not in ("cpu", "cuda", "mps"):
        raise InvalidValueError(name, where="device", expected=KNOWN)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = f"{name}, but torch sees {torch.cuda.device_count()} CUDA devices"
        raise InvalidValueError(found, where="device", advice="Give `device=cpu`.")
    if device.type == "cuda" and device.index is None and (own := local_device()) is not None:
        device = torch.device("cuda", own)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise InvalidValueError("mps, but torch sees no such device", where="device", advice="Give `device=cpu`.")
    if device.type == "cuda" and not set(ALLOCATOR) & set(os.environ):
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"  # read when the first memory is taken
    return device


def give_back_memory() -> None:
    """Free unused GPU memory, such as that of a finished trainer: it refers to itself."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """bf16 if `precision` says so, or by default on CUDA."""
    half = precision == "bf16" or (precision == "auto" and device.type == "cuda")
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=half)


def uncached(device: torch.device) -> torch.autocast:
    """Return the present autocast without its weight cache: a recorded step must not share converted weights."""
    kind = device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """To the device without waiting for it."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def full_precision(tensor: Tensor) -> torch.autocast:
    """Switches autocast off: scores near 1 tie in bf16."""
    return torch.autocast(tensor.device.type, enabled=False)


def working_dtype(x: Tensor) -> torch.dtype:
    """The precision of matrix products: half precision under autocast, else that of x."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def working(x: Tensor) -> Tensor:
    """Cast to the precision of the matrix products, to move wide tensors in it instead of float32."""
    return x.to(working_dtype(x))
