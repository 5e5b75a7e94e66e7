"""Tables of results as parquet and CSV, harmless in spreadsheets and terminals."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute as compute
import pyarrow.csv
import pyarrow.parquet

from mispair.errors import ExistsError, WriteError
from mispair.support.files import replacing

TABLE = "pairs.parquet"  # the table of an audit, in its folder
# Spreadsheets compute cells that begin like this, unless they are numbers.
_FORMULA = r"^'*[=+\-@\t\r]"  # with apostrophes: `original` takes one away
_NUMBER = r"^[+\-]?(\d+\.?\d*|\.\d+)([eE][+\-]?\d+)?$"
# Terminals obey control characters, and marks of direction show a text in another order.
_CONTROLS = r"[\x00-\x08\x0b-\x1f\x7f-\x{9f}\x{202a}-\x{202e}\x{2066}-\x{2069}]"


@contextmanager
def table_writer(path: Path) -> Iterator[Callable[[pyarrow.Table], None]]:
    """Write a table piece by piece as parquet or as CSV, by the ending of the name, whole or not at all."""
    kind: Any = pyarrow.csv.CSVWriter if path.suffix.lower() == ".csv" else pyarrow.parquet.ParquetWriter
    writers: list[Any] = []
    with replacing(path) as file, ExitStack() as stack:

        def write(piece: pyarrow.Table) -> None:
            if not writers:  # the first piece has the schema
                writers.append(stack.enter_context(kind(file, piece.schema)))
            writers[0].write_table(piece)

        yield write


def write_table(path: str | Path, pieces: Iterable[pyarrow.Table], *, overwrite: bool = False) -> None:
    """Write pieces of a table as parquet or CSV, by the ending of the name, whole or not at all."""
    path = Path(path)
    if path.suffix.lower() not in (".parquet", ".csv"):
        raise WriteError("a table of an unknown kind", where=path, expected="a name that ends in .parquet or .csv")
    if path.exists() and not overwrite:
        raise ExistsError("the file is there already", where=path, advice="Give another name, or `overwrite`.")
    with table_writer(path) as write:
        for piece in pieces:
            write(piece)


def defused(table: pyarrow.Table) -> pyarrow.Table:
    """The table for people: spreadsheets compute nothing, terminals obey nothing.

    Texts that a spreadsheet would compute get an apostrophe in front, and control characters become U+FFFD.
    """
    for place, field in enumerate(table.schema):
        if pyarrow.types.is_string(field.type) or pyarrow.types.is_large_string(field.type):
            table = table.set_column(place, field, _harmless(table.column(place)))
    return table


def defused_text(text: str) -> str:
    """The text with an apostrophe in front if a spreadsheet would compute it.

    >>> defused_text("=1+1"), defused_text("'=1+1"), defused_text("-2")
    ("'=1+1", "''=1+1", '-2')
    """
    return f"'{text}" if re.match(_FORMULA, text) and not re.fullmatch(_NUMBER, text, re.ASCII) else text


def original(text: str) -> str:
    """The text before it was defused.

    >>> original("'=1+1"), original("'twas")
    ('=1+1', "'twas")
    """
    return text[1:] if text.startswith("'") and re.match(_FORMULA, text) else text


def _harmless(column: Any) -> Any:
    formula = compute.and_not(
        compute.match_substring_regex(column, _FORMULA), compute.match_substring_regex(column, _NUMBER)
    )
    marked = compute.binary_join_element_wise(pyarrow.scalar("'", column.type), column, pyarrow.scalar("", column.type))
    lines = compute.replace_substring(compute.if_else(formula, marked, column), "\r\n", "\n")
    return compute.replace_substring_regex(lines, _CONTROLS, "\ufffd")
