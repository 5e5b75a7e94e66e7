"""Measure whether the audit's probabilities and its interval of the noise rate hold: `make bench-coverage ARGS=FOLDER`.

Many audits of pairs with a known share of mismatched ones. A 95 % interval should hold the truth in 95 % of them, and
of pairs with a match score of 0.7, as of suggestions with that probability, 70 % should be correct.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean

from rich.table import Table
from tyro.conf import Positional

import bench_audit
from bench_audit import AuditQuality
from common import at_least, check_ratios, run
from mispair.auditing.auditor import LEAST
from mispair.cli.output import print_json, print_table, say
from mispair.errors import InvalidValueError
from mispair.pairs.layouts.opening import open_source
from mispair.pairs.source import Source


@dataclass(frozen=True)
class SimulatedAudit:
    """One audit of a data set with injected noise."""

    data: str
    noise_ratio: float  # asked for; that of the audit is measured
    quality: AuditQuality

    def sentence(self) -> str:
        """The interval, in words."""
        one = self.quality
        return (
            f"{self.data} {one.pairs} pairs, {one.all_noise:.3f} mismatched: {one.noise_rate:.3f} "
            f"({one.noise_low:.3f} to {one.noise_high:.3f}){'' if one.covered else ', MISSED'}"
        )

    def to_json(self) -> dict[str, object]:
        """What `--json` prints."""
        return {"data": self.data, "column": self.noise_ratio, "covered": self.quality.covered, **vars(self.quality)}


def measure(
    sources: Sequence[Source],
    noise_ratios: Sequence[float],
    sizes: Sequence[int],
    audits: int,
    *,
    natural_noise: float = 0.0,
    device: str = "auto",
) -> Iterator[SimulatedAudit]:
    """So many audits of each data set, size and noise ratio, with other pairs and other noise each time."""
    used = [(source, size) for source in sources for size in sorted(set(sizes)) if LEAST <= size <= len(source)]
    if not used:
        has = ", ".join(f"{source.name} has {len(source):,}" for source in sources)
        raise InvalidValueError(
            f"{', '.join(map(str, sizes))}, but {has}",
            where="pairs",
            expected=f"at least {LEAST}, and no more than that",
        )
    for (source, size), ratio in product(used, sorted(set(noise_ratios))):
        for quality in bench_audit.measure(
            source, ("caption",), (ratio,), audits, natural_noise=natural_noise, count=size, device=device,
            baselines=False,
        ):  # fmt: skip
            yield SimulatedAudit(source.name, ratio, quality)


def coverage_tables(found: Sequence[SimulatedAudit]) -> list[Table]:
    """Coverage and calibration: a row for each data set and size, a column for each noise ratio."""
    ratios = sorted({one.noise_ratio for one in found})
    metrics: dict[str, Callable[[AuditQuality], float]] = {
        "95 % interval of the noise rate: share that hold the truth": lambda one: float(one.covered),
        "  their mean width": lambda one: one.noise_high - one.noise_low,
        "Expected calibration error of the match score": lambda one: one.calibration_error,
        "Expected calibration error of suggestions": lambda one: one.suggestion_error,
        "Mean probability of first suggestions": lambda one: one.suggestion_claim,
        "  share of them that is correct": lambda one: one.suggestion_correct,
    }
    rows: dict[tuple[str, str], list[SimulatedAudit]] = {}
    for one in found:
        rows.setdefault((one.data, f"{one.quality.pairs:,}"), []).append(one)
    rows["all", ""] = list(found)
    tables = []
    for title, metric in metrics.items():
        table = Table("data", "pairs", *(f"{ratio:.0%}" for ratio in ratios), "all", title=title)
        for names, audits in rows.items():
            columns = [[one for one in audits if one.noise_ratio == ratio] for ratio in ratios]
            table.add_row(*names, *(_mean(metric, part) for part in [*columns, audits]))
        tables.append(table)
    return tables


def _mean(metric: Callable[[AuditQuality], float], audits: Sequence[SimulatedAudit]) -> str:
    return f"{fmean(metric(one.quality) for one in audits):.3f}" if audits else ""


def main(
    sources: Positional[tuple[Path, ...]],
    *,
    noise_ratio: tuple[float, ...] = (0.0, 0.05, 0.2, 0.4, 0.6, 0.8, 1.0),
    pairs: tuple[int, ...] = (200, 1000, 5000, 20000),
    audits: int = 10,
    natural_noise: float = 0.0,
    device: str = "auto",
    json: bool = False,
) -> None:
    """Measure how often the interval of the noise rate holds the truth, and how well probabilities are calibrated.

    Args:
        sources: Folders of embeddings or features; their pairs count as matched.
        noise_ratio: Fractions of mismatched pairs.
        pairs: Numbers of pairs, drawn at random; those above what a folder has are left out.
        audits: Audits of each.
        natural_noise: Fraction of the pairs that are mismatched already.
        device: auto, cpu, cuda, cuda:1, mps.
        json: Print the numbers as JSON.
    """
    if not sources:
        raise InvalidValueError("nothing", where="sources", expected="folders of embeddings or features")
    at_least(1, audits=audits, pairs=pairs)
    check_ratios((*noise_ratio, natural_noise))
    opened = [open_source(source) for source in sources]
    found = []
    for one in measure(opened, noise_ratio, pairs, audits, natural_noise=natural_noise, device=device):
        found.append(one)
        say(one.sentence(), file=sys.stderr)
    if json:
        print_json({"audits": [one.to_json() for one in found]})
    else:
        for table in coverage_tables(found):
            print_table(table)


if __name__ == "__main__":
    sys.exit(run(main))
