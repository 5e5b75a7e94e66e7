"""The report of a comparison: all of it there, all of it escaped, nothing from elsewhere."""

from __future__ import annotations

import base64
import csv
import io
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image

from html_reader import Reader
from mispair.bench.report.page import write_report
from mispair.bench.report.plot import COLOURS
from mispair.bench.report.summary import ranking_of
from mispair.bench.report.tables import part_tables
from mispair.bench.suite.record import Record
from mispair.bench.suite.suite import Cell, Part, Row, Suite, digest, read_suite
from mispair.errors import DataError

HOSTILE = "</td></p><script>alert(1)</script>\"'><img src=x onerror=alert(1)> {{ 7 * 7 }} &amp; \x00\ud800"
COMMAND = "mispair bench report results"
RECALLS = {f"{side}_r{k}": 40.0 + k for side in ("i2t", "t2i") for k in (1, 5, 10)}
SHAPES = read_suite("shapes")


def figures(rsum: float) -> dict[str, float]:
    return {
        **RECALLS,
        "rsum": rsum,
        **{f"{side}_{kind}_rank": 5.0 for side in ("i2t", "t2i") for kind in ("median", "mean")},
    }


def done(cell: Cell, rsum: float = 240.0, **found: Any) -> Record:
    """A training that has ended well, as `record.py` describes it."""
    start = Record(cell.name, cell.label, digest(cell.config), asdict(cell.config), "done")
    filled: dict[str, Any] = {
        "data": {
            "mismatch": 0.4,
            "tested_on": "shapes test",
            "name": "shapes train",
            "pairs": 7500,
            "dev_protocol": "full",
        },
        "test": {"network A": figures(rsum - 11), "network B": figures(rsum - 9), "averaged": figures(rsum)},
        "validation": [{"epoch": epoch, "rsum": 200.0 + 9 * epoch, "seconds": 20.0} for epoch in range(5)],
        "found": {"labels_clean": [[5, 20]] * 2, "labels_noisy": [[20, 2]] * 2, "bank_bytes": [100, 100]},
        "eta": [{"eta": eta, "accuracy": 0.8, "precision": 0.9, "recall": eta} for eta in (0.1, 0.2)],
        "examples": EXAMPLES,
        "environment": {"mispair": "0.1.0", "torch": "2.6", "device": "cpu", "command": "mispair bench run shapes"},
    }
    return replace(start, **{**filled, **found})


def replaced(kind: str, text: str, *, image: str, wrong: bool, true: str, **new: str) -> dict[str, Any]:
    return {"kind": kind, "text": text, "image": image, "label": 0.1, "wrong": wrong, "true_image": true, **new}


EXAMPLES = [
    {"kind": "right", "text": "a green heart", "image": "one", "label": 0.914},
    {"kind": "wrong", "text": "a red star", "image": "two", "label": 0.0312},
    replaced("new text", "a ring", image="two", wrong=False, true="two", new_text="a cross"),
    replaced("new image", "a moon", image="one", wrong=True, true="two", new_image="two"),
    replaced("new image", "a sun", image="one", wrong=True, true="three", new_image="two"),
]


def all_done(suite: Suite = SHAPES, seeds: int = 1) -> dict[str, Record]:
    return {cell.name: done(cell, 240.0 + number) for number, cell in enumerate(suite.cells(seeds))}


def failed(record: Record, error: str) -> Record:
    return Record(record.name, record.label, record.digest, record.config, "failed", error)


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
        files = write_report(suite, seeds, records, tmp_path / "out", images, command)
        assert files[0] == tmp_path / "out" / "index.html"
        return read(files[0].read_text(encoding="utf-8"))

    return write


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    Image.new("RGB", (400, 300), "red").save(folder / "one.jpg")
    Image.new("RGBA", (50, 80), "blue").save(folder / "two.png")
    return folder


def sizes(page: Checker) -> list[tuple[int, int]]:
    """Of the pictures on a page."""
    sources = [str(attrs["src"]) for tag, attrs in page.tags if tag == "img"]
    assert all(source.startswith("data:image/jpeg;base64,") for source in sources)
    return [Image.open(io.BytesIO(base64.b64decode(source.split(",")[1]))).size for source in sources]


# ---------------------------------------------------------------------- files


