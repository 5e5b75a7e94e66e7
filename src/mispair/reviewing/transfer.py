"""Decisions to and from files: CSV, and the JSON of Label Studio and Argilla after `mispair audit --for`."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mispair.errors import ConflictError, DamagedError, InvalidValueError, NotFoundError, ShapeError
from mispair.pairs.result_tables import defused_text, original
from mispair.reviewing.decisions import COLUMNS, FILE, Decision, Decisions, Mode, Verdict, read_current
from mispair.reviewing.pair_table import PairTable, read_audit
from mispair.support.files import read_regular, take_long_cells, unreadable, write_atomically
from mispair.support.formatting import listed


def decisions_csv(decisions: Iterable[Decision]) -> bytes:
    """Decisions as CSV, one row a pair, in their order."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    for decision in sorted(decisions, key=lambda one: one.number):
        cells = {name: getattr(decision, name) for name in COLUMNS}
        cells["time"] = decision.time.isoformat(timespec="milliseconds")
        writer.writerow("" if cell is None else defused_text(str(cell)) for cell in cells.values())
    return text.getvalue().encode()


def write_decisions(audit: Path, path: Path) -> int:
    """Write the current decisions on an audit as CSV, and return their number. The audit may be read-only."""
    read_audit(audit, "id")
    file = audit / FILE
    current = read_current(file) if file.exists() else {}
    write_atomically(path, decisions_csv(current.values()))
    return len(current)


def read_decisions(
    decisions: Decisions,
    path: Path,
    reviewer: str = "",
    table: PairTable | None = None,
    *,
    takes_captions: bool = True,
) -> int:
    """Add the decisions of a file; returns how many.

    They count as made now, and never for the estimate of the noise rate.

    Args:
        decisions: Decisions to add them to.
        path: A CSV with the columns id and verdict, and any others of `write_decisions`; or the JSON that Label Studio
            or Argilla exports, with the choice matched or mismatched.
        reviewer: Who decided, where the file does not say it.
        table: The pairs that there are, if they are known.
        takes_captions: Whether the data set can take new captions.
    """
    try:
        text = read_regular(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from None
    read = _from_json if path.suffix.lower() == ".json" else _from_csv
    given = list(read(path, text, reviewer))
    if table is not None:
        names = list(dict.fromkeys(name for one in given for name in (one.id, one.partner or one.id)))
        there = table.find(names)
        if unknown := [repr(name) for name in names if name not in there]:
            advice = "Give ids as its table shows them. Nothing was added"
            raise NotFoundError(f"the audit has no pair {listed(unknown)}", where=path, advice=advice)
    rewritten = [repr(one.id) for one in given if one.verdict is Verdict.REWRITE]
    if rewritten and not takes_captions:
        what = f"new captions for {listed(rewritten)}, but the data set has vectors instead of captions"
        raise ConflictError(what, where=path, advice="Re-pair or drop these pairs. Nothing was added")
    return len(decisions.add(given))


def _from_csv(path: Path, text: str, reviewer: str) -> Iterator[Decision]:
    take_long_cells()
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        missing = {"id", "verdict"} - set(reader.fieldnames or ())
        if missing:
            found = ", ".join(reader.fieldnames or ()) or "none"
            expected = f"id and verdict ({', '.join(Verdict)})"
            raise ShapeError(f"the columns are {found}", where=path, expected=expected)
        for number, row in enumerate(reader, start=2):
            verdict = (row["verdict"] or "").strip()
            if verdict not in list(Verdict):
                raise InvalidValueError(f"{verdict!r} in line {number}", where=path, expected=", ".join(Verdict))
            texts = ("id", "replaced", "partner", "caption", "reviewer", "accepted")
            name, replaced, partner, caption, who, accepted = (original(row.get(column) or "") for column in texts)
            who = who or reviewer
            yield Decision(name, Verdict(verdict), replaced, partner, caption, who, accepted, mode=Mode.IMPORT)
    except csv.Error as error:
        raise DamagedError(f"this is not valid CSV ({error})", where=path, advice="Write it again") from None


def _from_json(path: Path, text: str, reviewer: str) -> Iterator[Decision]:
    expected = "the JSON that Label Studio or Argilla exports: a list with an id and annotations or responses"
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError):
        raise DamagedError("this is not valid JSON", where=path, expected=expected) from None
    if not isinstance(entries, list):
        raise ShapeError("no list", where=path, expected=expected)
    for number, entry in enumerate(entries):
        try:
            given = _label_studio(entry) if "data" in entry else _argilla(entry)
            "".join(given or ()).encode()
        except (AttributeError, KeyError, TypeError, IndexError, UnicodeError):  # the last: half of a character
            raise ShapeError(f"entry {number + 1} is not understood", where=path, expected=expected) from None
        if given is None:  # nobody has decided on it
            continue
        name, choice, who = given
        if choice not in _CHOICES:
            raise InvalidValueError(f"{choice!r} for {name!r}", where=path, expected=" or ".join(_CHOICES))
        yield Decision(name, _CHOICES[choice], reviewer=who or reviewer, mode=Mode.IMPORT)


_CHOICES = {"matched": Verdict.KEEP, "mismatched": Verdict.DROP}
Choice = tuple[str, str, str]  # id, choice, who


def _label_studio(task: dict[str, Any]) -> Choice | None:
    """The last annotation of a task, without skipped ones."""
    done = [one for one in task.get("annotations", []) if not one.get("was_cancelled") and one.get("result")]
    if not done:
        return None
    who = done[-1].get("completed_by")
    who = (who.get("email") if isinstance(who, dict) else who) or ""
    results = [one for one in done[-1]["result"] if one.get("type") == "choices"]
    choice = results[0]["value"]["choices"][0]
    return str(task["data"]["id"]), str(choice), str(who)


def _argilla(record: dict[str, Any]) -> Choice | None:
    """The last response of a record."""
    given = (record.get("responses") or {}).get("verdict") or []
    return (str(record["id"]), str(given[-1]["value"]), str(given[-1].get("user_id") or "")) if given else None
