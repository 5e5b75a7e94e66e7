"""Measure each Triton kernel beside plain torch and `torch.compile`: `make bench-kernels`, on a CUDA device.

One training step of 128 pairs, recorded as a CUDA graph. A row takes one kernel away, and compiles the plain code that
takes its place, or compiles the whole similarity around the kernels that are left.
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
from mispair.models import base, encoders, sgraf, vse
from mispair.models.kernels import attention, context, gpo, graph, gru, normalize
from mispair.pairs.synthetic import synthetic_pairs

TIMES = 40
KERNELS: dict[str, Any] = {
    kernel.__name__.rpartition(".")[2]: kernel for kernel in (graph, attention, context, normalize, gru, gpo)
}
ENTRIES = {
    "graph": ("attend", "attend_first"),
    "attention": ("weights",),
    "context": ("attended_difference",),
    "normalize": ("unit",),
    "gru": ("scan",),
    "gpo": ("pool",),
}
PLAIN: dict[str, list[tuple[Any, str]]] = {  # what takes the place of each kernel; torch's GRU is cuDNN's
    "graph": [(sgraf, "plain_attention")],
    "attention": [(sgraf, "context_weights"), (sgraf, "unit_over_words")],
    "context": [(sgraf, "similarity_vectors")],
    "normalize": [(module, "l2norm") for module in (base, encoders, sgraf, vse)],
    "gpo": [(vse.GPO, "forward")],
}
USED = {"sgr": ("graph", "attention", "context", "normalize", "gru"), "vse": ("gpo", "gru", "normalize")}
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
    comparison = SpeedComparison(config, synthetic_pairs(None, 512), device)
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
        rows: list[tuple[str, Sequence[str], Sequence[tuple[Any, str]]]] = [("all kernels", (), ())]
        for name in used:
            rows.append((f"without {name}", (name,), ()))
            if name in PLAIN:
                rows.append((f"{name} compiled", (name,), PLAIN[name]))
        rows.append(("all kernels, the rest compiled", (), WHOLE[model]))
        kept = ("graph", "gru") if model == "sgr" else ("gpo", "gru")
        rows.append((f"{' and '.join(kept)}, the rest compiled", [k for k in used if k not in kept], WHOLE[model]))
        for what, without, compiled in rows:
            with changed(without, compiled):
                say(f"{model}, {what}: {step_ms(model):.2f} ms")
            torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(run(main))
