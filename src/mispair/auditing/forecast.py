"""Forecast time and memory of an audit from audits of two small samples; nothing is written."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from mispair.auditing.audit import Settings, audit_source, check, check_rows
from mispair.auditing.auditor import LEAST, SAMPLE
from mispair.auditing.blocks import Block, count_all, opened
from mispair.auditing.inputs import AuditInput
from mispair.auditing.scoring.scan import PART
from mispair.encoders.encode import Encoders, Loaded, encode
from mispair.pairs.edits import Edits
from mispair.pairs.source import Source
from mispair.support.formatting import byte_size, duration
from mispair.support.memory import peak_memory

LARGER = 1 << 13  # pairs of the larger sample; the smaller one has a quarter
PHOTOS = 1 << 9  # pairs of the larger sample where images and captions have to be encoded
WARMING = 32  # of them, before the time is taken
HELD = 100  # bytes a pair that an audit keeps in memory, beside the vectors; see docs/performance.md
MACHINES = (1, 4, 16, 64)
MEASURING, ENCODING = "measuring all pairs", "encoding"
# These take no longer for more pairs than are learned from; the others are linear in the pairs.
BOUNDED = ("learning", "comparing with similar pairs", "searching better partners")
Stages = Mapping[str, float]


def expected(pairs: int, samples: Mapping[int, Stages], machines: int = 1) -> dict[str, float]:
    """Expected seconds of each stage of an audit, extrapolated from two audits of fewer pairs.

    Stages that are linear in the pairs follow the line through both samples; those whose work is bounded follow the
    power of the pairs that goes through both. Only encoding and measuring can be shared by several machines.
    """
    small, large = min(samples), max(samples)
    found = {}
    for stage, seconds in samples[large].items():
        less = min(samples[small].get(stage, 0.0), seconds)
        if small == large or pairs <= large:
            found[stage] = seconds * min(1.0, pairs / large)
        elif stage in BOUNDED:
            power = min(1.0, math.log(seconds / less) / math.log(large / small)) if less > 0 else 1.0
            found[stage] = seconds * max(1.0, min(pairs, SAMPLE) / large) ** power
        else:
            found[stage] = seconds + (seconds - less) / (large - small) * (pairs - large)
    return {
        stage: seconds / machines if stage in (ENCODING, MEASURING) else seconds for stage, seconds in found.items()
    }


@dataclass(frozen=True)
class Forecast:
    """Expected time and memory of an audit."""

    pairs: int  # how many there are
    bytes: int  # of their vectors; they are read about twice
    parts: int  # pieces that workers measure
    seconds: Mapping[int, Mapping[str, float]]  # expected seconds of each stage, by the number of machines
    memory: int | None  # bytes that the process needs that learns and writes the tables; None where it is not known
    sample: int  # pairs of the larger sample
    sample_seconds: float  # how long both samples took

    def lines(self) -> list[str]:
        """In words."""
        one = self.seconds[1]
        shared = [stage for stage in (ENCODING, MEASURING) if stage in one]
        alone = [f"{stage} {duration(seconds)}" for stage, seconds in one.items() if stage not in shared]
        return [
            f"{self.pairs:,} pairs, {byte_size(self.bytes)} of vectors, {self.parts:,} "
            f"part{'s' * (self.parts > 1)} of at most {PART:,} rows.",
            f"Expected from audits of at most {self.sample:,} of them, which took {duration(self.sample_seconds)} on "
            "this machine:",
            *(
                f"  {machines} machine{'s' * (machines > 1)}: {duration(sum(stages.values()))}, of which "
                + " and ".join(f"{stage} {duration(stages[stage])}" for stage in shared)
                for machines, stages in self.seconds.items()
            ),
            f"Always on one machine: {', '.join(alone)}.",
            *([] if self.memory is None else [f"Memory of that process: about {byte_size(self.memory)}."]),
            "Nothing was written.",
        ]


def forecast(source: Source, settings: Settings, encoders: Encoders, pairs: int | None = None) -> Forecast:
    """Audit two small samples on this machine, and extrapolate to all pairs; images and captions are encoded first.

    Args:
        pairs: Number of all pairs, if the source has only some of them.

    Raises:
        DataError: The pairs cannot be audited.
    """
    plain = replace(settings, checked=None, by=None, partnered=((), ()))
    pairs, since, seconds = pairs or len(source), time.monotonic(), 0.0
    check_rows(source, settings)
    with TemporaryDirectory() as folder:
        if not source.is_encoded:
            source, seconds = _encoded(source, encoders.views(), Path(folder))
        check(source, plain)
        large = min(len(source), LARGER)
        samples: dict[int, Stages] = {}
        for size in sorted({max(LEAST, large // 4), large}):
            encoding = {ENCODING: seconds * size} if seconds else {}
            samples[size] = encoding | audit_source(source.part(0, size), plain).stages
        width = sum(side.width * side.dtype.itemsize for side in (source.left, source.right))
    peak = peak_memory()
    return Forecast(
        pairs,
        pairs * width,
        -(-pairs // PART),
        {machines: expected(pairs, samples, machines) for machines in MACHINES},
        None if peak is None else peak + HELD * (pairs - large),
        large,
        time.monotonic() - since,
    )


def forecast_blocks(data: AuditInput, blocks: Sequence[Block], settings: Settings) -> Forecast:
    """Forecast from the first block; of the others, only the number of rows is read, or the sizes of tars."""
    with opened(data, blocks[0]) as rows:
        pairs = count_all(data, blocks, rows)
        return forecast(rows.source, settings, replace(data.models, device=settings.device), pairs)


def _encoded(source: Source, encoders: Loaded, cache: Path) -> tuple[Source, float]:
    """Encode a sample of the images and captions; return it with vectors, and the seconds a pair."""
    rows = np.linspace(0, len(source) - 1, PHOTOS).astype(np.int64)
    some = source.edited(Edits.keeping(np.isin(np.arange(len(source)), rows)))
    encode(some.edited(Edits.keeping(np.arange(len(some)) < WARMING)), encoders, cache)
    since = time.monotonic()
    found = encode(some, encoders, cache)
    seconds = (time.monotonic() - since) / max(1, len(some) - found.kept)
    return some.with_vectors(*found.sides(source.name), found.problems), seconds
