"""`mispair bench speed`: training step, forward pass, evaluation, labels and bank, beside plain loops that do the same.

Both are measured in one run on one machine, one after the other, as medians. Only such ratios mean anything.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from mispair.bench.measure import reference_loops
from mispair.compute.cuda_graphs import CudaGraphStep
from mispair.compute.devices import autocast, pick_device
from mispair.compute.optimizer import make as make_optimizer
from mispair.config import Config, VseSettings
from mispair.data.batches import Batch, PairLoader
from mispair.data.pairs import IntArray, Pairs, Tokens
from mispair.data.synthetic import REGIONS, WIDTH, synthetic_pairs
from mispair.functional.losses import hard_loss
from mispair.functional.rank_correlation import bank_correlation, distances
from mispair.methods.memory_bank import Bank
from mispair.models import SGR, VSE, Encoded, Network, SideSpec, build
from mispair.models.inference import encode_side, inference, score

NEGATIVES = 8
SECONDS = 3.0  # measured once, and again until so much time has gone by
TIMES = 20  # or so many runs


@dataclass(frozen=True)
class Row:
    """One thing measured."""

    what: str
    model: str
    ours_ms: float
    loop_ms: float
    ours_bytes: int | None  # most memory beyond what was there before; known on a GPU only
    loop_bytes: int | None
    share: float | None = None  # of the matrix products per second that a plain large product reaches here

    @property
    def ratio(self) -> float:
        return self.loop_ms / self.ours_ms


@dataclass(frozen=True)
class Report:
    """All rows and what they were measured with."""

    device: str
    settings: dict[str, Any]
    rows: list[Row]

    def figures(self) -> dict[str, Any]:
        rows = [{**asdict(row), "ratio": row.ratio} for row in self.rows]
        return {"device": self.device, "torch": torch.__version__, "settings": self.settings, "rows": rows}

    def table(self) -> Table:
        settings = ", ".join(f"{name} {value:g}" for name, value in self.settings.items())
        table = Table(title=f"{self.device}: {settings}", caption="loop: a caption, item or pair at a time")
        for head in ("", "ours, ms", "loop, ms", "times", "ours, MB", "loop, MB", "of peak"):
            table.add_column(head, justify="right" if head else "left", no_wrap=True)
        for row in self.rows:
            share = "" if row.share is None else f"{row.share:.0%}"
            memory = ("" if count is None else f"{count / 1e6:,.0f}" for count in (row.ours_bytes, row.loop_bytes))
            times = (f"{row.ours_ms:,.2f}", f"{row.loop_ms:,.2f}", f"{row.ratio:,.1f}")
            table.add_row(f"{row.model} {row.what}", *times, *memory, share)
        return table


class Stopwatch:
    """Medians and peaks on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, run: Callable[[], object], warm: int = 3, times: int = TIMES) -> tuple[float, int | None]:
        """Milliseconds of one run, and bytes that it needs beyond what there is."""
        gpu = self.device.type == "cuda"
        if gpu:  # before the warm-up: what it records keeps its memory
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        for _ in range(warm):
            run()
        if gpu:
            torch.cuda.synchronize()
        taken: list[float] = []
        while not taken or (len(taken) < times and sum(taken) < SECONDS):
            start = time.perf_counter()
            run()
            if gpu:
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
        peak = torch.cuda.max_memory_allocated() - before if gpu else None
        return 1e3 * statistics.median(taken), peak


