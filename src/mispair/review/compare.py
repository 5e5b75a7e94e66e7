"""Two audits of the same data: what the second changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mispair.auditing.inputs import AuditInput
from mispair.auditing.sources.row_ids import look_up
from mispair.errors import DataError
from mispair.review.decisions import read_answers, read_partnered
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
    _check_ids(first, before, second.cells("id", np.arange(len(second))), now)
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


def check_decided(before: Path, data: AuditInput) -> None:
    """Refuses decisions on other images and captions than those of a data set, before these are encoded.

    Vectors are not looked at: `compare` tells whether they are other pairs.

    Raises:
        DataError: The pairs are others, or one that was decided on has changed since.
    """
    pairs = data.open_raw()
    if pairs is None:
        return
    table = PairTable(before)
    _check_ids(table, before, pairs.ids.to_pylist(), pairs.name)
    decided = sorted(table.find(list(set(read_answers(before)).union(*read_partnered(before)))).values())
    rows = np.array(decided, dtype=np.int64)
    for what, now in (("image", pairs.image_names), ("caption", pairs.captions)):
        if what in table:
            for row, old, new in zip(decided, table.cells(what, rows), look_up(now, rows), strict=True):
                if old != new:
                    raise DataError(
                        f"{before}: the {what} of {table.cell('id', row)!r} was {old!r} when it was decided on, and is "
                        f"{new!r} now; decide that you are unsure of it, or audit without --decisions."
                    )


def _check_ids(table: PairTable, before: Path, ids: Sequence[str], now: object) -> None:
    if len(table) != len(ids) or table.cells("id", np.arange(len(table))) != ids:
        raise DataError(f"{before} and {now} hold other pairs; give the decisions on this data.")
