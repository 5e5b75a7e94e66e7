"""An `Auditor` on pairs that it has not seen, and an audit: `make bench-auditor ARGS="LEFT.npy RIGHT.npy"`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from tyro.conf import Positional

import mispair
from common import at_least, check_ratios, run
from mispair.functional.metrics import auroc
from mispair.pairs.noise import caption_noise


def main(
    left: Positional[Path], right: Positional[Path], *, noise_ratio: tuple[float, ...] = (0.2, 0.4), seeds: int = 3
) -> None:
    """Print a row for each noise ratio and seed: AUROC on one half of the pairs.

    The auditor learns from the other half, the audit from all pairs.

    Args:
        left: Vectors of one side.
        right: Vectors of the other side.
        noise_ratio: Fractions of the pairs to mismatch.
        seeds: Number of draws.
    """
    check_ratios(noise_ratio)
    at_least(1, seeds=seeds)
    lefts, rights = (np.load(path).astype(np.float32) for path in (left, right))
    rows = np.arange(len(lefts))
    print("| noise ratio | seed | audit | auditor |\n|---|---|---|---|")
    for ratio in noise_ratio:
        for seed in range(seeds):
            link = caption_noise(rows, ratio, seed)
            items, matched = lefts[link], link == rows
            learned, unseen = np.array_split(np.random.default_rng(seed).permutation(rows), 2)
            audited = mispair.audit(items, rights).match_score[unseen]
            scored = mispair.Auditor().fit(items[learned], rights[learned]).score(items[unseen], rights[unseen])
            values = [auroc(scores, matched[unseen]) or 0.5 for scores in (audited, scored)]
            print(f"| {ratio:g} | {seed} | {values[0]:.4f} | {values[1]:.4f} |", flush=True)


if __name__ == "__main__":
    sys.exit(run(main))
