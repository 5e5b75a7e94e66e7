"""The report of a comparison: all of it there, all of it escaped, nothing from elsewhere."""

from __future__ import annotations

import base64
import csv
import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image

from html_reader import Reader
from mispair.bench.report import exports
from mispair.bench.report.figures import COLORS
from mispair.bench.report.page import best_row, write_report
from mispair.bench.report.tables import part_tables
from mispair.bench.suite.record import PairExample, Record
from mispair.bench.suite.results_folder import Results
from mispair.bench.suite.suite import Cell, Part, Suite, SuiteRow, read_suite
from mispair.errors import MispairError
from mispair.training.run_folder import Environment

HOSTILE = "</td></p><script>alert(1)</script>\"'><img src=x onerror=alert(1)> {{ 7 * 7 }} &amp; \x00\ud800"
COMMAND = "mispair bench report results"
RECALLS = {f"{side}_r{k}": 40.0 + k for side in ("i2t", "t2i") for k in (1, 5, 10)}
SHAPES = read_suite("shapes")
EXAMPLES_ALONE = replace(SHAPES, parts=tuple(part for part in SHAPES.parts if part.kind == "examples"))  # no figures


def metrics(rsum: float) -> dict[str, float]:
    return {
        **RECALLS,
        "rsum": rsum,
        **{f"{side}_{kind}_rank": 5.0 for side in ("i2t", "t2i") for kind in ("median", "mean")},
    }


ENVIRONMENT = Environment(
    mispair="0.1.0", torch="2.6", device="cpu", command="mispair bench run shapes", python="3.11", numpy="2.0",
    platform="Linux", threads=1, started="2026-11-16",
)  # fmt: skip


def done(cell: Cell, rsum: float = 240.0, **content: Any) -> Record:
    """The record of a training that succeeded."""
    filled: dict[str, Any] = {
        "data": {
            "mismatch": 0.4,
            "tested_on": "shapes test",
            "name": "shapes train",
            "pairs": 7500,
            "dev_protocol": "full",
        },
        "test": {"network A": metrics(rsum - 11), "network B": metrics(rsum - 9), "averaged": metrics(rsum)},
        "validation": [{"epoch": epoch, "rsum": 200.0 + 9 * epoch, "seconds": 20.0} for epoch in range(5)],
        "method": {"labels_clean": [[5, 20]] * 2, "labels_noisy": [[20, 2]] * 2, "bank_bytes": [100, 100]},
        "eta": [{"eta": eta, "accuracy": 0.8, "precision": 0.9, "recall": eta} for eta in (0.1, 0.2)],
        "examples": EXAMPLES,
        "environment": ENVIRONMENT,
    }
    return Record.of(cell, "done", **{**filled, **content})


EXAMPLES = (
    PairExample("matched", "a green heart", "one", 0.914),
    PairExample("mismatched", "a red star", "two", 0.0312),
    PairExample("new text", "a ring", "two", 0.1, mismatched=False, true_image="two", new_text="a cross"),
    PairExample("new image", "a moon", "one", 0.1, mismatched=True, true_image="two", new_image="two"),
    PairExample("new image", "a sun", "one", 0.1, mismatched=True, true_image="three", new_image="two"),
)


def all_done(suite: Suite = SHAPES, seeds: int = 1) -> dict[str, Record]:
    return {cell.name: done(cell, 240.0 + number) for number, cell in enumerate(suite.cells(seeds))}


def failed(record: Record, error: str) -> Record:
    return Record(record.name, record.label, record.digest, record.config, "failed", error=error)


class Checker(Reader):
    """Keeps the title apart."""

    def __init__(self) -> None:
        super().__init__()
        self.title = ""

    def handle_data(self, data: str) -> None:
        if self.open == ["html", "head", "title"]:
            self.title += data
        else:
            super().handle_data(data)

    @property
    def heading(self) -> str:
        """What the page is called, without the name of the suite."""
        return self.title.split(": ", 1)[1]


