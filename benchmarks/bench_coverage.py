"""Whether the audit's interval, bound and probabilities hold: `make bench-coverage ARGS="FOLDER [FOLDER ...]"`.

Many audits of pairs of which a share exchanged their partners: at random; with one of the ten most similar pairs by
left items, right items or both; or mixed, half of them at random and half by left items. --natural adds pairs that
people have judged: a sample with the wanted share of wrong ones.

Only pairs that were exchanged at random certainly have nothing to do with each other. Of those that are wrong in other
ways some share may have. So the interval of the noise rate holds if it does not end below the share of random exchanges
and does not begin above the share of all wrong pairs; the bound, if it is at least the share of all wrong pairs.

--jobs runs several audits at a time, in processes of --threads threads. Each audit is a line of --out, so the same
command resumes, and only what is missing is audited.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
from tyro.conf import Positional

import bench_audit
import bench_near
from bench_audit import AuditQuality
from common import at_least, check_names, check_ratios, run
from mispair.auditing.audit import Audit, Settings, audit_source
from mispair.auditing.auditor import LEAST
from mispair.errors import InvalidValueError, ShapeError
from mispair.pairs.layouts.arrays import from_pairs
from mispair.pairs.layouts.opening import open_source
from mispair.pairs.noise import caption_noise
from mispair.pairs.pairs import Pairs, Vectors
from mispair.support.arrays import IntArray
from mispair.support.cores import share_cores

Kind = Literal["random", "left", "right", "both", "mixed"]
NATURAL = "natural"
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.floating]


@dataclass(frozen=True)
class Task:
    """One audit to make."""

    data: str  # folder, or NATURAL
    kind: str
    pairs: int
    noise_ratio: float
    seed: int

    @property
    def name(self) -> str:
        return " ".join(
            str(part) for part in (Path(self.data).name, self.kind, self.pairs, self.noise_ratio, self.seed)
        )


@dataclass(frozen=True)
class Measured:
    """One audit beside the truth, as a line of the file has it."""

    task: str
    data: str
    kind: str
    column: float  # noise ratio that was asked for
    wrong: float  # share of all wrong pairs
    unrelated: float  # share of pairs that were exchanged at random
    found: float  # share of the wrong pairs that is flagged
    claimed: float | None  # the same, as the audit says; None for natural noise
    at_most: float
    quality: AuditQuality

    @property
    def outside(self) -> float:
        """How far the interval is from what it should hold."""
        return max(self.unrelated - self.quality.noise_high, self.quality.noise_low - self.wrong, 0.0)

    @property
    def unbound(self) -> float:
        """How far the share of all wrong pairs is above the bound."""
        return max(self.wrong - self.at_most, 0.0)

    def line(self) -> str:
        return json.dumps({**vars(self), "quality": vars(self.quality)})

    @classmethod
    def of(cls, line: str) -> Measured:
        values = json.loads(line)
        return cls(**{**values, "quality": AuditQuality(**values["quality"])})


def exchanged(pairs: Pairs, kind: str, noise_ratio: float, seed: int) -> tuple[IntArray, Bools]:
    """The left item of each pair (n,), and which pairs were exchanged at random."""
    own = np.asarray(pairs.link)
    if kind == "random":
        link = caption_noise(own, noise_ratio, seed)
        return link, link != own
    assert isinstance(pairs.left, Vectors)
    assert isinstance(pairs.right, Vectors)
    left, right = np.asarray(pairs.left.features)[own], np.asarray(pairs.right.features)
    mixed = kind == "mixed"
    near = bench_near.partners(left, right, "left" if mixed else kind, noise_ratio / (1 + mixed), seed)
    random = np.zeros(len(own), dtype=np.bool_)
    if mixed:
        others = np.flatnonzero(near == np.arange(len(own)))
        share = min(noise_ratio / 2 * len(own) / len(others), 1.0)
        near[others] = others[caption_noise(np.arange(len(others)), share, seed)]
        random[others] = own[near[others]] != own[others]
    return own[near], random


def drawn(given: Sequence[Path], count: int, noise_ratio: float, seed: int) -> tuple[Pairs, Bools]:
    """Judged pairs of which a share is wrong, and which of them are; fewer pairs where there are too few."""
    left, right, matched = (np.load(path) for path in given)
    rng = np.random.default_rng(seed)
    parts = []
    for rows, share in ((np.flatnonzero(matched == 0), noise_ratio), (np.flatnonzero(matched == 1), 1 - noise_ratio)):
        wanted = round(count * share)
        if wanted > len(rows):
            raise InvalidValueError(f"{wanted:,}, but there are {len(rows):,}", where="pairs", expected="fewer")
        parts.append(rng.choice(rows, wanted, replace=False))
    rows = rng.permutation(np.concatenate(parts))
    own, wrong = np.arange(count), matched[rows] == 0
    # No partner is known for the wrong ones: each right item counts as that of another pair.
    pairs = Pairs(Vectors(left[rows]), Vectors(right[rows]), np.where(wrong, np.roll(own, 1), own))
    return pairs.with_link(own), wrong


def audit_one(task: Task, natural: Sequence[Path]) -> Measured:
    """Make an audit, and compare it with the truth."""
    if task.data == NATURAL:
        noisy, wrong = drawn(natural, task.pairs, task.noise_ratio, task.seed)
        unrelated = np.zeros(len(wrong), dtype=np.bool_)
    else:
        pairs = bench_audit.pairs_of(open_source(Path(task.data)), task.pairs, task.seed)
        link, unrelated = exchanged(pairs, task.kind, task.noise_ratio, task.seed)
        noisy, wrong = pairs.with_link(link), link != pairs.link
    audit = audit_source(from_pairs(noisy), Settings(device="cpu"))
    return Measured(
        task=task.name,
        data=Path(task.data).name,
        kind=task.kind,
        column=task.noise_ratio,
        wrong=float(wrong.mean()),
        unrelated=float(unrelated.mean()),
        found=float(audit.is_mismatch[wrong].mean()) if wrong.any() else 0.0,
        claimed=claim(audit, task.kind, float(unrelated.sum() / max(wrong.sum(), 1))),
        at_most=audit.summary.at_most,
        quality=bench_audit.judge(noisy, audit, task.kind, task.seed),
    )


def claim(audit: Audit, kind: str, random: float) -> float | None:
    """The share of such exchanges that the audit says it would flag; `random` of them are random ones."""
    found = {one.by if one.kind == "similar" else one.kind: one.found for one in audit.summary.detections}
    parts = {"random": ("random", "random"), "mixed": ("random", "left")}.get(kind, ("random", kind))
    if not all(part in found for part in parts):
        return None
    return random * found[parts[0]] + (1 - random) * found[parts[1]]


def measure(
    tasks: Sequence[Task], natural: Sequence[Path], jobs: int, threads: int, minutes: float | None
) -> Iterator[Measured]:
    """Audits in several processes; none is begun after so many minutes."""
    share_cores(str(threads))
    end = None if minutes is None else time.monotonic() + 60 * minutes
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(_in_time, task, natural, end) for task in tasks]
        for future in as_completed(futures):
            if (found := future.result()) is not None:
                yield found


def _in_time(task: Task, natural: Sequence[Path], end: float | None) -> Measured | None:
    return None if end is not None and time.monotonic() > end else audit_one(task, natural)


def coverage_table(found: Sequence[Measured]) -> str:
    """A row for each data set, kind of noise and size: what holds, and how far what does not is off."""
    lines = [
        "| data | noise | pairs | audits | interval holds | farthest outside | its width | bound holds | "
        "farthest above | mean bound | claimed - found: mean, worst of the means |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str, str], list[Measured]] = {}
    for one in found:
        groups.setdefault((one.data, one.kind, f"{one.quality.pairs:,}"), []).append(one)
    for kind in dict.fromkeys(one.kind for one in found):
        groups["all", kind, ""] = [one for one in found if one.kind == kind]
    groups["all", "", ""] = list(found)
    for names, audits in groups.items():
        lines.append("| " + " | ".join([
            *names,
            f"{len(audits)}",
            f"{fmean(one.outside == 0 for one in audits):.1%}".replace("%", " %"),
            f"{max(one.outside for one in audits):.3f}",
            f"{fmean(one.quality.noise_high - one.quality.noise_low for one in audits):.3f}",
            f"{fmean(one.unbound == 0 for one in audits):.1%}".replace("%", " %"),
            f"{max(one.unbound for one in audits):.3f}",
            f"{fmean(one.at_most for one in audits):.2f}",
            claims(audits),
        ]) + " |")  # fmt: skip
    return "\n".join(lines)


def claims(audits: Sequence[Measured]) -> str:
    """How much more exchanges are claimed to be found than are, and the worst mean over the seeds."""
    cells: dict[tuple[str, str, int, float], list[float]] = {}
    for one in audits:
        if one.claimed is not None and one.wrong > 0:
            key = one.data, one.kind, one.quality.pairs, one.column
            cells.setdefault(key, []).append(one.claimed - one.found)
    means = [fmean(errors) for errors in cells.values()]
    return f"{fmean(means):+.3f}, {max(means, key=abs):+.3f}" if means else ""


def probability_table(found: Sequence[Measured]) -> str:
    """Rates and probabilities: a row for each data set, kind and size, a column for each noise ratio."""
    ratios = sorted({one.column for one in found})
    metrics: dict[str, Callable[[Measured], float]] = {
        "interval of the noise rate holds": lambda one: float(one.outside == 0),
        "its width": lambda one: one.quality.noise_high - one.quality.noise_low,
        "calibration error of the match score": lambda one: one.quality.calibration_error,
        "calibration error of suggestions": lambda one: one.quality.suggestion_error,
        "first suggestions claim": lambda one: one.quality.suggestion_claim,
        "first suggestions are correct": lambda one: one.quality.suggestion_correct,
    }
    lines = [f"| noise, pairs | | {' | '.join(f'{ratio:g}' for ratio in ratios)} |", f"|---|---|{'---|' * len(ratios)}"]
    for group in sorted({(one.kind, one.quality.pairs) for one in found}):
        audits = [one for one in found if (one.kind, one.quality.pairs) == group]
        for title, metric in metrics.items():
            if group[0] == NATURAL and "suggestions" in title:
                continue  # nobody knows better partners
            columns = [[metric(one) for one in audits if one.column == ratio] for ratio in ratios]
            cells = " | ".join(f"{fmean(column):.3f}" if column else "" for column in columns)
            lines.append(f"| {group[0]}, {group[1]:,} | {title} | {cells} |")
    return "\n".join(lines)


def main(
    folders: Positional[tuple[Path, ...]],
    *,
    kinds: tuple[str, ...] = ("random",),
    natural: tuple[Path, ...] = (),
    noise_ratio: tuple[float, ...] = (0.0, 0.05, 0.2, 0.4, 0.6),
    pairs: tuple[int, ...] = (1000, 3000),
    audits: int = 3,
    out: Path = Path("coverage.jsonl"),
    jobs: int = 1,
    threads: int = 2,
    minutes: float | None = None,
) -> None:
    """Measure how often the interval and the bound hold, and how well probabilities are calibrated.

    Args:
        folders: Folders of embeddings or features; their pairs count as matched.
        kinds: Of the exchanges: random, left, right, both, mixed.
        natural: Three files of judged pairs as well: vectors of both sides, and 1 for each pair that matches, else 0.
        noise_ratio: Fractions of mismatched pairs.
        pairs: Numbers of pairs, drawn at random; those above what there is are left out.
        audits: Audits of each.
        out: File of the audits.
        jobs: Audits at a time.
        threads: Threads of each.
        minutes: Begin no audit later than this.
    """
    if not folders and not natural:
        raise InvalidValueError("nothing", where="folders", expected="folders of embeddings or features")
    if len(natural) not in (0, 3):
        raise ShapeError(f"{len(natural)} files", where="natural", expected="left.npy, right.npy and matched.npy")
    at_least(1, audits=audits, jobs=jobs, threads=threads)
    at_least(LEAST, pairs=pairs)
    check_ratios(noise_ratio)
    check_names(kinds, get_args(Kind), "kinds")
    sizes = {str(folder): len(open_source(folder)) for folder in folders}
    tasks = [
        Task(data, kind, size, ratio, seed)
        for seed, size, ratio, kind, data in product(range(audits), pairs, noise_ratio, kinds, sizes)
        if size <= sizes[data] and (ratio or kind == kinds[0])
    ]
    if folders and not tasks:
        has = ", ".join(f"{Path(data).name} has {size:,}" for data, size in sizes.items())
        raise InvalidValueError(f"{', '.join(map(str, pairs))}, but {has}", where="pairs", expected="no more than that")
    if natural:
        judged = np.load(natural[2])
        tasks += [
            Task(NATURAL, NATURAL, size, ratio, seed)
            for seed, size, ratio in product(range(audits), pairs, noise_ratio)
            if size * ratio <= (judged == 0).sum() and size * (1 - ratio) <= (judged == 1).sum()
        ]
        tasks.sort(key=lambda task: task.seed)
    names = {task.name for task in tasks}
    lines = out.read_text().splitlines() if out.exists() else []
    found = [one for one in map(Measured.of, lines) if one.task in names]
    made = {one.task for one in found}
    with out.open("a") as file:
        for one in measure([task for task in tasks if task.name not in made], natural, jobs, threads, minutes):
            print(one.line(), file=file, flush=True)
            found.append(one)
    if found:
        print(coverage_table(found))
        print()
        print(probability_table(found))


if __name__ == "__main__":
    sys.exit(run(main))
