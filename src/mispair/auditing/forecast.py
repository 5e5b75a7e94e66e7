"""Forecast time and memory of an audit from audits of two small samples; nothing is written."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mispair.auditing.audit import Settings, audit_source, check
from mispair.auditing.auditor import LEAST, SAMPLE
from mispair.auditing.scoring.scan import PART
from mispair.pairs.source import Source
from mispair.support.formatting import byte_size, duration
from mispair.support.memory import peak_memory

LARGER = 1 << 13  # pairs of the larger sample; the smaller one has a quarter
HELD = 100  # bytes a pair that an audit keeps in memory, beside the vectors; see docs/performance.md
MACHINES = (1, 4, 16, 64)
MEASURING = "measuring all pairs"
# These take no longer for more pairs than are learned from; the others are linear in the pairs.
BOUNDED = ("learning", "comparing with similar pairs", "searching better partners")
Stages = Mapping[str, float]


def expected(pairs: int, samples: Mapping[int, Stages], machines: int = 1) -> dict[str, float]:
    """Expected seconds of each stage of an audit, extrapolated from two audits of fewer pairs.

    Stages that are linear in the pairs follow the line through both samples; those whose work is bounded follow the
    power of the pairs that goes through both. Only the measuring can be shared by several machines.
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
    if MEASURING in found:
        found[MEASURING] /= machines
    return found


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
        alone = [f"{stage} {duration(seconds)}" for stage, seconds in one.items() if stage != MEASURING]
        return [
            f"{self.pairs:,} pairs, {byte_size(self.bytes)} of vectors, {self.parts:,} "
            f"part{'s' * (self.parts > 1)} of at most {PART:,} rows.",
            f"Expected from audits of at most {self.sample:,} of them, which took {duration(self.sample_seconds)} on "
            "this machine:",
            *(
                f"  {machines} machine{'s' * (machines > 1)}: {duration(sum(stages.values()))}, of which measuring "
                f"{duration(stages.get(MEASURING, 0.0))}"
                for machines, stages in self.seconds.items()
            ),
            f"Always on one machine: {', '.join(alone)}.",
            *([] if self.memory is None else [f"Memory of that process: about {byte_size(self.memory)}."]),
            "Nothing was written.",
        ]


def forecast(source: Source, settings: Settings) -> Forecast:
    """Audit two small samples on this machine, and extrapolate to all pairs.

    Raises:
        DataError: The pairs cannot be audited.
    """
    check(source, settings)
    plain = replace(settings, checked=None, by=None, partnered=((), ()))
    large = min(len(source), LARGER)
    samples: dict[int, Stages] = {}
    since = time.monotonic()
    for size in sorted({max(LEAST, large // 4), large}):
        samples[size] = audit_source(source.part(0, size), plain).stages
    took = time.monotonic() - since
    peak = peak_memory()
    return Forecast(
        len(source),
        len(source) * sum(side.width * side.dtype.itemsize for side in (source.left, source.right)),
        -(-len(source) // PART),
        {machines: expected(len(source), samples, machines) for machines in MACHINES},
        None if peak is None else peak + HELD * (len(source) - large),
        large,
        took,
    )
