"""The page from Python: `mispair.review` and `Audit.review`."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import httpx
import numpy as np
import pyarrow.parquet
import pytest

import mispair
from audited import write_audit
from mispair.errors import ExistsError, InvalidValueError, NotFoundError
from mispair.reviewing.decisions import Verdict
from refusals import refused


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Addresses that a browser was given."""
    found: list[str] = []
    monkeypatch.setattr(webbrowser, "open", found.append)
    return found


def decide(page: mispair.ReviewPage, row: int, verdict: str) -> None:
    headers = {"Origin": page.url.rstrip("/")}
    answer = httpx.post(f"{page.url}decide", data={"row": str(row), "verdict": verdict}, headers=headers)
    assert answer.status_code == 200


def audit(seed: int = 0, first: int = 0) -> mispair.Audit:
    rng = np.random.default_rng(seed)
    left = rng.normal(size=(120, 8)).astype(np.float32)
    right = left @ rng.normal(size=(8, 8)).astype(np.float32)
    right[:20] = right[:20][::-1]
    return mispair.audit(left, right, ids=[f"p{row + first}" for row in range(120)])


def test_a_folder_is_reviewed(tmp_path: Path, opened: list[str]) -> None:
    with mispair.review(str(write_audit(tmp_path / "<audit>")), reviewer="ana") as page:
        assert opened == [page.url]
        assert 'aria-label="Pair p0"' in httpx.get(page.url).text
        decide(page, 3, "drop")
        assert {name: (one.verdict, one.reviewer) for name, one in page.decisions.items()} == {
            "p3": (Verdict.DROP, "ana")
        }
        assert page.url in repr(page)
        assert page.url in page._repr_html_()
        assert "<audit>" not in page._repr_html_()
    with pytest.raises(httpx.TransportError):
        httpx.get(page.url)
    assert list(page.decisions) == ["p3"]


def test_an_audit_in_memory_is_written_and_reviewed(tmp_path: Path, opened: list[str]) -> None:
    found = audit()
    for row, verdict in enumerate(("keep", "drop")):  # the second time the decisions are there
        with found.review(tmp_path / "review", browser=False) as page:
            decide(page, row, verdict)
    assert opened == []
    assert {name: str(one.verdict) for name, one in page.decisions.items()} == {"p0": "keep", "p1": "drop"}
    assert pyarrow.parquet.read_table(tmp_path / "review/pairs.parquet").equals(found.table)
    with refused(ExistsError, tmp_path / "review"):
        audit(1, first=5).review(tmp_path / "review")
    assert list(page.decisions) == ["p0", "p1"]


def test_the_default_folder_is_review(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    with mispair.review(audit()) as page:
        assert page.folder == Path("review")
    assert len(opened) == 1


def test_what_is_no_audit_or_port_is_refused(tmp_path: Path) -> None:
    with refused(NotFoundError, tmp_path, "pairs.parquet"):
        mispair.review(tmp_path)
    with refused(InvalidValueError, "port", "70000"):
        mispair.review(write_audit(tmp_path / "audit"), port=70000)
