"""Links of the pages outside the site, answers to the questions of users, and names that the pages mention."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://github.com/mispair/mispair/blob/main/"
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower())) for heading in headings}


PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").glob("*.md")) + sorted((ROOT / "benchmarks").rglob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    """Relative links, and links to a page of the repository that is not part of the site."""
    for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        if link.startswith("http") and not link.startswith(REPOSITORY):
            continue
        path, _, anchor = link.removeprefix(REPOSITORY).partition("#")
        target = (ROOT if link.startswith(REPOSITORY) else page.parent) / path if path else page
        assert target.exists(), f"{page.name}: {link}"
        is_api = target.name == "reference.md"  # its anchors are made of docstrings
        assert not anchor or is_api or anchor in anchors(target), f"{page.name}: {link}"


@pytest.mark.parametrize("path", [ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")], ids=lambda path: path.stem)
def test_files_of_the_package_exist(path: Path) -> None:
    """Files that a page names in backticks, such as `models/sgraf.py`."""
    named = re.findall(r"`(?:src/mispair/)?(\w+(?:/\w+)+\.py)`", path.read_text(encoding="utf-8"))
    assert not [name for name in named if not (ROOT / "src/mispair" / name).is_file() and not (ROOT / name).is_file()]


QUESTIONS = re.split(r"^## ", (ROOT / "docs/questions.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
ASKED = (
    "wrong",
    "sure",
    "not find",
    "threshold",
    "CLIP",
    "undo",
    "long",
    "send",
    "PyTorch",
    "resume",
    "WebDataset",
    "language",
)


@pytest.mark.parametrize("word", ASKED)
def test_each_question_has_a_short_answer_that_leads_further(word: str) -> None:
    [text] = [text for text in QUESTIONS if word in text.partition("\n")[0]]
    answer, arrow, where = text.partition("→")
    assert arrow
    assert len(answer.split()) <= 80
    links = LINK.findall(where)
    assert links
    for link in links:
        page, _, anchor = link.partition("#")
        assert (ROOT / "docs" / page).is_file()
        assert not anchor or anchor in anchors(ROOT / "docs" / page), link


def test_readme_leads_to_the_questions() -> None:
    assert "(docs/questions.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").glob("*/*.*")), ids=lambda picture: picture.stem)
def test_pictures_are_small_and_shown(picture: Path) -> None:
    assert picture.stat().st_size <= 150_000
    assert any(f"{picture.parent.name}/{picture.name})" in page.read_text(encoding="utf-8") for page in PAGES)


def test_results_are_one_page() -> None:
    assert len((ROOT / "docs/results.md").read_text(encoding="utf-8").split()) <= 1500
