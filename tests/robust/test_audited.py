"""Match scores from audits, tables, files, `Pairs` and lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch

import mispair
from audit_cases import make_case
from mispair.errors import DamagedError, DataError, NotFoundError, ShapeError
from mispair.methods.soft_partners import SoftPartners
from mispair.pairs.audited import AuditColumns
from mispair.pairs.layouts.opening import open_raw
from mispair.robust.robust import Robust
from refusals import refused

PLAIN = mispair.Pairs(mispair.Vectors(np.ones((2, 2))), mispair.Vectors(np.ones((2, 2))), np.arange(2))


@pytest.fixture(scope="module")
def audit() -> mispair.Audit:
    case = make_case(120, 0.3)
    left = case.left.copy()
    left[7], left[3] = left[8], np.nan
    return mispair.audit(left, case.right, texts=[f"caption {row // 2}" for row in range(120)], keep_best=0.7)


def _best(partners: SoftPartners) -> dict[tuple[int, bool], int]:
    """The first lender of each item."""
    items = zip(partners.own.tolist(), partners.keeps_right.tolist(), strict=True)
    return dict(zip(items, partners.lenders[:, 0].tolist(), strict=True))


def test_an_audit_and_its_table_say_the_same(audit: mispair.Audit, tmp_path: Path) -> None:
    audit.to_parquet(tmp_path / "pairs.parquet")
    whole = Robust(audit, "mend")
    assert np.array_equal(np.flatnonzero(audit.kept), whole.trained)
    assert 3 not in whole.trained
    assert whole.partners is not None
    assert whole._left[7] == whole._left[8] == 7
    frames = audit.table, audit.to_pandas(), pytest.importorskip("polars").from_arrow(audit.table)
    for form in (tmp_path, tmp_path / "pairs.parquet", str(tmp_path / "pairs.parquet"), *frames):
        table = Robust(form, "mend")
        assert np.array_equal(table.trained, whole.trained)
        assert np.allclose(table.weights, whole.weights)
        assert table.partners is not None
        # A table has the best partner of each side only.
        assert np.array_equal(np.unique(table.partners.own), np.unique(whole.partners.own))
        best = _best(whole.partners)
        assert all(best[item] == lender for item, lender in _best(table.partners).items())
        assert table._right[10] == table._right[11] != table._right[12]


def test_the_cut_of_the_audit_holds_unless_another_is_given(audit: mispair.Audit) -> None:
    flagged = pyarrow.array(np.arange(120) < 60)
    table = audit.table.set_column(audit.table.column_names.index("is_mismatch"), "is_mismatch", flagged)
    assert Robust(table).trained.tolist() == list(range(60, 120))
    low = Robust(table, flag_below=0.01)
    assert np.array_equal(low.trained, np.flatnonzero(audit.match_score >= 0.01))


def test_lists_and_tables_of_scores_alone(tmp_path: Path) -> None:
    numbers = [0.9, 0.1, 1, 0.6]
    table = pyarrow.table({"match_score": numbers})
    pyarrow.csv.write_csv(table, tmp_path / "scores.csv")
    columns = table["match_score"], table.to_pandas()["match_score"]
    for form in (numbers, np.array(numbers), torch.tensor(numbers), *columns, table, tmp_path / "scores.csv"):
        robust = Robust(form, "mend")
        assert robust.trained.tolist() == [0, 2, 3]
        assert robust.partners is None
    frame = table.to_pandas().sort_values("match_score")
    for form in (frame, frame["match_score"]):
        with refused(ShapeError, "Robust: the table"):
            Robust(form)
        assert Robust(form.reset_index(drop=True)).trained.tolist() == [1, 2, 3]
        assert Robust(form[1:]).trained.tolist() == [0, 1, 2]  # some of the pairs
    assert Robust(pyarrow.table({"match_score": [None, 0.9, 0.8, float("nan")]})).trained.tolist() == [1, 2]
    assert Robust([True, False, True]).trained.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("source", "kind", "where", "names"),
    [
        ([0.5, 1.5, -1.0], DataError, "the match scores", "1.5"),
        ([0.5, float("nan")], DataError, "the match scores", "pair 1"),
        (np.zeros((2, 2)), ShapeError, "the match scores", "(2, 2)"),
        (["a", "b"], ShapeError, "the match scores", "list"),
        ([[1.0], [1.0, 2.0]], ShapeError, "the match scores", "list"),
        ("nowhere.parquet", NotFoundError, "nowhere.parquet", ""),
        (pyarrow.table({"score": [1.0]}), NotFoundError, "the table", "score"),
        (PLAIN, DataError, "pairs", "attach_to"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_what_is_no_list_of_scores_is_refused(source: Any, kind: type[DataError], where: str, names: str) -> None:
    with refused(kind, where, names):
        Robust(source)


def test_a_column_whose_name_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pairs.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"id": ["a"], "match_score": [0.5]}), path)
    path.write_bytes(path.read_bytes().replace(b"match_score", b"match\xff\xfecore"))
    with refused(DamagedError, path):
        AuditColumns.read(path)
    with refused(DamagedError, path):
        open_raw(path)


def test_a_damaged_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pairs.parquet").write_bytes(b"PAR1 nothing")
    with refused(DamagedError, tmp_path / "pairs.parquet"):
        Robust(tmp_path)
    pyarrow.parquet.write_table(pyarrow.table({"match_score": ["a"]}), tmp_path / "pairs.parquet")
    with refused(DamagedError, tmp_path):
        Robust(tmp_path)


def test_columns_survive_the_disk(tmp_path: Path) -> None:
    columns = AuditColumns.of_scores(np.array([0.9, 0.2, np.nan], np.float32), np.array([True, False, False]))
    columns.save(tmp_path / "audited.parquet")
    found = AuditColumns.read(tmp_path / "audited.parquet")
    np.testing.assert_array_equal(found.match_score, columns.match_score)
    np.testing.assert_array_equal(found.flagged, columns.flagged)
    assert found.kept.tolist() == [False, True, False]
