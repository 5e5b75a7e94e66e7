"""An audit with the decisions of a review: the fate of each pair, and the export of the mended set."""

from __future__ import annotations

import csv
import hashlib
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mispair.auditing.folder import read_input
from mispair.auditing.inputs import AuditInput
from mispair.auditing.output_files import AUDIT, READ_BACK, TABLE
from mispair.errors import DataError, NotFoundError
from mispair.pairs.audited import AuditColumns
from mispair.pairs.edits import Edits
from mispair.pairs.layouts.copies import MANIFEST, clean_edits, is_copied, mended_edits, write_copy
from mispair.pairs.result_tables import defused, write_table
from mispair.pairs.source import Source
from mispair.pairs.tables import read_parquet
from mispair.reviewing.decisions import FILE, Decision, Verdict, read_current
from mispair.reviewing.pair_table import texts
from mispair.support.files import Json, sha256_of
from mispair.support.formatting import plain
from mispair.support.owned_folder import check_unchanged, read_mark

if TYPE_CHECKING:
    import pyarrow

Policy = Literal["flagged", "decided"]
Manifest = list[dict[str, Any]]


@dataclass(frozen=True)
class Reviewed:
    """An audit and the decisions on it."""

    data: AuditInput  # what was audited
    table: pyarrow.Table  # the table of the audit
    decisions: Mapping[str, Decision]  # those that count, by the ids of the pairs
    request: Mapping[str, Json]  # another one after other decisions or another audit

    @classmethod
    def read(cls, audit: Path, images: Path | None = None) -> Reviewed:
        """Read an audit, perhaps with decisions; `images` is the folder of the images, if they have been moved."""
        data = read_input(audit)
        data = data if images is None else replace(data, images=images)
        check_unchanged(audit, AUDIT, READ_BACK)
        for place in data.places:
            if str(place) != "shapes" and not place.exists():
                raise DataError(
                    f"{place}, which was audited, is not there any more; move it back, or audit it where it is now and "
                    f"take the decisions along: mispair review {shlex.quote(str(audit))} --export-decisions FILE, and "
                    "then --import-decisions FILE for the new audit."
                )
        data.check()
        decisions = read_current(audit / FILE) if (audit / FILE).exists() else {}
        request: dict[str, Json] = {
            "audit": sha256_of(audit / TABLE),
            "decisions": hashlib.sha256(repr(sorted(decisions.items())).encode()).hexdigest(),
        }
        suggested = [f"suggested_{side}{kind}" for side in ("right", "left") for kind in ("", "_score")]
        columns = ["id", "match_score", "is_mismatch", *suggested]
        return cls(data, read_parquet(audit / TABLE, columns, ["image", "caption"]), decisions, request)

    def open(self, device: str) -> Source:
        """The audited pairs; images and captions are not encoded."""
        source, table = self.data.open(device), self.table
        known = {name: column for name, column in known_columns(source).items() if name in table.schema.names}
        if not all(texts(table.column(name)).equals(texts(column)) for name, column in known.items()):
            raise DataError(f"{source.name}: the data is not the one that was audited; audit it again.")
        if not source.is_encoded:
            _check_images(source, table)
        return source

    @cached_property
    def rows(self) -> dict[str, int]:
        return first_rows(self.table.column("id").to_pylist())

    @cached_property
    def decided(self) -> dict[int, Decision]:
        """The decisions on known pairs, by row."""
        return {self.rows[name]: one for name, one in self.decisions.items() if name in self.rows}

    def sentence(self) -> str:
        """Count the decisions, in one sentence."""
        counts = Counter(str(one.verdict) for one in self.decided.values())
        verdicts = ", ".join(f"{count:,} {verdict}" for verdict, count in counts.items())
        return f"{len(self.table):,} audited pairs, of which people decided on {counts.total():,}" + (
            f" ({verdicts})." if verdicts else "."
        )

    def plan(self, source: Source, *, policy: Policy = "decided", mend: bool = False) -> tuple[Edits, Manifest]:
        """The fate of each pair; people's decisions come before the audit's.

        Args:
            source: The audited pairs.
            policy: Treatment of pairs without a decision: `flagged` leaves out flagged and unreadable ones,
                `decided` keeps all.
            mend: Give undecided flagged pairs their surest suggested partner, where it is sure enough.

        Returns:
            The edits, and for each pair its `id`; its `action` (kept, dropped, re-paired, rewritten, or repeated: it is
            the same as a pair before it now, which is there once); `by` whom it was decided (a reviewer, and the
            annotator whose suggestion was accepted; "audit"; or "nobody"); the `match_score` of the pair as it was,
            None if it could not be read; the side that was `replaced`; the `partner` that the new item was taken from;
            and the `time` when a person decided.
        """
        ids, scores = (self.table.column(name).to_pylist() for name in ("id", "match_score"))
        automatic = mended_edits(self.table, source) if mend else clean_edits(self.table)
        keep = automatic.keep.copy() if policy == "flagged" else np.ones(len(ids), dtype=bool)
        image_from, caption_from = automatic.image_from.copy(), automatic.caption_from.copy()
        rewritten: dict[int, str] = {}
        decided = {row: one for row, one in self.decided.items() if one.verdict is not Verdict.UNSURE}
        for row, one in decided.items():
            keep[row] = one.verdict is not Verdict.DROP
            image_from[row] = caption_from[row] = row
            if one.verdict is Verdict.REWRITE:
                rewritten[row] = one.caption
            if one.verdict is Verdict.REPAIR:
                if one.partner not in self.rows:
                    raise DataError(
                        f"The pair {ids[row]!r} was re-paired with {one.partner!r}, which is not there any more; "
                        "decide on it again in the review."
                    )
                (image_from if one.replaced == "left" else caption_from)[row] = self.rows[one.partner]
        edits = Edits(keep, image_from, caption_from, rewritten)
        repeated = edits.repeats(source.groups)
        manifest: Manifest = []
        for row, (name, image, caption) in enumerate(zip(ids, image_from.tolist(), caption_from.tolist(), strict=True)):
            moved, by_person = row != image or row != caption, decided.get(row)
            by_audit = "dropped" if not keep[row] else "re-paired" if moved else "kept"
            manifest.append(
                {
                    "id": name,
                    "action": "repeated" if repeated[row] else by_person.verdict.past if by_person else by_audit,
                    "by": by_person.by if by_person else "audit" if policy == "flagged" or moved else "nobody",
                    "match_score": scores[row],
                    "replaced": "" if not moved else "left" if image != row else "right",
                    "partner": "" if not moved else ids[image if image != row else caption],
                    "time": by_person.time.isoformat(timespec="seconds") if by_person else "",
                }
            )
        return edits.each_once(source.groups), manifest

    def columns(self, edits: Edits) -> AuditColumns:
        """Match scores and flags after the edits.

        They are 0 and flagged where a pair is left out, 1 where a person keeps, re-pairs or rewrites it, and the
        audit's where nobody has decided.
        """
        audited = AuditColumns.of_table(self.table.select(["match_score", "is_mismatch"]))
        score, flagged = audited.match_score.copy(), audited.flagged.copy()
        for row, one in self.decided.items():
            if one.verdict is not Verdict.UNSURE:
                score[row], flagged[row] = one.verdict is not Verdict.DROP, one.verdict is Verdict.DROP
        score[~edits.keep], flagged[~edits.keep] = 0, True  # also what repeats another pair
        return AuditColumns.of_scores(score, flagged)


