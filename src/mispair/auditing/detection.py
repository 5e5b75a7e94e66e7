"""What an audit can see: which mismatches it would find that it makes itself."""

from __future__ import annotations

import numpy as np
from pydantic import BaseModel, ConfigDict

from mispair.auditing.match_scores import new_match_scores
from mispair.auditing.scoring.calibration import noise_interval
from mispair.auditing.scoring.judge import Judge
from mispair.functional.logistic import probability
from mispair.pairs.pairs import MATCH_THRESHOLD

FALSE_ALARMS = 0.01  # share of the matched pairs
FEW = 20  # simulated pairs, below which nothing is said


class Detection(BaseModel):
    """How well mismatches of one kind are found, from trusted pairs whose partners are exchanged on purpose.

    Attributes:
        kind: "random", "similar" (the ten nearest left or right items in a tenth of the data) or "most_similar" (the
            nearest one).
        found: Share of them below the cut, each by itself.
        found_at_1_percent: The same where 1 % of the pairs that seem to match are below the cut.
        at_most: Upper end of the 95 % interval of the noise rate if the mismatched pairs are like these. Partners that
            are even more alike hide better.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    found: float
    found_at_1_percent: float
    at_most: float


def detections(judge: Judge, threshold: float) -> list[Detection]:
    """What the audit sees of each kind of mismatch, at this cut of the match score."""
    observed = judge.observed
    matched = observed[probability(judge.combination.log_odds(observed)) >= MATCH_THRESHOLD]
    if len(matched) < FEW:
        return []
    lowest = np.quantile(matched, FALSE_ALARMS)
    found = []
    for kind, sums in (("random", judge.null), ("similar", judge.similar), ("most_similar", judge.most_similar)):
        if len(sums) < FEW:
            continue
        below = new_match_scores(judge, sums) < threshold
        high = judge.combination.high if kind == "random" else noise_interval(observed, sums)[1]
        found.append(
            Detection(
                kind=kind,
                found=float(below.mean()),
                found_at_1_percent=float((sums < lowest).mean()),
                at_most=high,
            )
        )
    return found
