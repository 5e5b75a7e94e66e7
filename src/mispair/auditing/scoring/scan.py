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
from mispair.pairs.source import Source
from mispair.support.arrays import IntArray
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
    """Measures and status of every row."""

    measures: npt.NDArray[np.float32]  # (N, m), NaN where a row could not be read
    status: npt.NDArray[np.uint8]  # (N,) key of FAULTS, or BAD_IN_TABLE

    @classmethod
    def empty(cls, rows: int, measures: int) -> Scan:
        return cls(np.full((rows, measures), np.nan, dtype=np.float32), np.zeros(rows, dtype=np.uint8))


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


def scan(
    source: Source,
    judge: Judge,
    groups: IntArray,
    *,
    workers: int,
    device: torch.device,
    folder: Path | None = None,
    step: Callable[[int], object] = lambda _: None,
) -> Scan:
    """Measure all pairs of a source.

    Args:
        source: The pairs.
        judge: What was learned.
        groups: (N,) pairs of one group are in one fold.
        workers: Blocks measured at the same time.
        device: Where to compute.
        folder: Place of the finished parts; existing parts are not measured again.
        step: Called with the number of rows that were done.
    """
    rows, size = len(source), block_size(device)
    result, missing = Scan.empty(rows, len(judge.names)), list[int]()
    for start in range(0, rows, PART):
        stop = min(start + PART, rows)
        if folder is not None and _loaded(folder, start, Scan(result.measures[start:stop], result.status[start:stop])):
            step(stop - start)
        else:
            missing += range(start, stop, size)  # a part is a number of whole blocks

    def block(start: int) -> Scan:
        return _measured(source, judge, start, fold_numbers(groups[start : start + size]), device)

    for start, found in zip(missing, parallel_map(block, missing, workers), strict=True):
        stop = start + len(found.status)
        result.measures[start:stop], result.status[start:stop] = found.measures, found.status
        step(stop - start)
        if folder is not None and (stop % PART == 0 or stop == rows):
            begin = start // PART * PART
            with replacing(_file(folder, begin)) as file:
                np.savez(file, measures=result.measures[begin:stop], status=result.status[begin:stop])
    return result


def _file(folder: Path, start: int) -> Path:
    return folder / f"part-{start // PART:06d}.npz"


def _measured(source: Source, judge: Judge, start: int, fold: npt.NDArray[np.uint8], device: torch.device) -> Scan:
    """Measure one block; unreadable rows have no measures, learned rows have them already."""
    stop = start + len(fold)
    left, right = source.tensors(slice(start, stop), device)
    part = Scan(np.full((len(fold), len(judge.names)), np.nan, dtype=np.float32), faults(left, right))
    bad = source.known_rows
    part.status[bad[np.searchsorted(bad, start) : np.searchsorted(bad, stop)] - start] = BAD_IN_TABLE
    good = np.flatnonzero(part.status == READABLE)
    known, measures = judge.known(start + good)
    part.measures[good[known]] = measures
    rest = np.delete(good, known)
    if len(rest):
        score = source.network_score
        sides = (left, right) if len(rest) == len(left) else (left[rest], right[rest])
        networks = None if score is None else score(start + rest, start + rest)
        part.measures[rest] = judge.measure(*sides, fold[rest], networks)
    return part


def _loaded(folder: Path, start: int, part: Scan) -> bool:
    """Fill a part from its file; False without a complete one."""
    try:
        with np.load(_file(folder, start), allow_pickle=False) as saved:
            pairs = [(own, saved[name]) for name, own in vars(part).items()]
    except Exception:  # a damaged archive raises almost anything: BadZipFile, EOFError, KeyError, ValueError
        return False
    if any((own.shape, own.dtype) != (found.shape, found.dtype) for own, found in pairs):
        return False
    for own, found in pairs:
        own[:] = found
    return True
