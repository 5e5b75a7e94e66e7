"""Measure how well an audit detects injected noise, on your own data: `make bench-audit ARGS=FOLDER`.

Some of the pairs are mismatched on purpose, and the scores of an audit are compared with the truth. Pairs that were
mismatched before count as matched there, so the measured AUROC is too low: see `corrected_auroc`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.table import Table
from sklearn.metrics import average_precision_score
from torch.nn.functional import normalize
from tyro.conf import Positional

from audit_baselines import baseline_scores
from common import at_least, check_ratios, run
from mispair.auditing.audit import Audit, Settings, audit_source
from mispair.auditing.scoring.partners import Partners
from mispair.cli.output import print_json, print_table, say
from mispair.config import NoiseKind
from mispair.errors import ConflictError, InvalidValueError
from mispair.functional.metrics import auroc
from mispair.pairs.layouts.arrays import from_pairs, open_arrays
from mispair.pairs.layouts.opening import open_source
from mispair.pairs.noise import noise_index
from mispair.pairs.pairs import Pairs, Vectors
from mispair.pairs.source import Source
from mispair.support.arrays import IntArray

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
    corrected_auroc: float  # without the natural noise
    measures: dict[str, float]  # AUROC of each measure by itself
    baselines: dict[str, float]  # AUROC of other methods; see `audit_baselines`
    baseline_precision: dict[str, float]  # their average precision
    natural_noise: float  # share of the pairs that were mismatched before
    noise_rate: float  # estimate, of natural and injected noise together
    noise_low: float
    noise_high: float
    calibration_error: float  # expected calibration error of the match score
    reliability: list[tuple[float, float, int]]  # in ten bins: mean match score, share of matched pairs, pairs
    right_correct: float  # share of the flagged mismatched pairs whose first suggested right item fits the left one
    left_correct: float
    neighbour_correct: float  # the same with the partner of the nearest left neighbour
    chance: float
    suggestion_claim: float  # mean probability of the first suggestions for flagged pairs, of both sides
    suggestion_correct: float  # share of them that are the original partner
    suggestion_error: float  # expected calibration error of these probabilities
    seconds: float

    @property
    def all_noise(self) -> float:
        """Share of mismatched pairs, natural and injected ones together."""
        return self.noise_ratio + (1 - self.noise_ratio) * self.natural_noise

    @property
    def covered(self) -> bool:
        """Whether the interval of the noise rate contains the truth."""
        return self.noise_low <= self.all_noise <= self.noise_high


@dataclass(frozen=True)
class NaturalNoise:
    """Noise rate of the pairs as they are, with its interval where an audit has estimated it."""

    rate: float
    interval: tuple[float, float] | None = None

    def sentence(self) -> str:
        """What is assumed, in words."""
        if self.interval is None:
            known = f"You say that {self.rate:.1%} of them are mismatched already."
        else:
            low, high = self.interval
            known = (
                f"An audit of the pairs as they are estimates that {self.rate:.1%} ({low:.1%} to {high:.1%}) of them "
                "are mismatched already; --natural-noise 0 says that none are."
            )
        return (
            f"Assumed: your own pairs are matched, and only those that were exchanged on purpose are not. {known} That "
            "lowers the AUROC, and is taken out of the corrected one on the assumption that these pairs are like "
            "shuffled ones. The interval is compared with natural and injected noise together."
        )


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
    natural_noise: float = 0.0,
    count: int | None = None,
    device: str = "auto",
    baselines: bool = True,
) -> Iterator[AuditQuality]:
    """Audits for every kind of noise, noise ratio and seed.

    Args:
        source: The pairs.
        kinds: Of the injected noise.
        noise_ratios: Shares of mismatched pairs.
        seeds: How many audits of each.
        natural_noise: Share of the pairs that are mismatched already.
        count: Pairs to draw; all by default.
        device: Where to audit.
        baselines: Whether to measure other methods as well.
    """
    for kind in kinds:
        for noise_ratio in noise_ratios:
            for seed in range(seeds):
                pairs = pairs_of(source, count, seed)
                noisy = pairs.with_link(noise_index(pairs, noise_ratio=noise_ratio, seed=seed, kind=kind))
                audit = audit_source(from_pairs(noisy), Settings(device=device))
                others = baseline_scores(*_vectors(noisy), noisy.link) if baselines else {}
                yield judge(noisy, audit, kind, seed, natural_noise, others)


def find_natural_noise(source: Source, *, count: int | None = None, device: str = "auto") -> NaturalNoise:
    """Estimates the noise rate of the pairs as they are."""
    combination = audit_source(from_pairs(pairs_of(source, count)), Settings(device=device)).judge.combination
    return NaturalNoise(combination.rate, (combination.low, combination.high))


def corrected_auroc(measured: float, natural_noise: float, tie: float = 0.5) -> float:
    """The AUROC of a score if it was known which pairs were mismatched before any were so on purpose.

    A pair that counts as matched is so with a probability of 1 - p, the natural noise. Then it is above one that was
    mismatched on purpose with the probability A in question; else with b, which is 1/2 if natural and injected
    mismatches have the same scores. So (1 - p) A + p b is measured.

    Args:
        measured: AUROC of pairs that count as matched against injected mismatches.
        natural_noise: p.
        tie: b.

    >>> round(corrected_auroc(0.7 * 0.95 + 0.3 * 0.5, 0.3), 3)
    0.95
    """
    if natural_noise >= 1:
        return measured
    return float(np.clip((measured - natural_noise * tie) / (1 - natural_noise), 0, 1))


def _vectors(pairs: Pairs) -> tuple[npt.NDArray[np.floating], npt.NDArray[np.floating]]:
    """(n, D) and (n, E) items of all pairs."""
    assert isinstance(pairs.left, Vectors)
    assert isinstance(pairs.right, Vectors)
    return np.asarray(pairs.left.features)[pairs.link], np.asarray(pairs.right.features)


def judge(
    pairs: Pairs,
    audit: Audit,
    kind: str,
    seed: int,
    natural_noise: float = 0.0,
    baselines: Mapping[str, npt.NDArray[np.floating]] | None = None,
) -> AuditQuality:
    """Compares an audit, and the scores of other methods, with the truth."""
    mismatched = pairs.mismatched
    assert mismatched is not None
    assert pairs.truth is not None
    score, combination = audit.score, audit.judge.combination
    flagged = mismatched[audit.suggested]
    own = pairs.link[audit.suggested[flagged]]
    right_fits = _fits(audit.new_rights, pairs.link[audit.suggested], pairs.truth)
    left_fits = _fits(audit.new_lefts, pairs.truth[audit.suggested], pairs.link)
    found = auroc(score, ~mismatched) or 0.5
    baselines = baselines or {}
    claims = np.concatenate([audit.new_rights.scores[:, 0], audit.new_lefts.scores[:, 0]])
    correct = np.concatenate([right_fits, left_fits])[~np.isnan(claims)]
    claims = claims[~np.isnan(claims)]
    return AuditQuality(
        kind=kind,
        noise_ratio=float(mismatched.mean()),
        seed=seed,
        pairs=len(pairs),
        auroc=found,
        corrected_auroc=corrected_auroc(found, natural_noise, _tie(audit, mismatched)),
        average_precision=_precision(score, mismatched),
        measures={
            name: auroc(audit.scan.measures[:, column], ~mismatched) or 0.5
            for column, name in enumerate(audit.judge.names)
        },
        baselines={name: auroc(scores, ~mismatched) or 0.5 for name, scores in baselines.items()},
        baseline_precision={name: _precision(scores, mismatched) for name, scores in baselines.items()},
        natural_noise=natural_noise,
        noise_rate=combination.rate,
        noise_low=combination.low,
        noise_high=combination.high,
        calibration_error=calibration_error(audit.match_score, ~mismatched),
        reliability=reliability(audit.match_score, ~mismatched),
        right_correct=_mean(right_fits[flagged]),
        left_correct=_mean(left_fits[flagged]),
        neighbour_correct=_mean(_by_neighbour(pairs, audit.suggested[flagged])),
        chance=_mean(np.bincount(pairs.truth, minlength=len(pairs.left))[own] / len(pairs)),
        suggestion_claim=_mean(claims),
        suggestion_correct=_mean(correct),
        suggestion_error=calibration_error(claims, correct) if len(claims) else 0.0,
        seconds=audit.seconds,
    )


def _precision(score: npt.NDArray[np.floating], mismatched: BoolArray) -> float:
    return float(average_precision_score(mismatched, -score)) if mismatched.any() else float("nan")


def _tie(audit: Audit, mismatched: BoolArray) -> float:
    """Probability that a shuffled pair has a higher score than one that was mismatched on purpose."""
    shuffled, injected = audit.judge.combination.log_odds(audit.judge.null), audit.score[mismatched]
    both = np.concatenate([shuffled, injected])
    return 0.5 if not len(injected) else auroc(both, np.arange(len(both)) < len(shuffled)) or 0.5


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
    metrics: list[tuple[str, Callable[[AuditQuality], float]]] = [
        ("AUROC of the match score", lambda row: row.auroc),
        ("  corrected for natural noise", lambda row: row.corrected_auroc),
        *((f"  of {name} alone", partial(_named, "measures", name)) for name in rows[0].measures),
        *((f"  of the baseline {name}", partial(_named, "baselines", name)) for name in rows[0].baselines),
        ("average precision of the match score", lambda row: row.average_precision),
        *((f"  of the baseline {name}", partial(_named, "baseline_precision", name)) for name in rows[0].baselines),
        ("estimated noise rate", lambda row: row.noise_rate),
        ("  its interval holds the truth", lambda row: float(row.covered)),
        ("expected calibration error", lambda row: row.calibration_error),
        ("first suggested right item is correct", lambda row: row.right_correct),
        ("first suggested left item is correct", lambda row: row.left_correct),
        ("  by the nearest neighbour's partner", lambda row: row.neighbour_correct),
        ("  by chance", lambda row: row.chance),
        ("probability of the first suggestions", lambda row: row.suggestion_claim),
        ("  share of them that is correct", lambda row: row.suggestion_correct),
        ("seconds", lambda row: row.seconds),
    ]
    for name, metric in metrics:
        table.add_row(name, *(f"{fmean(map(metric, group)):.4f}" for group in groups.values()))
    lowest = (min(row.auroc for row in group) for group in groups.values())
    table.add_row("AUROC, lowest of the seeds", *(f"{value:.4f}" for value in lowest))
    return table


def _named(attribute: str, name: str, row: AuditQuality) -> float:
    value: float = getattr(row, attribute)[name]
    return value


def main(
    source: Positional[Path | None] = None,
    *,
    left: Path | None = None,
    right: Path | None = None,
    kind: tuple[NoiseKind, ...] = ("caption",),
    noise_ratio: tuple[float, ...] = (0.2, 0.4, 0.6),
    seeds: int = 3,
    pairs: int | None = None,
    baselines: bool = True,
    natural_noise: float | None = None,
    device: str = "auto",
    json: bool = False,
) -> None:
    """Measure how well an audit detects injected noise, on your own data, beside other methods.

    Args:
        source: Folder of embeddings or features; its pairs count as matched.
        left: Vectors of one side as .npy, instead.
        right: Vectors of the other side.
        kind: Of the noise: caption (at random), near (among similar items), group (whole groups), image.
        noise_ratio: Fractions of mismatched pairs.
        seeds: Audits of each.
        pairs: Use only so many pairs, drawn at random.
        baselines: Measure other methods as well: cosine (in a common space), CCA cosine, neighbours, LEMoN.
        natural_noise: Fraction of your own pairs that are mismatched; by default an audit of them estimates it.
        device: auto, cpu, cuda, cuda:1, mps.
        json: Print the numbers as JSON.
    """
    at_least(1, seeds=seeds, pairs=pairs)
    check_ratios(noise_ratio)
    if natural_noise is not None and not 0 <= natural_noise < 1:
        raise InvalidValueError(str(natural_noise), where="natural_noise", expected="0 to below 1, such as 0.05")
    if source is not None and left is None and right is None:
        opened = open_source(source)
    elif source is None and left is not None and right is not None:
        opened = open_arrays(left, right)
    else:
        raise ConflictError("Give a folder, or both `left=A.npy` and `right=B.npy`", where="left")
    if natural_noise is None:
        natural = find_natural_noise(opened, count=pairs, device=device)
    else:
        natural = NaturalNoise(natural_noise)
    rows = []
    for row in measure(
        opened, kind, noise_ratio, seeds, natural_noise=natural.rate, count=pairs, device=device, baselines=baselines
    ):
        rows.append(row)
        say(f"{row.kind} {row.noise_ratio:.2f} seed {row.seed}: {row.auroc:.4f}", file=sys.stderr)
    if json:
        print_json({"input": opened.name, "assumes": natural.sentence(), "audits": [vars(row) for row in rows]})
    else:
        print_table(quality_table(rows))
        say(natural.sentence())


if __name__ == "__main__":
    sys.exit(run(main))
