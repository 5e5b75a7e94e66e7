"""`mispair bench audit`: how well an audit detects injected noise, on data of your own.

The pairs count as matched. Some are mismatched on purpose, and the scores of an audit are compared with the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.table import Table
from sklearn.metrics import average_precision_score
from torch.nn.functional import normalize

from mispair.auditing.audit import Audit, Settings, audit_source
from mispair.auditing.scoring.partners import Partners
from mispair.auditing.sources.from_pairs import from_pairs
from mispair.auditing.sources.source import Source
from mispair.config import NoiseKind
from mispair.data.noise import noise_index
from mispair.data.pairs import IntArray, Pairs, Vectors
from mispair.functional.metrics import auroc

BINS = 10
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class AuditQuality:
    """One audit of pairs with injected noise, compared with the truth."""

    kind: str  # of the noise
    noise_ratio: float  # measured
    seed: int
    pairs: int
    auroc: float  # of the match score
    average_precision: float  # mismatched pairs first
    measures: dict[str, float]  # AUROC of each measure by itself
    noise_rate: float  # estimate
    noise_low: float
    noise_high: float
    calibration_error: float  # expected calibration error of the match score
    reliability: list[tuple[float, float, int]]  # in ten bins: mean match score, share of matched pairs, pairs
    right_correct: float  # share of the flagged mismatched pairs whose first suggested right item fits the left one
    left_correct: float
    neighbour_correct: float  # the same with the partner of the nearest left neighbour
    chance: float
    seconds: float


def pairs_of(source: Source, count: int | None = None, seed: int = 0) -> Pairs:
    """The pairs of a source, in memory; at most so many, drawn at random."""
    rows = np.arange(len(source))
    if count is not None and count < len(rows):
        rows = np.sort(np.random.default_rng(seed).choice(rows, count, replace=False))
    left, right = source.gather(rows)
    if source.groups is None:
        return Pairs(Vectors(left), Vectors(right), np.arange(len(rows)), name=source.name)
    _, first, link = np.unique(source.groups[rows], return_index=True, return_inverse=True)
    return Pairs(Vectors(left[first]), Vectors(right), link, name=source.name)


def measure(
    source: Source,
    kinds: Sequence[NoiseKind],
    noise_ratios: Sequence[float],
    seeds: int,
    *,
    count: int | None = None,
    device: str = "auto",
    on_result: Callable[[AuditQuality], None],
) -> Iterator[AuditQuality]:
    """Audits for every kind of noise, noise ratio and seed."""
    for kind in kinds:
        for noise_ratio in noise_ratios:
            for seed in range(seeds):
                pairs = pairs_of(source, count, seed)
                noisy = pairs.with_link(noise_index(pairs, noise_ratio=noise_ratio, seed=seed, kind=kind))
                quality = judge(noisy, audit_source(from_pairs(noisy), Settings(device=device)), kind, seed)
                on_result(quality)
                yield quality


def judge(pairs: Pairs, audit: Audit, kind: str, seed: int) -> AuditQuality:
    """Compares an audit with the truth."""
    mismatched = pairs.mismatched
    assert mismatched is not None
    assert pairs.truth is not None
    score, combination = audit.score, audit.judge.combination
    flagged = mismatched[audit.suggested]
    own = pairs.link[audit.suggested[flagged]]
    right_fits = _fits(audit.new_rights, pairs.link[audit.suggested], pairs.truth)
    left_fits = _fits(audit.new_lefts, pairs.truth[audit.suggested], pairs.link)
    return AuditQuality(
        kind=kind,
        noise_ratio=float(mismatched.mean()),
        seed=seed,
        pairs=len(pairs),
        auroc=auroc(score, ~mismatched) or 0.5,
        average_precision=float(average_precision_score(mismatched, -score)) if mismatched.any() else float("nan"),
        measures={
            name: auroc(audit.scan.measures[:, column], ~mismatched) or 0.5
            for column, name in enumerate(audit.judge.names)
        },
        noise_rate=combination.rate,
        noise_low=combination.low,
        noise_high=combination.high,
        calibration_error=calibration_error(audit.match_score, ~mismatched),
        reliability=reliability(audit.match_score, ~mismatched),
        right_correct=_mean(right_fits[flagged]),
        left_correct=_mean(left_fits[flagged]),
        neighbour_correct=_mean(_by_neighbour(pairs, audit.suggested[flagged])),
        chance=_mean(np.bincount(pairs.truth, minlength=len(pairs.left))[own] / len(pairs)),
        seconds=audit.seconds,
    )


def calibration_error(probability: npt.NDArray[Any], matched: BoolArray) -> float:
    """Expected calibration error: mean distance of the probabilities from the observed shares, over ten bins."""
    return sum(abs(mean - share) * count for mean, share, count in reliability(probability, matched)) / len(probability)


def reliability(probability: npt.NDArray[Any], matched: BoolArray) -> list[tuple[float, float, int]]:
    """Mean probability, share of matched pairs and number of pairs in each of ten bins that is not empty."""
    bins = np.minimum((probability * BINS).astype(int), BINS - 1)
    inside = [np.flatnonzero(bins == number) for number in range(BINS)]
    return [(float(probability[rows].mean()), float(matched[rows].mean()), len(rows)) for rows in inside if len(rows)]


def _fits(partners: Partners, wanted: IntArray, owner: IntArray) -> BoolArray:
    """Whether the first suggested row is one whose item belongs to the wanted left item."""
    first = partners.rows[:, 0]
    return np.asarray((first >= 0) & (owner[first] == wanted))


def _by_neighbour(pairs: Pairs, rows: IntArray) -> BoolArray:
    """Whether the partner of the nearest other left item fits."""
    assert isinstance(pairs.left, Vectors)
    assert pairs.truth is not None
    left = torch.from_numpy(np.asarray(pairs.left.features, dtype=np.float32))
    left = normalize(left - left.mean(0), dim=1)
    partner = np.full(len(pairs.left), -1)  # a pair of each left item
    partner[pairs.link] = np.arange(len(pairs))
    without = torch.from_numpy(partner < 0)
    fits = np.zeros(len(rows), dtype=bool)
    for start in range(0, len(rows), 1024):
        own = pairs.link[rows[start : start + 1024]]
        near = (left[own] @ left.T).masked_fill(without, -torch.inf)
        near[torch.arange(len(own)), torch.from_numpy(own)] = -torch.inf
        fits[start : start + 1024] = pairs.truth[partner[near.argmax(1).numpy()]] == own
    return fits


def _mean(values: npt.NDArray[Any]) -> float:
    return float(values.mean()) if len(values) else 0.0


def quality_table(rows: Sequence[AuditQuality]) -> Table:
    """A column for each kind of noise and noise ratio, means over the seeds."""
    groups: dict[str, list[AuditQuality]] = {}
    for row in rows:
        groups.setdefault(f"{row.kind} {row.noise_ratio:.0%}", []).append(row)
    table = Table("", *groups, title="Audit against the truth", caption="suggestions: for mismatched pairs with any")
    metrics: dict[str, Callable[[AuditQuality], float]] = {
        "AUROC of the match score": lambda row: row.auroc,
        **{f"  of {name} alone": partial(_auroc_of_measure, name=name) for name in rows[0].measures},
        "average precision": lambda row: row.average_precision,
        "estimated noise rate": lambda row: row.noise_rate,
        "  its interval holds the truth": lambda row: float(row.noise_low <= row.noise_ratio <= row.noise_high),
        "expected calibration error": lambda row: row.calibration_error,
        "first suggested right item is correct": lambda row: row.right_correct,
        "first suggested left item is correct": lambda row: row.left_correct,
        "  by the nearest neighbour's partner": lambda row: row.neighbour_correct,
        "  by chance": lambda row: row.chance,
        "seconds": lambda row: row.seconds,
    }
    for name, metric in metrics.items():
        table.add_row(name, *(f"{fmean(map(metric, group)):.4f}" for group in groups.values()))
    lowest = (min(row.auroc for row in group) for group in groups.values())
    table.add_row("AUROC, lowest of the seeds", *(f"{value:.4f}" for value in lowest))
    return table


def _auroc_of_measure(row: AuditQuality, name: str) -> float:
    return row.measures[name]
