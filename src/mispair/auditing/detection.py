"""What an audit can see: which mismatches it would find that it makes itself."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from pydantic import BaseModel, ConfigDict

from mispair.auditing.match_scores import MatchScores, SimilarPairs, new_match_scores
from mispair.auditing.scoring.calibration import noise_interval
from mispair.auditing.scoring.exchanges import Trial, lowered
from mispair.auditing.scoring.judge import Judge
from mispair.functional.logistic import FloatArray, probability
from mispair.pairs.pairs import MATCH_THRESHOLD, IntArray

FALSE_ALARMS = 0.01  # share of the matched pairs
FEW = 20  # simulated pairs, below which nothing is said


class Detection(BaseModel):
    """How well mismatches of one kind are found, from trusted pairs whose partners are exchanged on purpose.

    Attributes:
        kind: "random", "similar" (among the ten nearest of each other) or "most_similar" (among the three nearest).
        by: Which items are similar: "left", "right", "both", or "either"; empty if none is.
        found: Share of them below the cut.
        found_at_1_percent: The same where 1 % of the pairs that seem to match are below the cut.
        at_most: Upper end of the 95 % interval of the noise rate if the mismatched pairs are like these. Partners that
            are even more alike hide better.
        example: Ids of two pairs whose exchange is as hard to find as the median one; none where it is random.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    by: str = ""
    found: float
    found_at_1_percent: float
    at_most: float
    example: list[str] = []

    @property
    def words(self) -> str:
        """The kind, as in "exchanged ..."."""
        alike = "the most similar" if self.kind == "most_similar" else "similar"
        items = {"both": "left and right items", "either": "items"}.get(self.by, f"{self.by} items")
        return f"between {alike} {items}" if self.by else "at random"


def detections(
    judge: Judge, scores: MatchScores, similar: SimilarPairs, threshold: float, ids: Callable[[IntArray], list[str]]
) -> list[Detection]:
    """What the audit sees of each kind of mismatch, at this cut of the match score.

    Exchanges between similar items are tried out in audits of up to 65,536 pairs. In larger ones, "similar" are the ten
    nearest items in a tenth of a sample, by their left or right side.
    """
    alone = judge.observed
    matched = alone[probability(judge.combination.log_odds(alone)) >= MATCH_THRESHOLD]
    if len(matched) < FEW:
        return []
    lowest = float(np.quantile(matched, FALSE_ALARMS))
    tried = [trial for trial in similar.trials if trial.sums.size >= FEW]
    by_sums = {"random": judge.null} | ({} if tried else {"similar": judge.similar})
    found = []
    for kind, sums in by_sums.items():
        if len(sums) >= FEW:
            detection = Detection(
                kind=kind,
                by="" if kind == "random" else "either",
                found=float((new_match_scores(judge, sums) < threshold).mean()),
                found_at_1_percent=float((sums < lowest).mean()),
                at_most=judge.combination.high if kind == "random" else noise_interval(alone, sums)[1],
            )
            found.append(detection)
    observed = similar.lowered(scores.log_odds)
    observed = observed[~np.isnan(observed)]
    cut = float(np.quantile(observed[probability(observed) >= MATCH_THRESHOLD], FALSE_ALARMS)) if tried else 0.0
    return found + [_tried(trial, judge, observed, cut, threshold, ids) for trial in tried]


def _tried(
    trial: Trial, judge: Judge, observed: FloatArray, cut: float, threshold: float, ids: Callable[[IntArray], list[str]]
) -> Detection:
    score = lowered(judge.combination.log_odds(trial.sums), trial.chance)
    match = new_match_scores(judge, trial.sums.reshape(-1)).reshape(-1, 2) * (1 - trial.chance)
    middle = score.min(axis=1).argsort()[len(score) // 2]
    return Detection(
        kind=trial.kind,
        by=trial.by,
        found=float((match < threshold).mean()),
        found_at_1_percent=float((score < cut).mean()),
        at_most=noise_interval(observed, score.reshape(-1))[1],
        example=ids(trial.couples[middle]),
    )