class SpeedComparison:
    """A network, pairs to train it on, and the two ways to do it."""

    def __init__(self, config: Config, pairs: Pairs, device: torch.device) -> None:
        self.config, self.pairs, self.device = config, pairs, device
        self.network = build(config, SideSpec.of(pairs.left), SideSpec.of(pairs.right), seed=0).to(device).train()
        self.loader = PairLoader(pairs, device)
        self.optimizer = make_optimizer(config, list(self.network.parameters()))
        self.watch = Stopwatch(device)
        self._chosen = self._choices()

    def _choices(self) -> Iterator[IntArray]:
        rng = np.random.default_rng(2)
        while True:
            yield rng.choice(len(self.pairs), self.config.batch_size, replace=False)

    def batch(self, *, pad_shapes: bool) -> Batch:
        chosen = next(self._chosen)
        return self.loader.batch(chosen, pad_shapes=self.loader.pad_shapes(chosen) if pad_shapes else (None, None))

    def similarity(self, batch: Batch) -> Tensor:
        with autocast(self.device, self.config.precision):
            return self.network.similarity(self.network.encode_left(batch.left), self.network.encode_right(batch.right))

    def loop_similarity(self, batch: Batch) -> Tensor:
        """In float32 and a caption or an item at a time, as the public implementations."""
        return loop_similarity(self.network, batch)

    def learn(self, S: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        hard_loss(S, 0.2, NEGATIVES).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.config.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def steps(self) -> Row:
        step = CudaGraphStep(lambda batch: self.learn(self.similarity(batch)), on=self.device.type == "cuda")
        self.learn(self.similarity(self.batch(pad_shapes=True)))  # the optimizer's memory is nobody's
        theirs = self.watch(lambda: self.learn(self.loop_similarity(self.batch(pad_shapes=False))), warm=2)
        ours = self.watch(lambda: step(self.batch(pad_shapes=True)), warm=30 if self.device.type == "cuda" else 2)
        share = self._share(3 * self._flops(), ours[0])
        return Row("training step", self.config.model, ours[0], theirs[0], ours[1], theirs[1], share)

    def forwards(self) -> Row:
        look = CudaGraphStep(self.similarity, on=self.device.type == "cuda")
        with inference(self.network):
            theirs = self.watch(lambda: self.loop_similarity(self.batch(pad_shapes=False)), warm=2)
            ours = self.watch(lambda: look(self.batch(pad_shapes=True)), warm=30 if self.device.type == "cuda" else 2)
        share = self._share(self._flops(), ours[0])
        return Row("forward", self.config.model, ours[0], theirs[0], ours[1], theirs[1], share)

    def evaluations(self) -> Row:
        """All images against all captions; the loop takes a slice, its time grows with the number of pairs."""
        left, right = self.loader.left, self.loader.right

        def evaluate() -> Tensor:
            with autocast(self.device, self.config.precision):
                sides = encode_side(self.network, left, left=True), encode_side(self.network, right, left=False)
                return score(self.network, *sides)

        ours = self.watch(evaluate, warm=1, times=3)
        with inference(self.network):
            theirs = self.watch(lambda: self.loop_similarity(self.batch(pad_shapes=False)), warm=1, times=5)
        grown = theirs[0] * len(self.pairs.left) * len(self.pairs) / self.config.batch_size**2
        return Row("evaluation", self.config.model, ours[0], grown, ours[1], theirs[1])

    def labels(self, size: int) -> Row:
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
        return Row(f"labels, bank of {size:,}", self.config.model, ours[0], theirs[0], ours[1], theirs[1])

    def pushes(self, size: int) -> Row:
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
        kept = sum(part.nbytes for part in whole)
        return Row(f"push, bank of {size:,}", self.config.model, ours[0], theirs[0], bank.nbytes, kept)

    def _flops(self) -> float:
        """Of the matrix products of one forward pass; those that only exist in one of the two ways left out."""
        config, B, D, H = self.config, self.config.batch_size, self.config.embed_size, self.config.word_size
        words = float(self.pairs.right.lengths.mean()) * B  # type: ignore[union-attr]
        recurrence = 2 * words * 3 * D * (H + D)
        if config.model == "vse":
            return 2 * (B * REGIONS * (WIDTH * (D + D // 2) + D * D // 2) + recurrence)
        s, nodes = config.sgraf.sim_size, B * (B + words)
        attention = B * words * REGIONS * D * 2 + nodes * D * s
        graph = (config.sgraf.graph_steps - 1) * nodes * s * s * 2 + B * B * s * s * 2
        pools = (B * REGIONS + words) * D * D
        return 2 * (B * REGIONS * WIDTH * D + recurrence + attention + graph + pools)

    def _share(self, flops: float, milliseconds: float) -> float:
        """Of what one large product of the same precision reaches on this device."""
        half = self.device.type == "cuda" and self.config.precision != "float32"
        size = 8192 if self.device.type == "cuda" else 1024
        square = torch.rand(size, size, device=self.device, dtype=torch.bfloat16 if half else torch.float32)
        peak, _ = self.watch(lambda: square @ square, times=10)
        return flops / milliseconds / (2 * size**3 / peak)


def _padded(side: Encoded) -> Tensor:
    return (side.pooled if side.local is None else side.local).float()


def loop_similarity(network: Network, batch: Batch) -> Tensor:
    """What `network.similarity` gives, by plain loops; SGR without dropout."""
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
    tell: Callable[[str], None] = print,
) -> Report:
    """Measures everything for each model. By default a GPU gets the sizes of the paper and a CPU smaller ones."""
    place = pick_device(device)
    gpu = place.type == "cuda"
    batch, width = batch_size or (128 if gpu else 32), embed_size or (1024 if gpu else 256)
    pairs = synthetic_pairs(captions, images or (512 if gpu else 64))
    rows: list[Row] = []
    for model in models:
        config = Config(model=model, batch_size=batch, embed_size=width, device=device, vse=VseSettings(augment=False))
        contest = SpeedComparison(config, pairs, place)
        jobs: list[Callable[[], Row]] = [contest.steps, contest.forwards, contest.evaluations]
        jobs += [lambda size=size, contest=contest: contest.labels(size) for size in banks]  # type: ignore[misc]
        jobs += [lambda size=size, contest=contest: contest.pushes(size) for size in banks]  # type: ignore[misc]
        for job in jobs:
            rows.append(job())
            tell(rows[-1].what)
        del contest
    assert isinstance(pairs.right, Tokens)
    words = float(pairs.right.lengths.mean())
    settings = {"batch_size": batch, "embed_size": width, "images": len(pairs.left), "mean_words": words}
    name = torch.cuda.get_device_name(place) if gpu else f"{torch.get_num_threads()} CPU threads"
    return Report(name, settings, rows)
