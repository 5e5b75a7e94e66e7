"""Measure each Triton kernel beside plain torch and `torch.compile`: `make bench-kernels`, on a CUDA device.

One training step of 128 pairs, recorded as a CUDA graph. A row takes a kernel away, or what mispair compiles itself,
and compiles the plain code that takes its place, or all that is around the kernels that are left.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo

from bench_speed import SpeedComparison
from common import run
from mispair.cli.output import say
from mispair.compute.cuda_graphs import CudaGraphStep
from mispair.config import Config
from mispair.errors import ConflictError
from mispair.models import sgraf, vse
from mispair.models.kernels import compiled as fused
from mispair.models.kernels import gpo, graph, gru
from synthetic import synthetic_pairs

TIMES = 40
KERNELS: dict[str, Any] = {"graph": graph, "gru": gru, "gpo": gpo, "compiled": fused}
ENTRIES = {"graph": (), "gru": ("scan",), "gpo": ("pool",), "compiled": ()}
PLAIN: dict[str, list[tuple[Any, str]]] = {  # what takes the place of each kernel; torch's GRU is cuDNN's
    "graph": [(sgraf, "plain_attention")],
    "gpo": [(vse.GPO, "forward")],
}
USED = {"sgr": ("graph", "gru", "compiled"), "vse": ("gpo", "gru")}
WHOLE: dict[str, list[tuple[Any, str]]] = {
    "sgr": [(sgraf.SGR, "similarity")],
    "vse": [(vse.PooledRegions, "forward"), (vse.PooledWords, "forward")],
}


@contextmanager
def changed(without: Sequence[str], compiled: Sequence[tuple[Any, str]]) -> Iterator[None]:
    """Take kernels away, hide the others from the compiler, and compile some functions."""
    torch._dynamo.reset()
    with ExitStack() as stack:
        for name, kernel in KERNELS.items():
            if name in without:
                stack.enter_context(patch.object(kernel, "available", lambda _: False))
            else:
                for entry in ENTRIES[name]:
                    hidden = torch.compiler.disable(getattr(kernel, entry))  # type: ignore[no-untyped-call]
                    stack.enter_context(patch.object(kernel, entry, hidden))
        for owner, name in compiled:
            stack.enter_context(patch.object(owner, name, torch.compile(getattr(owner, name), dynamic=False)))
        yield


def step_ms(model: str) -> float:
    """Median milliseconds of a training step on one batch."""
    device = torch.device("cuda")
    config = Config(model=model, batch_size=128, embed_size=1024, device="cuda")
    comparison = SpeedComparison(config, synthetic_pairs(512), device)
    batch = comparison.batch(pad_shapes=True)
    step = CudaGraphStep(lambda given: comparison.train(comparison.similarity(given)), on=True)
    for _ in range(3):
        comparison.train(comparison.similarity(batch))
    for _ in range(5):
        step(batch)
    times: list[float] = []
    for _ in range(TIMES):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        step(batch)
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def main() -> None:
    """Print the time of a training step for each way to compute it."""
    if not torch.cuda.is_available():
        raise ConflictError("no CUDA device", where="device", expected="a GPU, as kernels run nowhere else")
    for model, used in USED.items():
        rows: list[tuple[str, Sequence[str], Sequence[tuple[Any, str]]]] = [("as it is", (), ())]
        for name in used:
            rows.append((f"without {name}", (name,), ()))
            if name in PLAIN:
                rows.append((f"without {name}, its place compiled for one shape", (name,), PLAIN[name]))
        rows.append(("the rest compiled for one shape", ("compiled",), WHOLE[model]))
        rows.append(("gru, the rest compiled for one shape", [k for k in used if k != "gru"], WHOLE[model]))
        for what, without, compiled in rows:
            with changed(without, compiled):
                say(f"{model}, {what}: {step_ms(model):.2f} ms")
            torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(run(main))
