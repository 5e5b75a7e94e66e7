"""Mismatches that people have judged: `make bench-natural ARGS="left.npy right.npy matched.npy"`.

Nothing is exchanged here: MATCHED says of each pair what people call it. The table has the AUROC of the match score and
of the best measure, the noise rate of the audit with its bound, and then the same after decisions on pairs that the
review draws. Its AUROC is that of the other pairs. The share of the draws whose interval holds the truth is over many
draws from the first audit.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tyro.conf import Positional

import mispair
from common import at_least, run
from mispair.auditing.audit import Audit
from mispair.errors import ShapeError
from mispair.functional.metrics import auroc
from mispair.reviewing.noise_estimate import Draw

Truth = npt.NDArray[np.bool_]


def without(audit: Audit, matched: Truth) -> str:
    """The row of an audit without decisions."""
    measures = [auroc(column, matched) or 0.5 for column in audit.scan.measures.T]
    best, summary = int(np.argmax(measures)), audit.summary
    return (
        f"| 0 | | {auroc(audit.score, matched) or 0.5:.4f} | {measures[best]:.4f} ({audit.judge.names[best]}) | "
        f"{summary.noise_rate:.3f} ({summary.noise_rate_low:.3f} to {summary.noise_rate_high:.3f}) | "
        f"{summary.at_most:.2f} | | |"
    )


def holding(audit: Audit, matched: Truth, count: int, draws: int) -> tuple[float, float]:
    """Share of the draws whose interval holds the truth, and the mean half width of the intervals."""
    held, widths = [], []
    for seed in range(draws):
        draw = Draw(1.0 - audit.match_score.astype(np.float64), seed)
        estimate = draw.estimate((~matched[draw.order[:count]]).astype(np.float64))
        assert estimate is not None
        held.append(estimate.low <= (~matched).mean() <= estimate.high)
        widths.append(estimate.half_width)
    return float(np.mean(held)), float(np.mean(widths))


def main(
    left: Positional[Path],
    right: Positional[Path],
    matched: Positional[Path],
    *,
    decisions: tuple[int, ...] = (60, 100, 300),
    seeds: int = 3,
    draws: int = 200,
) -> None:
    """Print a table of audits with and without decisions.

    Args:
        left: Vectors, as a .npy file.
        right: Vectors of their partners.
        matched: 1 for each pair that people call a match, else 0.
        decisions: How many pairs are decided.
        seeds: Draws for which the audit is made again with the decisions.
        draws: Draws for the share of intervals that hold the truth.
    """
    at_least(1, seeds=seeds, draws=draws, decisions=decisions)
    x, y, truth = (np.load(path) for path in (left, right, matched))
    truth = truth.astype(bool)
    if not len(x) == len(y) == len(truth):
        raise ShapeError(f"{len(x)}, {len(y)} and {len(truth)} rows", expected="as many of each")
    audit = mispair.audit(x, y)
    print(f"{len(truth):,} pairs, {(~truth).mean():.3f} of them called mismatched.\n")
    print("| decisions | seed | match score | best measure | noise rate | at most | intervals that hold | half width |")
    print("|---|---|---|---|---|---|---|---|")
    print(without(audit, truth), flush=True)
    for count in decisions:
        share, width = holding(audit, truth, count, draws)
        for seed in range(seeds):
            draw = Draw(1.0 - audit.match_score.astype(np.float64), seed)
            drawn = draw.order[:count]
            estimate = draw.estimate((~truth[drawn]).astype(np.float64))
            again = mispair.audit(x, y, checked={str(row): bool(truth[row]) for row in drawn.tolist()})
            others = np.setdiff1d(np.arange(len(truth)), drawn)
            rate = "" if estimate is None else f"{estimate.rate:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"
            print(
                f"| {count} | {seed} | {auroc(again.match_score[others], truth[others]) or 0.5:.4f} | | {rate} | | "
                f"{share:.3f} | {width:.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(run(main))
