"""Decisions on data after a change, and the effect of learning from them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mispair.auditing.inputs import AuditInput
from mispair.errors import ChangedError
from mispair.reviewing.decisions import read_answers, read_partnered
from mispair.reviewing.pair_table import read_audit, texts
from mispair.reviewing.reviewed import first_rows, known_columns


@dataclass(frozen=True)
class Changes:
    """Differences between two audits, over the pairs of both."""

    answers: int  # decisions that the second audit has learned from
    gone: int  # decisions on pairs that it does not have
    flagged: int  # pairs that only the second flags
    cleared: int  # pairs that only the first flags
    moved: float  # mean change of the match score, over the pairs that nobody has decided on

    def sentence(self) -> str:
        gone = f" ({self.gone:,} more are on pairs that are gone)" if self.gone else ""
        return (
            f"Learned from {self.answers:,} decisions{gone}: {self.flagged:,} more pairs are flagged, {self.cleared:,} "
            f"are not any more; the other match scores have moved by {self.moved:.3f} on average."
        )


def compare(before: Path, now: Path) -> Changes:
    """Compare two audits of the same data; pairs may have been added and removed."""
    first, second = read_audit(before, "id"), read_audit(now, "id")
    known, there = (first_rows(audit["id"].to_pylist()) for audit in (first, second))
    both = [name for name in there if name in known]
    answers = read_answers(before)
    gone = answers.keys() - there.keys()

    def change(column: str) -> Any:
        """(B,) the values now less those before."""
        old, new = (np.asarray(audit[column].cast("float32")) for audit in (first, second))
        return new[[there[name] for name in both]] - old[[known[name] for name in both]]

    flagged, moved = change("is_mismatch"), np.abs(change("match_score"))
    moved = moved[np.array([name not in answers for name in both], bool)]
    return Changes(
        len(answers) - len(gone),
        len(gone),
        int((flagged > 0).sum()),
        int((flagged < 0).sum()),
        float(np.nanmean(moved)) if np.isfinite(moved).any() else 0.0,
    )


def check_decided(before: Path, data: AuditInput, how: str) -> Collection[str]:
    """Ids of missing pairs with a decision or a partner in one.

    Args:
        before: The audit that was reviewed.
        data: The data to audit now. Pairs may have been added and removed, if images or captions are known.
        how: Another way out, for the message.
    """
    if data.is_run:  # its networks would have to be loaded
        return ()
    pairs = data.open(device="cpu")
    columns = known_columns(pairs)
    audited = read_audit(before, "image", "caption")
    ids, old_ids = columns["id"].to_pylist(), audited["id"].to_pylist()
    compared = [what for what in ("image", "caption") if what in audited.column_names and what in columns]
    decided = set(read_answers(before)).union(*read_partnered(before))
    now = {name: row for name, row in first_rows(ids).items() if name in decided}
    other = not compared and old_ids != ids  # then a number may mean another pair
    if decided and (other or not now):
        advice = f"Give the decisions on this data, or {how}"
        raise ChangedError(f"{pairs.name} holds other pairs", where=before, advice=advice)
    then = {name: row for name, row in first_rows(old_ids).items() if name in now}
    for what in compared:
        old, new = (
            texts(column).take(np.array([*rows.values()], dtype=np.int64)).fill_null("").to_pylist()
            for column, rows in ((audited[what], then), (columns[what], {name: now[name] for name in then}))
        )
        for name, was, found in zip(then, old, new, strict=True):
            if was != found:
                raise ChangedError(
                    f"the {what} of {name!r} was {was!r} when it was decided on, and is {found!r} now",
                    where=before,
                    advice=f"Decide that you are unsure of it, or {how}",
                )
    return decided - now.keys()
