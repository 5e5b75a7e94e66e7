from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import mispair
from audit_cases import Case, make_case
from mispair.auditing.audit import Audit, language_notes
from mispair.auditing.findings import REASONS
from mispair.auditing.scoring.partners import Partners
from mispair.auditing.scoring.reasons import caption_reasons
from mispair.auditing.scoring.scan import BAD_IN_TABLE, READABLE
from mispair.errors import DataError, ExistsError
from mispair.functional.metrics import auroc
from mispair.pairs.layouts.arrays import open_arrays

arrow = pytest.importorskip("pyarrow")
csv = pytest.importorskip("pyarrow.csv")
parquet = pytest.importorskip("pyarrow.parquet")

BAD = {3: "the right vector is zero", 8: "duplicate id", 9: "missing id", 12: "the left vector has numbers that"}


@pytest.fixture(scope="module")
def case() -> Case:
    made = make_case(200, 0.3)
    made.right[3] = 0
    made.left[12, 0] = np.inf
    return made


@pytest.fixture(scope="module")
def audit(case: Case) -> Audit:
    ids = [f"pair {row}" for row in range(200)]
    ids[8], ids[9] = ids[7], ""
    return mispair.audit(case.left, case.right, ids, device="cpu")


def test_one_row_a_pair_in_the_order_of_the_input(audit: Audit, case: Case) -> None:
    table = audit.table
    text, number = arrow.string(), arrow.float32()
    assert {field.name: field.type for field in table.schema} == {
        "id": arrow.large_string(), "status": text, "match_score": number, "is_mismatch": arrow.bool_(), "reason": text,
        "reasons": text,
        "suggested_right": text, "suggested_right_score": number, "suggested_left": text,
        "suggested_left_score": number, "contrast": number, "evidence": number,
    }  # fmt: skip
    columns = table.to_pydict()
    assert columns["id"] == audit.source.ids(range(200))
    measured = ("match_score", "is_mismatch", "contrast", "evidence")
    for row in range(200):
        assert columns["status"][row].startswith(BAD.get(row, "ok"))
        assert all((columns[name][row] is None) == (row in BAD) for name in measured)
        if row in BAD:
            assert columns["reason"][row] == ""
            assert columns["suggested_right"][row] is columns["suggested_left"][row] is None
        else:
            assert 0 <= columns["match_score"][row] <= 1
            assert columns["is_mismatch"][row] == (columns["match_score"][row] < 0.5)
            assert bool(columns["reason"][row]) == columns["is_mismatch"][row]
            assert columns["reason"][row] in {"", *REASONS.values()}
    found = np.array([bool(flag) for flag in columns["is_mismatch"]])
    assert found[case.mismatched].mean() > 0.3 > 0.1 > found[~case.mismatched].mean()


def test_the_reason_is_what_speaks_most_against_the_pair(audit: Audit) -> None:
    combination, measures = audit.judge.combination, audit.scan.measures.astype(np.float64)
    z = np.clip((measures - combination.centre) / combination.spread, -8, 12)
    usual = z[audit.match_score >= 0.5].mean(0)
    rows = np.arange(len(audit))
    for row, reason in zip(rows, audit.reasons(rows), strict=True):
        against = {
            REASONS[name]: (usual[k] - z[row, k]) * max(combination.weights[k], 0)
            for k, name in enumerate(audit.judge.names)
        }
        assert reason == (max(against, key=lambda words: against[words]) if audit.is_mismatch[row] else "")
    assert audit.reasons(rows[::-1][:7]) == audit.reasons(rows)[::-1][:7]
    assert audit.reasons(np.arange(0)) == []


def test_figures_add_up(audit: Audit) -> None:
    summary, columns = audit.summary, audit.table.to_pydict()
    assert summary.pairs == len(audit) == 200
    assert summary.scored == 200 - len(BAD)
    assert sum(summary.unreadable.values()) == len(BAD) == len(audit.bad_rows)
    assert summary.unreadable["missing id"] == 1
    assert summary.flagged == sum(map(bool, columns["is_mismatch"])) == len(audit.suggested)
    assert 0 <= summary.noise_rate_low <= summary.noise_rate <= summary.noise_rate_high <= 1
    assert sum(measure.weight for measure in summary.measures.values()) == pytest.approx(1)
    for side in ("left", "right"):
        assert getattr(summary, f"suggested_{side}") == sum(name is not None for name in columns[f"suggested_{side}"])


def test_suggestions_begin_with_those_of_the_table(audit: Audit) -> None:
    rows = audit.suggestions.to_pylist()
    flagged = dict(zip(audit.table["id"].to_pylist(), audit.table.to_pylist(), strict=True))
    assert rows
    for row in rows:
        pair = flagged[row["id"]]
        assert pair["is_mismatch"]
        assert row["suggested_id"] in flagged
        assert row["suggested_id"] != row["id"]
        assert 0 < row["score"] < 1
        assert pair["match_score"] < 0.5
        if row["rank"] == 1:
            assert pair[f"suggested_{row['replaced']}"] == row["suggested_id"]
            assert pair[f"suggested_{row['replaced']}_score"] == row["score"]
    ranks: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        ranks.setdefault((row["id"], row["replaced"]), []).append(row["rank"])
    assert {tuple(found) for found in ranks.values()} <= {(1,), (1, 2), (1, 2, 3)}


def test_tables_without_a_row_or_a_suggestion_keep_their_types(audit: Audit, tmp_path: Path) -> None:
    nothing = Partners.none(0)
    quiet = replace(audit, suggested=np.arange(0), new_rights=nothing, new_lefts=nothing)
    assert quiet.suggestions.schema == audit.suggestions.schema
    assert quiet.suggestions.num_rows == 0
    assert quiet.table.schema == audit.table.schema
    parquet.write_table(quiet.suggestions, tmp_path / "a.parquet")
    assert parquet.read_table(tmp_path / "a.parquet").schema == audit.suggestions.schema


