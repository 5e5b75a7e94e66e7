"""`mispair bench scale`: how the time and the memory of an audit grow with the number of pairs.

Pairs are made up, on disk: each has a place of its own in one of a thousand clusters, which both sides see through
random directions and much noise; some are joined wrongly.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mispair.auditing.audit import Settings, audit_source
from mispair.auditing.sources.source import open_arrays
from mispair.functional.metrics import auroc
from mispair.support.memory import peak_memory

HIDDEN, CLUSTERS, APART, NOISE = 64, 1000, 0.8, 6.0
CHUNK = 1 << 15  # pairs made at a time


@dataclass(frozen=True)
class ScaleResult:
    """One audit."""

    pairs: int
    seconds: float
    stages: dict[str, float]  # seconds of each part of the work
    peak_bytes: int | None  # peak memory of the process so far
    auroc: float
    noise_rate: float


def make(folder: Path, pairs: int, width: int, wrong: float, seed: int = 0) -> npt.NDArray[np.bool_]:
    """Writes left.npy and right.npy in half precision; tells which pairs are wrong."""
    rng = np.random.default_rng(seed)
    clusters = rng.standard_normal((CLUSTERS, HIDDEN), dtype=np.float32)
    maps = [rng.standard_normal((HIDDEN, width), dtype=np.float32) for _ in range(2)]
    is_wrong = rng.random(pairs) < wrong

    def places(count: int) -> npt.NDArray[np.float32]:
        own = rng.standard_normal((count, HIDDEN), dtype=np.float32)
        return np.asarray(clusters[rng.integers(CLUSTERS, size=count)] + APART * own)

    # Not by a memory map, whose pages would count as memory of the audit that follows.
    header = {"descr": "<f2", "fortran_order": False, "shape": (pairs, width)}
    with (folder / "left.npy").open("wb") as left, (folder / "right.npy").open("wb") as right:
        for file in (left, right):
            np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, pairs, CHUNK):
            here = slice(start, min(start + CHUNK, pairs))
            hidden = places(here.stop - start)
            other = np.where(is_wrong[here, None], places(len(hidden)), hidden)
            for file, values, seen in zip((left, right), (hidden, other), maps, strict=True):
                vectors = values @ seen + NOISE * rng.standard_normal((len(hidden), width), dtype=np.float32)
                file.write(vectors.astype("<f2").tobytes())
    return is_wrong


def measure(sizes: Sequence[int], width: int, wrong: float, device: str) -> Iterator[ScaleResult]:
    """Audits made-up pairs of each size, the smallest first."""
    for pairs in sorted(sizes):
        with tempfile.TemporaryDirectory(prefix="mispair-") as folder:
            is_wrong = make(Path(folder), pairs, width, wrong)
            source = open_arrays(Path(folder) / "left.npy", Path(folder) / "right.npy")
            audit = audit_source(source, Settings(device=device))
            right = auroc(audit.score, ~is_wrong) or 0.5
            yield ScaleResult(pairs, audit.seconds, audit.stages, peak_memory(), right, audit.judge.combination.rate)
