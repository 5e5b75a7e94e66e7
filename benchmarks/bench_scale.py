"""Measure how the time and the memory of an audit grow with the number of pairs: `make bench-scale`.

Pairs are generated on disk: each is a point in one of a thousand clusters, which both sides map linearly and with much
noise; some are mismatched.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from common import at_least, check_ratios, run
from mispair.auditing.audit import Settings, audit_source
from mispair.cli.output import print_json, say
from mispair.functional.metrics import auroc
from mispair.pairs.layouts.arrays import open_arrays
from mispair.support.memory import peak_memory

HIDDEN, CLUSTERS, APART, NOISE = 64, 1000, 0.8, 6.0
CHUNK = 1 << 15  # pairs made at a time


@dataclass(frozen=True)
class ScaleResult:
    """One audit."""

    pairs: int
    seconds: float
    stages: dict[str, float]  # seconds
    peak_bytes: int | None  # peak memory of the process so far
    auroc: float
    noise_rate: float  # estimate


def generate(folder: Path, pairs: int, width: int, noise_ratio: float, seed: int = 0) -> npt.NDArray[np.bool_]:
    """Writes left.npy and right.npy in half precision; gives which pairs are mismatched."""
    rng = np.random.default_rng(seed)
    clusters = rng.standard_normal((CLUSTERS, HIDDEN), dtype=np.float32)
    maps = [rng.standard_normal((HIDDEN, width), dtype=np.float32) for _ in range(2)]
    mismatched = rng.random(pairs) < noise_ratio

    def points(count: int) -> npt.NDArray[np.float32]:
        own = rng.standard_normal((count, HIDDEN), dtype=np.float32)
        return np.asarray(clusters[rng.integers(CLUSTERS, size=count)] + APART * own)

    # Not by a memory map, whose pages would count as memory of the audit that follows.
    header = {"descr": "<f2", "fortran_order": False, "shape": (pairs, width)}
    with (folder / "left.npy").open("wb") as left, (folder / "right.npy").open("wb") as right:
        for file in (left, right):
            np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, pairs, CHUNK):
            here = slice(start, min(start + CHUNK, pairs))
            hidden = points(here.stop - start)
            other = np.where(mismatched[here, None], points(len(hidden)), hidden)
            for file, values, linear in zip((left, right), (hidden, other), maps, strict=True):
                vectors = values @ linear + NOISE * rng.standard_normal((len(hidden), width), dtype=np.float32)
                file.write(vectors.astype("<f2").tobytes())
    return mismatched


def measure(sizes: Sequence[int], width: int, noise_ratio: float, device: str) -> Iterator[ScaleResult]:
    """Audits generated pairs of each size, the smallest first."""
    for pairs in sorted(sizes):
        with tempfile.TemporaryDirectory(prefix="mispair-") as folder:
            mismatched = generate(Path(folder), pairs, width, noise_ratio)
            source = open_arrays(Path(folder) / "left.npy", Path(folder) / "right.npy")
            audit = audit_source(source, Settings(device=device))
            quality = auroc(audit.score, ~mismatched) or 0.5
            rate = audit.judge.combination.rate
            yield ScaleResult(pairs, audit.seconds, audit.stages, peak_memory(), quality, rate)


def main(
    *,
    pairs: tuple[int, ...] = (10_000, 100_000, 1_000_000),
    width: int = 512,
    noise_ratio: float = 0.4,
    device: str = "auto",
    json: bool = False,
) -> None:
    """Measure how the time and the memory of an audit grow with the number of pairs, on generated pairs.

    Args:
        pairs: One or more numbers of pairs.
        width: Numbers a vector.
        noise_ratio: Fraction of mismatched pairs.
        device: auto, cpu, cuda, cuda:1, mps.
        json: Print the numbers as JSON.
    """
    at_least(1, pairs=pairs, width=width)
    check_ratios((noise_ratio,))
    sizes = []
    for size in measure(pairs, width, noise_ratio, device):
        sizes.append(size)
        stages = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in size.stages.items())
        memory = "" if size.peak_bytes is None else f", {size.peak_bytes / 1e9:.2f} GB"
        say(f"{size.pairs:,} pairs: {size.seconds:.1f} s ({stages}){memory}", file=sys.stderr if json else sys.stdout)
    if json:
        print_json({"width": width, "audits": [vars(size) for size in sizes]})


if __name__ == "__main__":
    sys.exit(run(main))
