"""Decisions on data that may have changed since, and what an audit that has learned from them changed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mispair.auditing.inputs import AuditInput
from mispair.errors import ChangedError
from mispair.pairs.row_ids import Texts
from mispair.reviewing.decisions import read_answers, read_partnered
from mispair.reviewing.pair_table import audit_columns, audit_schema
from mispair.reviewing.reviewed import first_rows, known_columns


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
    """Compare two outputs of audits of the same data, to which pairs may have been added and from which removed."""
    first, second = (audit_columns(audit, "id", "match_score", "is_mismatch") for audit in (before, now))
    known, there = first_rows(first["id"]), first_rows(second["id"])
    both = [name for name in there if name in known]
    answers = read_answers(before)
    gone = answers.keys() - there.keys()

    def change(column: str, kind: type[np.generic]) -> Any:
        """(B,) the values now less those before."""
        old, new = (np.array(audit[column], kind).astype(np.float32) for audit in (first, second))
        return new[[there[name] for name in both]] - old[[known[name] for name in both]]

    flagged, moved = change("is_mismatch", np.bool_), np.abs(change("match_score", np.float32))
    moved = moved[np.array([name not in answers for name in both], bool)]
    return Changes(
        len(answers) - len(gone),
        len(gone),
        int((flagged > 0).sum()),
        int((flagged < 0).sum()),
        float(np.nanmean(moved)) if np.isfinite(moved).any() else 0.0,
    )


def check_decided(before: Path, data: AuditInput, how: str) -> Collection[str]:
    """Refuse decisions on other pairs than those of a data set, before these are encoded.

    Args:
        before: The audit that was reviewed.
        data: What is audited now. Pairs may have been added and removed, unless neither images nor captions are known.
        how: What else to do.

    Returns:
        Ids of pairs that were decided on, or that lent a partner, and are gone.

    Raises:
        ChangedError: The pairs are others, or one that was decided on has changed since.
    """
    if data.is_run:  # its networks would have to be loaded
        return ()
    pairs = data.open(device="cpu")
    columns = known_columns(pairs)
    ids, old_ids = columns["id"].to_pylist(), audit_columns(before, "id")["id"]
    compared = [what for what in ("image", "caption") if what in audit_schema(before) and what in columns]
    decided = set(read_answers(before)).union(*read_partnered(before))
    now = {name: row for name, row in first_rows(ids).items() if name in decided}
    other = not compared and old_ids != ids  # then a number may mean another pair
    if decided and (other or not now):
        advice = f"Give the decisions on this data, or {how}"
        raise ChangedError(f"{pairs.name} holds other pairs", where=before, advice=advice)
    then = {name: row for name, row in first_rows(old_ids).items() if name in now}
    for what in compared:
        old = audit_columns(before, what)[what]
        new = Texts(columns[what])(np.array([now[name] for name in then], dtype=np.int64))
        for (name, row), found in zip(then.items(), new, strict=True):
            if (old[row] or "") != (found or ""):
                raise ChangedError(
                    f"the {what} of {name!r} was {old[row]!r} when it was decided on, and is {found!r} now",
                    where=before,
                    advice=f"Decide that you are unsure of it, or {how}",
                )
    return decided - now.keys()
