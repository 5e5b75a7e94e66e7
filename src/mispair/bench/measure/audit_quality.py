"""`mispair bench audit`: how well an audit finds wrong pairs, where they were made wrong on purpose.

The pairs are taken for right. Some are joined wrongly, the audit is not told which, and its scores are held against the
truth: on your own data this says what an audit of such data is worth.
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
    """One audit of pairs with known mistakes."""

    kind: str
    ratio: float  # share of wrong pairs that was reached
    seed: int
    pairs: int
    auroc: float  # of the match score
    precision: float  # average precision: wrong pairs first
    measures: dict[str, float]  # AUROC of each measure alone
    noise_rate: float  # estimate
    noise_low: float
    noise_high: float
    calibration: float  # expected calibration error of the match score
    reliability: list[tuple[float, float, int]]  # by score, ten bins: mean score, share of right pairs, pairs
    right_found: float  # share of the found wrong pairs whose first suggested right item is of its left item
    left_found: float
    neighbour_found: float  # the same by the partner of the nearest left neighbour
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
    ratios: Sequence[float],
    seeds: int,
    *,
    count: int | None = None,
    device: str = "auto",
    tell: Callable[[AuditQuality], None],
) -> Iterator[AuditQuality]:
    """Audits for every kind and share of noise, and every seed."""
    for kind in kinds:
        for ratio in ratios:
            for seed in range(seeds):
                pairs = pairs_of(source, count, seed)
                noisy = pairs.with_link(noise_index(pairs, ratio=ratio, seed=seed, kind=kind))
                found = judge(noisy, audit_source(from_pairs(noisy), Settings(device=device)), kind, seed)
                tell(found)
                yield found


def judge(pairs: Pairs, audit: Audit, kind: str, seed: int) -> AuditQuality:
    """Holds an audit against the truth."""
    wrong = pairs.mismatched
    assert wrong is not None
    assert pairs.truth is not None
    score, combination = audit.score, audit.judge.combination
    mended = wrong[audit.suggested]
    kept = pairs.link[audit.suggested[mended]]
    right_fits = _fits(audit.new_rights, pairs.link[audit.suggested], pairs.truth)
    left_fits = _fits(audit.new_lefts, pairs.truth[audit.suggested], pairs.link)
    return AuditQuality(
        kind=kind,
        ratio=float(wrong.mean()),
        seed=seed,
        pairs=len(pairs),
        auroc=auroc(score, ~wrong) or 0.5,
        precision=average_precision(-score, wrong),
        measures={
            name: auroc(audit.scan.measures[:, column], ~wrong) or 0.5 for column, name in enumerate(audit.judge.names)
        },
        noise_rate=combination.rate,
        noise_low=combination.low,
        noise_high=combination.high,
        calibration=calibration_error(audit.match_score, ~wrong),
        reliability=reliability(audit.match_score, ~wrong),
        right_found=_mean(right_fits[mended]),
        left_found=_mean(left_fits[mended]),
        neighbour_found=_mean(_by_neighbour(pairs, audit.suggested[mended])),
        chance=_mean(np.bincount(pairs.truth, minlength=len(pairs.left))[kept] / len(pairs)),
        seconds=audit.seconds,
    )  # fmt: skip


def average_precision(scores: npt.NDArray[Any], positive: BoolArray) -> float:
    """Mean over the positives of the share of positives among those that score as high; nan without any.

    >>> average_precision(np.array([3.0, 2.0, 1.0]), np.array([True, False, True]))
    0.8333333333333333
    """
    order = np.argsort(-scores, kind="stable")
    hits = positive[order]
    # Equal scores share their place: the last of them counts.
    last = np.searchsorted(-scores[order], -scores[order], side="right")
    precision = np.cumsum(hits)[last - 1] / last
    return float(precision[hits].mean()) if hits.any() else float("nan")


def calibration_error(probability: npt.NDArray[Any], right: BoolArray) -> float:
    """Expected calibration error: how far the probabilities are from the shares, over ten bins."""
    return sum(abs(said - is_so) * count for said, is_so, count in reliability(probability, right)) / len(probability)


def reliability(probability: npt.NDArray[Any], right: BoolArray) -> list[tuple[float, float, int]]:
    """Mean probability, share of right ones and number of pairs in each of ten bins that is not empty."""
    bins = np.minimum((probability * BINS).astype(int), BINS - 1)
    inside = [np.flatnonzero(bins == number) for number in range(BINS)]
    return [(float(probability[rows].mean()), float(right[rows].mean()), len(rows)) for rows in inside if len(rows)]


def _fits(partners: Partners, wanted: IntArray, owner: IntArray) -> BoolArray:
    """Whether the first suggested row is one whose item belongs to the wanted left item."""
    first = partners.rows[:, 0]
    return np.asarray((first >= 0) & (owner[first] == wanted))


def _by_neighbour(pairs: Pairs, rows: IntArray) -> BoolArray:
    """Whether the partner of the nearest other left item would be right."""
    assert isinstance(pairs.left, Vectors)
    assert pairs.truth is not None
    left = torch.from_numpy(np.asarray(pairs.left.features, dtype=np.float32))
    left = normalize(left - left.mean(0), dim=1)
    lender = np.full(len(pairs.left), -1)  # a pair of each left item
    lender[pairs.link] = np.arange(len(pairs))
    free = torch.from_numpy(lender < 0)
    found = np.zeros(len(rows), dtype=bool)
    for start in range(0, len(rows), 1024):
        own = pairs.link[rows[start : start + 1024]]
        near = (left[own] @ left.T).masked_fill(free, -torch.inf)
        near[torch.arange(len(own)), torch.from_numpy(own)] = -torch.inf
        found[start : start + 1024] = pairs.truth[lender[near.argmax(1).numpy()]] == own
    return found


def _mean(values: npt.NDArray[Any]) -> float:
    return float(values.mean()) if len(values) else 0.0


def found_table(rows: Sequence[AuditQuality]) -> Table:
    """A column for each kind and share of noise, means over the seeds."""
    groups: dict[str, list[AuditQuality]] = {}
    for row in rows:
        groups.setdefault(f"{row.kind} {row.ratio:.0%}", []).append(row)
    table = Table("", *groups, title="Found and true", caption="suggestions: for the wrong pairs that were flagged")
    figures: dict[str, Callable[[AuditQuality], float]] = {
        "AUROC of the match score": lambda row: row.auroc,
        **{f"  of {name} alone": partial(_of_measure, name=name) for name in rows[0].measures},
        "average precision": lambda row: row.precision,
        "estimated noise rate": lambda row: row.noise_rate,
        "expected calibration error": lambda row: row.calibration,
        "first suggested right item is right": lambda row: row.right_found,
        "first suggested left item is right": lambda row: row.left_found,
        "  by the nearest neighbour's partner": lambda row: row.neighbour_found,
        "  by chance": lambda row: row.chance,
        "seconds": lambda row: row.seconds,
    }
    for name, show in figures.items():
        table.add_row(name, *(f"{fmean(map(show, found)):.4f}" for found in groups.values()))
    lowest = (min(row.auroc for row in found) for found in groups.values())
    table.add_row("AUROC, lowest of the seeds", *(f"{value:.4f}" for value in lowest))
    return table


def _of_measure(row: AuditQuality, name: str) -> float:
    return row.measures[name]
