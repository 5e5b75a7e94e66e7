"""Tables of a suite, from records that nobody has trained."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mispair.bench.report.exports import CSV_HEADS, LATEX, MARKDOWN, csv_rows, results_csv
from mispair.bench.report.tables import ReportTable, part_tables, provenance_table
from mispair.bench.suite.record import Record
from mispair.bench.suite.results_folder import Results
from mispair.bench.suite.suite import Cell, Part, Suite, SuiteRow, digest, read_suite
from mispair.support.terminal import COLUMNS
from mispair.training.run_folder import Environment

PLAIN, NCR, REPAIR = (
    SuiteRow("VSE-inf", "shapes/plain"),
    SuiteRow("NCR", "shapes/ncr"),
    SuiteRow("REPAIR", "shapes/repair"),
)
PAPER = {"VSE-inf": (293.3,), "REPAIR": (492.8,)}
PART = Part("noise", "Under noise", "retrieval", (PLAIN, NCR, REPAIR), noise_ratio=(0.4,), paper=PAPER)
SUITE = Suite("f30k", "Flickr30K", "f30k_precomp", (PART,))
RESULTS = ("i2t R@1", "i2t R@5", "i2t R@10", "t2i R@1", "t2i R@5", "t2i R@10", "rSum")


def metrics(rsum: float) -> dict[str, float]:
    """Recalls that make this sum, and metrics that no table shows."""
    parts = (0.1, 0.18, 0.2, 0.12, 0.19, 0.21)
    return {**dict(zip(COLUMNS, (rsum * part for part in parts), strict=False)), "i2t_mean_rank": 3.0, "rsum": rsum}


def one(rsum: float) -> dict[str, dict[str, float]]:
    """Results of a single network."""
    return {"network": metrics(rsum)}


def two(averaged: float, a: float, b: float) -> dict[str, dict[str, float]]:
    """Results of two networks, averaged and single."""
    return {"network A": metrics(a), "network B": metrics(b), "averaged": metrics(averaged)}


def record(cell: Cell, test: Mapping[str, Mapping[str, float]], **other: Any) -> Record:
    data = {"mismatch": 0.3987, "tested_on": "f30k test", "dev_protocol": "full", "noise_file": None}
    epochs = [{"epoch": epoch, "rsum": 200.0, "seconds": 30.0 + epoch} for epoch in range(4)]
    known: dict[str, Any] = {
        "test": test,
        "data": data,
        "environment": environment("NVIDIA H200", "0.1.0"),
        "validation": epochs,
    }
    return Record.of(cell, "done", **{**known, **other})


def environment(device: str, mispair: str) -> Environment:
    others = {"python": "3.11", "numpy": "2.0", "platform": "Linux", "command": "", "started": ""}
    return Environment(device=device, mispair=mispair, torch="2.6.0", threads=1, **others)


def failed(cell: Cell, error: str) -> Record:
    return Record.of(cell, "failed", error=error)


def at(suite: Suite, part: Part, row: str, seed: int = 0, noise_ratio: float = 0.4, value: Any = None) -> Cell:
    cells = part.cells(suite, seed + 1)
    return next(
        cell
        for key, cell in cells.items()
        if (key.row, key.noise_ratio, key.value, key.seed) == (row, noise_ratio, value, seed)
    )


def made(results: Mapping[str, Sequence[Any]], suite: Suite = SUITE, part: Part = PART) -> dict[str, Record]:
    """Records by the name of the cell, from results by row and seed; None where there is none."""
    found = {}
    for row, by_seed in results.items():
        for seed, test in enumerate(by_seed):
            if test is not None:
                cell = at(suite, part, row, seed)
                found[cell.name] = failed(cell, test) if isinstance(test, str) else record(cell, test)
    return found


def column(table: ReportTable, head: str) -> list[str]:
    return [row[table.heads.index(head)] for row in table.rows]


def cell_text(table: ReportTable, label: str, head: str) -> str:
    return next(row for row in table.rows if row[0] == label)[table.heads.index(head)]


def bold(table: ReportTable) -> set[str]:
    """The rows with a best result."""
    assert {table.heads[where] for _, where in table.bold} <= {"rSum", "single"}
    return {table.rows[number][0] for number, where in table.bold if table.heads[where] == "rSum"}


def markdown(table: ReportTable) -> str:
    return MARKDOWN.get_template("table.md").render(table=table)


def latex(table: ReportTable) -> str:
    return LATEX.get_template("table.tex").render(table=table)


def notes(table: ReportTable) -> str:
    return "\n".join(table.notes)


SOME = {
    "VSE-inf": [one(280.0), one(300.0)],
    "NCR": [two(480.0, 470.0, 474.0), two(484.0, 478.0, 474.0)],
    "REPAIR": [two(490.0, 480.0, 482.0), two(483.0, 479.0, 481.0)],
}


def tables_of(results: Mapping[str, Sequence[Any]], seeds: int = 2) -> list[ReportTable]:
    return part_tables(Results(SUITE, seeds, made(results)), PART)


# ---------------------------------------------------------------------- retrieval


def test_a_row_is_the_mean_over_the_seeds() -> None:
    table, *_ = tables_of(SOME)
    assert (table.name, table.title) == ("noise-noise-40", "Under noise")
    assert column(table, "method") == ["VSE-inf", "NCR", "REPAIR"]
    assert column(table, "networks") == ["1", "2", "2"]
    assert column(table, "seeds") == ["2", "2", "2"]
    assert column(table, "rSum") == ["290.0", "482.0", "486.5"]
    assert column(table, "sd") == ["± 14.1", "± 2.8", "± 4.9"]
    assert column(table, "single") == ["290.0", "474.0", "480.5"]
    assert column(table, "paper") == ["293.3", "-", "492.8"]
    assert bold(table) == {"REPAIR"}
    assert all(len(row) == len(table.heads) for row in table.rows)


@given(st.lists(st.tuples(*[st.floats(1, 100)] * 6), min_size=1, max_size=5))
def test_means_and_sd_are_numpys(recalls: list[tuple[float, ...]]) -> None:
    tests = [{"network": dict(zip(COLUMNS, (*row, sum(row)), strict=True))} for row in recalls]
    table, *_ = part_tables(Results(SUITE, len(tests), made({"VSE-inf": tests})), PART)
    found = np.array([[*row, sum(row)] for row in recalls])
    shown = [float(cell_text(table, "VSE-inf", head)) for head in RESULTS]
    np.testing.assert_allclose(shown, found.mean(axis=0), atol=0.0501)
    sd = cell_text(table, "VSE-inf", "sd")
    if len(tests) == 1:
        assert sd == "-"
    else:
        assert float(sd.removeprefix("± ")) == pytest.approx(np.std(found[:, -1], ddof=1), abs=0.0501)


def test_one_seed_has_no_sd() -> None:
    table, paired, *_ = tables_of({row: by_seed[:1] for row, by_seed in SOME.items()}, seeds=1)
    assert column(table, "rSum") == ["280.0", "480.0", "490.0"]
    assert column(table, "sd") == ["-"] * 3
    assert cell_text(paired, "NCR", "averaged: difference") == "+10.0"
    assert cell_text(paired, "NCR", "averaged: sd") == "-"


def test_ties_are_all_the_best() -> None:
    results = {"VSE-inf": [two(480.04, 1, 1)], "NCR": [two(479.96, 1, 1)], "REPAIR": [two(470, 1, 1)]}
    table, *_ = tables_of(results, seeds=1)
    assert bold(table) == {"VSE-inf", "NCR"}
    assert markdown(table).count("**480.0**") == 2
    assert latex(table).count(r"\textbf{480.0}") == 2


def test_one_network_is_not_compared_with_averaged_ones() -> None:
    results = {"VSE-inf": [one(500)], "NCR": [two(490, 470, 472)], "REPAIR": [two(480, 474, 476)]}
    table, *_ = tables_of(results, seeds=1)
    assert bold(table) == {"NCR"}
    assert (0, table.heads.index("single")) in table.bold
    assert len(table.bold) == 2
    table, *_ = tables_of({"VSE-inf": [one(500)], "NCR": [one(490)], "REPAIR": []}, seeds=1)
    assert bold(table) == {"VSE-inf"}
    assert len(table.bold) == 1


def test_tables_for_every_noise_ratio() -> None:
    part = replace(PART, noise_ratio=(0.2, 0.125), paper={"REPAIR": (504.4, float("nan"))})
    tables = part_tables(Results(SUITE, 1, {}), part)
    assert [table.name for table in tables] == [
        "noise-noise-20", "noise-noise-20-paired", "noise-noise-12.5", "noise-noise-12.5-paired"
    ]  # fmt: skip
    assert tables[0].title == "Under noise, 20\xa0% noise"
    assert column(tables[0], "paper") == ["-", "-", "504.4"]
    assert column(tables[2], "paper") == ["-", "-", "-"]


# ---------------------------------------------------------------------- pairs of rows


@given(
    st.lists(st.tuples(*[st.none() | st.tuples(*[st.floats(0, 600)] * 3)] * 2), min_size=1, max_size=6),
)
def test_paired_differences_are_of_seeds_that_both_have(
    pairs: list[tuple[tuple[float, ...] | None, tuple[float, ...] | None]],
) -> None:
    results = {
        "NCR": [None if ncr is None else two(*ncr) for ncr, _ in pairs],
        "REPAIR": [None if repair is None else two(*repair) for _, repair in pairs],
    }
    _, table, *_ = part_tables(Results(SUITE, len(pairs), made(results)), PART)
    both = [(ncr, repair) for ncr, repair in pairs if ncr is not None and repair is not None]
    for kind, first, last in (("averaged", 0, 1), ("single", 1, 3)):
        shown = [cell_text(table, "NCR", f"{kind}: {what}") for what in ("seeds", "difference", "sd", "positive")]
        differences = [float(np.mean(repair[first:last]) - np.mean(ncr[first:last])) for ncr, repair in both]
        if not differences:
            assert shown == ["-"] * 4
            continue
        assert int(shown[0].split()[0]) == len(differences)
        assert float(shown[1]) == pytest.approx(np.mean(differences), abs=0.0501)
        assert int(shown[3]) == sum(difference > 0 for difference in differences)
        if len(differences) > 1:
            assert float(shown[2].removeprefix("± ")) == pytest.approx(np.std(differences, ddof=1), abs=0.0501)


def test_averaged_is_never_compared_with_a_single_network() -> None:
    _, table, *_ = tables_of(SOME)
    assert table.name == "noise-noise-40-paired"
    assert column(table, "REPAIR minus") == ["VSE-inf", "NCR"]
    assert table.rows[0][1:5] == ["-"] * 4
    assert table.rows[0][5:] == ["2", "+190.5", "± 14.8", "2"]
    assert table.rows[1][1:] == ["2", "+4.5", "± 7.8", "1", "2", "+6.5", "± 3.5", "2"]
    assert not table.bold


def test_without_repair_the_last_row_is_compared_with() -> None:
    rows = (SuiteRow("hard", "shapes/repair", {"labels": "hard"}), SuiteRow("RC + NPR", "shapes/repair"))
    part = replace(PART, kind="ablation", rows=rows, paper={})
    records = made({"hard": [two(480, 1, 1)], "RC + NPR": [two(470, 1, 1)]}, part=part)
    table, paired = part_tables(Results(SUITE, 1, records), part)
    assert column(paired, "RC + NPR minus") == ["hard"]
    assert column(paired, "averaged: difference") == ["-10.0"]
    assert table.heads[-1] == "single"


def test_a_row_alone_is_compared_with_nothing() -> None:
    part = replace(PART, rows=(REPAIR,), paper={})
    assert len(part_tables(Results(SUITE, 2, {}), part)) == 1


# ---------------------------------------------------------------------- what is not there


@pytest.mark.parametrize("name", ["cc152k", "coco", "f30k", "f8k", "shapes"])
def test_no_records_at_all(name: str) -> None:
    suite = read_suite(name)
    for part in suite.parts:
        tables = part_tables(Results(suite, 2, {}), part)
        assert bool(tables) == (part.kind in ("retrieval", "ablation", "sweep", "cost"))
        for table in tables:
            assert all(len(row) == len(table.heads) for row in table.rows)
            assert "Missing" in notes(table)
            assert not table.bold
            assert markdown(table)
            assert latex(table)
    rows = list(csv.DictReader(io.StringIO(results_csv(Results(suite, 2, {})))))
    assert len(rows) == sum(len(part.cells(suite, 2)) for part in suite.parts)
    assert {row["status"] for row in rows} == {"missing"}


def test_missing_trainings_are_counted() -> None:
    table, paired, *_ = tables_of({**SOME, "VSE-inf": [], "NCR": [None, two(484.0, 1, 1)]})
    for either in (table, paired):
        assert "Missing: 3 of 6 trainings." in either.notes
    assert table.rows[0][1:] == [*["-"] * 11, "293.3"]
    assert cell_text(table, "NCR", "seeds") == "1 of 2"
    assert cell_text(table, "NCR", "rSum") == "484.0"
    assert "Missing: 1 of 6 trainings." in tables_of({**SOME, "VSE-inf": [one(1)]})[0].notes


def test_failed_trainings_tell_why() -> None:
    ncr = [SOME["NCR"][0], "All are equal."]
    results: dict[str, Sequence[Any]] = {**SOME, "VSE-inf": ["It ran out of memory.", None], "NCR": ncr}
    table, paired, *_ = tables_of(results)
    assert table.rows[0][1:-1] == ["failed"] * 11
    assert cell_text(table, "NCR", "seeds") == "1 of 2"
    assert paired.rows[0][1:] == ["failed"] * 8
    assert cell_text(paired, "NCR", "averaged: seeds") == "1 of 2"
    for either in (table, paired):
        assert "VSE-inf, seed 0 failed: It ran out of memory." in either.notes
        assert "NCR, seed 1 failed: All are equal." in either.notes
        assert "Missing: 1 of 6 trainings." in either.notes


def test_nothing_but_failures() -> None:
    table, *_ = tables_of({row: ["It broke."] * 2 for row in SOME})
    assert set(column(table, "rSum")) == {"failed"}


# ---------------------------------------------------------------------- data sets


def with_folds(test: dict[str, dict[str, float]], rsum: float) -> dict[str, dict[str, float]]:
    return {**test, "folds": metrics(rsum)}


COCO = Suite("coco", "MS-COCO", "coco_precomp", (PART,))
FOLDS = replace(PART, folds=True)


def test_results_on_folds() -> None:
    tests = {"VSE-inf": [with_folds(one(300.0), 410.0)], "REPAIR": [with_folds(two(415.0, 400.0, 402.0), 515.5)]}
    table, paired, *_ = part_tables(Results(COCO, 1, made(tests, COCO, FOLDS)), FOLDS)
    assert column(table, "rSum") == ["410.0", "-", "515.5"]
    assert column(table, "single") == ["410.0", "-", "-"]
    assert paired.rows[0][1:] == ["-"] * 8


def test_results_on_all_test_images_without_folds() -> None:
    tests = {"REPAIR": [with_folds(two(415.0, 400.0, 402.0), 515.5)]}
    table, *_ = part_tables(Results(COCO, 1, made(tests, COCO, PART)), PART)
    assert cell_text(table, "REPAIR", "rSum") == "415.0"
    assert cell_text(table, "REPAIR", "single") == "401.0"


def test_test_images_that_make_no_folds() -> None:
    table, *_ = part_tables(Results(COCO, 1, made({"REPAIR": [two(415.0, 1, 1)]}, COCO, FOLDS)), FOLDS)
    assert cell_text(table, "REPAIR", "rSum") == "-"
    assert "several whole thousands" in notes(table)


# ---------------------------------------------------------------------- provenance


def test_provenance_has_a_row_for_each_combination() -> None:
    records = made(SOME)
    usual = ["40\xa0%", "6", "39.87\xa0%", "by seed", "f30k test", "full", "NVIDIA H200", "0.1.0", "2.6.0"]
    assert provenance_table(records.values()).rows == [usual]
    cell = at(SUITE, PART, "NCR", 1)
    old = records[cell.name]
    data = replace(old.data, mismatch=0.4, dev_protocol="ncr", noise_file="0123456789abcdef")
    records[cell.name] = replace(old, data=data, environment=environment("cpu", "0.2.0"))
    table = provenance_table(records.values())
    assert table.rows[0] == [usual[0], "5", *usual[2:]]
    other = ["1", "40.00\xa0%", "file 0123456789ab", "f30k test", "ncr", "cpu", "0.2.0", "2.6.0"]
    assert table.rows[1] == ["40\xa0%", *other]
    first = at(SUITE, PART, "NCR", 0).name
    records[first] = replace(records[first], data=replace(records[first].data, mismatch=0.41))
    assert provenance_table(records.values()).rows[0][2] == "39.87–41.00\xa0%"


def test_provenance_without_injected_noise() -> None:
    part = replace(PART, noise_ratio=(0.0,), rows=(REPAIR,), paper={})
    cell = at(SUITE, part, "REPAIR", noise_ratio=0.0)
    (row,) = provenance_table([record(cell, two(1, 2, 3), data={"mismatch": None})]).rows
    assert row[:6] == ["0\xa0%", "1", "-", "none", "unknown", "unknown"]


# ---------------------------------------------------------------------- sweeps and cost

SWEEP = Part("bank", "Size", "sweep", (REPAIR,), noise_ratio=(0.4,), setting="bank_size", values=(256, 1024))


def test_a_sweep_has_a_row_for_each_value() -> None:
    low, high = (at(SUITE, SWEEP, "REPAIR", value=value) for value in SWEEP.values)
    records = {low.name: record(low, two(470, 1, 1)), high.name: failed(high, "Too big.")}
    (table,) = part_tables(Results(SUITE, 1, records), SWEEP)
    assert table.heads[0] == "bank_size"
    assert column(table, "bank_size") == ["256", "1024"]
    assert column(table, "rSum") == ["470.0", "failed"]
    assert bold(table) == {"256"}
    assert "REPAIR, bank_size = 1024, seed 0 failed: Too big." in table.notes


def test_a_sweep_of_several_rows_names_them() -> None:
    part = replace(SWEEP, rows=(NCR, REPAIR))
    (table,) = part_tables(Results(SUITE, 1, {}), part)
    assert [row[:2] for row in table.rows] == [[row, size] for row in ("NCR", "REPAIR") for size in ("256", "1024")]


COST = Part(
    "cost", "Cost", "cost", (SuiteRow("VSE-inf, M = 4096", "shapes/repair", {"bank_size": 4096}), PLAIN),
    noise_ratio=(0.4,),
)  # fmt: skip


def test_cost() -> None:
    repair, plain = (at(SUITE, COST, row.label) for row in COST.rows)
    records = {
        repair.name: record(
            repair, two(1, 2, 3), method={"bank_bytes": [20_000_000, 21_000_000]}, memory=2_340_000_000
        ),
        plain.name: record(plain, one(1)),
    }
    (table,) = part_tables(Results(SUITE, 1, records), COST)
    assert table.rows == [
        ["VSE-inf, M = 4096", "1", "2.1", "31.5", "41.0", "2.3"],
        ["VSE-inf", "1", "2.1", "31.5", "-", "-"],
    ]


def test_cost_without_validation_is_unknown() -> None:
    cell = at(SUITE, COST, "VSE-inf")
    (table,) = part_tables(Results(SUITE, 1, {cell.name: record(cell, one(1), validation=[])}), COST)
    assert table.rows[1][1:4] == ["1", "-", "-"]


# ---------------------------------------------------------------------- renderers


def small(text: str) -> ReportTable:
    return ReportTable("a b", text, ["method", text], [[text, "1.0"], ["-2.5", "± 0.1"]], [text], frozenset({(0, 1)}))


def test_markdown() -> None:
    assert markdown(small("M|N, bank_size")) == (
        "**M\\|N, bank_size**\n\n"
        "| method | M\\|N, bank_size |\n| --- | ---: |\n| M\\|N, bank_size | **1.0** |\n| -2.5 | ± 0.1 |\n\n"
        "- M\\|N, bank_size"
    )


@given(st.text(min_size=1))
def test_any_label_stays_in_its_place_in_markdown(text: str) -> None:
    for line in markdown(small(text)).split("\n")[2:6]:
        assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) == 3


def test_latex() -> None:
    assert latex(small("VSE-inf & 5 %")).splitlines() == [
        r"\begin{table}[ht]",
        r"\centering\footnotesize\setlength{\tabcolsep}{3pt}",
        r"\caption{VSE$\infty$ \& 5 \%}",
        r"\label{tab:a-b}",
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"method & VSE$\infty$ \& 5 \% \\",
        r"\midrule",
        r"VSE$\infty$ \& 5 \% & \textbf{1.0} \\",
        r"$-$2.5 & $\pm$ 0.1 \\",
        r"\bottomrule",
        r"\end{tabular}}",
        r"\par\smallskip\raggedright",
        r"VSE$\infty$ \& 5 \%\par",
        r"\end{table}",
    ]


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("50 % & a_b #1 $2", r"50 \% \& a\_b \#1 \$2"),
        (r"C:\x{y}", r"C:\textbackslash{}x\{y\}"),
        ("~^", r"\textasciitilde{}\textasciicircum{}"),
        ("VSE-inf", r"VSE$\infty$"),
        ("VSE-infinite", "VSE-infinite"),
        ("the loss is -inf", "the loss is -inf"),
        ("486.1*", "486.1{*}"),
        ("[x]", "{[}x{]}"),
        ("± 2.0", r"$\pm$ 2.0"),
        ("-2.0", "$-$2.0"),
        ("+2.0", "+2.0"),
        ("-", "-"),
        ("two\nlines", "two lines"),
        ("NVIDIA H200-80", "NVIDIA H200-80"),
    ],
)
def test_latex_escapes(text: str, escaped: str) -> None:
    assert latex(small(text)).splitlines()[2] == rf"\caption{{{escaped}}}"


@given(st.text(alphabet='ab-1 \\{}%&_#$~^*[]|<>"±\n', min_size=1))
def test_latex_leaves_nothing_special(text: str) -> None:
    caption = latex(small(text)).splitlines()[2]
    assert caption.startswith(r"\caption{")
    assert caption.endswith("}")
    inside = caption.removeprefix(r"\caption{")[:-1]
    known = r"\\(?:[{}%&_#$]|text(?:backslash|asciitilde|asciicircum|less|greater|bar)\{\})|\$\\pm\$|\$-\$|\{[\[\]*]\}"
    assert not set(re.sub(known, "", inside)) & set('\\{}%&_#$~^*[]|<>"±\n')


def test_csv_has_a_row_for_each_training() -> None:
    ncr_test = with_folds(two(484, 470, 474), 9)
    records = made({**SOME, "VSE-inf": [one(280.0), "It broke, badly."], "NCR": [None, ncr_test]})
    rows = {(row["row"], row["seed"]): row for row in csv_rows(Results(SUITE, 2, records), PART)}
    assert len(rows) == 6
    assert all(tuple(row) == CSV_HEADS for row in rows.values())
    assert {key: row["status"] for key, row in rows.items()} == {
        ("VSE-inf", 0): "done", ("VSE-inf", 1): "failed", ("NCR", 0): "missing", ("NCR", 1): "done",
        ("REPAIR", 0): "done", ("REPAIR", 1): "done",
    }  # fmt: skip
    ncr = rows["NCR", 1]
    assert (ncr["averaged_rsum"], ncr["alone_rsum"], ncr["folds_rsum"], ncr["networks"]) == (484, 472, 9, 2)
    assert ncr["alone_i2t_r1"] == pytest.approx(47.2)
    assert (ncr["part"], ncr["noise"], ncr["value"], ncr["seconds"]) == ("noise", 0.4, None, 126.0)
    assert (ncr["test_set"], ncr["dev_protocol"], ncr["device"]) == ("f30k test", "full", "NVIDIA H200")
    assert ncr["config_digest"] == digest(at(SUITE, PART, "NCR", 1).config)
    assert rows["REPAIR", 0]["folds_rsum"] is None
    assert rows["VSE-inf", 1]["error"] == "It broke, badly."
    assert rows["VSE-inf", 1]["averaged_rsum"] is None


def test_results_csv_keeps_every_digit() -> None:
    records = made({"VSE-inf": [one(1000 / 3)], "NCR": ['It said "no, no".']})
    rows = list(csv.DictReader(io.StringIO(results_csv(Results(SUITE, 1, records)))))
    assert [row["row"] for row in rows] == ["VSE-inf", "NCR", "REPAIR"]
    assert float(rows[0]["averaged_rsum"]) == float(rows[0]["alone_rsum"]) == 1000 / 3
    assert rows[0]["folds_rsum"] == ""
    assert rows[1]["error"] == 'It said "no, no".'
