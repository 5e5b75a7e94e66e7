"""Measure training step, forward pass, evaluation, labels and bank beside plain loops: `make bench-speed`.

Both are measured in one run on one machine, one after the other, as medians. Only their ratios can be compared between
machines.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.table import Table
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import reference_loops
from captions import pairs_of
from common import at_least, run
from mispair.cli.output import print_json, print_table, say
from mispair.compute.cuda_graphs import CudaGraphStep
from mispair.compute.devices import autocast, pick_device
from mispair.compute.optimizer import make as make_optimizer
from mispair.config import Config
from mispair.errors import ConflictError
from mispair.functional.losses import hard_loss
from mispair.functional.rank_correlation import bank_correlation, distances
from mispair.methods.memory_bank import Bank
from mispair.models import SGR, VSE, Encoded, Network, SideSpec, build
from mispair.models.comparison import compare
from mispair.models.inference import encode_side, inference, score
from mispair.pairs.batches import Batch, PairLoader
from mispair.pairs.pairs import Pairs, Tokens
from mispair.support.arrays import IntArray

MARGIN, NEGATIVES = 0.2, 8
SECONDS = 3.0  # measured once, and again until so much time has gone by
TIMES = 20  # or so many runs
COUNTED = 16  # pairs of the smaller of two batches whose FLOPs are counted


@dataclass(frozen=True)
class SpeedRow:
    """One operation, by mispair and by a loop."""

    what: str
    model: str
    ours_ms: float
    loop_ms: float
    ours_bytes: int | None  # peak memory beyond what was allocated before; known on a GPU only
    loop_bytes: int | None
    of_peak: float | None = None  # FLOPs a second, relative to those of one large matrix product on this device

    @property
    def ratio(self) -> float:
        return self.loop_ms / self.ours_ms


@dataclass(frozen=True)
class SpeedReport:
    """All rows, and the device and sizes that they were measured with."""

    device: str
    settings: dict[str, float]
    rows: list[SpeedRow]

    def to_json(self) -> dict[str, Any]:
        rows = [{**asdict(row), "ratio": row.ratio} for row in self.rows]
        return {"device": self.device, "torch": torch.__version__, "settings": self.settings, "rows": rows}

    def table(self) -> Table:
        settings = ", ".join(f"{name} {value:g}" for name, value in self.settings.items())
        table = Table(title=f"{self.device}: {settings}", caption="loop: a caption, item or pair at a time")
        for head in ("", "ours, ms", "loop, ms", "times", "ours, MB", "loop, MB", "of peak"):
            table.add_column(head, justify="right" if head else "left", no_wrap=True)
        for row in self.rows:
            of_peak = "" if row.of_peak is None else f"{row.of_peak:.0%}"
            memory = ("" if count is None else f"{count / 1e6:,.0f}" for count in (row.ours_bytes, row.loop_bytes))
            times = (f"{row.ours_ms:,.2f}", f"{row.loop_ms:,.2f}", f"{row.ratio:,.1f}")
            table.add_row(f"{row.model} {row.what}", *times, *memory, of_peak)
        return table


class Stopwatch:
    """Medians and peaks on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, run: Callable[[], object], warm: int = 3, times: int = TIMES) -> tuple[float, int | None]:
        """Milliseconds of one run, and bytes that it needs beyond what is allocated."""
        gpu = self.device.type == "cuda"
        if gpu:  # before the warm-up: what it records keeps its memory
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
        for _ in range(warm):
            run()
        if gpu:
            torch.cuda.synchronize(self.device)
        seconds: list[float] = []
        while not seconds or (len(seconds) < times and sum(seconds) < SECONDS):
            start = time.perf_counter()
            run()
            if gpu:
                torch.cuda.synchronize(self.device)
            seconds.append(time.perf_counter() - start)
        peak = torch.cuda.max_memory_allocated(self.device) - before if gpu else None
        return 1e3 * statistics.median(seconds), peak


