"""Links of the pages outside the site, and names that the pages mention."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower())) for heading in headings}


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(name: str) -> None:
    text = CODE.sub("", (ROOT / name).read_text(encoding="utf-8"))
    for link in LINK.findall(text):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        assert (ROOT / path).exists(), f"{name}: {link}"
        assert not anchor or anchor in anchors(ROOT / path), f"{name}: {link}"


@pytest.mark.parametrize("path", [ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")], ids=lambda path: path.stem)
def test_files_of_the_package_exist(path: Path) -> None:
    """Files that a page names in backticks, such as `models/sgraf.py`."""
    named = re.findall(r"`(?:src/mispair/)?(\w+(?:/\w+)+\.py)`", path.read_text(encoding="utf-8"))
    assert not [name for name in named if not (ROOT / "src/mispair" / name).is_file() and not (ROOT / name).is_file()]