def test_it_is_one_line_at_the_prompt(audit: Audit) -> None:
    flagged, (rate, low, high) = int(audit.is_mismatch.sum()), audit.summary.rates
    pairs = f"{flagged} of {audit.summary.scored} pairs"
    assert repr(audit) == f"<Audit: {pairs} flagged, noise rate {rate} ({low} to {high})>"
    assert float(rate.removesuffix("\xa0%")) == pytest.approx(100 * audit.judge.combination.rate, abs=0.51)


def test_what_a_notebook_shows(audit: Audit) -> None:
    page = audit._repr_html_()
    row = int(audit.suggested[0])
    assert audit.source.ids([row])[0] in page
    assert audit.reasons(np.array([row]))[0] in page
    assert f"{audit.match_score[row]:.3f}" in page
    assert page.count("<tr>") == 11


def test_a_notebook_shows_thumbnails_and_no_markup_of_the_data(case: Case, tmp_path: Path) -> None:
    Image.new("RGB", (40, 30), "red").save(tmp_path / "a<b>.png")
    np.save(tmp_path / "a.npy", case.left)
    np.save(tmp_path / "b.npy", case.right)
    lines = [f"p{row},a<b>.png,{row},<script>alert({row})</script>" for row in range(200)]
    (tmp_path / "ids.csv").write_text("\n".join(["id,image,group,caption", *lines]))
    found = mispair.audit(tmp_path / "a.npy", tmp_path / "b.npy", tmp_path / "ids.csv", images=tmp_path, device="cpu")
    page = found._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "data:image/" in page


def test_the_table_is_easy_for_other_libraries(audit: Audit) -> None:
    assert arrow.table(audit).equals(audit.table)
    polars, pandas = pytest.importorskip("polars"), pytest.importorskip("pandas")
    assert audit.to_polars()["match_score"].to_list() == audit.table["match_score"].to_pylist()
    assert polars.DataFrame(audit).shape == audit.table.shape
    assert isinstance(audit.to_pandas(), pandas.DataFrame)


def test_the_auditor_of_an_audit_scores_other_pairs(audit: Audit, case: Case) -> None:
    rows = np.flatnonzero(audit.scan.status == READABLE)
    scores = audit.auditor.score(case.left[rows], case.right[rows])
    assert (auroc(scores.astype(float), ~case.mismatched[rows]) or 0) > 0.9


def test_files(audit: Audit, tmp_path: Path) -> None:
    audit.to_parquet(tmp_path / "a.parquet")
    audit.to_csv(tmp_path / "a.csv")
    assert parquet.read_table(tmp_path / "a.parquet").equals(audit.table)
    read = csv.read_csv(
        tmp_path / "a.csv",
        convert_options=csv.ConvertOptions(column_types=audit.table.schema, strings_can_be_null=False),
    )
    for name in ("id", "status", "match_score", "is_mismatch", "reason", "evidence"):
        assert read[name].to_pylist() == audit.table[name].to_pylist()
    for write, name, other in ((audit.to_parquet, "a.parquet", "b.csv"), (audit.to_csv, "a.csv", "b.parquet")):
        with pytest.raises(ExistsError):
            write(tmp_path / name)
        write(tmp_path / name, overwrite=True)
        with pytest.raises(DataError, match=rf"the file name must end in \{Path(name).suffix}"):
            write(tmp_path / other)
    audit.to_html(tmp_path / "a.html")
    audit.to_html(tmp_path / "a.html")
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")


def test_the_clean_copy_holds_what_is_not_flagged_and_readable(audit: Audit, case: Case, tmp_path: Path) -> None:
    assert audit.write_clean(tmp_path / "clean") == (tmp_path / "clean").resolve()
    copy = open_arrays(tmp_path / "clean/left.npy", tmp_path / "clean/right.npy", tmp_path / "clean/ids.csv")
    kept = np.setdiff1d(np.flatnonzero(audit.match_score >= 0.5), list(BAD))
    assert copy.ids(range(len(copy))) == audit.source.ids(kept)
    np.testing.assert_array_equal(copy.block(0, 200)[0], case.left[kept])
    with pytest.raises(DataError, match="not empty"):
        audit.write_clean(tmp_path / "clean")


def test_a_status_of_the_table_comes_before_those_of_the_vectors(audit: Audit) -> None:
    assert audit.scan.status[[8, 9]].tolist() == [BAD_IN_TABLE, BAD_IN_TABLE]
    assert audit.status(np.array([9, 0, 8])) == ["missing id", "ok", "duplicate id"]


@pytest.mark.parametrize(("count", "flagged", "noted"), [(40, 12, True), (40, 3, False), (10, 9, False)])
def test_a_note_says_that_captions_in_another_language_are_flagged_more_often(
    count: int, flagged: int, noted: bool
) -> None:
    texts = ["Ein Hund und eine Frau sind auf der Wiese."] * count + ["A dog and a woman are in the grass."] * 360
    seen = caption_reasons(np.arange(len(texts)), lambda rows: [texts[row] for row in rows])
    low = np.zeros(len(texts), dtype=np.bool_)
    low[:flagged] = low[count : count + 18] = True  # 18 of 360 are 5 %
    notes = language_notes(seen, low)
    assert len(notes) == noted
    if noted:
        assert "40 captions" in notes[0]
        assert "30% of these pairs are flagged, and 5% of the others" in notes[0]
