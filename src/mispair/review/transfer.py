"""Decisions as CSV, to and from files."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

from mispair.errors import DataError
from mispair.review.decisions import COLUMNS, Decision, Decisions, Mode, Verdict
from mispair.support.files import write_atomically

LONGEST_CELL = 1 << 20


def decisions_csv(decisions: Decisions) -> bytes:
    """The decisions that count, one row a pair, in the order in which they were made."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    for decision in sorted(decisions.current.values(), key=lambda one: one.number):
        cells = {name: getattr(decision, name) for name in COLUMNS}
        cells["time"] = decision.time.isoformat(timespec="milliseconds")
        writer.writerow("" if cell is None else _defused(str(cell)) for cell in cells.values())
    return text.getvalue().encode()


def write_decisions(decisions: Decisions, path: Path) -> int:
    """Writes the decisions that count as CSV; returns how many."""
    write_atomically(path, decisions_csv(decisions))
    return len(decisions.current)


def read_decisions(decisions: Decisions, path: Path, reviewer: str = "") -> int:
    """Adds the decisions of a CSV with the columns id and verdict, and any others of an export; returns how many.

    They count as made now, and never for the estimate of the noise rate.

    Raises:
        DataError: The file cannot be read, or a row is no decision. Then none is added.
    """
    return len(decisions.add(list(_read(path, reviewer))))


def _read(path: Path, reviewer: str) -> Iterator[Decision]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}: the file cannot be read ({error.strerror or error}).") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: the text is not UTF-8 ({error.reason}); save the file again as UTF-8.") from None
    csv.field_size_limit(LONGEST_CELL)
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        missing = {"id", "verdict"} - set(reader.fieldnames or ())
        if missing:
            found = ", ".join(reader.fieldnames or ()) or "none"
            raise DataError(f"{path}: the columns are {found}; expected id and verdict ({', '.join(Verdict)}).")
        for number, row in enumerate(reader, start=2):
            verdict = (row["verdict"] or "").strip()
            if verdict not in list(Verdict):
                raise DataError(f"{path}, line {number}: {verdict!r} is no decision; expected {', '.join(Verdict)}.")
            name, replaced, partner, caption, who = (
                _original(row.get(column) or "") for column in ("id", "replaced", "partner", "caption", "reviewer")
            )
            yield Decision(name, Verdict(verdict), replaced, partner, caption, who or reviewer, mode=Mode.IMPORT)
    except csv.Error as error:
        raise DataError(f"{path}: this is not valid CSV ({error}); write it again.") from None


def _defused(cell: str) -> str:
    """A cell that a spreadsheet does not compute."""
    return f"'{cell}" if cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell


def _original(cell: str) -> str:
    return cell[1:] if cell.startswith("'") and cell[1:2] in tuple("=+-@\t\r") else cell
