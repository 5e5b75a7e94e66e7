"""The demo, on a handful of pictures."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from mispair import config, demo
from mispair.data import shapes


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> demo.DemoResult:
    folder = shapes.make(tmp_path / "shapes", train=24, dev=6, test=12)
    recipe = config.read_recipe("shapes/plain")
    small = replace(recipe, data=str(folder), epochs=1, embed_size=16, word_size=8, batch_size=32)
    monkeypatch.setattr(demo, "read_recipe", lambda _: small)
    return demo.run_demo(tmp_path / "demo", 0, Console(quiet=True))


def test_the_page_is_whole_and_stands_alone(result: demo.DemoResult) -> None:
    page = result.page.read_text()
    assert not re.search(r'(?:src|href)="(?!data:)', page)  # nothing is fetched from anywhere
    assert "http" not in page
    queries = page.count('class="card query"')
    assert queries > 0
    assert page.count("data:image/png;base64,") == demo.EXAMPLES + queries * 2 * demo.FOUND
    assert page.count(">wrong pair<") == page.count(">right pair<") == demo.EXAMPLES // 2
    for training in result.trainings:
        assert f"{training.test['rsum']:.1f}</td>" in page
    assert "{{" not in page


def test_the_figures_are_those_of_the_runs(result: demo.DemoResult) -> None:
    names = [training.name for training in result.trainings]
    assert names == ["All pairs right", "40% of the pairs wrong"]
    assert [len(training.curve) for training in result.trainings] == [2, 2]
    assert result.figures()["page"].endswith("index.html")
    assert len(result.tables()) == 2
