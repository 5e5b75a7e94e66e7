"""Figures of a comparison: the plotted numbers, and files that are valid, safe and the same every time."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import StepPatch

from mispair.bench.report.figures import COLORS, LINE_STYLES, MARKERS, ReportFigure, part_figures
from mispair.bench.suite.record import Record
from mispair.bench.suite.results_folder import Results
from mispair.bench.suite.suite import Cell, Part, PartKind, Suite, SuiteRow

HOSTILE = "</text><script>alert(1)</script> $x$ \\alpha {{ 1 }} & \"'\x00\ud800"
SHORT = {"warmup_epochs": 2, "epochs": 3}
SET = {**SHORT, "eta": 0.1, "bank_size": 4096}
REPAIR, NCR = SuiteRow("REPAIR", "shapes/repair", SET), SuiteRow("NCR", "shapes/ncr", SHORT)
MATCHED, MISMATCHED = [[0, 0, 10, 30], [0, 0, 20, 20]], [[40, 0, 0, 0], [30, 10, 0, 0]]


def suite_of(kind: PartKind, rows: tuple[SuiteRow, ...] = (REPAIR,), **settings: Any) -> tuple[Suite, Part]:
    part = Part("part", "Some title", kind, rows, **{"noise_ratio": (0.4,), **settings})
    return Suite("small", "Small", "shapes", (part,)), part


def epochs(*rsums: float) -> list[dict[str, Any]]:
    return [{"epoch": number, "rsum": rsum, "seconds": 1.0} for number, rsum in enumerate(rsums)]


def two_networks(averaged: float, single: float) -> dict[str, dict[str, float]]:
    return {"network A": {"rsum": single - 1}, "network B": {"rsum": single + 1}, "averaged": {"rsum": averaged}}


def record(cell: Cell, **content: Any) -> Record:
    return Record.of(cell, content.pop("status", "done"), **{"test": two_networks(240, 230), **content})


def draw(
    kind: PartKind, content: dict[tuple[str, Any, int], dict[str, Any]], seeds: int = 1, **part: Any
) -> list[ReportFigure]:
    """Figures of a part, with the content of the record of each row, value and seed."""
    suite, made = suite_of(kind, **part)
    cells = {(key.row, key.value, key.seed): cell for key, cell in made.cells(suite, seeds).items()}
    records = [record(cells[key], **values) for key, values in content.items()]
    return part_figures(Results(suite, seeds, {one.name: one for one in records}), made)


def axes_of(figure: ReportFigure) -> Axes:
    assert figure.plot is not None
    return figure.plot.axes[0]


def curves(figure: ReportFigure) -> dict[str, Any]:
    """x and y of each line with markers, by its label."""
    return {str(line.get_label()): line.get_xydata() for line in axes_of(figure).lines if line.get_marker() in MARKERS}


def marks(figure: ReportFigure) -> dict[str, float]:
    """The vertical lines by their labels."""
    lines = [line for line in axes_of(figure).lines if line.get_marker() not in MARKERS]
    return {str(line.get_label()): float(np.asarray(line.get_xdata())[0]) for line in lines}


def legend(figure: ReportFigure) -> list[str]:
    assert figure.plot is not None
    return [text.get_text() for text in figure.plot.legends[0].get_texts()]


def check(figure: ReportFigure) -> None:
    """The files are well formed, and all text lies inside the drawing."""
    root = ElementTree.fromstring(figure.svg)
    assert "<script" not in figure.svg
    assert not re.search(r"\b(nan|inf)\b", figure.svg)
    _, _, width, height = (float(number) for number in str(root.get("viewBox")).split())
    assert figure.plot is not None
    FigureCanvasAgg(figure.plot).draw()  # type: ignore[no-untyped-call]
    scale = 72 / figure.plot.dpi
    for text in figure.plot.legends[0].get_texts():
        box = text.get_window_extent()
        assert min(box.x0, box.y0) * scale >= -1
        assert box.x1 * scale <= width + 1
        assert box.y1 * scale <= height + 1


# ---------------------------------------------------------------------- validation


def test_validation_by_hand() -> None:
    (figure,) = draw("validation", {("REPAIR", None, 0): {"validation": epochs(200, 230, 250, 240, 220)}})
    expected = [(1, 200), (2, 230), (3, 250), (4, 240), (5, 220)]
    np.testing.assert_allclose(curves(figure)["REPAIR"], expected)
    assert marks(figure) == {"noisy pairs used": 3}  # 2 of warm-up, int(0.5 * 3) = 1
    (shade,) = axes_of(figure).patches
    assert (shade.get_x(), shade.get_width()) == (0, 2)  # type: ignore[attr-defined]
    assert legend(figure) == ["REPAIR", "warm-up", "noisy pairs used"]
    assert figure.caption == "One seed."
    assert axes_of(figure).get_xlabel() == "epochs trained"
    assert axes_of(figure).get_ylabel() == "validation rSum"
    check(figure)


def test_band_is_one_standard_deviation() -> None:
    content = {("REPAIR", None, seed): {"validation": epochs(200, rsum)} for seed, rsum in enumerate((290, 300, 310))}
    (figure,) = draw("validation", content, seeds=3)
    np.testing.assert_allclose(curves(figure)["REPAIR"], [(1, 200), (2, 300)])
    (band,) = axes_of(figure).collections
    corners = np.asarray(band.get_paths()[0].vertices)
    assert sorted({round(y, 6) for x, y in corners if x == 2}) == [290, 310]
    assert figure.caption == "Mean ± sd over 3 seeds."


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (REPAIR, True),
        (SuiteRow("train", "shapes/repair", {**SET, "labels": "hard", "noisy": "train"}), True),
        (SuiteRow("drop", "shapes/repair", {**SET, "noisy": "drop"}), False),
        (SuiteRow("never", "shapes/repair", {**SET, "noisy_start": 1.0}), False),
        (SuiteRow("plain", "shapes/plain"), False),
    ],
)
def test_noisy_pairs_are_marked_where_a_method_uses_them(row: SuiteRow, expected: bool) -> None:
    (figure,) = draw("validation", {(row.label, None, 0): {"validation": epochs(1, 2, 3, 4, 5)}}, rows=(row,))
    assert ("noisy pairs used" in legend(figure)) == expected


def test_marks_name_their_rows_where_these_differ() -> None:
    early = SuiteRow("early", "shapes/repair", {**SET, "noisy_start": 0.0, "warmup_epochs": 1})
    validation = {"validation": epochs(100, 150, 200, 250, 260)}
    content = {(row.label, None, 0): validation for row in (REPAIR, early, NCR)}
    (figure,) = draw("validation", content, rows=(REPAIR, early, NCR))
    assert {"noisy pairs used (REPAIR)", "noisy pairs used (early)"} <= set(legend(figure))
    assert {"warm-up (REPAIR, NCR)", "warm-up (early)"} <= set(legend(figure))
    check(figure)


def test_lines_differ_without_color() -> None:
    rows = tuple(SuiteRow(f"row {number}", "shapes/plain") for number in range(8))
    content = {(row.label, None, 0): {"validation": epochs(100 + i, 200 - i)} for i, row in enumerate(rows)}
    (figure,) = draw("validation", content, rows=rows)
    assert len(set(MARKERS)) == len(set(LINE_STYLES)) == 8
    assert len({line.get_marker() for line in axes_of(figure).lines if line.get_marker() in MARKERS}) == 8
    check(figure)


def test_many_epochs_have_few_markers() -> None:
    (figure,) = draw("validation", {("REPAIR", None, 0): {"validation": epochs(*range(200, 300))}})
    (line,) = [line for line in axes_of(figure).lines if line.get_label() == "REPAIR"]
    every: Any = line.get_markevery()
    marked = range(100)[every[0] :: every[1]]
    assert 6 <= len(marked) <= 12
    assert marked[-1] == 99


def test_a_figure_for_each_noise_ratio() -> None:
    figures = draw("validation", {}, noise_ratio=(0.2, 0.4))
    assert [figure.name for figure in figures] == ["part-20", "part-40"]
    assert figures[0].title == "Some title, 20\xa0% noise"


# ---------------------------------------------------------------------- labels


def labels(matched: Any, mismatched: Any, mismatch: float | None = 0.4) -> dict[str, Any]:
    return {"method": {"labels_clean": matched, "labels_noisy": mismatched}, "data": {"mismatch": mismatch}}


def densities(figure: ReportFigure) -> list[Any]:
    steps = [patch for patch in axes_of(figure).patches if isinstance(patch, StepPatch) and not patch.get_fill()]
    return [patch.get_data()[0] for patch in steps]


def test_densities_by_hand() -> None:
    (figure,) = draw("labels", {("REPAIR", None, 0): labels(MATCHED, MISMATCHED)})
    matched, mismatched = densities(figure)
    np.testing.assert_allclose(matched, [0, 0, 1.5, 2.5])
    np.testing.assert_allclose(mismatched, [3.5, 0.5, 0, 0])
    assert legend(figure) == ["matched pairs (mean 0.78)", "mismatched pairs (mean 0.16)"]
    assert figure.caption == "One seed."
    check(figure)


def test_densities_of_several_seeds() -> None:
    content = {("REPAIR", None, seed): labels(one, MISMATCHED) for seed, one in enumerate((MATCHED, [[0, 10, 10, 20]]))}
    (figure,) = draw("labels", content, seeds=2)
    np.testing.assert_allclose(densities(figure)[0], [0, 0.5, 1.25, 2.25])
    assert figure.caption == "Mean ± sd over 2 seeds."


@pytest.mark.parametrize(
    ("matched", "mismatched", "label"), [(MATCHED, [[0] * 4], "matched"), ([[0] * 4], MISMATCHED, "mismatched")]
)
def test_labels_of_one_kind_only(matched: Any, mismatched: Any, label: str) -> None:
    (figure,) = draw("labels", {("REPAIR", None, 0): labels(matched, mismatched)})
    (text,) = legend(figure)
    assert text.startswith(f"{label} pairs")
    check(figure)


def test_labels_without_known_truth_are_by_the_split() -> None:
    (figure,) = draw("labels", {("REPAIR", None, 0): labels(MATCHED, MISMATCHED, None)})
    assert [text.partition(" (")[0] for text in legend(figure)] == ["clean part", "noisy part"]


def test_rows_whose_names_differ_in_punctuation_only_have_files_of_their_own() -> None:
    rows = tuple(replace(REPAIR, label=label) for label in ("p < 0.5", "p > 0.5", "p = 1"))
    names = [figure.name for figure in draw("labels", {("p < 0.5", None, 0): {}}, rows=rows)]
    assert [name.partition("p-")[2] for name in names] == ["0.5-1", "0.5-2", "1"]


def test_method_without_labels() -> None:
    figures = draw("labels", {("NCR", None, 0): {}}, rows=(NCR, REPAIR))
    assert [figure.plot for figure in figures] == [None, None]
    assert figures[0].caption == "No figure: the method gives no labels."
    assert figures[1].caption == "No figure yet: 0 of 1 trainings done, 0 failed."
    assert [figure.name for figure in figures] == ["part-ncr", "part-repair"]
    assert figures[0].title == "Some title: NCR"


# ---------------------------------------------------------------------- eta


def eta_points(precisions: dict[float, float]) -> list[dict[str, float]]:
    return [{"eta": eta, "accuracy": 0.8, "precision": p, "recall": 1 - p} for eta, p in precisions.items()]


def test_eta_by_hand() -> None:
    (figure,) = draw("eta", {("REPAIR", None, 0): {"eta": eta_points({0.05: 1.0, 0.1: 0.75, 0.5: 0.25})}})
    found = curves(figure)
    np.testing.assert_allclose(found["accuracy"], [(0.05, 80), (0.1, 80), (0.5, 80)])
    np.testing.assert_allclose(found["precision"], [(0.05, 100), (0.1, 75), (0.5, 25)])
    np.testing.assert_allclose(found["recall"], [(0.05, 0), (0.1, 25), (0.5, 75)])
    assert marks(figure) == {"recipe: eta = 0.1": 0.1}
    check(figure)


def test_nothing_detected_has_no_precision() -> None:
    points = [{"eta": eta, "accuracy": 0.6, "recall": 0.0} for eta in (0.05, 0.1)]
    (figure,) = draw("eta", {("REPAIR", None, 0): {"eta": points}})
    assert "precision" not in curves(figure)
    check(figure)


def test_no_eta_without_a_split() -> None:
    (figure,) = draw("eta", {("plain", None, 0): {"eta": []}}, rows=(SuiteRow("plain", "shapes/plain"),))
    assert figure.plot is None
    assert figure.caption.startswith("No figure: the method does not split the pairs")


# ---------------------------------------------------------------------- sweep


def sweep(setting: str, rsums: dict[Any, list[float]], **part: Any) -> ReportFigure:
    """A sweep whose single networks are 10 below the averaged ones."""
    content = {
        ("REPAIR", value, seed): {"test": two_networks(rsum, rsum - 10)}
        for value, values in rsums.items()
        for seed, rsum in enumerate(values)
    }
    seeds = part.pop("seeds", max(1, *(len(values) for values in rsums.values())))
    (figure,) = draw("sweep", content, seeds=seeds, setting=setting, values=tuple(rsums), **part)
    check(figure)
    return figure


def test_bank_size_is_logarithmic() -> None:
    figure = sweep("bank_size", {256: [240], 1024: [245], 4096: [250]})
    np.testing.assert_allclose(curves(figure)["averaged networks"], [(256, 240), (1024, 245), (4096, 250)])
    np.testing.assert_allclose(curves(figure)["single network"], [(256, 230), (1024, 235), (4096, 240)])
    assert axes_of(figure).get_xscale() == "log"
    assert [label.get_text() for label in axes_of(figure).get_xticklabels()] == ["256", "1,024", "4,096"]
    assert marks(figure) == {"value of the recipe": 4096}
    assert not axes_of(figure).containers
    assert figure.caption == "One seed."


def test_tau_is_linear() -> None:
    assert axes_of(sweep("tau", {0.05: [240], 0.15: [245], 0.5: [250]})).get_xscale() == "linear"


def test_a_setting_over_many_magnitudes_is_logarithmic() -> None:
    assert axes_of(sweep("lr", {1e-5: [240], 1e-4: [245], 1e-3: [250]})).get_xscale() == "log"


def test_error_bars_from_two_seeds_on() -> None:
    figure = sweep("tau", {0.05: [240, 244, 248], 0.15: [250]}, seeds=3)
    bars = axes_of(figure).containers[0]
    segment = bars.lines[2][0].get_segments()[0]  # type: ignore[attr-defined]
    np.testing.assert_allclose(segment, [(0.05, 240), (0.05, 248)])
    assert figure.caption == "Mean ± sd over 1–3 seeds."


def test_values_that_are_words() -> None:
    figure = sweep("split_losses", {"smoothed": [240], "single": [250]})
    assert [label.get_text() for label in axes_of(figure).get_xticklabels()] == ["smoothed", "single"]


def test_values_in_any_order() -> None:
    figure = sweep("tau", {0.5: [250], 0.05: [240]})
    np.testing.assert_allclose(curves(figure)["averaged networks"], [(0.05, 240), (0.5, 250)])


def test_one_network_is_one_line() -> None:
    content = {("plain", value, 0): {"test": {"network": {"rsum": 200 + 1000 * value}}} for value in (0.001, 0.002)}
    (figure,) = draw("sweep", content, rows=(SuiteRow("plain", "shapes/plain"),), setting="lr", values=(0.001, 0.002))
    assert list(curves(figure)) == ["one network"]


def test_folds_where_the_part_has_them() -> None:
    test = {**two_networks(240, 230), "folds": {"rsum": 300.0}}
    (figure,) = draw("sweep", {("REPAIR", 0.1, 0): {"test": test}}, setting="tau", values=(0.1,), folds=True)
    np.testing.assert_allclose(curves(figure)["averaged networks"], [(0.1, 300)])


def test_several_rows_of_a_sweep() -> None:
    rows = (REPAIR, SuiteRow("other", "shapes/repair", {**SET, "eta": 0.2}))
    content = {(row.label, 0.1, 0): {"test": two_networks(240, 230)} for row in rows}
    (figure,) = draw("sweep", content, rows=rows, setting="tau", values=(0.1, 0.2))
    assert {"REPAIR, averaged networks", "other, single network"} <= set(legend(figure))
    assert figure.caption == "One seed. Missing: REPAIR, tau = 0.2; other, tau = 0.2."
    check(figure)


# ---------------------------------------------------------------------- no data


@pytest.mark.parametrize("kind", ["validation", "labels", "eta"])
def test_no_figure_without_records(kind: PartKind) -> None:
    (figure,) = draw(kind, {}, seeds=3)
    assert (figure.plot, figure.title) == (None, "Some title")
    assert figure.caption == "No figure yet: 0 of 3 trainings done, 0 failed."


def test_no_figure_of_failed_trainings() -> None:
    content = {("REPAIR", None, seed): {"status": "failed", "error": "Collapsed.", "test": {}} for seed in (0, 1)}
    (figure,) = draw("validation", content, seeds=3)
    assert figure.caption == "No figure yet: 0 of 3 trainings done, 2 failed."


def test_no_figure_without_validation_pairs() -> None:
    (figure,) = draw("validation", {("REPAIR", None, 0): {"validation": []}})
    assert figure.caption == "No figure: the data set has no validation pairs."


@pytest.mark.parametrize("kind", ["retrieval", "ablation", "cost", "examples"])
def test_tables_are_no_figures(kind: PartKind) -> None:
    assert draw(kind, {}) == []


def test_missing_rows_are_named() -> None:
    (figure,) = draw("validation", {("NCR", None, 0): {"validation": epochs(1, 2)}}, seeds=2, rows=(NCR, REPAIR))
    assert figure.caption == "One seed. Missing: REPAIR."


# ---------------------------------------------------------------------- files


@pytest.fixture
def figure() -> ReportFigure:
    (figure,) = draw("validation", {("REPAIR", None, 0): {"validation": epochs(1, 2, 3)}})
    return figure


def test_files_are_the_same_every_time(figure: ReportFigure) -> None:
    (again,) = draw("validation", {("REPAIR", None, 0): {"validation": epochs(1, 2, 3)}})
    assert figure.svg == again.svg
    assert figure.pdf == again.pdf
    assert figure.pdf.startswith(b"%PDF")
    assert "<dc:date>" not in figure.svg
    assert b"CreationDate" not in figure.pdf


def test_files_do_not_depend_on_the_users_style(figure: ReportFigure) -> None:
    with mpl.rc_context({"font.size": 20, "lines.linewidth": 9, "svg.fonttype": "path", "figure.dpi": 33}):
        (again,) = draw("validation", {("REPAIR", None, 0): {"validation": epochs(1, 2, 3)}})
        assert again.svg == figure.svg


def test_inline_svg_takes_its_colors_from_the_page(figure: ReportFigure) -> None:
    svg = str(figure.inline_svg())
    assert set(re.findall(r"#[0-9a-f]{6}", svg)) <= set(COLORS.values())
    assert not re.search(r"(?<!, )#[0-9a-f]{6}", svg)  # only as the second argument of var(--name, #...)
    assert "<style" not in svg
    assert "<metadata" not in svg
    root = ElementTree.fromstring(svg)
    ids = [str(element.get("id")) for element in root.iter() if element.get("id")]
    assert len(set(ids)) == len(ids) > 0
    assert all(name.startswith("part-") for name in ids)
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', svg))
    assert used <= set(ids)


def test_texts_are_escaped() -> None:
    row = SuiteRow(HOSTILE, "shapes/repair", SET)
    suite, part = suite_of("validation", (row,))
    part = replace(part, title=HOSTILE)
    (cell,) = part.cells(suite, 1).values()
    (figure,) = part_figures(Results(suite, 1, {cell.name: record(cell, validation=epochs(1, 2))}), part)
    check(figure)
    title = ElementTree.fromstring(figure.svg).find("{http://www.w3.org/2000/svg}title")
    assert title is not None
    assert title.text == HOSTILE.replace("\x00", "\ufffd").replace("\ud800", "\ufffd")


@pytest.mark.parametrize(
    "label", ["a very long name of a method that nobody can remember at all", "_hidden", "模型", "W" * 40]
)
def test_any_label_stays_inside(label: str) -> None:
    row = SuiteRow(label, "shapes/repair", SET)
    (figure,) = draw("validation", {(label, None, 0): {"validation": epochs(1, 2)}}, rows=(row,))
    assert len(legend(figure)[0]) <= 44
    assert legend(figure)[0][:5] == label.lstrip("_")[:5]
    if label.isascii() and label[0] != "W":
        check(figure)


@pytest.mark.parametrize("rsums", [(240.0,), (240.0, 240.0), (0.0, 0.0), (240.0, 240.0 + 1e-12), (0.0, 1e12)])
def test_any_range_draws(rsums: tuple[float, ...]) -> None:
    (figure,) = draw("validation", {("REPAIR", None, 0): {"validation": epochs(*rsums)}})
    check(figure)


def test_small_differences_are_not_blown_up() -> None:
    (figure,) = draw("validation", {("REPAIR", None, 0): {"validation": epochs(240.0, 240.1)}})
    low, high = axes_of(figure).get_ylim()
    assert high - low >= 2


@pytest.mark.parametrize("values", [(7,), (0,), (-1, 1), (1, 1), (0.0, 1e-9), (1, 10**12), (True, False), ("a" * 99,)])
def test_any_values_draw(values: tuple[Any, ...]) -> None:
    """Also values that no setting accepts."""
    suite, part = suite_of("validation")
    (cell,) = part.cells(suite, 1).values()

    class Same(Suite):
        def cell(self, *_: Any) -> Cell:
            return cell

    swept = Part("part", "Some title", "sweep", (REPAIR,), (0.4,), "tau", values)
    (figure,) = part_figures(Results(Same("small", "Small", "shapes", (swept,)), 1, {cell.name: record(cell)}), swept)
    check(figure)


@settings(max_examples=15)
@given(st.lists(st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=30), min_size=1, max_size=3))
def test_any_validation_is_plotted(seeds: list[list[float]]) -> None:
    content = {("REPAIR", None, seed): {"validation": epochs(*rsums)} for seed, rsums in enumerate(seeds)}
    (figure,) = draw("validation", content, seeds=len(seeds))
    for epoch, mean in curves(figure)["REPAIR"]:
        values = [rsums[int(epoch) - 1] for rsums in seeds if len(rsums) >= epoch]
        assert math.isclose(mean, np.mean(values), rel_tol=1e-9, abs_tol=1e-3)
