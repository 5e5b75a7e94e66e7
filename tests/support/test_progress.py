"""Progress without a terminal."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from mispair.support import progress as module
from mispair.support.progress import RowProgress, at_work, heartbeat, stage_part, tracked


def test_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("mispair.support.progress.time.monotonic", lambda: now)
    written = io.StringIO()
    with RowProgress(Console(file=written, force_terminal=False), 2000, "encoding") as bar:
        now += 10
        bar.step(500)
        bar.line()
        bar.begin("learning")
        now += 20
        bar.line()
        bar.begin("measuring")
        now += 10
        bar.reach(1000)
        bar.line()
    assert written.getvalue().splitlines() == [
        "encoding: 500 of 2,000, 50 a second, 30 s left",
        "encoding: done in 10 s",
        "learning: 20 s so far",
        "learning: done in 20 s",
        "measuring: 1,000 of 2,000, 50 a second, 20 s left",
        "measuring: done in 10 s",
    ]
    assert bar.stages["encoding"] == 10


def test_lines_come_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINE_SECONDS", 0.01)
    written = io.StringIO()
    with RowProgress(Console(file=written, force_terminal=False), 10, "plain vse") as bar:
        bar.step(1)
        bar.note("epoch 1/2")
        while not written.getvalue():  # a thread of its own writes it
            time.sleep(0.01)
    assert written.getvalue().startswith("plain vse: 1 of 10, ")
    assert " left; epoch 1/2\n" in written.getvalue()


def test_short_work_is_silent() -> None:
    written = io.StringIO()
    with RowProgress(Console(file=written, force_terminal=False), 10) as bar:
        bar.begin("learning")
        bar.step(10)
    assert written.getvalue() == ""


def test_parts_of_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("mispair.support.progress.time.monotonic", lambda: now)
    written = io.StringIO()
    with RowProgress(Console(file=written, force_terminal=False), 10, "learning") as bar:
        with stage_part(0.5):
            for number in tracked(range(5)):
                now += 10
                if number == 2:
                    bar.line()
        bar.line()
    assert written.getvalue().splitlines() == [
        "learning: 20%, 2 min 0 s left",
        "learning: 50%, 50 s left",
        "learning: done in 50 s",
    ]


def test_parts_without_a_progress() -> None:
    with stage_part(0.5):
        assert list(tracked([1, 2])) == [1, 2]


def test_the_innermost_heartbeat_with_a_line_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINE_SECONDS", 0.01)
    outer, beats = io.StringIO(), [0]

    def beat() -> bool:
        beats.append(len(outer.getvalue()))
        return True

    with at_work(Console(file=outer, force_terminal=False), "mispair train"):
        with heartbeat(Console(file=io.StringIO(), force_terminal=False), lambda: False):
            while not outer.getvalue():
                time.sleep(0.01)
        with heartbeat(Console(file=io.StringIO(), force_terminal=False), beat):
            while len(beats) < 5:
                time.sleep(0.01)
    assert outer.getvalue().startswith("mispair train: ")
    assert len(set(beats[2:])) == 1
