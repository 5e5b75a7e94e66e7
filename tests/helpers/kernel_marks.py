"""Where kernel tests run: on a GPU, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1)."""

import os

import pytest
import torch

from mispair.models.kernels.common import HAS_TRITON

CUDA = torch.device("cuda", 0)
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
HALF = {"cuda": torch.bfloat16, "cpu": torch.float16}  # Triton's interpreter multiplies the bits of bf16 as integers
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs Triton and TRITON_INTERPRET=1")
on_gpu = pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])
on_cpu = pytest.param("cpu", marks=interpreted)
on_device = pytest.mark.parametrize("device", [on_gpu, on_cpu])
quiet = pytest.mark.filterwarnings("ignore:mkldnn_matmul")