def test_files(tmp_path: Path) -> None:
    files = write_report(SHAPES, 1, all_done(), tmp_path, None, COMMAND)
    names = ["index.html", "tables.md", "tables.tex", "results.csv"]
    drawings = [f"figures/{name}.svg" for name in ("validation", "labels", "eta", "tau", "bank")]
    assert [str(file.relative_to(tmp_path)) for file in files] == [*names, *drawings]
    assert all(file.is_file() for file in files)
    for name in drawings:
        assert ElementTree.parse(tmp_path / name).getroot().tag.endswith("svg")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "results.csv").read_text())))
    assert len(rows) == sum(len(part.cells(SHAPES, 1)) for part in SHAPES.parts)


def test_tables_for_papers(tmp_path: Path) -> None:
    write_report(SHAPES, 1, all_done(), tmp_path, None, COMMAND)
    latex, markdown = (tmp_path / "tables.tex").read_text(), (tmp_path / "tables.md").read_text()
    assert latex.startswith("% Shapes: 13 of 13 trainings done.")
    assert r"\usepackage{booktabs,graphicx}" in latex.splitlines()[0]
    begun, ended = (re.findall(rf"\\{word}{{(\w+)}}", latex) for word in ("begin", "end"))
    assert sorted(begun) == sorted(ended)
    assert begun.count("table") == markdown.count("|---") + markdown.count("| --- |") > 4
    assert re.findall("^## (.*)", markdown, re.M) == [
        part.title for part in SHAPES.parts if part.kind in ("retrieval", "ablation", "sweep", "cost")
    ]


def test_refuses_what_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(DataError, match="cannot be written"):
        write_report(SHAPES, 1, {}, tmp_path / "out", None, COMMAND)


def test_twice_is_the_same(tmp_path: Path, images: Path) -> None:
    pages = [write_report(SHAPES, 1, all_done(), tmp_path / name, images, COMMAND)[0] for name in "ab"]
    assert pages[0].read_bytes() == pages[1].read_bytes()


# ---------------------------------------------------------------------- the page


def test_parts_in_order(report: Callable[..., Checker]) -> None:
    page = report(all_done())
    ids = [attrs["id"] for tag, attrs in page.tags if tag == "h2"]
    assert ids == [*(part.name for part in SHAPES.parts), "all-tables", "made-by"]
    links = [attrs["href"] for tag, attrs in page.tags if tag == "a"]
    assert links == [f"#{name}" for name in ids]
    assert sum(tag == "svg" for tag, _ in page.tags) == 5
    assert COMMAND in page.words
    assert "mispair bench run shapes" in page.words
    assert "torch 2.6" in page.words


def test_nothing_from_elsewhere(report: Callable[..., Checker], tmp_path: Path, images: Path) -> None:
    page = report(all_done(), images=images)
    for tag, attrs in page.tags:
        assert tag not in ("script", "link", "iframe", "object", "embed", "base")
        assert not any(name.startswith("on") for name in attrs)
        assert str(attrs.get("src", "data:")).startswith("data:")
        assert str(attrs.get("href", "#")).startswith("#")
    source = (tmp_path / "out" / "index.html").read_text()
    assert set(re.findall(r"https?://[^\"' ]+", source)) == {"http://www.w3.org/2000/svg"}
    assert "url(" not in source
    assert "default-src 'none'" in source


def test_dark_page_has_a_colour_for_every_ink(report: Callable[..., Checker], tmp_path: Path) -> None:
    report({})
    style = (tmp_path / "out" / "index.html").read_text().split("</style>")[0]
    for name in COLOURS:
        assert re.search(rf"\.{name} {{ (color|display): ", style), name
    blocks = re.findall(r":root {([^}]*)}", style)  # of what pages share, light and dark; then of this one
    light, dark = ("".join(blocks[start::2]) for start in range(2))
    for name, colour in COLOURS.items():
        assert name[0] != "s" or not name[1:].isdigit() or f"--{name}: {colour};" in light
    named = sorted(re.findall(r"--[\w-]+(?=:)", light))
    assert named == sorted(re.findall(r"--[\w-]+(?=:)", dark))
    assert len(named) > 10


def test_without_records(report: Callable[..., Checker], tmp_path: Path) -> None:
    page = report({}, seeds=2)
    assert "No training has ended well yet." in page.words
    assert "0 of 26" in page.words
    assert "26 not yet made" in page.words
    assert page.words.count("There is no figure yet") == 5
    assert "There are no examples yet" in page.words
    assert not (tmp_path / "out" / "figures").exists()


