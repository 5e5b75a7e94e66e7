"""Precision of the computations."""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-8  # added to lengths before something is divided by them


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
