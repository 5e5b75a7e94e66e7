"""The demo, on a handful of images."""

from __future__ import annotations

import html
import re
import shlex
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import mispair
from mispair import demo
from mispair.cli.main import main
from mispair.pairs.shapes import dataset
from mispair.reviewing.review import Review
from mispair.training.settings import read_recipe


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> demo.DemoResult:
    path = tmp_path_factory.mktemp("demo")
    folder = dataset.make(path / "shapes", train=80, dev=6, test=12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset, "cached", lambda **_: folder)
        patch.setattr(demo, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))  # two processes cost seconds
        return demo.run_demo(path / "demo", 0, Console(quiet=True))


def test_the_page_is_whole_and_self_contained(result: demo.DemoResult) -> None:
    page = result.page.read_text()
    assert not re.search(r'src="(?!data:)', page)  # no request leaves the page
    assert re.findall(r'href="(.*?)"', page) == ["audit/report.html"]
    assert (result.page.parent / "audit/report.html").is_file()
    assert "http" not in page
    queries, mended = page.count('class="card query"'), page.count('class="card mended"')
    assert queries == demo.QUERIES + 1
    assert 0 < mended <= demo.MENDED
    queries -= 1  # that of the loop, which only one model answers
    shown = demo.EXAMPLES + 3 * mended + (queries * len(result.trainings) + 1) * demo.FOUND
    assert page.count("data:image/png;base64,") == shown
    assert page.count(">mismatched indeed<") + page.count(">false alarm<") == mended
    assert page.count(">mismatched<") == page.count(">matched<") == demo.EXAMPLES // 2
    for training in result.trainings:
        assert f"{training.test['rsum']:.1f}</td>" in page
    assert "{{" not in page


def test_headings_are_made_from_the_numbers(result: demo.DemoResult) -> None:
    plain, audited = result.trainings
    for rsum, words in ((300.0, "adds 100 points"), (150.0, "costs 50 points"), (200.0, "changes nothing")):
        both = [replace(plain, test={**plain.test, "rsum": 200.0}), replace(audited, test={**plain.test, "rsum": rsum})]
        found = demo.headings(both, result.audited, result.loop)
        assert found["title"].endswith(words)
        assert found["trainings"] == f"Plain training reaches 200 points; with the audit first it is {rsum:.0f}"
        assert demo.gap(both) == rsum - 200


def test_the_loop_ends_with_files_that_the_commands_read(result: demo.DemoResult) -> None:
    out, loop = result.page.parent, result.loop
    assert sum(loop.exported.values()) == result.audited.pairs
    mended = mispair.load(out / "mended", "train")
    assert len(mended) == result.audited.pairs - loop.exported["dropped"]
    assert [len(mispair.load(out / "mended", split)) for split in ("dev", "test")] == [6, 12]
    assert f"has {len(mended)} of 80 pairs" in demo.headings(result.trainings, result.audited, loop)["loop"]
    assert loop.searched == 98
    assert len({Path(answer).name for answer in loop.answers}) == demo.FOUND
    review = Review(out / "audit")  # as `mispair review` opens it
    view = review.view(0)
    assert view.has_image
    assert view.caption
    review.close()
    text = result.page.read_text()
    assert [command.split()[1] for _, command in loop.commands] == ["review", "export", "train", "search"]
    for _, command in loop.commands:
        assert command in html.unescape(text)


def test_the_printed_commands_run(result: demo.DemoResult, capsys: pytest.CaptureFixture[str]) -> None:
    *_, (_, search) = result.loop.commands
    assert main(shlex.split(search)[1:]) == 0
    assert Path(result.loop.answers[0]).name in capsys.readouterr().out.replace("\n", "")


def test_the_metrics_are_those_of_the_runs(result: demo.DemoResult) -> None:
    metrics = result.metrics()
    assert metrics["page"].endswith("index.html")
    assert metrics["gap"] == demo.gap(result.trainings)
    assert 0 <= metrics["audit"]["precision"] <= 1
    assert result.audited.flagged + result.trainings[1].pairs == result.audited.pairs == 80
    assert result.table().row_count == 2


def test_both_trainings_have_the_same_settings_and_about_as_many_steps(result: demo.DemoResult) -> None:
    plain, audited = (read_recipe(training.folder / "config.toml") for training in result.trainings)
    assert (plain.audit, audited.audit) == (False, True)
    same = {name: getattr(plain, name) for name in ("audit", *demo.STRETCHED)}
    assert replace(audited, **same) == plain
    steps = [training.steps for training in result.trainings]
    assert abs(steps[1] - steps[0]) <= 0.35 * steps[0]  # whole epochs of very few pairs here; 276 and 285 in the demo


def test_another_seed_is_another_run(result: demo.DemoResult) -> None:
    names = {training.folder.name for training in result.trainings}
    assert len(names) == 2
    assert all(Path(result.page.parent / "runs" / name).is_dir() for name in names)
