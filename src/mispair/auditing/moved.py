"""What an audit was of, also where it was moved together with its data."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from mispair.auditing.output_files import AUDIT
from mispair.support.files import Json
from mispair.support.owned_folder import Mark, read_mark

MOVED = ("source", "left", "right", "ids", "images")


def read_audit_mark(out: Path) -> Mark | None:
    """The mark of an audit; None if there is none.

    Data that is not where it was when it was audited is looked for where it would be if the audit had been moved with
    it, as in a project folder that was renamed.

    Args:
        out: The output of the audit.
    """
    mark = read_mark(out, AUDIT)
    if mark is None or not mark.place:
        return mark
    moved = {name: _moved(mark.request[name], mark.place, out) for name in MOVED if name in mark.request}
    return replace(mark, request={**mark.request, **moved})


def _moved(found: Json, was: str, out: Path) -> Json:
    """A path, or a list that begins with one."""
    place, *others = found if isinstance(found, list) and found else [found]
    if not isinstance(place, str) or "://" in place:
        return found
    with suppress(OSError, ValueError):  # no path, or on another drive than the audit
        there = os.path.normpath(out.resolve() / os.path.relpath(place, was))
        if not os.path.lexists(place) and os.path.exists(there):
            return [there, *others] if isinstance(found, list) else there
    return found