class SpeedComparison:
    """A network, pairs to train it on, and the two ways to do it."""

    def __init__(self, config: Config, pairs: Pairs, device: torch.device) -> None:
        self.config, self.pairs, self.device = config, pairs, device
        self.network = build(config, SideSpec.of(pairs.left), SideSpec.of(pairs.right), seed=0).to(device).train()
        self.loader = PairLoader(pairs, device)
        self.optimizer = make_optimizer(config, list(self.network.parameters()))
        self.watch = Stopwatch(device)
        self._random_pairs = self._batches()

    def _batches(self) -> Iterator[IntArray]:
        rng = np.random.default_rng(2)
        while True:
            yield rng.choice(len(self.pairs), self.config.batch_size, replace=False)

    def batch(self, *, pad_shapes: bool) -> Batch:
        chosen = next(self._random_pairs)
        return self.loader.batch(chosen, pad_shapes=self.loader.pad_shapes(chosen) if pad_shapes else (None, None))

    def similarity(self, batch: Batch) -> Tensor:
        with autocast(self.device, self.config.precision):
            return compare(self.network, batch.left, batch.right)

    def loop_similarity(self, batch: Batch) -> Tensor:
        """In float32 and a caption or an item at a time, as the public implementations."""
        return loop_similarity(self.network, batch)

    def train(self, S: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        hard_loss(S, MARGIN, NEGATIVES).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.config.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def training_step(self) -> SpeedRow:
        step = CudaGraphStep(lambda batch: self.train(self.similarity(batch)), on=self.device.type == "cuda")
        self.train(self.similarity(self.batch(pad_shapes=True)))  # allocates the optimizer's state, which both need
        theirs = self.watch(lambda: self.train(self.loop_similarity(self.batch(pad_shapes=False))), warm=2)
        ours = self.watch(lambda: step(self.batch(pad_shapes=True)), warm=30 if self.device.type == "cuda" else 2)
        of_peak = self._of_peak(self.flops(train=True), ours[0])
        return SpeedRow("training step", self.config.model, ours[0], theirs[0], ours[1], theirs[1], of_peak)

    def forward(self) -> SpeedRow:
        step = CudaGraphStep(self.similarity, on=self.device.type == "cuda")
        with inference(self.network):
            theirs = self.watch(lambda: self.loop_similarity(self.batch(pad_shapes=False)), warm=2)
            ours = self.watch(lambda: step(self.batch(pad_shapes=True)), warm=30 if self.device.type == "cuda" else 2)
        of_peak = self._of_peak(self.flops(train=False), ours[0])
        return SpeedRow("forward", self.config.model, ours[0], theirs[0], ours[1], theirs[1], of_peak)

    def evaluation(self) -> SpeedRow:
        """All images against all captions; the loop computes one batch, its time is scaled by the number of pairs."""
        left, right = self.loader.left, self.loader.right

        def evaluate() -> Tensor:
            with autocast(self.device, self.config.precision):
                sides = encode_side(self.network, left, left=True), encode_side(self.network, right, left=False)
                return score(self.network, *sides)

        ours = self.watch(evaluate, warm=1, times=3)
        with inference(self.network):
            theirs = self.watch(lambda: self.loop_similarity(self.batch(pad_shapes=False)), warm=1, times=5)
        scaled = theirs[0] * len(self.pairs.left) * len(self.pairs) / self.config.batch_size**2
        return SpeedRow("evaluation", self.config.model, ours[0], scaled, ours[1], theirs[1])

    def labels(self, size: int) -> SpeedRow:
        """Rank-correlation labels of a batch; the loop compares all distances of a pair with each other, M x M."""
        D, B = self.config.embed_size, self.config.batch_size
        bank, items = (
            torch.nn.functional.normalize(torch.rand(2, count, D, device=self.device) - 0.5, dim=-1)
            for count in (size, B)
        )

        def by_counting() -> None:
            for a, b in zip(distances(items[0], bank[0]), distances(items[1], bank[1]), strict=True):
                torch.corrcoef(torch.stack([reference_loops.count_ranks(a), reference_loops.count_ranks(b)]))

        ours = self.watch(lambda: bank_correlation(*items, *bank))
        theirs = self.watch(by_counting, warm=1, times=5)
        return SpeedRow(f"labels, bank of {size:,}", self.config.model, ours[0], theirs[0], ours[1], theirs[1])

    def push(self, size: int) -> SpeedRow:
        """A batch into a full bank; the loop keeps texts padded, in float32, and copies the whole bank."""
        with inference(self.network), autocast(self.device, self.config.precision):
            batch = self.batch(pad_shapes=False)
            a, b = self.network.encode_left(batch.left), self.network.encode_right(batch.right)
        numbers, bank, padded = np.arange(len(batch)), Bank(size), [_padded(side) for side in (a, b)]
        for _ in range(-(-size // len(batch))):
            bank.push(a, b, numbers)
        whole = [part.repeat(-(-size // len(part)), *(1,) * (part.dim() - 1))[:size] for part in padded]

        def push_all() -> None:
            for place, part in enumerate(padded):
                whole[place] = torch.cat([whole[place], part])[-size:]

        ours, theirs = self.watch(lambda: bank.push(a, b, numbers)), self.watch(push_all)
        copied = sum(part.nbytes for part in whole)
        return SpeedRow(f"push, bank of {size:,}", self.config.model, ours[0], theirs[0], bank.nbytes, copied)

    def flops(self, *, train: bool) -> float:
        """Of the matrix products of a step or a forward pass, counted by torch where there are no kernels: on a CPU.

        Encoding grows with the batch and scoring with its square, so two small batches give the FLOPs of any.
        """
        B, n = self.config.batch_size, max(1, min(COUNTED, self.config.batch_size // 2))
        network, loader = copy.deepcopy(self.network).cpu(), PairLoader(self.pairs, torch.device("cpu"))
        assert isinstance(self.pairs.right, Tokens)
        lengths = self.pairs.right.lengths
        average = np.argsort(np.abs(lengths - lengths.mean()), kind="stable")[: 2 * n]  # so padding counts for little
        once, twice = (_count_flops(network, loader.batch(some), train=train) for some in (average[n:], average))
        square = (twice - 2 * once) / (2 * n**2)
        return (once / n - square * n) * B + square * B**2

    def _of_peak(self, flops: float, milliseconds: float) -> float:
        """Relative to one large matrix product of the same precision on this device."""
        half = self.device.type == "cuda" and self.config.precision != "float32"
        size = 8192 if self.device.type == "cuda" else 1024
        square = torch.rand(size, size, device=self.device, dtype=torch.bfloat16 if half else torch.float32)
        peak, _ = self.watch(lambda: square @ square, times=10)
        return flops / milliseconds / (2 * size**3 / peak)


def _count_flops(network: Network, batch: Batch, *, train: bool) -> int:
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(train):
        S = compare(network, batch.left, batch.right)
        if train:
            hard_loss(S, MARGIN, NEGATIVES).backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops())


def _padded(side: Encoded) -> Tensor:
    return (side.pooled if side.local is None else side.local).float()


def loop_similarity(network: Network, batch: Batch) -> Tensor:
    """The same as `network.similarity`, by plain loops; SGR without dropout."""
    if isinstance(network, SGR):
        left, right = network.encode_left(batch.left), network.encode_right(batch.right)
        lengths = right.lengths.tolist() if right.lengths is not None else []
        return reference_loops.sgr_similarity(network, left.parts()[0].float(), right.parts()[0].float(), lengths)
    assert isinstance(network, VSE)
    return reference_loops.vse_similarity(network, batch.left, batch.right)


def measure(
    models: tuple[Literal["sgr", "vse"], ...],
    *,
    device: str = "auto",
    batch_size: int | None = None,
    embed_size: int | None = None,
    banks: tuple[int, ...] = (4096, 8192),
    captions: Path | None = None,
    images: int | None = None,
    on_row: Callable[[str], None] = print,
) -> SpeedReport:
    """Measures everything for each model. By default a GPU gets the sizes of the paper and a CPU smaller ones."""
    place = pick_device(device)
    gpu = place.type == "cuda"
    batch, width = batch_size or (128 if gpu else 32), embed_size or (1024 if gpu else 256)
    pairs = pairs_of(captions, images or (512 if gpu else 64))
    rows: list[SpeedRow] = []
    for model in models:
        config = Config(model=model, batch_size=batch, embed_size=width, device=device, own={"augment": False})
        comparison = SpeedComparison(config, pairs, place)
        jobs: list[Callable[[], SpeedRow]] = [comparison.training_step, comparison.forward, comparison.evaluation]
        jobs += [partial(job, size) for job in (comparison.labels, comparison.push) for size in banks]
        for job in jobs:
            rows.append(job())
            on_row(rows[-1].what)
        del comparison, jobs  # frees the memory of the device
    assert isinstance(pairs.right, Tokens)
    words = float(pairs.right.lengths.mean())
    settings = {"batch_size": batch, "embed_size": width, "images": len(pairs.left), "mean_words": words}
    name = torch.cuda.get_device_name(place) if gpu else f"{torch.get_num_threads()} CPU threads"
    return SpeedReport(name, settings, rows)


def main(
    *,
    model: tuple[Literal["sgr", "vse"], ...] = ("sgr", "vse"),
    device: str = "auto",
    batch_size: int | None = None,
    embed_size: int | None = None,
    bank_size: tuple[int, ...] = (4096, 8192),
    captions: Path | None = None,
    images: int | None = None,
    json: bool = False,
) -> None:
    """Measure training step, forward pass, evaluation, labels and bank beside plain loops that do the same.

    Args:
        model: Which networks.
        device: auto, cpu, cuda, cuda:1, mps.
        batch_size: Pairs a batch; 128 on a GPU, 32 on a CPU.
        embed_size: Width of the embedding; 1024 on a GPU, 256 on a CPU.
        bank_size: Sizes of the memory bank.
        captions: File with a caption a line (.gz or not), for the lengths; generated by default.
        images: How many images to evaluate on, with five captions each; 512 on a GPU, 64 on a CPU.
        json: Print the numbers as JSON.
    """
    at_least(2, batch_size=batch_size, embed_size=embed_size, images=images, bank_size=bank_size)
    if batch_size is not None and images is not None and batch_size > 5 * images:
        raise ConflictError(f"{batch_size}, but {images} images have {5 * images} captions", where="batch_size")
    report = measure(
        model, device=device, batch_size=batch_size, embed_size=embed_size, banks=bank_size, captions=captions,
        images=images, on_row=lambda what: say(what, file=sys.stderr),
    )  # fmt: skip
    if json:
        print_json(report.to_json())
    else:
        print_table(report.table())


if __name__ == "__main__":
    sys.exit(run(main))
