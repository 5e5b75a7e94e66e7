"""The pairs of an audit as a review leaves them, to train on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mispair.auditing.inputs import AuditInput
from mispair.auditing.output_files import AUDIT, TABLE
from mispair.errors import DataError
from mispair.pairs.audited import AuditColumns
from mispair.pairs.edits import Edits, Mask
from mispair.pairs.pairs import IntArray
from mispair.pairs.source import Source
from mispair.reviewing.decisions import Verdict
from mispair.reviewing.export import first_rows, open_audited, plan, read_reviewed
from mispair.support.files import Json
from mispair.support.owned_folder import read_mark


@dataclass(frozen=True)
class ReviewedPairs:
    """Audited pairs with the decisions on them.

    Attributes:
        data: Where the pairs are.
        pairs: The pairs as they were audited.
        edits: What becomes of each: those that are dropped, or that repeat another, are left out; all others are there.
        columns: Match scores and flags after the edits: 0 and flagged where a pair is left out, 1 where a person keeps,
            re-pairs or rewrites it, and the audit's where nobody has decided.
        request: Another one after other decisions or another audit.
        decided: How many pairs have each verdict.
    """

    data: AuditInput
    pairs: Source
    edits: Edits
    columns: AuditColumns
    request: Mapping[str, Json]
    decided: Counter[str]

    def sentence(self) -> str:
        """How much was decided by people."""
        verdicts = ", ".join(f"{count:,} {verdict}" for verdict, count in self.decided.items())
        return f"{len(self.edits):,} audited pairs, of which people decided on {self.decided.total():,}" + (
            f" ({verdicts})." if verdicts else "."
        )

    @property
    def data_set(self) -> Path | None:
        """The folder, if it is one that a training reads as it is."""
        folder = self.data.source
        return folder if self.pairs.layout in ("clip", "precomp") else None

    @property
    def edits_with_unmatched(self) -> Edits:
        """The same, but no row is left out: those that were have the images and captions that no pair has.

        Their match score says that the two are no match.
        """
        edits, free = self.edits, ~self.edits.keep
        rewritten = np.isin(np.arange(len(edits)), list(edits.rewritten))
        return replace(
            edits,
            keep=np.ones(len(edits), dtype=bool),
            image_from=_with_unused(edits.image_from, free, edits.keep, self.pairs.groups),
            caption_from=_with_unused(edits.caption_from, free, edits.keep & ~rewritten, None),
        )


def _with_unused(taken: IntArray, free: Mask, using: Mask, groups: IntArray | None) -> IntArray:
    """The row whose item each row gets (N,): free rows get items that no other row uses, their own if it is one.

    Args:
        taken: (N,) the row whose item each row gets so far.
        free: (N,) rows that may get another one.
        using: (N,) rows that use theirs.
        groups: (N,) rows of one group have the same item; None if all differ.
    """
    own = np.arange(len(taken))
    item = own if groups is None else groups
    used = np.isin(item, item[taken[using]])
    wanting = np.flatnonzero(free & used)
    unused = np.flatnonzero(~used & ~np.isin(item, item[free]))
    unused = unused[np.unique(item[unused], return_index=True)[1]][: len(wanting)]
    taken = np.where(free, own, taken)
    taken[wanting[: len(unused)]] = unused
    return taken


def is_audit(folder: Path) -> bool:
    """Whether an audit was written to a folder."""
    return read_mark(folder, AUDIT) is not None


def read_review(audit: Path, images: Path | None = None, device: str = "auto") -> ReviewedPairs:
    """Reads an audit and the decisions on it.

    Args:
        audit: The output of the audit.
        images: Folder of the images, if they have been moved since.
        device: Where networks run, if they are needed to open the data.

    Raises:
        DataError: The folder holds no audit, or its input has changed or is gone.
    """
    found = read_reviewed(audit, images)
    data = found.data
    pairs = open_audited(data, found.table, device)
    if data.is_run:
        raise DataError(
            f"{audit}: this is an audit of the training pairs of {data.source}, by its networks; audit the data itself "
            "to train on it."
        )
    if pairs.is_encoded and pairs.split not in (None, "train"):
        raise DataError(f"{audit}: this is an audit of the split {pairs.split}; training needs one of train.")
    edits, _ = plan(found.table, pairs, found.decisions, policy="decided", mend=False)
    audited = AuditColumns.of_table(found.table, str(audit / TABLE))
    score, flagged = audited.match_score.copy(), audited.flagged.copy()
    rows = first_rows(found.table.column("id").to_pylist())
    decided = {rows[name]: one.verdict for name, one in found.decisions.items() if name in rows}
    for row, verdict in decided.items():
        if verdict is not Verdict.UNSURE:
            score[row], flagged[row] = verdict is not Verdict.DROP, verdict is Verdict.DROP
    score[~edits.keep], flagged[~edits.keep] = 0, True  # also what repeats another pair
    columns = AuditColumns.of_scores(score, flagged)
    return ReviewedPairs(data, pairs, edits, columns, found.request, Counter(map(str, decided.values())))
