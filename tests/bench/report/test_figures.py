"""Figures of a comparison: every coordinate where it belongs, every word borne by the data."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import asdict, replace
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mispair.bench.report.figures import Figure, part_figures
from mispair.bench.report.plot import DASHES, HEIGHT, MARKERS, TOP, WIDTH
from mispair.bench.suite.record import Record
from mispair.bench.suite.suite import Cell, Part, PartKind, Row, Suite, digest

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "</text><script>alert(1)</script> & \"'\x00\ud800"
CHARACTER, ROW = 9.35, 19  # room for a character; height of a line above the plot
SHORT = {"warmup_epochs": 2, "epochs": 3}
SET = {**SHORT, "eta": 0.1, "bank_size": 4096}
REPAIR, NCR = Row("REPAIR", "shapes/repair", SET), Row("NCR", "shapes/ncr", SHORT)
ETAS = (0.01, 0.05, 0.1, 0.2, 0.5)
RIGHT, WRONG = [[0, 0, 10, 30], [0, 0, 20, 20]], [[40, 0, 0, 0], [30, 10, 0, 0]]


def suite_of(kind: PartKind, rows: tuple[Row, ...] = (REPAIR,), **settings: Any) -> tuple[Suite, Part]:
    part = Part("part", "Some title", kind, rows, **{"noise": (0.4,), **settings})
    return Suite("small", "Small", "shapes", (part,)), part


def record(cell: Cell, **found: Any) -> Record:
    return Record(cell.name, cell.label, digest(cell.config), asdict(cell.config), found.pop("status", "done"), **found)


def epochs(*rsums: float) -> list[dict[str, Any]]:
    return [{"epoch": number, "rsum": rsum, "seconds": 1.0} for number, rsum in enumerate(rsums)]


def two_networks(averaged: float, alone: float) -> dict[str, dict[str, float]]:
    return {"network A": {"rsum": alone - 1}, "network B": {"rsum": alone + 1}, "averaged": {"rsum": averaged}}


def draw(
    kind: PartKind, found: dict[tuple[str, Any, int], dict[str, Any]], seeds: int = 1, **part: Any
) -> list[Figure]:
    """Figures of a part, with what was found for each row, value and seed."""
    suite, made = suite_of(kind, **part)
    cells = made.cells(suite, seeds)
    places = {(place.row, place.value, place.seed): cell for place, cell in cells.items()}
    records = [record(places[key], **what) for key, what in found.items()]
    return part_figures(suite, made, seeds, {one.name: one for one in records})


def elements(svg: str, tag: str, style: str | None = None) -> list[ElementTree.Element]:
    found = ElementTree.fromstring(svg).iter(SVG + tag)
    return [one for one in found if style is None or one.get("class") == style]


def texts(svg: str) -> list[str]:
    return [one.text or "" for one in elements(svg, "text")]


def corners(path: str) -> list[tuple[float, float]]:
    """Where a path goes; a marker, drawn from its middle on, counts as its middle."""
    at, found = (0.0, 0.0), []
    for command, x, y in re.findall(r"([MLHV])(-?[\d.]+)(?:,(-?[\d.]+))?", re.split("[a-z]", path)[0]):
        at = (float(x), at[1]) if command == "H" else (at[0], float(x)) if command == "V" else (float(x), float(y))
        found.append(at)
    return found


def curves(svg: str) -> list[list[tuple[float, float]]]:
    """The lines in the plot, in the order of their styles."""
    paths = [one for one in elements(svg, "path") if one.get("stroke-dasharray") and " L" in str(one.get("d"))]
    return [corners(str(one.get("d"))) for one in paths]


def markers(svg: str) -> list[tuple[float, float]]:
    """Those on the data, not the samples beside the names."""
    return [corners(str(one.get("d")))[0] for one in elements(svg, "path") if one.find(SVG + "title") is not None]


def bars(svg: str) -> list[list[tuple[float, float]]]:
    paths = [str(one.get("d")) for one in elements(svg, "path") if " V" in str(one.get("d"))]
    return [corners(path) for path in paths]


def check(svg: str) -> None:
    """Well-formed, finite, and inside its viewBox."""
    root = ElementTree.fromstring(svg)
    left, top, width, height = (float(number) for number in str(root.get("viewBox")).split())
    assert (left, top, width) == (0, 0, WIDTH)
    assert not re.search(r"\b(nan|inf)\b", re.sub(r"<title>.*?</title>|<desc>.*?</desc>", "", svg, flags=re.S))
    for one in root.iter():
        across = [float(str(one.get(name))) for name in ("x", "x1", "x2") if one.get(name)]
        down = [float(str(one.get(name))) for name in ("y", "y1", "y2") if one.get(name)]
        for x, y in corners(one.get("d") or ""):
            across.append(x)
            down.append(y)
        across += [across[0] + float(str(one.get("width")))] if one.tag == SVG + "rect" and across else []
        down += [down[0] + float(str(one.get("height")))] if one.tag == SVG + "rect" and down else []
        assert all(0 <= x <= width for x in across), ElementTree.tostring(one)
        assert all(0 <= y <= height for y in down), ElementTree.tostring(one)


# ---------------------------------------------------------------------- validation


def test_validation_by_hand() -> None:
    (figure,) = draw("validation", {("REPAIR", None, 0): {"validation": epochs(200, 230, 250, 240, 220)}})
    left, right, top = 14 + 3 * CHARACTER, WIDTH - 44 - 6 * CHARACTER, TOP + ROW
    step = (right - left) / 5
    (curve,) = curves(figure.svg)
    heights = [top + HEIGHT * (1 - share) for share in (0, 0.6, 1, 0.8, 0.4)]
    wanted = [(left + step * number, y) for number, y in zip(range(1, 6), heights, strict=True)]
    assert [x for point in curve for x in point] == pytest.approx([x for point in wanted for x in point], abs=0.01)
    assert markers(figure.svg) == curve
    (mark,) = elements(figure.svg, "line", "ink")
    assert float(str(mark.get("x1"))) == pytest.approx(left + 3 * step, abs=0.01)  # 2 of warm-up, int(0.5 * 3) = 1
    (shade,) = elements(figure.svg, "rect", "shade")
    assert float(str(shade.get("x"))) == pytest.approx(left, abs=0.01)
    assert float(str(shade.get("width"))) == pytest.approx(2 * step, abs=0.01)
    assert {"200", "250", "epochs trained", "validation rSum, of 600", "warm-up", "REPAIR"} <= set(texts(figure.svg))
    assert figure.caption == (
        "REPAIR ends at 220.0 (at best 250.0, after 3 epochs). The warm-up is shaded. Noisy pairs come in after 3 "
        "epochs. One seed."
    )


def test_band_is_one_standard_deviation() -> None:
    found = {("REPAIR", None, seed): {"validation": epochs(200, rsum)} for seed, rsum in enumerate((290, 300, 310))}
    (figure,) = draw("validation", found, seeds=3)
    (band,) = [corners(str(one.get("d"))) for one in elements(figure.svg, "path", "s0")]
    assert len(band) == 4
    below, middle, above = band[2][1], curves(figure.svg)[0][1][1], band[1][1]
    per_point = (curves(figure.svg)[0][0][1] - middle) / 100
    assert (below - middle, middle - above) == pytest.approx((10 * per_point, 10 * per_point), abs=0.02)
    assert "ends at 300.0\xa0±\xa010.0" in figure.caption
    assert "Mean of 3 seeds, bands of ± one standard deviation." in figure.caption


def noisy_lines(row: Row) -> list[str]:
    (figure,) = draw("validation", {(row.label, None, 0): {"validation": epochs(1, 2, 3, 4, 5)}}, rows=(row,))
    return [text for text in texts(figure.svg) if "noisy" in text]


def test_noisy_pairs_come_in_where_a_method_uses_them() -> None:
    assert noisy_lines(REPAIR) == ["noisy pairs come in"]
    assert noisy_lines(Row("train", "shapes/repair", {**SET, "labels": "hard", "noisy": "train"})) == [
        "noisy pairs come in"
    ]
    assert noisy_lines(Row("drop", "shapes/repair", {**SET, "noisy": "drop"})) == []
    assert noisy_lines(Row("never", "shapes/repair", {**SET, "noisy_start": 1.0})) == []
    assert noisy_lines(Row("plain", "shapes/plain")) == []


def test_marks_tell_whose_they_are() -> None:
    early = Row("early", "shapes/repair", {**SET, "noisy_start": 0.0, "warmup_epochs": 1})
    validation = {"validation": epochs(100, 150, 200, 250, 260)}
    found = {(row.label, None, 0): validation for row in (REPAIR, early, NCR)}
    (figure,) = draw("validation", found, rows=(REPAIR, early, NCR))
    assert {"noisy pairs come in (REPAIR)", "noisy pairs come in (early)"} <= set(texts(figure.svg))
    assert "The warm-up is shaded: 1 epoch (early); 2 epochs (REPAIR, NCR)." in figure.caption
    assert "Noisy pairs come in after 1 epoch (early)." in figure.caption
    check(figure.svg)


def test_lines_differ_without_colour() -> None:
    rows = tuple(Row(f"row {number}", "shapes/plain") for number in range(8))
    found = {(row.label, None, 0): {"validation": epochs(100 + i, 200 - i)} for i, row in enumerate(rows)}
    (figure,) = draw("validation", found, rows=rows)
    check(figure.svg)
    paths = [one for one in elements(figure.svg, "path") if one.get("stroke-dasharray")]
    assert len({one.get("stroke-dasharray") for one in paths}) == len(set(DASHES)) == 8
    assert len(set(MARKERS)) == 8
    names = sorted(float(str(one.get("y"))) for one in elements(figure.svg, "text") if str(one.text).startswith("row"))
    assert all(later - earlier >= ROW - 0.01 for earlier, later in itertools.pairwise(names))


def test_many_epochs_have_few_markers() -> None:
    (figure,) = draw("validation", {("REPAIR", None, 0): {"validation": epochs(*range(200, 300))}})
    assert 6 <= len(markers(figure.svg)) <= 12
    assert markers(figure.svg)[-1] == curves(figure.svg)[0][-1]


def test_a_share_of_noise_each() -> None:
    figures = draw("validation", {}, noise=(0.2, 0.4))
    assert [figure.name for figure in figures] == ["part-20", "part-40"]
    assert figures[0].title == "Some title, 20\xa0% noise"


# ---------------------------------------------------------------------- labels


def labels(right: Any, wrong: Any, mismatch: float | None = 0.4) -> dict[str, Any]:
    return {"found": {"labels_clean": right, "labels_noisy": wrong}, "data": {"mismatch": mismatch}}


def test_densities_by_hand() -> None:
    (figure,) = draw("labels", {("REPAIR", None, 0): labels(RIGHT, WRONG)})
    left, right, top = 14 + CHARACTER, WIDTH - 18, TOP + ROW
    assert [text for text in texts(figure.svg) if text.isdigit()] == ["0", "1", "2", "3", "4"]
    heaps = curves(figure.svg)  # the wrong ones are dashed
    assert len(heaps) == 1
    density = [3.5, 0.5, 0.0, 0.0]
    bottom = top + HEIGHT
    wanted: list[tuple[float, float]] = [(left, bottom)]
    for number, value in enumerate(density):
        sides = [left + (right - left) * (number + side) / 4 for side in (0, 1)]
        wanted += [(x, bottom - HEIGHT * value / 4) for x in sides]
    wanted.append((right, bottom))
    assert [x for point in heaps[0] for x in point] == pytest.approx([x for p in wanted for x in p], abs=0.01)
    assert figure.caption == (
        "y* is the label that REPAIR gave each pair before its last epoch. Of the right pairs 100\xa0% have y* ≥ 0.5 "
        "(mean 0.78). Of the wrong pairs 0\xa0% have y* ≥ 0.5 (mean 0.16). One seed."
    )


def test_labels_without_wrong_pairs() -> None:
    (figure,) = draw("labels", {("REPAIR", None, 0): labels(RIGHT, [[0] * 4, [0] * 4], 0.0)})
    assert "There are no wrong pairs." in figure.caption
    assert "wrong pairs" not in texts(figure.svg)
    check(figure.svg)


def test_labels_without_right_pairs() -> None:
    (figure,) = draw("labels", {("REPAIR", None, 0): labels([[0] * 4, [0] * 4], WRONG, 1.0)})
    assert "There are no right pairs." in figure.caption
    check(figure.svg)


def test_labels_where_nobody_knows_the_truth() -> None:
    (figure,) = draw("labels", {("REPAIR", None, 0): labels(RIGHT, WRONG, None)})
    assert {"pairs taken for clean", "pairs taken for noisy"} <= set(texts(figure.svg))
    assert not {"right pairs", "wrong pairs"} & set(texts(figure.svg))


def test_rows_whose_names_differ_in_signs_only_have_figures_of_their_own() -> None:
    rows = tuple(replace(REPAIR, label=label) for label in ("p < 0.5", "p > 0.5", "p = 1"))
    names = [figure.name for figure in draw("labels", {("p < 0.5", None, 0): {}}, rows=rows)]
    assert [name.partition("p-")[2] for name in names] == ["0.5-1", "0.5-2", "1"]


def test_method_without_labels() -> None:
    figures = draw("labels", {("NCR", None, 0): {}}, rows=(NCR, REPAIR))
    assert [figure.svg for figure in figures] == ["", ""]
    assert figures[0].caption == "There is no figure: NCR gives no labels."
    assert figures[1].caption == "There is no figure yet: its only training has not ended well."
    assert [figure.name for figure in figures] == ["part-ncr", "part-repair"]
    assert figures[0].title == "Some title: NCR"


def test_densities_of_several_seeds() -> None:
    found = {("REPAIR", None, seed): labels(right, WRONG) for seed, right in enumerate((RIGHT, [[0, 10, 10, 20]]))}
    (figure,) = draw("labels", found, seeds=2)
    check(figure.svg)
    assert len(elements(figure.svg, "path", "right")) == 1  # the band
    assert "Of the right pairs 88\xa0% have" in figure.caption  # 100 and 75


# ---------------------------------------------------------------------- eta


def eta_curve(precisions: dict[float, float]) -> list[dict[str, float]]:
    return [{"eta": eta, "accuracy": 0.8, "precision": p, "recall": 1 - p} for eta, p in precisions.items()]


def test_eta_by_hand() -> None:
    (figure,) = draw("eta", {("REPAIR", None, 0): {"eta": eta_curve({0.05: 1.0, 0.1: 0.75, 0.5: 0.25})}})
    check(figure.svg)
    accuracy, precision, recall = curves(figure.svg)
    left, right, top = 14 + 3 * CHARACTER, WIDTH - 44 - 9 * CHARACTER, TOP + ROW
    assert [x for x, _ in precision] == pytest.approx(
        [left + (right - left) * share for share in (0.1, 0.2, 1)], abs=0.01
    )
    assert [y for _, y in precision] == pytest.approx([top, top + HEIGHT / 4, top + 3 * HEIGHT / 4], abs=0.01)
    assert [y for _, y in recall] == pytest.approx([top + HEIGHT, top + 3 * HEIGHT / 4, top + HEIGHT / 4], abs=0.01)
    assert {y for _, y in accuracy} == {round(top + 0.2 * HEIGHT, 2)}
    (mark,) = elements(figure.svg, "line", "ink")
    assert float(str(mark.get("x1"))) == pytest.approx(left + 0.2 * (right - left), abs=0.01)
    assert "eta = 0.1 in the recipe" in texts(figure.svg)
    assert figure.caption == (
        "At eta = 0.1, 75.0\xa0% of the pairs found are wrong indeed (precision), and 25.0\xa0% of the wrong ones are "
        "found (recall). Accuracy is 80.0\xa0% at every eta. One seed."
    )


def test_nothing_found_has_no_precision() -> None:
    nothing = [{"eta": eta, "accuracy": 0.6, "recall": 0.0} for eta in (0.05, 0.1)]
    some = {"eta": 0.2, "accuracy": 0.8, "precision": 0.9, "recall": 0.5}
    (figure,) = draw("eta", {("REPAIR", None, 0): {"eta": [*nothing, some]}})
    assert figure.caption.startswith("At eta = 0.1, no pair is found. Accuracy")
    assert len(curves(figure.svg)) == 2  # one point is no line
    check(figure.svg)
    (figure,) = draw("eta", {("REPAIR", None, 0): {"eta": nothing}})
    assert "precision" not in "".join(texts(figure.svg))


def test_accuracy_where_it_is_highest() -> None:
    curve = [{**entry, "accuracy": 0.7 + entry["eta"]} for entry in eta_curve({0.05: 1.0, 0.2: 0.75, 0.1: 0.5})]
    (figure,) = draw("eta", {("REPAIR", None, 0): {"eta": curve}})
    assert "Accuracy is highest at eta = 0.2 (90.0\xa0%)." in figure.caption


def test_eta_that_was_not_measured() -> None:
    (figure,) = draw("eta", {("REPAIR", None, 0): {"eta": eta_curve({0.2: 0.9})}})
    assert figure.caption.startswith("At eta = 0.2, next to 0.1 of the recipe, 90.0\xa0%")
    check(figure.svg)


def test_no_eta_without_a_split() -> None:
    (figure,) = draw("eta", {("plain", None, 0): {"eta": []}}, rows=(Row("plain", "shapes/plain"),))
    assert (figure.svg, figure.caption[:39]) == ("", "There is no figure: plain does not spli")


# ---------------------------------------------------------------------- sweep


def sweep(setting: str, rsums: dict[Any, list[float]], **part: Any) -> Figure:
    """A sweep whose single networks are 10 below the averaged ones."""
    found = {
        ("REPAIR", value, seed): {"test": two_networks(rsum, rsum - 10)}
        for value, values in rsums.items()
        for seed, rsum in enumerate(values)
    }
    seeds = part.pop("seeds", max(1, *(len(values) for values in rsums.values())))
    (figure,) = draw("sweep", found, seeds=seeds, setting=setting, values=tuple(rsums), **part)
    if figure.svg:
        check(figure.svg)
    return figure


def test_bank_size_is_logarithmic() -> None:
    figure = sweep("bank_size", {256: [240], 1024: [245], 4096: [250]})
    averaged, alone = curves(figure.svg)
    steps = [later[0] - earlier[0] for earlier, later in itertools.pairwise(averaged)]
    assert steps[0] == pytest.approx(steps[1], abs=0.02)
    left, right = 14 + 3 * CHARACTER, WIDTH - 44 - 14 * CHARACTER
    room = math.log(16) * 0.05  # on either side
    first = left + (right - left) * room / (math.log(16) + 2 * room)
    assert averaged[0][0] == alone[0][0] == pytest.approx(first, abs=0.01)
    assert [y for _, y in averaged] == pytest.approx([TOP + HEIGHT / 2, TOP + HEIGHT / 4, TOP], abs=0.01)
    assert [y for _, y in alone] == pytest.approx([TOP + HEIGHT, TOP + 3 * HEIGHT / 4, TOP + HEIGHT / 2], abs=0.01)
    assert {"256", "1,024", "4,096", "bank_size, logarithmic"} <= set(texts(figure.svg))
    assert not bars(figure.svg)
    assert figure.caption == (
        "Averaged: highest at bank_size = 4,096 (250.0), lowest at bank_size = 256 (240.0). Single network: highest at "
        "bank_size = 4,096 (240.0), lowest at bank_size = 256 (230.0). The recipe has bank_size = 4,096. One seed."
    )


def test_tau_is_linear() -> None:
    averaged, _ = curves(sweep("tau", {0.05: [240], 0.15: [245], 0.5: [250]}).svg)
    shares = [(x - averaged[0][0]) / (averaged[-1][0] - averaged[0][0]) for x, _ in averaged]
    assert shares == pytest.approx([0, 0.1 / 0.45, 1], abs=0.001)


def test_error_bars_from_two_seeds_on() -> None:
    figure = sweep("tau", {0.05: [240, 244, 248], 0.15: [250]}, seeds=3)
    found = bars(figure.svg)
    assert len(found) == 2  # averaged and single, of the value with three seeds
    top, bottom = found[0][0][1], found[0][1][1]
    point = curves(figure.svg)[0][0]
    assert (top + bottom) / 2 == pytest.approx(point[1], abs=0.02)
    per_point = (point[1] - curves(figure.svg)[0][1][1]) / 6
    assert bottom - top == pytest.approx(2 * 4 * per_point, abs=0.05)
    assert found[0][0][0] == pytest.approx(point[0]) != found[1][0][0]  # beside each other
    assert "Mean of 3 seeds, bars of ± one standard deviation (tau = 0.15 has 1)." in figure.caption


def test_values_with_as_few_seeds_are_named_together() -> None:
    caption = sweep("tau", {0.05: [240, 244, 248], 0.15: [250], 0.2: [251, 252], 0.5: [253]}, seeds=3).caption
    assert "(tau = 0.15; tau = 0.5 have 1, tau = 0.2 has 2)." in caption


def test_no_best_value_where_all_are_as_good() -> None:
    assert sweep("tau", {0.05: [240.0], 0.15: [240.01]}).caption.startswith("Averaged: 240.0 at every value.")


def test_values_that_are_words() -> None:
    figure = sweep("split", {"smoothed": [240], "single": [250]})
    assert {"smoothed", "single"} <= set(texts(figure.svg))
    assert "highest at split = single (250.0)" in figure.caption


def test_a_setting_over_many_magnitudes_is_logarithmic() -> None:
    averaged, _ = curves(sweep("lr", {1e-5: [240], 1e-4: [245], 1e-3: [250]}).svg)
    steps = [later[0] - earlier[0] for earlier, later in itertools.pairwise(averaged)]
    assert steps[0] == pytest.approx(steps[1], abs=0.02)


def test_values_in_any_order() -> None:
    (averaged, _) = curves(sweep("tau", {0.5: [250], 0.05: [240]}).svg)
    assert averaged[0][0] < averaged[1][0]
    assert averaged[0][1] > averaged[1][1]


def test_one_network_is_one_line() -> None:
    found = {("plain", value, 0): {"test": {"network": {"rsum": 200 + 1000 * value}}} for value in (0.001, 0.002)}
    (figure,) = draw("sweep", found, rows=(Row("plain", "shapes/plain"),), setting="lr", values=(0.001, 0.002))
    assert len(curves(figure.svg)) == 1
    assert "One network: highest at lr = 0.002 (202.0)" in figure.caption


def test_folds_where_asked_for() -> None:
    test = {**two_networks(240, 230), "folds": {"rsum": 300.0}}
    (figure,) = draw("sweep", {("REPAIR", 0.1, 0): {"test": test}}, setting="tau", values=(0.1,), folds=True)
    assert "Averaged: 300.0 at tau = 0.1." in figure.caption


def test_several_rows() -> None:
    rows = (REPAIR, Row("other", "shapes/repair", {**SET, "eta": 0.2}))
    found = {(row.label, 0.1, 0): {"test": two_networks(240, 230)} for row in rows}
    (figure,) = draw("sweep", found, rows=rows, setting="tau", values=(0.1, 0.2))
    assert {"REPAIR, averaged", "other, single network"} <= set(texts(figure.svg))
    assert "Not there yet: REPAIR, tau = 0.2; other, tau = 0.2." in figure.caption
    check(figure.svg)


# ---------------------------------------------------------------------- degenerate


@pytest.mark.parametrize("kind", ["validation", "labels", "eta"])
def test_no_figure_without_records(kind: PartKind) -> None:
    (figure,) = draw(kind, {}, seeds=3)
    assert (figure.svg, figure.title) == ("", "Some title")
    assert figure.caption == "There is no figure yet: none of its 3 trainings has ended well."


def test_no_figure_of_failed_trainings() -> None:
    found = {("REPAIR", None, seed): {"status": "failed", "error": "Collapsed."} for seed in (0, 1)}
    (figure,) = draw("validation", found, seeds=3)
    assert figure.caption == "There is no figure yet: none of its 3 trainings has ended well (2 failed)."


def test_no_figure_without_validation_pairs() -> None:
    (figure,) = draw("validation", {("REPAIR", None, 0): {"validation": []}})
    assert (figure.svg, figure.caption) == ("", "There is no figure: the data set has no pairs for validation.")


@pytest.mark.parametrize("kind", ["retrieval", "ablation", "cost", "examples"])
def test_tables_are_no_figures(kind: PartKind) -> None:
    assert draw(kind, {}) == []


def test_missing_rows_are_named() -> None:
    (figure,) = draw("validation", {("NCR", None, 0): {"validation": epochs(1, 2)}}, seeds=2, rows=(NCR, REPAIR))
    assert figure.caption.endswith("One seed, of 2 asked for. Not there yet: REPAIR.")
    assert len(curves(figure.svg)) == 1


@pytest.mark.parametrize(
    "rsums",
    [(240.0,), (240.0, 240.0), (0.0, 0.0), (240.0, 240.0 + 1e-12), (1e9, 1e9 + 1), (0.0, 1e12), (5.0, math.nan, 7.0)],
)
def test_any_range_draws(rsums: tuple[float, ...]) -> None:
    (figure,) = draw("validation", {("REPAIR", None, 0): {"validation": epochs(*rsums)}})
    check(figure.svg)
    assert len(markers(figure.svg)) == sum(math.isfinite(rsum) for rsum in rsums)
    assert "nan" not in figure.caption


def test_small_differences_stay_small() -> None:
    (figure,) = draw("validation", {("REPAIR", None, 0): {"validation": epochs(240.0, 240.1)}})
    (curve,) = curves(figure.svg)
    assert curve[0][1] - curve[1][1] <= HEIGHT / 15


@pytest.mark.parametrize("values", [(7,), (0,), (-1, 1), (1, 1), (0.0, 1e-9), (1, 10**12), (True, False), ("a" * 99,)])
def test_any_values_draw(values: tuple[Any, ...]) -> None:
    """Also values that no setting takes."""
    suite, part = suite_of("validation")
    (cell,) = part.cells(suite, 1).values()

    class Same(Suite):
        def cell(self, *_: Any) -> Cell:
            return cell

    swept = Part("part", "Some title", "sweep", (REPAIR,), (0.4,), "tau", values)
    records = {cell.name: record(cell, test=two_networks(240, 230))}
    (figure,) = part_figures(Same("small", "Small", "shapes", (swept,)), swept, 1, records)
    check(figure.svg)


def test_texts_are_escaped() -> None:
    row = Row(HOSTILE, "shapes/repair", SET)
    suite, part = suite_of("validation", (row,))
    part = replace(part, title=HOSTILE)
    (cell,) = part.cells(suite, 1).values()
    (figure,) = part_figures(suite, part, 1, {cell.name: record(cell, validation=epochs(1, 2))})
    assert "<script" not in figure.svg
    check(figure.svg.encode().decode())
    assert elements(figure.svg, "title")[0].text == HOSTILE.replace("\x00", "\ufffd").replace("\ud800", "\ufffd")


def test_long_names_stay_inside() -> None:
    row = Row("a very long name of a method that nobody can remember", "shapes/repair", SET)
    (figure,) = draw("validation", {(row.label, None, 0): {"validation": epochs(1, 2)}}, rows=(row,))
    check(figure.svg)
    (shown,) = [one for one in elements(figure.svg, "text") if str(one.text).startswith("a very")]
    assert float(str(shown.get("x"))) + CHARACTER * len(str(shown.text)) <= WIDTH
    assert len(str(shown.text)) == 24


RSUM = st.floats(0, 600)
SHARE = st.floats(0, 1)
COUNTS = st.lists(st.integers(0, 10**6), min_size=20, max_size=20)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=30), min_size=1, max_size=3))
@example([[0.1 + 0.2, 0.3], [0.3, 0.1 + 0.2]])
def test_any_validation_is_inside(seeds: list[list[float]]) -> None:
    found = {("REPAIR", None, seed): {"validation": epochs(*rsums)} for seed, rsums in enumerate(seeds)}
    (figure,) = draw("validation", found, seeds=len(seeds))
    check(figure.svg)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(COUNTS, COUNTS), min_size=1, max_size=3))
def test_any_labels_are_inside(seeds: list[tuple[list[int], list[int]]]) -> None:
    found = {("REPAIR", None, seed): labels([right], [wrong]) for seed, (right, wrong) in enumerate(seeds)}
    (figure,) = draw("labels", found, seeds=len(seeds))
    if figure.svg:
        check(figure.svg)
    assert bool(figure.svg) == any(sum(right) + sum(wrong) for right, wrong in seeds)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.tuples(SHARE, SHARE, SHARE), min_size=5, max_size=5), min_size=1, max_size=3))
def test_any_eta_is_inside(seeds: list[list[tuple[float, float, float]]]) -> None:
    names = ("eta", "accuracy", "precision", "recall")
    found = {
        ("REPAIR", None, number): {
            "eta": [dict(zip(names, (eta, *shares), strict=True)) for eta, shares in zip(ETAS, seed, strict=True)]
        }
        for number, seed in enumerate(seeds)
    }
    (figure,) = draw("eta", found, seeds=len(seeds))
    check(figure.svg)


@settings(deadline=None, max_examples=40)
@given(st.dictionaries(st.integers(2, 10**8), st.lists(RSUM, min_size=1, max_size=3), min_size=1, max_size=6))
def test_any_sweep_is_inside(rsums: dict[int, list[float]]) -> None:
    assert sweep("bank_size", rsums).svg
