"""One resumable pass over all pairs in bounded memory.

Rows are measured in blocks that are cut by row number alone, each by one thread: neither the shards of the files nor
the number of workers can change a score.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mispair.auditing.scoring.folds import fold_numbers
from mispair.auditing.scoring.judge import Judge
from mispair.compute.threads import parallel_map
from mispair.pairs.pairs import IntArray
from mispair.pairs.source import Source
from mispair.support.files import replacing

BLOCK = 8192  # rows measured at a time
GPU_BLOCKS = 4  # of these at a time on a GPU, which would be idle between smaller ones
PART = 8 * BLOCK  # rows saved at a time

READABLE, BAD_IN_TABLE = 0, 255  # status of a row: fine, or bad by the table
FAULTS = {
    READABLE: "ok",
    1: "the left vector has numbers that are not finite",
    2: "the right vector has numbers that are not finite",
    3: "the left vector is zero",
    4: "the right vector is zero",
}


@dataclass(frozen=True)
class Scan:
    """What the pass found about every row."""

    measures: npt.NDArray[np.float32]  # (N, m), NaN where a row could not be read
    status: npt.NDArray[np.uint8]  # (N,) key of FAULTS, or BAD_IN_TABLE

    @classmethod
    def empty(cls, rows: int, measures: int) -> Scan:
        return cls(
            np.full((rows, measures), np.nan, dtype=np.float32),
            np.zeros(rows, dtype=np.uint8),
        )

    def put(self, start: int, part: Scan) -> None:
        here = slice(start, start + len(part.status))
        self.measures[here], self.status[here] = part.measures, part.status


def faults(left: Tensor, right: Tensor) -> npt.NDArray[np.uint8]:
    """Faults of the vectors of each row, as keys of FAULTS."""
    found = torch.zeros(len(left), dtype=torch.uint8, device=left.device)
    for side, vectors in ((1, right), (0, left)):  # a fault of the left side takes precedence
        length = torch.linalg.vector_norm(vectors, dim=1)
        found[length == 0] = 3 + side
        # A square may overflow where the numbers are finite: those few are checked one by one.
        doubtful = torch.nonzero(~torch.isfinite(length))[:, 0]
        found[doubtful[~torch.isfinite(vectors[doubtful]).all(dim=1)]] = 1 + side
    return found.cpu().numpy()


def block_size(device: torch.device) -> int:
    """Rows computed at a time."""
    return BLOCK * (GPU_BLOCKS if device.type == "cuda" else 1)


def _ignore(_: object) -> None:
    """No-op callback."""


def scan(
    source: Source,
    judge: Judge,
    groups: IntArray | None,
    *,
    workers: int,
    device: torch.device,
    folder: Path | None = None,
    step: Callable[[int], None] = _ignore,
) -> Scan:
    """Measures all pairs of a source, which may be a part of another one.

    Args:
        source: The pairs.
        judge: What was learned.
        groups: (N,) pairs of one group are in one fold; None if all differ.
        workers: Blocks measured at the same time.
        device: Where.
        folder: Where finished parts are kept; those that are there already are not measured again.
        step: Called with the number of rows that were done.
    """
    result, missing = Scan.empty(len(source), len(judge.names)), []
    for start in range(0, len(source), PART):
        stop = min(start + PART, len(source))
        before = None if folder is None else _load(_part(folder, start), stop - start, len(judge.names))
        if before is None:
            missing.append((start, stop))
        else:
            result.put(start, before)
            step(stop - start)
    known = source.known_rows
    size = block_size(device)
    blocks = [(begin, min(begin + size, stop), stop) for start, stop in missing for begin in range(start, stop, size)]

    def block(where: tuple[int, int, int]) -> Scan:
        start, stop, _ = where
        bad = known[np.searchsorted(known, start) : np.searchsorted(known, stop)] - start
        rows = np.arange(start, stop)
        fold = fold_numbers(rows if groups is None else groups[start:stop])
        return _measured(source, judge, start, rows, fold, bad, device)

    for (begin, stop, end), part in zip(blocks, parallel_map(block, blocks, workers), strict=True):
        result.put(begin, part)
        step(stop - begin)
        if folder is not None and stop == end:
            start = begin // PART * PART
            part = Scan(result.measures[start:end], result.status[start:end])
            _save(folder, start, part)
    return result


def _part(folder: Path, start: int) -> Path:
    return folder / f"part-{start // PART:06d}.npz"


def _measured(
    source: Source,
    judge: Judge,
    start: int,
    rows: IntArray,
    fold: npt.NDArray[np.uint8],
    bad: IntArray,
    device: torch.device,
) -> Scan:
    """One block; rows that cannot be read have no measures, and those that were learned from have them already."""
    left, right = source.tensors(slice(start, start + len(rows)), device)
    part = Scan.empty(len(rows), len(judge.names))
    part.status[:] = faults(left, right)
    part.status[bad] = BAD_IN_TABLE
    good = np.flatnonzero(part.status == READABLE)
    known, measures = judge.known(rows[good])
    part.measures[good[known]] = measures
    rest = np.delete(good, known)
    if len(rest):
        score = source.network_score
        sides = (left, right) if len(rest) == len(left) else (left[rest], right[rest])
        networks = None if score is None else score(start + rest, start + rest)
        part.measures[rest] = judge.measure(*sides, fold[rest], networks)
    return part


def _save(folder: Path, start: int, part: Scan) -> None:
    """Keep a part that was measured in a file, which is whole or absent."""
    with replacing(_part(folder, start)) as file:
        np.savez(file, measures=part.measures, status=part.status)


def _load(path: Path, rows: int, measures: int) -> Scan | None:
    """A part that was saved; None if it is not there or not whole."""
    try:
        with np.load(path, allow_pickle=False) as saved:
            part = Scan(saved["measures"], saved["status"])
    except Exception:  # a damaged archive raises almost anything: BadZipFile, EOFError, KeyError, ValueError
        return None
    expected = Scan.empty(rows, measures)
    same = all(
        (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        for found, wanted in zip(vars(part).values(), vars(expected).values(), strict=True)
    )
    return part if same else None
