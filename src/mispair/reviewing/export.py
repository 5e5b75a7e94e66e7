"""The data set after a review, in the layout it came in."""

from __future__ import annotations

import csv
import hashlib
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mispair.auditing.folder import read_input
from mispair.auditing.inputs import AuditInput
from mispair.auditing.output_files import AUDIT, READ_BACK, TABLE
from mispair.errors import DataError
from mispair.pairs.edits import Edits
from mispair.pairs.layouts.copies import (
    MANIFEST,
    check_place,
    clean_edits,
    is_copied,
    mended_edits,
    write_copy,
)
from mispair.pairs.result_tables import defused, write_table
from mispair.pairs.source import Source
from mispair.pairs.tables import read_parquet
from mispair.reviewing.decisions import FILE, Decision, Verdict, read_current
from mispair.support.files import Json, sha256_of
from mispair.support.formatting import plain
from mispair.support.owned_folder import check_unchanged

if TYPE_CHECKING:
    import pyarrow

Policy = Literal["flagged", "decided"]


@dataclass(frozen=True)
class Exported:
    """What became of the pairs.

    Attributes:
        folder: Where the data set is.
        counts: Pairs that were kept, dropped, re-paired and rewritten, and that repeat another one.
    """

    folder: Path
    counts: Mapping[str, int]


def export(
    audit: Path,
    to: Path,
    *,
    policy: Policy = "flagged",
    mend: bool = False,
    overwrite: bool = False,
    images: Path | None = None,
    device: str = "auto",
) -> Exported:
    """Writes the audited data set as it is after the decisions, with a manifest of what became of each pair.

    If the folder is the answer to the same question already, nothing is written, unless it may be replaced.

    Args:
        audit: The output of an audit, perhaps with decisions of a review.
        to: Folder for the data set.
        policy: What happens to pairs that nobody has decided on: `flagged` leaves out flagged and unreadable ones,
            `decided` keeps all.
        mend: Give undecided flagged pairs their surest suggested partner, where it is sure enough.
        overwrite: Replace an earlier copy there.
        images: Folder of the images, if they have been moved since the audit.
        device: Where encoders and networks run, if they are needed to open the data.

    Raises:
        DataError: The folder holds no audit, its input has changed or is gone, or the copy cannot be written.
    """
    found = read_reviewed(audit, images)
    request: dict[str, Json] = {**found.request, "policy": policy, "mend": mend}
    if not overwrite and is_copied(to, request):  # by a run that was killed before it could say so, or long ago
        return Exported(to, _counts(to / MANIFEST))
    source = open_audited(found.data, found.table, device)
    if not source.is_encoded:
        check_place(source.owns, found.data.source, source.files, to, overwrite)
    edits, manifest = plan(found.table, source, found.decisions, policy=policy, mend=mend)
    write_copy(
        source, edits, to, overwrite, request=request, also=lambda folder: _write_manifest(manifest, folder / MANIFEST)
    )
    return Exported(to, Counter(row.action for row in manifest))


@dataclass(frozen=True)
class Reviewed:
    """An audit and the decisions on it.

    Attributes:
        data: What was audited.
        table: The table of the audit.
        decisions: Those that count, by the ids of the pairs.
        request: Another one after other decisions or another audit.
    """

    data: AuditInput
    table: pyarrow.Table
    decisions: Mapping[str, Decision]
    request: Mapping[str, Json]


def read_reviewed(audit: Path, images: Path | None = None) -> Reviewed:
    """Reads the output of an audit, perhaps with decisions of a review.

    Args:
        audit: The output of the audit.
        images: Folder of the images, if they have been moved since.

    Raises:
        DataError: The folder holds no audit, or its input is gone.
    """
    data = read_input(audit)
    data = data if images is None else replace(data, images=images)
    check_unchanged(audit, AUDIT, READ_BACK)
    for place in (data.source, data.left, data.right, data.ids):
        if place is not None and str(place) != "shapes" and not place.exists():
            raise DataError(
                f"{place}, which was audited, is not there any more; move it back, or audit it where it is now and "
                f"take the decisions along: mispair review {shlex.quote(str(audit))} --export-decisions FILE, and then "
                "--import-decisions FILE for the new audit."
            )
    data.check()
    decisions = read_current(audit / FILE) if (audit / FILE).exists() else {}
    request: dict[str, Json] = {
        "audit": sha256_of(audit / TABLE),
        "decisions": hashlib.sha256(repr(sorted(decisions.items())).encode()).hexdigest(),
    }
    return Reviewed(data, _read_table(audit / TABLE), decisions, request)


def open_audited(data: AuditInput, table: pyarrow.Table, device: str) -> Source:
    """The audited pairs; images and captions are not encoded.

    Raises:
        DataError: The data is not the one of the table.
    """
    source = data.open(device)
    known = {name: column for name, column in known_columns(source).items() if name in table.schema.names}
    if not all(_equal(table.column(name), column) for name, column in known.items()):
        raise DataError(f"{source.name}: the data is not the one that was audited; audit it again.")
    if not source.is_encoded:
        _check_images(source, table)
    return source


