"""Docstrings of the package are plain English, as far as a program can tell."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "mispair"
PRONOUNS = re.compile(r"\b(?:that|which|who|whose|whom|what|whatever)\b", re.IGNORECASE)
SECTION = re.compile(r"^(Returns|Raises):\n((?:[ \t]+.*\n?|\n)+)", re.MULTILINE)
ENTRY = re.compile(r"^(\s+)(\S.*(?:\n\1\s+\S.*)*)", re.MULTILINE)
SHAPE = re.compile(r"\(\w+(?:, \w+)*,?\)")
MOST_PRONOUNS = 0.15
"""Relative pronouns in the first line of a docstring, on average; cleanlab has 0.19, open_clip 0.06."""
FEWEST_WORDS = 3


def docstrings(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield file and line of each definition, and its docstring."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield f"{path.relative_to(folder)}:{getattr(node, 'lineno', 1)}", text


def entries(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name of each `Returns` and `Raises` entry of a docstring, and what the entry says."""
    for name, body in SECTION.findall(text):
        if name == "Returns":
            yield name, body.strip()
        else:
            yield from ((name, entry.partition(":")[2].strip()) for _, entry in ENTRY.findall(body))


def test_entries_are_found() -> None:
    text = "Read.\n\nReturns:\n    The\n    rows.\n\nRaises:\n    ValueError: It\n        is.\n    OSError: a: b\n"
    assert list(entries(text)) == [
        ("Returns", "The\n    rows."),
        ("Raises", "It\n        is."),
        ("Raises", "a: b"),
    ]


def test_first_lines_have_few_relative_pronouns() -> None:
    found = [(where, text.splitlines()[0]) for where, text in docstrings(PACKAGE)]
    offenders = [(where, line) for where, line in found if PRONOUNS.search(line)]
    each = sum(len(PRONOUNS.findall(line)) for _, line in found) / len(found)
    print("\n".join(f"{where}: {line}" for where, line in offenders))
    assert each <= MOST_PRONOUNS, f"{each:.2f} relative pronouns in each first line, by {len(offenders)} docstrings"


def test_returns_and_raises_say_something() -> None:
    empty = [
        f"{where}: {name}: {said}"
        for where, text in docstrings(PACKAGE)
        for name, said in entries(text)
        if len(said.split()) < FEWEST_WORDS and not SHAPE.search(said)
    ]
    assert not empty, "\n".join(empty)