def is_audit(folder: Path) -> bool:
    """Whether an audit was written to a folder."""
    return read_mark(folder, AUDIT) is not None


def _check_images(pairs: Source, table: pyarrow.Table) -> None:
    """Refuse missing images that the audit could read."""
    rows = np.flatnonzero(np.asarray(table.column("match_score").is_valid()))
    rows = rows if pairs.groups is None else rows[np.unique(pairs.groups[rows], return_index=True)[1]]
    files = [file for row in rows.tolist() if (file := pairs.image_file(row)) is not None]
    gone = [file.name for file in files if not file.exists()]
    if gone:
        what = f"{len(gone):,} of {len(files):,} images that were audited are not there any more, such as "
        advice = "Put them back, or audit again with `overwrite`, which leaves the decisions as they are."
        raise NotFoundError(what + plain(gone[0]), where=pairs.name, advice=advice)


def known_columns(source: Source) -> dict[str, Any]:
    """Columns to recognise the pairs of an audit by."""
    return {"id": source.id_column(0, len(source)), **source.item_columns(0, len(source))}


def first_rows(ids: Sequence[str]) -> dict[str, int]:
    """The row of each id; the first row of a repeated id, as in an audit."""
    return {name: row for row, name in reversed(list(enumerate(ids)))}


def export(
    audit: Path,
    to: Path,
    *,
    policy: Policy = "flagged",
    mend: bool = False,
    overwrite: bool = False,
    images: Path | None = None,
    device: str = "auto",
) -> Mapping[str, int]:
    """Write the audited data set with the decisions, and a manifest; returns how many pairs have each action.

    A finished export of the same audit and decisions is kept, unless `overwrite` is given. `policy` and `mend`
    are those of `Reviewed.plan`; `images` is the folder of the images, if they have been moved since the audit.
    """
    found = Reviewed.read(audit, images)
    request: dict[str, Json] = {**found.request, "policy": policy, "mend": mend}
    if not overwrite and is_copied(to, request):  # by a run that was killed before it could say so, or long ago
        with (to / MANIFEST).open(encoding="utf-8", newline="") as file:
            return Counter(row["action"] for row in csv.DictReader(file))
    source = found.open(device)
    edits, manifest = found.plan(source, policy=policy, mend=mend)
    write_copy(source, edits, to, overwrite, request=request, also=lambda folder: _write_manifest(manifest, folder))
    return Counter(row["action"] for row in manifest)


def _write_manifest(manifest: Manifest, folder: Path) -> None:
    import pyarrow

    write_table(folder / MANIFEST, [defused(pyarrow.Table.from_pylist(manifest))])