def _check_images(pairs: Source, table: pyarrow.Table) -> None:
    """Refuses to go on without images that the audit could read, of which nobody would notice that they are missing."""
    rows = np.flatnonzero(np.asarray(table.column("match_score").is_valid()))
    rows = rows if pairs.groups is None else rows[np.unique(pairs.groups[rows], return_index=True)[1]]
    files = [file for row in rows.tolist() if (file := pairs.image_file(row)) is not None]
    gone = [file.name for file in files if not file.exists()]
    if gone:
        raise DataError(
            f"{pairs.name}: {len(gone):,} of {len(files):,} images that were audited are not there any more, such as "
            f"{plain(gone[0])}; put them back, or audit again with --overwrite, which leaves the decisions as they are."
        )


def known_columns(source: Source) -> dict[str, Any]:
    """Columns of an audit's table by which its pairs are recognised."""
    return {"id": source.id_column(0, len(source)), **source.item_columns(0, len(source))}


def _equal(column: pyarrow.ChunkedArray, other: Any) -> bool:
    import pyarrow

    text = pyarrow.large_string()
    return bool(column.cast(text).equals(pyarrow.chunked_array([other.cast(text)])))


@dataclass(frozen=True)
class ManifestRow:
    """What became of one pair.

    Attributes:
        id: The pair.
        action: kept, dropped, re-paired, rewritten, or repeated: it has become the same as a pair before it, which is
            there once.
        by: Who decided: a reviewer, and the annotator whose suggestion was accepted; "audit" by the match score; or
            "nobody".
        match_score: Of the pair as it was; None if it could not be read.
        replaced: The side that was replaced.
        partner: The pair that the new item was taken from.
        time: When a person decided.
    """

    id: str
    action: str
    by: str
    match_score: float | None
    replaced: str = ""
    partner: str = ""
    time: str = ""


_ACTIONS = {Verdict.KEEP: "kept", Verdict.DROP: "dropped", Verdict.REPAIR: "re-paired", Verdict.REWRITE: "rewritten"}


def plan(
    table: pyarrow.Table, source: Source, decisions: Mapping[str, Decision], *, policy: Policy, mend: bool
) -> tuple[Edits, list[ManifestRow]]:
    """What becomes of each row of the table of an audit; people's decisions come before the audit's.

    Raises:
        DataError: A decision names a pair that is not there.
    """
    ids = table.column("id").to_pylist()
    scores = table.column("match_score").to_pylist()
    automatic = mended_edits(table, source) if mend else clean_edits(table)
    if policy == "decided":
        automatic = Edits(np.ones(len(ids), dtype=bool), automatic.image_from, automatic.caption_from)
    keep, image_from, caption_from = automatic.keep.copy(), automatic.image_from.copy(), automatic.caption_from.copy()
    places = first_rows(ids)
    own = np.arange(len(ids))
    moved = (image_from != own) | (caption_from != own)
    rewritten: dict[int, str] = {}
    rows = [
        ManifestRow(
            ids[row],
            "re-paired" if moved[row] and keep[row] else "kept" if keep[row] else "dropped",
            "audit" if policy == "flagged" or moved[row] else "nobody",
            scores[row],
            replaced="" if not moved[row] else "left" if image_from[row] != row else "right",
            partner="" if not moved[row] else ids[image_from[row] if image_from[row] != row else caption_from[row]],
        )
        for row in range(len(ids))
    ]
    for name, decision in decisions.items():
        row = places.get(name)
        if row is None or decision.verdict is Verdict.UNSURE:
            continue
        keep[row] = decision.verdict is not Verdict.DROP
        image_from[row] = caption_from[row] = row
        if decision.verdict is Verdict.REWRITE:
            rewritten[row] = decision.caption
        if decision.verdict is Verdict.REPAIR:
            if decision.partner not in places:
                raise DataError(
                    f"The pair {name!r} was re-paired with {decision.partner!r}, which is not there any more; "
                    "decide on it again in the review."
                )
            (image_from if decision.replaced == "left" else caption_from)[row] = places[decision.partner]
        rows[row] = ManifestRow(
            name,
            _ACTIONS[decision.verdict],
            (decision.reviewer or "a person") + (f", as {decision.accepted} suggests" if decision.accepted else ""),
            scores[row],
            decision.replaced,
            decision.partner,
            decision.time.isoformat(timespec="seconds"),
        )
    edits = Edits(keep, image_from, caption_from, rewritten)
    for row in np.flatnonzero(edits.repeats(source.groups)).tolist():
        rows[row] = replace(rows[row], action="repeated")
    return edits.each_once(source.groups), rows


def first_rows(ids: Sequence[str]) -> dict[str, int]:
    """The row of each id; the first of rows with the same one, as the audit could read only that."""
    return {name: row for row, name in reversed(list(enumerate(ids)))}


def _read_table(path: Path) -> pyarrow.Table:
    suggested = [f"suggested_{side}{kind}" for side in ("right", "left") for kind in ("", "_score")]
    return read_parquet(path, ["id", "match_score", "is_mismatch", *suggested], ["image", "caption"])


def _write_manifest(rows: list[ManifestRow], path: Path) -> None:
    import pyarrow

    columns = {name: [getattr(row, name) for row in rows] for name in ManifestRow.__dataclass_fields__}
    write_table(path, [defused(pyarrow.table(columns))])


def _counts(manifest: Path) -> Counter[str]:
    with manifest.open(encoding="utf-8", newline="") as file:
        return Counter(row["action"] for row in csv.DictReader(file))