def test_how_much_is_done(report: Callable[..., Checker], tmp_path: Path) -> None:
    records = all_done()
    names = list(records)
    for name in names[:2]:
        records[name] = failed(records[name], "All similarities became equal.")
    del records[names[-1]]
    page = report(records)
    assert "10 of 13" in page.words
    assert "2 failed , 1 not yet made" in page.words
    assert "Trainings that failed" in page.words
    said = (tmp_path / "out" / "tables.md").read_text()
    assert f"10 of 13 trainings done; 2 failed: {names[0]}, {names[1]}; 1 not yet made." in said


def test_notes_of_all_tables_stand_once(report: Callable[..., Checker]) -> None:
    page = report(all_done())
    assert page.words.count("Dev protocol: full.") == 1
    assert page.words.count("Another data set than the paper's") == 3  # retrieval, ablation, cost


# ---------------------------------------------------------------------- the headline


def test_figures_tell_what_they_come_from(report: Callable[..., Checker]) -> None:
    rows = (Row("NCR", "shapes/ncr"),)
    suite = replace(SHAPES, parts=(Part("validation", "Validation", "validation", rows, noise=(0.4,)),))
    (cell,) = suite.cells(1)
    data = {"mismatch": 0.4, "tested_on": "shapes test", "dev_protocol": "ncr", "noise_file": "0123456789abcdef"}
    page = report({cell.name: done(cell, data=data)}, suite=suite)
    assert "Dev protocol: ncr." in page.text
    assert "Noise: file with SHA-256 0123456789ab." in page.text


def small_suite(*labels: str) -> Suite:
    rows = tuple(Row(label, "shapes/repair", {"tau": 0.1 + number / 100}) for number, label in enumerate(labels))
    return Suite("small", "Small", "shapes", (Part("noise", "Noise", "retrieval", rows, (0.2, 0.4)),))


def headline(report: Callable[..., Checker], rsums: dict[str, list[float]]) -> str:
    suite, seeds = small_suite(*rsums), max(1, *map(len, rsums.values()))
    cells = suite.parts[0].cells(suite, seeds)
    records = {
        cell.name: done(cell, rsums[place.row][place.seed])
        for place, cell in cells.items()
        if place.noise == 0.4 and place.seed < len(rsums[place.row])
    }
    return report(records, suite, seeds).heading.replace("\xa0", " ")


@pytest.mark.parametrize(
    ("rsums", "said"),
    [
        ({"A": [200.0], "B": [240.0], "C": [230.0]}, "B has the highest rSum at 40 % noise: 240.0; next is C, 230.0."),
        ({"A": [200.0, 220.0], "B": [240.0, 250.0]}, "B has the highest rSum at 40 % noise: 245.0; next is A, 210.0."),
        ({"A": [1.0, 3.0], "B": [9.0]}, "So far, B has the highest rSum at 40 % noise: 9.0; next is A, 2.0."),
        ({"A": [1.0], "B": [9.0], "C": []}, "So far, B has the highest rSum at 40 % noise: 9.0; next is A, 1.0."),
        ({"A": [200.0], "B": []}, "A reaches an rSum of 200.0 at 40 % noise."),
        ({"A": [240.01], "B": [240.04]}, "B and A have the same highest rSum at 40 % noise: 240.0."),
        ({"A": [], "B": []}, "No training has ended well yet."),
    ],
)
def test_headline(report: Callable[..., Checker], rsums: dict[str, list[float]], said: str) -> None:
    assert headline(report, rsums) == said


def test_no_headline_without_a_table_of_results(report: Callable[..., Checker]) -> None:
    suite = Suite("small", "Small", "shapes", (Part("eta", "Eta", "eta", (Row("REPAIR", "shapes/repair"),)),))
    assert "1 of 1 training compared." in report(all_done(suite), suite).words


# ---------------------------------------------------------------------- examples


def test_examples_tell_right_from_wrong_in_words(report: Callable[..., Checker], images: Path) -> None:
    words = report(all_done(), images=images).words
    shown = words[words.index("Right pairs") :]
    assert re.search(r"✓ right pair y\* 0\.91 a green heart", shown)
    assert re.search(r"✗ wrong pair y\* 0\.03 a red star", shown)
    assert re.search(r"✓ right pair y\* 0\.10 a ring given instead a cross", shown)
    assert re.search(r"a moon in the data given instead: ✓ the right one written for, never shown", shown)
    assert re.search(r"a sun in the data given instead: another one three written for, never shown", shown)


