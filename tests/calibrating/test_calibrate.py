"""`mispair.calibrate`: what it takes, what it gives, and what it refuses."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest

import mispair
from mispair.errors import ConflictError, DataError, NotFoundError, ShapeError, TooFewError
from mispair.reviewing.decisions import FILE, Decision, Decisions, Mode, Verdict
from mispair.reviewing.noise_estimate import Draw
from refusals import refused
from scored import N, five_levels, joint_space, made


def test_an_array_with_shuffled_scores() -> None:
    score, wrong, null = made()
    score[[3, 7]] = np.nan, np.inf
    found = mispair.calibrate(score, shuffled=null)
    assert abs(found.noise_rate - wrong.mean()) < 0.03
    assert np.flatnonzero(np.isnan(found.match_score)).tolist() == [3, 7]
    assert any("2 of 3,000" in note for note in found.notes)
    table = found.table.to_pydict()
    assert table["status"][3] == "no score"
    assert table["match_score"][3] is None
    assert table["id"][:2] == ["0", "1"]
    assert found.cut(purity=0.95).kept < N
    assert found.cut(keep=1000).kept == 1000
    assert "noise rate" in repr(found)
    assert found._repr_html_().count("<tr>") == 1 + len(found.cuts())


def test_purity_asked_is_purity_got() -> None:
    score, wrong, null = made(5)
    rows = np.random.default_rng(0).choice(N, 300, replace=False)
    checked = np.full(N, np.nan)
    checked[rows] = ~wrong[rows]
    for found in (mispair.calibrate(score, shuffled=null), mispair.calibrate(score, checked=checked)):
        for purity in (0.9, 0.95, 0.98):
            cut = found.cut(purity=purity)
            assert (~wrong[score >= cut.least]).mean() == pytest.approx(purity, abs=0.03)
            assert (score >= cut.least).sum() == cut.kept


def test_a_table_of_two_columns_with_a_column_of_answers(tmp_path: Path) -> None:
    score, wrong, _ = made()
    cells = ["" if row % 5 else "no" if wrong[row] else "yes" for row in range(N)]
    table = pyarrow.table(
        {"uid": [f"u{row}" for row in range(N)], "clip": score, "vlm": five_levels(score), "ok": cells}
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    found = mispair.calibrate(tmp_path / "a.parquet", ["clip", "vlm"], checked="ok")
    assert found.view.low <= wrong.mean() <= found.view.high
    assert found.table.column_names == ["id", "clip", "vlm", "combined_score", "match_score", "is_mismatch", "status"]
    assert found.table["id"][0].as_py() == "u0"
    same = mispair.calibrate(table, ["clip", "vlm"], checked="ok")  # in memory
    assert same.match_score == pytest.approx(found.match_score)


def test_checked_rows_of_a_file_by_id(tmp_path: Path) -> None:
    score, wrong, _ = made()
    pyarrow.csv.write_csv(pyarrow.table({"id": [f"p{row}" for row in range(N)], "clip": score}), tmp_path / "a.csv")
    lines = ["id,right", *(f"p{row},{'no' if wrong[row] else 'yes'}" for row in range(0, N, 9)), "p1,"]
    (tmp_path / "checked.csv").write_text("\n".join(lines))
    found = mispair.calibrate(tmp_path / "a.csv", "clip", checked=tmp_path / "checked.csv")
    assert found.view.count == len(range(0, N, 9))
    by_id = {f"p{row}": not wrong[row] for row in range(0, N, 9)}
    assert mispair.calibrate(tmp_path / "a.csv", "clip", checked=by_id).match_score == pytest.approx(found.match_score)
    (tmp_path / "checked.csv").write_text("id,right\nnobody,yes\n")
    with refused(NotFoundError, names="nobody"):
        mispair.calibrate(tmp_path / "a.csv", "clip", checked=tmp_path / "checked.csv")
    (tmp_path / "checked.csv").write_text("id,right\np1,perhaps\n")
    with refused(DataError, names="perhaps"):
        mispair.calibrate(tmp_path / "a.csv", "clip", checked=tmp_path / "checked.csv")


def test_vectors_of_files(tmp_path: Path) -> None:
    cosine, left, right, wrong = joint_space()
    np.save(tmp_path / "a.npy", left.astype(np.float32))
    np.save(tmp_path / "b.npy", right.astype(np.float32))
    found = mispair.calibrate(cosine, left=tmp_path / "a.npy", right=tmp_path / "b.npy")
    assert abs(found.noise_rate - wrong.mean()) < 0.02
    assert found.view.look_alikes_found is not None
    with refused(ShapeError, tmp_path / "a.npy"):
        mispair.calibrate(cosine[:-1], left=tmp_path / "a.npy", right=tmp_path / "b.npy")


def test_several_kinds_of_evidence() -> None:
    cosine, left, right, wrong = joint_space()
    checked = np.full(N, np.nan)
    checked[::10] = ~wrong[::10]
    found = mispair.calibrate(cosine, left=left, right=right, checked=checked)
    assert [view.evidence for view in found.views] == ["vectors", "checked"]
    assert found.view is found.views[1]
    upside = mispair.calibrate(cosine, left=left, right=right, checked=np.where(np.arange(N) % 10, np.nan, np.where(
        np.random.default_rng(0).random(N) < 0.3, cosine > 0.9, checked)))  # fmt: skip
    assert any("disagree" in note for note in upside.notes)


def test_a_folder_of_parquet_files(tmp_path: Path) -> None:
    score, _, null = made()
    (tmp_path / "data").mkdir()
    for number, part in enumerate(np.split(score, 3)):
        pyarrow.parquet.write_table(pyarrow.table({"clip": part}), tmp_path / f"data/train-{number}.parquet")
    found = mispair.calibrate(tmp_path, "clip", shuffled=null)
    assert found.table["clip"].to_numpy() == pytest.approx(score)
    (tmp_path / "empty").mkdir()
    with refused(NotFoundError, tmp_path / "empty"):
        mispair.calibrate(tmp_path / "empty", "clip", shuffled=null)


def test_scores_alone_are_refused() -> None:
    with refused(ConflictError):
        mispair.calibrate(made()[0])


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    score, _, null = made()
    (tmp_path / "a.csv").write_text("id,clip\n1,high\n")
    with refused(ShapeError, tmp_path / "a.csv", "clip"):
        mispair.calibrate(tmp_path / "a.csv", "clip", shuffled=null)
    with refused(NotFoundError, tmp_path / "a.csv", "siglip"):
        mispair.calibrate(tmp_path / "a.csv", "siglip", shuffled=null)
    with refused(ConflictError, "score"):
        mispair.calibrate(tmp_path / "a.csv", shuffled=null)
    with refused(ShapeError, "scores"):
        mispair.calibrate(np.array(["a", "b"]), shuffled=null)
    with refused(ShapeError, "shuffled"):
        mispair.calibrate(score, shuffled=np.column_stack([null, null]))
    with refused(ConflictError):
        mispair.calibrate(score, left=np.ones((N, 2)))
    with refused(ConflictError, "score"):
        mispair.calibrate(np.column_stack([score, score]), left=np.ones((N, 2)), right=np.ones((N, 2)))
    with refused(ShapeError, "checked"):
        mispair.calibrate(score, checked=np.ones(4))
    with refused(ConflictError):
        mispair.calibrate(score, shuffled=null).cut()


def test_an_audit_of_the_same_rows() -> None:
    cosine, left, right, wrong = joint_space()
    rows = np.arange(600)
    ids = [f"p{row}" for row in rows]
    audit = mispair.audit(left[rows], right[rows], ids=ids, device="cpu")
    levels = five_levels(4 * cosine[rows])
    table = pyarrow.table({"id": ids[::-1], "vlm": levels[::-1]})  # another order: rows are found by their ids
    found = mispair.calibrate(table, "vlm", audit=audit)
    assert found.noise_rate == audit.summary.noise_rate
    assert found.view.at_most == audit.summary.at_most
    match = found.match_score[::-1]
    assert np.corrcoef(match, ~wrong[rows])[0, 1] > 0.5
    by_row = mispair.calibrate(levels, audit=audit)
    assert by_row.match_score == pytest.approx(match)
    with refused(ShapeError):
        mispair.calibrate(levels[:-1], audit=audit)


def test_drawn_decisions_of_a_review(tmp_path: Path) -> None:
    """The uneven draw of a review is undone; other decisions do not count."""
    score, wrong, _ = made(2)
    table = pyarrow.table({"id": [f"p{row}" for row in range(N)], "clip": score})
    rates = []
    for seed in range(12):
        draw = Draw(1 / (1 + np.exp(2.6 * score - 1.5)), 100 + seed)
        made_by = [
            Decision(
                f"p{row}", Verdict.DROP if wrong[row] else Verdict.KEEP, mode=Mode.RATE, draw="d",
                inclusion=float(draw.inclusion(place + 1, draw.order[place : place + 1])[0]), number=place + 1,
            )
            for place, row in enumerate(draw.order[:150].tolist())
        ]  # fmt: skip
        made_by.append(Decision("p0", Verdict.UNSURE, number=200))
        audit = tmp_path / str(seed)
        audit.mkdir()
        with closing(Decisions(audit / FILE)) as decisions:
            decisions.add(made_by)
        found = mispair.calibrate(table, "clip", checked=audit)
        rates.append(found.noise_rate)
    assert wrong[draw.order[:150]].mean() > wrong.mean() + 0.08
    assert np.mean(rates) == pytest.approx(wrong.mean(), abs=0.02)
    assert found.view.count == 150
    (tmp_path / "chosen").mkdir()
    with closing(Decisions(tmp_path / "chosen" / FILE)) as decisions:
        decisions.add(made_by[-1:])
    with refused(TooFewError, tmp_path / "chosen"):
        mispair.calibrate(table, "clip", checked=tmp_path / "chosen")