def read(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    assert not checker.open
    return checker


@pytest.fixture
def report(tmp_path: Path) -> Callable[..., Checker]:
    """Writes a report, and reads its page."""

    def write(
        records: dict[str, Record],
        suite: Suite = SHAPES,
        seeds: int = 1,
        images: Path | None = None,
        command: str = COMMAND,
    ) -> Checker:
        files = write_report(Results(suite, seeds, records), tmp_path / "out", images, command)
        assert files[0] == tmp_path / "out" / "index.html"
        return read(files[0].read_text(encoding="utf-8"))

    return write


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return make_images(tmp_path / "images")


def make_images(folder: Path) -> Path:
    folder.mkdir()
    Image.new("RGB", (400, 300), "red").save(folder / "one.jpg")
    Image.new("RGBA", (50, 80), "blue").save(folder / "two.png")
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The files of a report with every kind of part, all of it done."""
    folder = tmp_path_factory.mktemp("whole")
    return write_report(Results(SHAPES, 1, all_done()), folder / "out", make_images(folder / "images"), COMMAND)


@pytest.fixture(scope="module")
def page(whole: list[Path]) -> Checker:
    return read(whole[0].read_text(encoding="utf-8"))


def sizes(page: Checker) -> list[tuple[int, int]]:
    """Of the images on a page."""
    sources = [str(attrs["src"]) for tag, attrs in page.tags if tag == "img"]
    assert all(source.startswith("data:image/jpeg;base64,") for source in sources)
    return [Image.open(io.BytesIO(base64.b64decode(source.split(",")[1]))).size for source in sources]


# ---------------------------------------------------------------------- files


def test_files(whole: list[Path]) -> None:
    out = whole[0].parent
    names = ["index.html", "tables.md", "tables.tex", "results.csv"]
    figures = ("validation", "labels", "eta", "tau", "bank")
    drawings = [f"figures/{name}.{ending}" for name in figures for ending in ("svg", "pdf")]
    assert [str(file.relative_to(out)) for file in whole] == [*names, *drawings]
    assert all(file.is_file() for file in whole)
    for name in drawings[::2]:
        assert ElementTree.parse(out / name).getroot().tag.endswith("svg")
    rows = list(csv.DictReader(io.StringIO((out / "results.csv").read_text())))
    assert len(rows) == sum(len(part.cells(SHAPES, 1)) for part in SHAPES.parts)


def test_tables_for_papers(whole: list[Path]) -> None:
    markdown, latex = (file.read_text() for file in whole[1:3])
    assert latex.startswith("% Shapes: 13 of 13 trainings done.")
    assert r"\usepackage{booktabs,graphicx}" in latex.splitlines()[0]
    begun, ended = (re.findall(rf"\\{word}{{(\w+)}}", latex) for word in ("begin", "end"))
    assert sorted(begun) == sorted(ended)
    assert begun.count("table") == markdown.count("|---") + markdown.count("| --- |") > 4
    tables = [part.title for part in SHAPES.parts if part.kind in ("retrieval", "ablation", "sweep", "cost")]
    assert re.findall("^## (.*)", markdown, re.M) == [exports.plain_markdown(title) for title in tables] + [
        "Provenance"
    ]


def test_refuses_what_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(MispairError) as caught:
        write_report(Results(SHAPES, 1, {}), tmp_path / "out", None, COMMAND)
    assert str(tmp_path / "out") in str(caught.value)


def test_twice_is_the_same(whole: list[Path], tmp_path: Path) -> None:
    images = whole[0].parents[1] / "images"
    again = write_report(Results(SHAPES, 1, all_done()), tmp_path / "out", images, COMMAND)[0]
    assert again.read_bytes() == whole[0].read_bytes()


# ---------------------------------------------------------------------- the page


def test_parts_in_order(page: Checker) -> None:
    ids = [attrs["id"] for tag, attrs in page.tags if tag == "h2"]
    assert ids == [*(part.name for part in SHAPES.parts), "reading", "provenance", "commands"]
    links = [attrs["href"] for tag, attrs in page.tags if tag == "a"]
    assert links == [f"#{name}" for name in ids]
    assert sum(tag == "svg" for tag, _ in page.tags) == 5
    assert COMMAND in page.words
    assert "mispair bench run shapes" in page.words
    assert "2.6" in page.words


def test_nothing_from_elsewhere(page: Checker, whole: list[Path]) -> None:
    for tag, attrs in page.tags:
        assert tag not in ("script", "link", "iframe", "object", "embed", "base")
        assert not any(name.startswith("on") for name in attrs)
        assert str(attrs.get("src", "data:")).startswith("data:")
        assert str(attrs.get("href", attrs.get("xlink:href", "#"))).startswith("#")
    source = whole[0].read_text()
    assert {url.split("/")[2] for url in re.findall(r"https?://[^\"' ]+", source)} == {"www.w3.org"}
    assert not re.search(r"url\((?!#)", source)
    assert "default-src 'none'" in source


def test_page_has_all_colors_of_the_figures_in_light_and_dark(report: Callable[..., Checker], tmp_path: Path) -> None:
    report({})
    style = (tmp_path / "out" / "index.html").read_text().split("</style>")[0]
    blocks = re.findall(r":root {([^}]*)}", style)  # of what pages share, light and dark; then of this one
    light, dark = ("".join(blocks[start::2]) for start in range(2))
    for name, color in COLORS.items():
        assert f"--{name}: {color};" in light
        assert f"--{name}: " in dark
    assert len(set(COLORS.values())) == len(COLORS)  # else one would take the name of the other


def test_ids_on_the_page_are_unique(page: Checker) -> None:
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(set(ids)) == len(ids)


def test_without_records(report: Callable[..., Checker], tmp_path: Path) -> None:
    page = report({}, seeds=2)
    assert page.heading == "0 of 26 trainings done, 26 missing."
    assert "26 missing" in page.words
    assert page.words.count("No figure yet") == 5
    assert "No examples yet" in page.words
    assert not (tmp_path / "out" / "figures").exists()


def test_how_much_is_done(report: Callable[..., Checker], tmp_path: Path) -> None:
    suite = replace(SHAPES, parts=tuple(part for part in SHAPES.parts if part.kind in ("retrieval", "ablation")))
    records = all_done(suite)
    names = list(records)
    for name in names[:2]:
        records[name] = failed(records[name], "All similarities became equal.")
    del records[names[-1]]
    page = report(records, suite)
    done = f"{len(names) - 3} of {len(names)}"
    assert done in page.words
    assert "2 failed , 1 missing" in page.words
    assert "Failed trainings" in page.words
    text = (tmp_path / "out" / "tables.md").read_text()
    assert f"{done} trainings done, 2 failed ({names[0]}, {names[1]}), 1 missing." in text


# ---------------------------------------------------------------------- the headline


def small_suite(*labels: str) -> Suite:
    rows = tuple(SuiteRow(label, "shapes/repair", {"tau": 0.1 + number / 100}) for number, label in enumerate(labels))
    return Suite("small", "Small", "shapes", (Part("noise", "Noise", "retrieval", rows, (0.2, 0.4)),))


def headline(report: Callable[..., Checker], rsums: dict[str, list[float]]) -> str:
    suite, seeds = small_suite(*rsums), max(1, *map(len, rsums.values()))
    cells = suite.parts[0].cells(suite, seeds)
    records = {
        cell.name: done(cell, rsums[key.row][key.seed])
        for key, cell in cells.items()
        if key.noise_ratio == 0.4 and key.seed < len(rsums[key.row])
    }
    return report(records, suite, seeds).heading.replace("\xa0", " ")


@pytest.mark.parametrize(
    ("rsums", "expected"),
    [
        ({"A": [200.0], "B": [240.0], "C": [230.0]}, "B: rSum 240.0, one seed at 40 % noise."),
        ({"A": [200.0, 220.0], "B": [240.0, 250.0]}, "B: rSum 245.0 ± 7.1, 2 seeds at 40 % noise."),
        ({"A": [200.0], "B": []}, "A: rSum 200.0, one seed at 40 % noise."),
        ({"A": [], "B": []}, "0 of 4 trainings done, 4 missing."),
    ],
)
def test_headline(report: Callable[..., Checker], rsums: dict[str, list[float]], expected: str) -> None:
    assert headline(report, rsums) == expected


def test_headline_of_averaged_networks_leaves_single_ones_out(report: Callable[..., Checker]) -> None:
    rows = (SuiteRow("one", "shapes/plain"), SuiteRow("A", "shapes/repair"), SuiteRow("B", "shapes/ncr"))
    suite = replace(SHAPES, parts=(replace(SHAPES.parts[0], rows=rows),))
    records = {cell.name: done(cell, rsum) for cell, rsum in zip(suite.cells(1), (300.0, 200.0, 240.0), strict=True)}
    first = next(iter(suite.cells(1)))
    records[first.name] = done(first, test={"network": metrics(300.0)})
    page = report(records, suite)
    assert page.heading.replace("\xa0", " ") == "B: rSum 240.0, one seed at 40 % noise."
    assert "Highest rSum 240.0" in page.words


def test_headline_without_a_table_of_results(report: Callable[..., Checker]) -> None:
    suite = Suite("small", "Small", "shapes", (Part("eta", "Eta", "eta", (SuiteRow("REPAIR", "shapes/repair"),)),))
    assert "1 of 1 trainings done." in report(all_done(suite), suite).words


# ---------------------------------------------------------------------- examples


def test_examples_name_matched_and_mismatched_pairs(page: Checker) -> None:
    shown = page.words[page.words.index("Matched pairs") :]
    assert re.search(r"✓ matched y\* 0\.91 a green heart", shown)
    assert re.search(r"✗ mismatched y\* 0\.03 a red star", shown)
    assert re.search(r"✓ matched y\* 0\.10 a ring replacement a cross", shown)
    assert re.search(r"a moon in the data replacement: ✓ the true one true, not in training", shown)
    assert re.search(r"a sun in the data replacement: another one three true, not in training", shown)


def test_images_are_made_small(page: Checker) -> None:
    found = sizes(page)
    assert found.count((200, 150)) == 3
    assert found.count((50, 80)) == 5


def test_names_replace_images_that_do_not_exist(page: Checker) -> None:
    assert "1 of 3 images are not in" in page.words
    assert "three" in page.words


@pytest.mark.parametrize("there", [True, False])
def test_without_a_folder_of_images(report: Callable[..., Checker], tmp_path: Path, there: bool) -> None:
    page = report(all_done(EXAMPLES_ALONE), EXAMPLES_ALONE, images=tmp_path / "nowhere" if there else None)
    assert "There is no folder with the images, so only their names are shown." in page.words
    assert sizes(page) == []


def with_image(name: str) -> dict[str, Record]:
    """The records of examples whose only image has this name."""
    examples = (replace(EXAMPLES[0], image=name),)
    return {key: replace(one, examples=examples) for key, one in all_done(EXAMPLES_ALONE).items()}


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "", ".", "\x00", "broken", "x" * 5000])
def test_names_that_are_no_images(report: Callable[..., Checker], images: Path, name: str) -> None:
    Image.new("RGB", (9, 9)).save(images.parent / "secret.png")
    (images / "broken").write_bytes(b"not an image")
    assert sizes(report(with_image(name), EXAMPLES_ALONE, images=images)) == []


def test_image_without_an_ending(report: Callable[..., Checker], images: Path) -> None:
    Image.new("RGB", (9, 9)).save(images / "plain", "PNG")
    assert sizes(report(with_image("plain"), EXAMPLES_ALONE, images=images)) == [(9, 9)]


# ---------------------------------------------------------------------- escaping


def test_texts_are_escaped(report: Callable[..., Checker], tmp_path: Path) -> None:
    kinds = ("retrieval", "validation", "labels", "eta", "examples")
    parts = tuple(Part(kind, HOSTILE, kind, (SuiteRow(HOSTILE, "shapes/repair"),), (0.4,)) for kind in kinds)  # type: ignore[arg-type]
    suite = Suite("hostile", HOSTILE, "shapes", parts)
    names = ("text", "image", "new_text", "new_image", "true_image")
    texts: list[dict[str, Any]] = [
        {name: HOSTILE for name in names if getattr(one, name) is not None} for one in EXAMPLES
    ]
    examples = [replace(one, **changed) for one, changed in zip(EXAMPLES, texts, strict=True)]
    environment = ENVIRONMENT.model_copy(update={"device": HOSTILE, "torch": HOSTILE, "command": HOSTILE})
    data = {"name": HOSTILE, "tested_on": HOSTILE, "pairs": 5, "mismatch": 0.4, "dev_protocol": HOSTILE}
    records = all_done(suite, 2)
    first, second = records
    content: dict[str, Any] = {"examples": examples, "environment": environment, "data": data}
    records[first] = replace(records[first], **content)
    records[second] = failed(records[second], HOSTILE)
    page = report(records, suite, 2, command=HOSTILE)
    assert not {"script", "img"} & {tag for tag, _ in page.tags}
    assert page.words.count("<script>alert(1)</script>") > 20
    assert "49" not in page.words
    source = (tmp_path / "out" / "index.html").read_bytes().decode()
    assert "\x00" not in source
    for name in ("validation", "labels", "eta"):
        ElementTree.parse(tmp_path / "out" / "figures" / f"{name}.svg")


def test_the_oracle_is_not_ranked() -> None:
    rows = (SuiteRow("plain", "shapes/plain"), SuiteRow("oracle", "shapes/plain", {"method": "oracle"}))
    suite = replace(SHAPES, parts=(replace(SHAPES.parts[0], rows=rows),))
    plain, oracle = suite.cells(1)
    records = {cell.name: done(cell, rsum) for cell, rsum in ((plain, 200.0), (oracle, 300.0))}
    best = best_row(Results(suite, 1, records))
    assert best is not None
    assert best[0].label == "plain"
    (table, _) = part_tables(Results(suite, 1, records), suite.parts[0])
    assert {table.rows[row][0] for row, _ in table.bold} == {"plain"}
