"""`mispair bench coverage`: whether the audit's probabilities and its interval of the noise rate can be believed.

Many audits of pairs with a known share of mismatched ones. A 95 % interval should hold the truth in 95 % of them, and
of pairs with a match score of 0.7, as of suggestions with that probability, 70 % should be correct.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean

from rich.table import Table

from mispair.auditing.audit import LEAST
from mispair.bench.measure import audit_quality
from mispair.bench.measure.audit_quality import AuditQuality
from mispair.errors import ConfigError
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
    on_result: Callable[[SimulatedAudit], None] = lambda _: None,
) -> Iterator[SimulatedAudit]:
    """So many audits of each data set, size and noise ratio, with other pairs and other noise each time."""
    used = [(source, size) for source in sources for size in sorted(set(sizes)) if LEAST <= size <= len(source)]
    if not used:
        has = ", ".join(f"{source.name} has {len(source):,}" for source in sources)
        raise ConfigError(
            f"--pairs: no folder has so many ({has}), or they are fewer than {LEAST}; give other numbers."
        )
    for (source, size), ratio in product(used, sorted(set(noise_ratios))):
        for quality in audit_quality.measure(
            source, ("caption",), (ratio,), audits, natural_noise=natural_noise, count=size, device=device,
            baselines=False,
        ):  # fmt: skip
            found = SimulatedAudit(source.name, ratio, quality)
            on_result(found)
            yield found


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
