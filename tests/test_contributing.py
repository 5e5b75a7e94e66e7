"""The tables of CONTRIBUTING.md name the packages and files that there are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src/mispair"
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## A new method")[0]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if line.startswith("|")]


def test_every_package_has_a_row() -> None:
    named = {name.rstrip("/") for row in ROWS if len(row) == 3 for name in re.findall(r"`([\w./]+)`", row[1])}
    there = {path.name for path in SOURCE.iterdir() if path.name not in ("__pycache__", "__main__.py", "py.typed")}
    assert there <= named
    assert {name for name in named - there if not (ROOT / name).exists()} == set()


def test_modules_are_where_their_row_says() -> None:
    for row in (row for row in ROWS if len(row) == 3):
        folder = SOURCE / re.findall(r"`([\w./]+)`|$", row[1])[0]
        if folder.is_dir() and row[1].startswith("`"):
            for name in re.findall(r"`(\w+)`", row[2]):
                assert (folder / f"{name}.py").exists(), f"{folder.name}: {name}"


def test_files_of_changes_exist() -> None:
    rows = ROWS[next(place for place, row in enumerate(ROWS) if row[0] == "change") + 2 :]
    names = [name for _, files in rows for name in re.findall(r"`([\w/<>]+\.\w+)`", files)]
    assert len(names) > 10
    for name in names:
        path = SOURCE / name
        assert (path.parent if "<" in name else path).exists(), name
