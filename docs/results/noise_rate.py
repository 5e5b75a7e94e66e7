"""How many decisions fix the noise rate: simulated reviewers, with right and with badly calibrated match scores.

python docs/results/noise_rate.py --data f8k_pairs --out noise_rate makes the table in docs/review.md and prints it.

The training pairs of reviewer.py are audited, with several seeds of the noise. On each audit reviewers who know the
truth decide on drawn pairs until half of the 95 % interval is 1.5 points or less. It is computed after every hundredth
part of the decisions so far, and less often while it is far from that.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet
from reviewer import Trial

from mispair.auditing.audit import Settings
from mispair.auditing.folder import audit_path
from mispair.auditing.inputs import AuditInput
from mispair.auditing.output_files import TABLE
from mispair.functional.logistic import FloatArray, probability
from mispair.reviewing.noise_estimate import LEAST, Draw, NoiseEstimate
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of embeddings, one pair an image")
    parser.add_argument("--out", type=Path, required=True, help="folder of the audits")
    parser.add_argument("--seeds", nargs="+", type=int, default=[30, 31, 32, 33, 34], help="of the noise")
    parser.add_argument("--reviewers", type=int, default=100, help="of each audit")
    parser.add_argument("--noise-ratios", nargs="+", type=float, default=list(NOISE_RATIOS))
    given = parser.parse_args()
    print(f"| noise | {' | '.join(SCORES)} |\n|{'---|' * (len(SCORES) + 1)}")
    for noise_ratio in given.noise_ratios:
        audits = [audited(given.data, given.out / f"{noise_ratio}_{seed}", noise_ratio, seed) for seed in given.seeds]
        cells = []
        for change in SCORES.values():
            found = [
                (decide(probability(change(odds)), mismatched, number), mismatched.mean())
                for odds, mismatched in audits
                for number in range(given.reviewers)
            ]
            covered = np.mean([one.low <= truth <= one.high for one, truth in found])
            cells.append(f"{np.mean([one.decided for one, _ in found]):.0f}, {covered:.1%}".replace("%", " %"))
        print(f"| {100 * noise_ratio:.0f} % | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
