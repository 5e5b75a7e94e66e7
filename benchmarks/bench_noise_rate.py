"""How many decisions fix the noise rate: simulated reviewers, with right and with badly calibrated match scores.

`make bench-noise-rate ARGS="--data f8k_pairs --out noise_rate"` makes the table in docs/review.md and prints it.

The training pairs of bench_reviewer.py are audited, with several seeds of the noise. On each audit reviewers who know
the truth decide on drawn pairs until half of the 95 % interval is 1.5 points or less. It is computed after every
hundredth part of the decisions so far, and less often while it is far from that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet

from bench_reviewer import Trial
from common import run
from mispair.auditing.audit import Settings
from mispair.auditing.folder import audit_path
from mispair.auditing.inputs import AuditInput
from mispair.auditing.output_files import TABLE
from mispair.auditing.summary import NoiseEstimate
from mispair.functional.logistic import FloatArray, probability
from mispair.reviewing.noise_estimate import LEAST, Draw
from mispair.reviewing.review import PRECISION

NOISE_RATIOS = (0.05, 0.2, 0.4)
SCORES: dict[str, Callable[[FloatArray], FloatArray]] = {
    "scores of the audit": lambda odds: odds,
    "twice too sure": lambda odds: 2 * odds,
    "log odds shifted by 1": lambda odds: odds + 1,
}  # what becomes of the log odds that a pair is mismatched
SUREST = 1e-6  # of the scores before that
LEAP = 0.1  # share of the decisions that are missing, by the width so far, after which it is computed again


def audited(data: Path, folder: Path, noise_ratio: float, seed: int) -> tuple[FloatArray, FloatArray]:
    """(N,) log odds that each pair is mismatched by its match score, and (N,) whether it is."""
    trial = Trial(data, folder, seed, noise_ratio, held_out=500)
    pairs, images = trial.make_set(noise_ratio)
    audit_path(AuditInput(pairs), folder / "audit", Settings(device="cpu"))
    score = np.asarray(pyarrow.parquet.read_table(folder / "audit" / TABLE)["match_score"], dtype=np.float64)
    q = np.clip(1 - score, SUREST, 1 - SUREST)
    return np.log(q / (1 - q)), (images != np.arange(len(images))).astype(np.float64)


def decide(mismatch: FloatArray, mismatched: FloatArray, seed: int) -> NoiseEstimate:
    """The estimate of a reviewer who decides until it is precise enough."""
    draw = Draw(mismatch, seed)
    answers, count = mismatched[draw.order], LEAST
    while True:
        found = draw.estimate(answers[:count])
        assert found is not None
        if found.half_width <= PRECISION:
            return found
        missing = count * ((found.half_width / PRECISION) ** 2 - 1)
        count += max(1, count // 100, int(LEAP * missing))


def main(
    *,
    data: Path,
    out: Path,
    seeds: tuple[int, ...] = (30, 31, 32, 33, 34),
    reviewers: int = 100,
    noise_ratios: tuple[float, ...] = NOISE_RATIOS,
) -> None:
    """Print a row of the table for each noise ratio.

    Args:
        data: Folder of embeddings, one pair an image.
        out: Folder of the audits.
        seeds: Of the noise.
        reviewers: Of each audit.
        noise_ratios: Fractions of mismatched pairs.
    """
    print(f"| noise | {' | '.join(SCORES)} |\n|{'---|' * (len(SCORES) + 1)}")
    for noise_ratio in noise_ratios:
        audits = [audited(data, out / f"{noise_ratio}_{seed}", noise_ratio, seed) for seed in seeds]
        cells = []
        for change in SCORES.values():
            found = [
                (decide(probability(change(odds)), mismatched, number), mismatched.mean())
                for odds, mismatched in audits
                for number in range(reviewers)
            ]
            covered = np.mean([one.low <= truth <= one.high for one, truth in found])
            cells.append(f"{np.mean([one.decisions for one, _ in found]):.0f}, {covered:.1%}".replace("%", " %"))
        print(f"| {100 * noise_ratio:.0f} % | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    sys.exit(run(main))
