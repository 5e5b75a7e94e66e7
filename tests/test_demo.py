"""The demo, on a handful of pictures."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from mispair import config, demo
from mispair.data.shapes import dataset


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> demo.DemoResult:
    path = tmp_path_factory.mktemp("demo")
    folder = dataset.make(path / "shapes", train=24, dev=6, test=12)
    recipe = config.read_recipe("shapes/repair")
    sizes = {"warmup_epochs": 1, "epochs": 2, "embed_size": 16, "word_size": 8, "batch_size": 32, "eta": 1.0}
    small = config.override(recipe, {"data": str(folder), **sizes})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "read_recipe", lambda name: replace(small, method=config.read_recipe(name).method))
        return demo.run_demo(path / "demo", 0, Console(quiet=True))


def test_the_page_is_whole_and_stands_alone(result: demo.DemoResult) -> None:
    page = result.page.read_text()
    assert not re.search(r'src="(?!data:)', page)  # nothing is fetched from anywhere
    assert re.findall(r'href="(.*?)"', page) == ["audit/report.html"]
    assert (result.page.parent / "audit/report.html").is_file()
    assert "http" not in page
    queries = page.count('class="card query"')
    assert queries > 0
    mended = page.count('class="card mended"')
    assert 0 < mended <= demo.MENDED
    assert (
        page.count("data:image/png;base64,") == demo.EXAMPLES + 3 * mended + queries * len(demo.TRAININGS) * demo.FOUND
    )
    assert page.count(">wrong indeed<") + page.count(">false alarm<") == mended
    assert page.count("<rect") == 40  # two bars for each of the histogram's bins
    assert page.count(">wrong pair<") == page.count(">right pair<") == demo.EXAMPLES // 2
    for training in result.trainings:
        assert f"{training.test['rsum']:.1f}</td>" in page
    assert "{{" not in page


def test_the_figures_are_those_of_the_runs(result: demo.DemoResult) -> None:
    assert [training.name for training in result.trainings] == list(demo.TRAININGS)
    assert [len(training.curve) for training in result.trainings] == [3] * 3
    assert result.figures()["page"].endswith("index.html")
    found = result.figures()["audit"]
    assert 0 <= found["precision"] <= 1
    assert 0 <= found["recall"] <= 1
    assert result.table().row_count == 3


def test_the_trainings_are_what_their_names_say(result: demo.DemoResult) -> None:
    plain, hard, repair = (config.read_recipe(t.folder / "config.toml") for t in result.trainings)
    assert (plain.method, plain.networks) == ("plain", 2)
    assert {settings.noise_ratio for settings in (plain, hard, repair)} == {demo.NOISE}
    assert (hard.method, hard.repair.labels, hard.repair.noisy) == ("repair", "hard", "train")
    assert (repair.method, repair.repair.labels, repair.repair.noisy) == ("repair", "rank", "replace")


def test_another_seed_has_its_own_runs(result: demo.DemoResult) -> None:
    for training in result.trainings:
        settings = config.read_recipe(training.folder / "config.toml")
        out = result.page.parent
        assert demo.run_folder(out, training.name, settings) == training.folder
        assert demo.run_folder(out, training.name, replace(settings, seed=1)) != training.folder


def test_names_of_curves_do_not_touch() -> None:
    lines = [demo.Training(str(i), "good", Path(), {}, [0.0, 100.0 + i], None) for i in range(4)]
    placed = [y for _, _, y in demo._curves(lines)]
    assert all(after - before >= 19 for before, after in itertools.pairwise(placed))
