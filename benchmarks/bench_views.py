"""Audits with several encoders a side: `make bench-views ARGS="FOLDER [FOLDER ...]"`.

FOLDER has vectors by several encoders of each side, left_1.npy, left_2.npy, ... and right_1.npy, .... Captions are
exchanged at random or among look-alikes by the first left view, the first right view, or both. Each exchange is audited
by every pair of single views, by all views together, and by all of them with a view of random numbers on each side.
The tables have the AUROC of the match score, means over the seeds.

Each audit is a line of --out, so the same command resumes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from tyro.conf import Positional

import mispair
from bench_near import Kind, Vectors, partners
from common import at_least, check_ratios, run
from mispair.errors import NotFoundError
from mispair.functional.metrics import auroc
from mispair.support.cores import share_cores

ALL, JUNK = "all", "all and random numbers"
KINDS: tuple[Kind, ...] = ("random", "left", "right", "both")
Case = tuple[Path, Kind, float, int, str]  # folder, exchanges, noise ratio, seed, views


def views_of(folder: Path, side: str, pairs: int | None) -> list[Vectors]:
    """The vectors of one side by each encoder, of the first pairs."""
    files = sorted(folder.glob(f"{side}_*.npy"))
    if not files:
        raise NotFoundError("no vectors", where=folder, expected=f"{side}_1.npy, {side}_2.npy, ...")
    return [np.load(file)[:pairs].astype(np.float32) for file in files]


def names_of(folder: Path) -> list[str]:
    """What is audited: pairs of single views such as 1+2, then all."""
    counts = [range(1, len(views_of(folder, side, 1)) + 1) for side in ("left", "right")]
    return [*(f"{left}+{right}" for left, right in product(*counts)), ALL, JUNK]


def measure(case: Case, pairs: int | None) -> dict[str, Any]:
    """One audit."""
    folder, kind, noise_ratio, seed, views = case
    left, right = (views_of(folder, side, pairs) for side in ("left", "right"))
    link = partners(left[0], right[0], kind, noise_ratio, seed)
    if views == JUNK:
        random = np.random.default_rng(seed)
        for side in (left, right):
            side.append(random.standard_normal(side[0].shape).astype(np.float32))
    elif views != ALL:
        left, right = ([side[int(number) - 1]] for side, number in zip((left, right), views.split("+"), strict=True))
    start = time.process_time()
    found = mispair.audit([side[link] for side in left], right, device="cpu")
    score = auroc(found.score, link == np.arange(len(link)))
    seconds = time.process_time() - start
    return dict(zip(("data", "kind", "noise_ratio", "seed", "views"), (folder.name, *case[1:]), strict=True)) | {
        "auroc": score, "seconds": seconds,
    }  # fmt: skip


def table(done: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each data set, kind and noise ratio; differences are seed by seed, from the best single pair."""
    lines = [
        "| data | exchanged | mismatched | first views | best single pair | all views | difference, worst seed | "
        "with random numbers | time, times the first views |",
        "|---" * 9 + "|",
    ]
    groups: dict[tuple[str, str, float], dict[str, dict[int, dict[str, Any]]]] = {}
    for row in done:
        key = row["data"], row["kind"], row["noise_ratio"]
        groups.setdefault(key, {}).setdefault(row["views"], {})[row["seed"]] = row
    for key, by_views in sorted(groups.items()):
        seeds = set.intersection(*(set(rows) for rows in by_views.values()))
        if not seeds or not {"1+1", ALL, JUNK} <= set(by_views):
            continue

        def mean(views: str, column: str = "auroc", rows: Any = by_views, seeds: set[int] = seeds) -> float:
            return fmean(rows[views][seed][column] for seed in seeds)

        best = max((views for views in by_views if views not in (ALL, JUNK)), key=mean)
        gains = [by_views[ALL][seed]["auroc"] - by_views[best][seed]["auroc"] for seed in seeds]
        lines.append(
            f"| {key[0]} | {key[1]} | {key[2]:.0%} | {mean('1+1'):.3f} | {mean(best):.3f} ({best}) | {mean(ALL):.3f} | "
            f"{fmean(gains):+.3f}, {min(gains):+.3f} | {mean(JUNK):.3f} | "
            f"{mean(ALL, 'seconds') / mean('1+1', 'seconds'):.1f} |"
        )
    return lines


def main(
    folders: Positional[tuple[Path, ...]],
    *,
    noise_ratio: tuple[float, ...] = (0.2,),
    seeds: int = 3,
    pairs: int | None = None,
    jobs: int = 1,
    out: Path = Path("views.jsonl"),
) -> None:
    """Print a table of audits by their views.

    Args:
        folders: Folders of vectors.
        noise_ratio: Fractions of mismatched pairs.
        seeds: Audits of each kind.
        pairs: Use the first so many pairs; all by default.
        jobs: Audits at a time, each on one core.
        out: File of the audits.
    """
    check_ratios(noise_ratio)
    at_least(1, seeds=seeds, pairs=pairs, jobs=jobs)
    names = {folder: names_of(folder) for folder in folders}
    done = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    known = {(row["data"], row["kind"], row["noise_ratio"], row["seed"], row["views"]) for row in done}
    cases = [
        (folder, kind, ratio, seed, views)
        for seed, folder, kind, ratio in product(range(seeds), folders, KINDS, noise_ratio)
        for views in reversed(names[folder])  # the longest first
        if (folder.name, kind, ratio, seed, views) not in known
    ]
    share_cores("1")
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool, out.open("a", encoding="utf-8") as file:
        for future in as_completed([pool.submit(measure, case, pairs) for case in cases]):
            done.append(future.result())
            file.write(json.dumps(done[-1]) + "\n")
            file.flush()
    print("\n".join(table(done)))


if __name__ == "__main__":
    sys.exit(run(main))
