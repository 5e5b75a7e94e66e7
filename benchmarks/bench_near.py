"""Partners exchanged among look-alikes: `make bench-near ARGS=FOLDER`.

Pairs of FOLDER, whose items are used once each, exchange partners with a pair whose left item, right item, or both are
among the ten most similar ones, and at random. The table has the AUROC of the match score and of the best measure, the
estimated rates, the share of the exchanges that is flagged beside the share that the audit claims of such ones, and how
many pairs it says may be mismatched at most.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
from tyro.conf import Positional

import mispair
from common import at_least, check_names, check_ratios, run
from mispair.functional.metrics import auroc
from mispair.pairs.layouts.opening import open_source
from mispair.pairs.noise import caption_noise, near_noise
from mispair.support.arrays import IntArray

Kind = Literal["left", "right", "both", "random"]
Vectors = npt.NDArray[np.floating]


def partners(left: Vectors, right: Vectors, kind: str, noise_ratio: float, seed: int) -> IntArray:
    """(n,) the left item that each right item gets."""
    own = np.arange(len(left))
    if kind == "random":
        return caption_noise(own, noise_ratio, seed)
    units = [
        (side - side.mean(0)) / np.linalg.norm(side - side.mean(0), axis=1, keepdims=True) for side in (left, right)
    ]
    side = {"left": left, "right": right, "both": np.concatenate(units, axis=1)}[kind]
    return near_noise(own, side, noise_ratio, seed)


def measure(left: Vectors, right: Vectors, kind: str, noise_ratio: float, seed: int) -> str:
    """A row of the table."""
    link = partners(left, right, kind, noise_ratio, seed)
    matched = link == np.arange(len(link))
    found = mispair.audit(left[link], right)
    summary = found.summary
    measures = [auroc(column, matched) or 0.5 for column in found.scan.measures.T]
    best = int(np.argmax(measures))
    close = "" if summary.close_rate is None else f"{summary.close_rate:.3f}"
    claimed = [one.found for one in summary.detections if (one.kind, one.by) in (("similar", kind), (kind, ""))]
    return " | ".join([
        f"| {kind}", f"{noise_ratio:g}", f"{seed}", f"{auroc(found.score, matched) or 0.5:.4f}",
        f"{measures[best]:.4f} ({found.judge.names[best]})",
        f"{summary.noise_rate:.3f} ({summary.noise_rate_low:.3f} to {summary.noise_rate_high:.3f})", close,
        f"{found.is_mismatch[~matched].mean():.3f}", "".join(f"{one:.3f}" for one in claimed),
        f"{summary.at_most:.2f} |",
    ])  # fmt: skip


def main(
    folder: Positional[Path],
    *,
    kinds: tuple[str, ...] = get_args(Kind),
    noise_ratio: tuple[float, ...] = (0.4,),
    seeds: int = 1,
    pairs: int | None = None,
) -> None:
    """Print a table of audits.

    Args:
        folder: Embeddings or features.
        kinds: left, right, both (alike by these items), random.
        noise_ratio: Shares of mismatched pairs.
        seeds: Audits of each kind.
        pairs: Use so many of the pairs.
    """
    check_names(kinds, get_args(Kind), "kinds")
    check_ratios(noise_ratio)
    at_least(1, seeds=seeds, pairs=pairs)
    source = open_source(folder)
    _, first = np.unique(source.first_rows, return_index=True)  # one pair a left item
    left, right = (np.asarray(side) for side in source.gather(np.sort(first)[:pairs]))
    print(
        "| exchanged | mismatched | seed | match score | best measure | noise rate | close rate | flagged | claimed | "
        "at most |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for kind in kinds:
        for ratio in noise_ratio:
            for seed in range(seeds):
                print(measure(left, right, kind, ratio, seed), flush=True)


if __name__ == "__main__":
    sys.exit(run(main))
