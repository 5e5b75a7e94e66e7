"""Where kernel tests run: on a GPU; without one, on the CPU in Triton's interpreter, which `conftest.py` turns on."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from mispair.models.kernels.common import HAS_TRITON

CUDA = torch.device("cuda", 0)


def _interpreter_works() -> bool:
    """Triton before 3.7 takes numbers out of arrays in a way that NumPy has refused since 2.4."""
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]

    return str(triton.__version__) >= "3.7" or np.lib.NumpyVersion(np.__version__) < "2.4.0"


INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1" and _interpreter_works()
HALF = {"cuda": torch.bfloat16, "cpu": torch.float16}  # Triton's interpreter multiplies the bits of bf16 as integers
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs no GPU, and a Triton that works with this NumPy")
on_gpu = pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])
on_cpu = pytest.param("cpu", marks=interpreted)
on_device = pytest.mark.parametrize("device", [on_gpu, on_cpu])
slow_on_cpu = pytest.mark.parametrize("device", [on_gpu, pytest.param("cpu", marks=[interpreted, pytest.mark.slow])])
on_gpu_only = pytest.mark.parametrize("device", [on_gpu])  # the interpreter cannot fail it
quiet = pytest.mark.filterwarnings("ignore:mkldnn_matmul")


def cases(names: str, on_cpu: list[Any], on_gpu: list[Any], slow_on_cpu: Sequence[Any] = ()) -> pytest.MarkDecorator:
    """Parametrizes by a device and these values: few where each size takes seconds to compile or to interpret."""
    gpu = [pytest.param("cuda", *value, marks=[pytest.mark.gpu, needs_gpu]) for value in on_gpu]
    cpu = [pytest.param("cpu", *value, marks=interpreted) for value in on_cpu]
    slow = [pytest.param("cpu", *value, marks=[interpreted, pytest.mark.slow]) for value in slow_on_cpu]
    return pytest.mark.parametrize(f"device, {names}", gpu + cpu + slow)
