"""Two audits of the same data: what the second changed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mispair.errors import DataError
from mispair.review.decisions import read_answers
from mispair.review.pair_table import PairTable


@dataclass(frozen=True)
class Changes:
    """How the verdicts of two audits differ.

    Attributes:
        answers: Decisions that the second audit has learned from.
        flagged: Pairs that only the second flags.
        cleared: Pairs that only the first flags.
        moved: Mean change of the match score, over the pairs that nobody has decided on.
    """

    answers: int
    flagged: int
    cleared: int
    moved: float

    def sentence(self) -> str:
        return (
            f"Learned from {self.answers:,} decisions: {self.flagged:,} more pairs are flagged, {self.cleared:,} are "
            f"not any more; the other match scores have moved by {self.moved:.3f} on average."
        )


def compare(before: Path, now: Path) -> Changes:
    """Compares two outputs of audits of the same pairs.

    Raises:
        DataError: They are of other pairs.
    """
    first, second = PairTable(before), PairTable(now)
    rows = np.arange(len(first))
    if len(first) != len(second) or first.cells("id", rows) != second.cells("id", rows):
        raise DataError(f"{before} and {now} are audits of other pairs; give the decisions on this data.")
    answers = read_answers(before)
    undecided = np.ones(len(first), dtype=bool)
    undecided[list(first.find(list(answers)).values())] = False
    moved = np.abs(first.score - second.score)[undecided]
    return Changes(
        len(answers),
        int((second.flagged & ~first.flagged).sum()),
        int((first.flagged & ~second.flagged).sum()),
        float(np.nanmean(moved)) if np.isfinite(moved).any() else 0.0,
    )
