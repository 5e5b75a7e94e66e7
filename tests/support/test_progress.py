"""Progress without a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from mispair.support.progress import progress


def test_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("mispair.support.progress.time.monotonic", lambda: now)
    written = io.StringIO()
    with progress(Console(file=written, force_terminal=False), 2000, "encoding") as bar:
        for _ in range(10):
            now += 4
            bar.step(100)
        now += 20
        bar.begin("learning")
    assert written.getvalue().splitlines() == [
        "encoding: 400 of 2,000",
        "encoding: 800 of 2,000",
        "learning: 1,000 of 2,000",
    ]
    assert bar.stages["encoding"] == 60


def test_short_work_is_silent() -> None:
    written = io.StringIO()
    with progress(Console(file=written, force_terminal=False), 10) as bar:
        bar.begin("learning")
        bar.step(10)
    assert written.getvalue() == ""
