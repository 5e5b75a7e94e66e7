"""The paper's numbers agree with themselves, and with the suites that show them."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from mispair.bench import paper
from mispair.bench.report.rows import paper_data
from mispair.bench.suite.suite import read_suite
from mispair.support.terminal import COLUMNS

SIZES = {"table-1": 48, "table-2": 8, "table-3": 12, "table-4": 4, "table-5": 14, "table-6": 4}


def test_every_line_of_every_table_is_there_once() -> None:
    results = paper.results()
    assert Counter(result.table for result in results) == SIZES
    assert (
        max(Counter((result.table, result.data, result.noise_ratio, result.method) for result in results).values()) == 1
    )
    assert {result.data for result in results} == {"Flickr30K", "MS-COCO 1K", "MS-COCO 5K", "CC152K"}


def test_six_recalls_make_the_sum() -> None:
    whole = [result for result in paper.results() if result.recalls]
    assert len(whole) == 48 + 8 + 10 + 4
    for result in whole:
        assert set(result.recalls) == set(COLUMNS) - {"rsum"}
        assert result.rsum is not None
        assert math.fsum(result.recalls.values()) == pytest.approx(result.rsum, abs=0.05), result


def test_recalls_grow_with_k() -> None:
    for result in paper.results():
        for side in ("i2t", "t2i") if result.recalls else ():
            r1, r5, r10 = (result.recalls[f"{side}_r{k}"] for k in (1, 5, 10))
            assert 0 < r1 < r5 < r10 < 100, result


def test_tables_agree_where_they_overlap() -> None:
    whole, ablation = (
        paper.find(table, "Flickr30K", 0.4, method)
        for table, method in (("table-1", "REPAIR"), ("table-4", "RC + NPR"))
    )
    assert whole is not None
    assert ablation is not None
    assert whole.recalls == ablation.recalls
    assert whole.rsum == ablation.rsum == 492.8


@pytest.mark.parametrize(
    ("table", "data", "noise", "method", "rsum"),
    [
        ("table-1", "Flickr30K", 0.6, "SCAN", 131.7),
        ("table-1", "MS-COCO 1K", 0.2, "SGR", 434.0),  # its line is broken in two in the source
        ("table-2", "CC152K", 0.0, "REPAIR", 369.2),
        ("table-3", "MS-COCO 5K", 0.4, "BiCro", 398.9),
        ("table-5", "MS-COCO 1K", 0.6, "NCR", 475.8),
    ],
)
def test_find(table: str, data: str, noise: float, method: str, rsum: float) -> None:
    found = paper.find(table, data, noise, method)
    assert found is not None
    assert found.rsum == rsum


def test_what_the_paper_does_not_have() -> None:
    assert paper.find("table-1", "Flickr30K", 0.3, "REPAIR") is None
    assert paper.find("table-1", "Flickr8k", 0.4, "REPAIR") is None
    assert paper.find("table-9", "Flickr30K", 0.4, "REPAIR") is None
    empty = paper.find("table-3", "MS-COCO 5K", 0.6, "MSCN")
    assert empty is not None
    assert empty.rsum is None
    assert empty.recalls == {}


@pytest.mark.parametrize("noise", [0.0, 0.4])
def test_cost_has_no_noise_ratio(noise: float) -> None:
    found = paper.find("table-6", "Flickr30K", noise, "SGR, M = 4096")
    assert found is not None
    assert (found.hours, found.extra_bytes, found.noise_ratio) == (28.1, 1_850_000_000, None)


def test_stars_stand_with_ncr_and_bicro() -> None:
    starred = {(result.table, result.method) for result in paper.results() if result.star}
    assert starred == {(table, method) for table in ("table-1", "table-2", "table-3") for method in ("NCR", "BiCro")}


def test_networks_of_the_paper() -> None:
    models = {(result.table, result.method): result.model for result in paper.results()}
    assert models["table-1", "SCAN"] == "scan"
    assert (
        models["table-1", "VSE-inf"] == models["table-5", "REPAIR"] == models["table-6", "VSE-inf, M = 8192"] == "vse"
    )
    assert models["table-1", "REPAIR"] == models["table-4", "hard"] == models["table-6", "SGR, M = 8192"] == "sgr"


@pytest.mark.parametrize("name", ["f30k", "coco", "cc152k"])
def test_every_row_of_the_papers_suites_has_a_number(name: str) -> None:
    suite = read_suite(name)
    for part in suite.parts:
        for noise_ratio in part.noise_ratio if part.paper else ():
            for row in part.rows:
                assert part.paper is not None
                found = paper.find(part.paper, paper_data(suite, part), noise_ratio, row.label)
                assert found is not None, (part.name, noise_ratio, row.label)
                assert found.model == suite.cell(row, noise_ratio, {}, seed=0).config.model