def test_pictures_are_made_small(report: Callable[..., Checker], images: Path) -> None:
    found = sizes(report(all_done(), images=images))
    assert found.count((200, 150)) == 3
    assert found.count((50, 80)) == 5


def test_names_stand_for_pictures_that_are_not_there(report: Callable[..., Checker], images: Path) -> None:
    page = report(all_done(), images=images)
    assert "1 of 9 pictures are not in" in page.words
    assert "three" in page.words


@pytest.mark.parametrize("there", [True, False])
def test_without_a_folder_of_pictures(report: Callable[..., Checker], tmp_path: Path, there: bool) -> None:
    page = report(all_done(), images=tmp_path / "nowhere" if there else None)
    assert "No folder with the pictures was given, so only their names are here." in page.words
    assert sizes(page) == []


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "", ".", "\x00", "broken", "x" * 5000])
def test_names_that_are_no_pictures(report: Callable[..., Checker], images: Path, name: str) -> None:
    Image.new("RGB", (9, 9)).save(images.parent / "secret.png")
    (images / "broken").write_bytes(b"not a picture")
    records = {key: replace(one, examples=[{**EXAMPLES[0], "image": name}]) for key, one in all_done().items()}
    assert sizes(report(records, images=images)) == []


def test_picture_of_its_own_name(report: Callable[..., Checker], images: Path) -> None:
    Image.new("RGB", (9, 9)).save(images / "plain", "PNG")
    records = {key: replace(one, examples=[{**EXAMPLES[0], "image": "plain"}]) for key, one in all_done().items()}
    assert sizes(report(records, images=images)) == [(9, 9)]


# ---------------------------------------------------------------------- escaping


def test_texts_are_escaped(report: Callable[..., Checker], tmp_path: Path) -> None:
    kinds = ("retrieval", "validation", "labels", "eta", "examples")
    parts = tuple(Part(kind, HOSTILE, kind, (Row(HOSTILE, "shapes/repair"),), (0.4,)) for kind in kinds)  # type: ignore[arg-type]
    suite = Suite("hostile", HOSTILE, "shapes", parts)
    said = {"text": HOSTILE, "image": HOSTILE, "new_text": HOSTILE, "new_image": HOSTILE, "true_image": HOSTILE}
    examples = [{**example, **{key: said[key] for key in said.keys() & example.keys()}} for example in EXAMPLES]
    environment = {"device": HOSTILE, "torch": HOSTILE, "command": HOSTILE}
    data = {"name": HOSTILE, "tested_on": HOSTILE, "pairs": 5, "mismatch": 0.4, "dev_protocol": HOSTILE}
    records = all_done(suite, 2)
    first, second = records
    records[first] = replace(records[first], examples=examples, environment=environment, data=data)
    records[second] = failed(records[second], HOSTILE)
    page = report(records, suite, 2, command=HOSTILE)
    assert not {"script", "img"} & {tag for tag, _ in page.tags}
    assert page.words.count("<script>alert(1)</script>") > 20
    assert "49" not in page.words
    source = (tmp_path / "out" / "index.html").read_bytes().decode()
    assert "\x00" not in source
    for name in ("validation", "labels", "eta"):
        ElementTree.parse(tmp_path / "out" / "figures" / f"{name}.svg")


def test_who_knows_which_pairs_are_right_is_no_competitor() -> None:
    rows = (Row("plain", "shapes/plain"), Row("ceiling", "shapes/plain", {"method": "oracle"}))
    suite = replace(SHAPES, parts=(replace(SHAPES.parts[0], rows=rows),))
    plain, ceiling = suite.cells(1)
    records = {cell.name: done(cell, rsum) for cell, rsum in ((plain, 200.0), (ceiling, 300.0))}
    ranking = ranking_of(suite, 1, records)
    assert ranking is not None
    assert [row.label for row in ranking.rows] == ["plain"]
    assert ranking.is_complete
    (table, _) = part_tables(suite, suite.parts[0], 1, records)
    assert {table.rows[row][0] for row, _ in table.bold} == {"plain"}
