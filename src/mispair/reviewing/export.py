"""The data set after a review, in the layout it came in."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mispair.pairs.layouts.copies import MANIFEST, is_copied, write_copy
from mispair.pairs.result_tables import defused, write_table
from mispair.reviewing.reviewed import Manifest, Policy, Reviewed
from mispair.support.files import Json


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    folder: Path  # where the data set is
    counts: Mapping[str, int]  # pairs that were kept, dropped, re-paired and rewritten, and that repeat another one


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
    """Write the audited data set as it is after the decisions, with a manifest of all pairs.

    If the folder is the answer to the same question already, nothing is written, unless it may be replaced.

    Args:
        audit: The output of an audit, perhaps with decisions of a review.
        to: Folder for the data set.
        policy: What happens to pairs that nobody has decided on; see `Reviewed.plan`.
        mend: Give undecided flagged pairs their surest suggested partner, where it is sure enough.
        overwrite: Replace an earlier copy there.
        images: Folder of the images, if they have been moved since the audit.
        device: Where encoders and networks run, if they are needed to open the data.
    """
    found = Reviewed.read(audit, images)
    request: dict[str, Json] = {**found.request, "policy": policy, "mend": mend}
    if not overwrite and is_copied(to, request):  # by a run that was killed before it could say so, or long ago
        with (to / MANIFEST).open(encoding="utf-8", newline="") as file:
            return Exported(to, Counter(row["action"] for row in csv.DictReader(file)))
    source = found.open(device)
    edits, manifest = found.plan(source, policy=policy, mend=mend)
    write_copy(source, edits, to, overwrite, request=request, also=lambda folder: _write_manifest(manifest, folder))
    return Exported(to, Counter(row["action"] for row in manifest))


def _write_manifest(manifest: Manifest, folder: Path) -> None:
    import pyarrow

    write_table(folder / MANIFEST, [defused(pyarrow.Table.from_pylist(manifest))])
