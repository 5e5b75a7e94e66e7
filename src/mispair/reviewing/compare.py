"""Decisions on data that may have changed since, and what an audit that has learned from them changed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mispair.auditing.inputs import AuditInput
from mispair.errors import DataError
from mispair.pairs.row_ids import look_up
from mispair.reviewing.decisions import read_answers, read_partnered
from mispair.reviewing.export import known_columns
from mispair.reviewing.pair_table import PairTable


@dataclass(frozen=True)
class Changes:
    """How the verdicts of two audits differ, over the pairs that both have.

    Attributes:
        answers: Decisions that the second audit has learned from.
        gone: Decisions on pairs that it does not have.
        flagged: Pairs that only the second flags.
        cleared: Pairs that only the first flags.
        moved: Mean change of the match score, over the pairs that nobody has decided on.
    """

    answers: int
    gone: int
    flagged: int
    cleared: int
    moved: float

    def sentence(self) -> str:
        gone = f" ({self.gone:,} more are on pairs that are gone)" if self.gone else ""
        return (
            f"Learned from {self.answers:,} decisions{gone}: {self.flagged:,} more pairs are flagged, {self.cleared:,} "
            f"are not any more; the other match scores have moved by {self.moved:.3f} on average."
        )


def compare(before: Path, now: Path) -> Changes:
    """Compares two outputs of audits of the same data, to which pairs may have been added and from which removed."""
    first, second = PairTable(before), PairTable(now)
    known = first.find(second.cells("id", np.arange(len(second))))
    there = second.find(list(known))
    old, new = (np.array([rows[name] for name in there], dtype=np.int64) for rows in (known, there))
    answers = read_answers(before)
    gone = answers.keys() - there.keys()
    undecided = np.array([name not in answers for name in there], dtype=bool)
    moved = np.abs(first.score[old] - second.score[new])[undecided]
    flagged = second.flagged[new].astype(int) - first.flagged[old]
    return Changes(
        len(answers) - len(gone),
        len(gone),
        int((flagged > 0).sum()),
        int((flagged < 0).sum()),
        float(np.nanmean(moved)) if np.isfinite(moved).any() else 0.0,
    )


def check_decided(before: Path, data: AuditInput, how: str) -> Collection[str]:
    """Refuses decisions on other pairs than those of a data set, before these are encoded.

    Args:
        before: The audit that was reviewed.
        data: What is audited now. Pairs may have been added and removed, unless neither images nor captions are known.
        how: What else to do.

    Returns:
        Ids of pairs that were decided on, or that lent a partner, and are gone.

    Raises:
        DataError: The pairs are others, or one that was decided on has changed since.
    """
    if data.is_run:  # its networks would have to be loaded
        return ()
    raw = data.open_raw()
    pairs = data.open(None, device="cpu") if raw is None else raw
    columns, table = known_columns(pairs), PairTable(before)
    ids = columns["id"].to_pylist()
    compared = [what for what in ("image", "caption") if what in table and what in columns]
    decided = set(read_answers(before)).union(*read_partnered(before))
    now = {name: row for row, name in reversed(list(enumerate(ids))) if name in decided}
    other = not compared and table.cells("id", np.arange(len(table))) != ids  # then a number may mean another pair
    if decided and (other or not now):
        raise DataError(f"{before} and {pairs.name} hold other pairs; give the decisions on this data, or {how}")
    old = {name: row for name, row in table.find(list(decided)).items() if name in now}
    for what in compared:
        new = look_up(columns[what], np.array([now[name] for name in old], dtype=np.int64))
        for name, was, found in zip(old, table.cells(what, list(old.values())), new, strict=True):
            if was != (found or ""):
                raise DataError(
                    f"{before}: the {what} of {name!r} was {was!r} when it was decided on, and is {found!r} now; "
                    f"decide that you are unsure of it, or {how}"
                )
    return decided - now.keys()
