"""A review over an audit's output: filters, order, decisions, and which pair comes next."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from audited import write_audit
from mispair.errors import (
    ConflictError,
    DamagedError,
    DataError,
    InvalidValueError,
    MispairError,
    NotFoundError,
    ShapeError,
)
from mispair.pairs.result_tables import defused_text, original
from mispair.reviewing import noise_estimate
from mispair.reviewing import review as review_module
from mispair.reviewing.decisions import Decision, Decisions, Mode, Verdict
from mispair.reviewing.pair_table import Filter, PairTable
from mispair.reviewing.review import Review
from mispair.reviewing.transfer import read_decisions, write_decisions
from refusals import refused

KEEP = Decision("", Verdict.KEEP, session="s")


@pytest.fixture
def review(tmp_path: Path) -> Review:
    review = Review(write_audit(tmp_path / "audit"))
    review.decisions.setting("seed", "0")  # of the draw, else another one each time: one interval in twenty may be off
    return review


filters = st.builds(
    Filter,
    low=st.sampled_from([0.0, 0.2, 0.5]),
    high=st.sampled_from([0.3, 0.9, 1.0]),
    flagged=st.booleans(),
    reason=st.sampled_from(["", "other items fit either side better", "image is tiny", "no such reason"]),
    text=st.sampled_from(["", "DOG", "caption 1", "p2", "%", "\\", "nothing"]),
    sort=st.sampled_from(["score", "-score", "doubt", "row"]),
)


@given(wanted=filters)
def test_a_filter_lets_through_what_it_says(tmp_path_factory: pytest.TempPathFactory, wanted: Filter) -> None:
    table = PairTable(write_audit(tmp_path_factory.mktemp("audit")))
    pairs = table.read(range(60))
    score = np.arange(60, dtype=np.float32) / 60
    expected = [
        row
        for row in range(60)
        if wanted.low <= score[row] <= wanted.high
        and (score[row] < 0.5 or not wanted.flagged)
        and (not wanted.reason or wanted.reason in (pairs[row].reason, *pairs[row].reasons.split("; ")))
        and (wanted.text.lower() in pairs[row].caption.lower() or wanted.text.lower() in pairs[row].id.lower())
    ]
    keys = {"score": score, "-score": -score, "doubt": abs(score - 0.5), "row": np.arange(60)}[wanted.sort]
    expected.sort(key=lambda row: keys[row])
    assert table.select(wanted).tolist() == expected
    assert table.select(wanted).tolist() == expected  # remembered


def test_of_equal_ids_the_first_is_meant(tmp_path: Path) -> None:
    folder = write_audit(tmp_path, 6)
    table = pyarrow.parquet.read_table(folder / "pairs.parquet")
    columns = {
        "id": ["p0", "p1", "p2", "p3", "p1", "p1"],
        "match_score": pyarrow.array([0.1, 0.2, 0.3, 0.9, None, None], pyarrow.float32()),
    }
    for name, values in columns.items():
        table = table.set_column(table.column_names.index(name), name, [values])
    pyarrow.parquet.write_table(table, folder / "pairs.parquet")
    review = Review(folder)
    assert review.table.find(["p1", "p3"]) == {"p1": 1, "p3": 3}
    for rows in ([4], [0, 5]):
        with refused(DataError, folder, "'p1'"):
            review.decide(rows, KEEP)
    review.decide([0, 1, 2, 3], KEEP)
    review = Review(folder)  # reads the decisions again
    assert review.rows(Filter(flagged=False, sort="row"), "decided").tolist() == [0, 1, 2, 3]
    assert review.next_instructive() is None


def test_reasons_are_counted_and_shown_each(review: Review) -> None:
    counts = review.table.counts("reason", "reasons")
    assert counts["image is tiny"] == 12
    assert counts["caption is empty"] == 6
    assert counts["other items fit either side better"] == 15
    assert review.view(10).reasons_once == ["other items fit either side better", "caption is empty", "image is tiny"]


def test_a_folder_that_is_no_audit_is_refused(tmp_path: Path) -> None:
    with refused(NotFoundError, tmp_path, "pairs.parquet"):
        Review(tmp_path)
    (tmp_path / "pairs.parquet").write_bytes(b"PAR1 damaged")
    with refused(DamagedError, tmp_path / "pairs.parquet"):
        Review(tmp_path)
    with refused(NotFoundError, tmp_path / "nowhere"):
        Review(tmp_path, tmp_path / "nowhere")


def test_a_pair_has_its_suggestions_best_first(review: Review) -> None:
    view = review.view(3)
    assert (view.id, view.status) == ("p3", "ok")
    assert view.score == pytest.approx(0.05)
    found = [(one.replaced, one.id, round(one.score or 0, 1)) for one in view.suggestions]
    assert found == [("right", "p4", 0.9), ("right", "p5", 0.6), ("left", "p4", 0.9), ("left", "p5", 0.6)]
    assert not review.view(50).suggestions
    with refused(NotFoundError, review.folder, "60"):
        review.view(60)


def test_states_and_neighbours(review: Review) -> None:
    review.decide([0, 2], KEEP)
    review.decide([1], replace(KEEP, verdict=Verdict.DROP))
    wanted = Filter()
    assert review.rows(wanted, "decided").tolist() == [0, 1, 2]
    assert review.rows(wanted, "keep").tolist() == [0, 2]
    assert review.rows(wanted, "undecided").tolist() == list(range(3, 30))
    assert review.neighbours(1, wanted) == (0, 2)
    assert review.neighbours(1, wanted, "undecided") == (None, 3)
    assert review.neighbours(29, wanted) == (28, None)
    assert review.neighbours(45, wanted) == (None, 0)  # not flagged: begins at the first
    assert review.undo("s") == [1]
    assert review.undo("s") == [0, 2]
    assert review.undo("s") == []
    assert review.rows(wanted, "undecided").tolist() == list(range(30))
    assert not review.progress()


def test_states_follow_what_has_changed_alone(review: Review, monkeypatch: pytest.MonkeyPatch) -> None:
    review.decide(range(20), KEEP)
    assert len(review.rows(Filter(), "keep")) == 20
    asked: list[str] = []
    find = review.table.find

    def asking(ids: Collection[str]) -> dict[str, int]:
        asked.extend(ids)
        return find(ids)

    monkeypatch.setattr(review.table, "find", asking)
    review.decide([25], replace(KEEP, verdict=Verdict.DROP))
    Decisions(review.decisions.path).add([Decision("p1", Verdict.UNSURE), Decision("elsewhere", Verdict.KEEP)])
    assert review.rows(Filter(), "unsure").tolist() == [1]
    assert review.rows(Filter(), "decided").tolist() == [*range(20), 25]
    assert sorted(asked) == ["elsewhere", "p1", "p25"]
    assert review.progress() == {"keep": 19, "drop": 1, "unsure": 1}  # "elsewhere" is no pair of this audit
    assert review.next_instructive() not in (None, *range(20), 25)


@pytest.mark.parametrize(
    ("rows", "decision", "kind"),
    [
        ([], KEEP, NotFoundError),
        ([60], KEEP, NotFoundError),
        ([-1], KEEP, NotFoundError),
        ([0, 1], Decision("", Verdict.REWRITE, caption="a dog"), ConflictError),
    ],
)
def test_what_cannot_be_decided_is_refused(
    review: Review, rows: list[int], decision: Decision, kind: type[MispairError]
) -> None:
    with refused(kind):
        review.decide(rows, decision)
    assert not review.decisions.current


def test_the_noise_rate_counts_drawn_pairs_only(review: Review, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise_estimate, "LEAST", 5)
    review.decide(list(range(30)), replace(KEEP, verdict=Verdict.DROP))  # browsing freely
    assert review.rate().decided == 0
    asked = []
    for _ in range(10):
        row = review.next_drawn("s")
        assert row is not None
        assert review.next_drawn("s") == row
        asked.append(row)
        matched = row >= 30
        verdict = Verdict.KEEP if matched else Verdict.DROP
        drawn = Decision(
            "", verdict, session="s", mode=Mode.RATE, inclusion=review.inclusion(row), draw=review.draw_key
        )
        review.decide([row], drawn)
    assert len(set(asked)) == 10
    progress = review.rate()
    assert progress.decided == 10
    assert progress.estimate is not None
    assert progress.estimate.low <= 0.5 <= progress.estimate.high
    review.undo("s")
    assert review.rate().decided == 9
    assert review.next_drawn("s") == asked[-1]


def test_a_drawn_pair_is_not_given_to_two_sessions(review: Review, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = review.next_drawn("one"), review.next_drawn("other")
    assert one != other
    assert (review.next_drawn("one"), review.next_drawn("other")) == (one, other)
    monkeypatch.setattr(review_module, "RESERVED", 0.0)  # the other one has left
    assert review.next_drawn("other") == one


def test_the_draw_is_the_same_after_a_restart_and_another_over_other_scores(tmp_path: Path) -> None:
    folder = write_audit(tmp_path, 60)
    first = Review(folder)
    row = first.next_drawn("s")
    assert row is not None
    first.decide([row], Decision("", Verdict.KEEP, session="s", mode=Mode.RATE, inclusion=0.5, draw=first.draw_key))
    assert Review(folder).rate().decided == 1
    write_audit(tmp_path, 61)
    assert Review(folder).rate().decided == 0
    assert len(Review(folder).decisions.current) == 1


def test_teaching_asks_for_the_least_certain(review: Review) -> None:
    row = review.next_instructive()
    assert row is not None
    assert abs(row / 60 - 0.5) < 0.2
    review.decide([row], KEEP)
    assert review.next_instructive() != row


@pytest.mark.parametrize("name", ["../secret.jpg", "/etc/passwd", "a\0b", "", "missing.jpg", "link.jpg"])
def test_no_image_outside_its_folder_is_found(tmp_path: Path, name: str) -> None:
    import pyarrow
    import pyarrow.parquet

    folder = write_audit(tmp_path / "audit", 4)
    images = tmp_path / "images"
    images.mkdir()
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    (images / "here.jpg").write_bytes(b"image")
    (images / "link.jpg").symlink_to(tmp_path / "secret.jpg")
    table = pyarrow.parquet.read_table(folder / "pairs.parquet")
    place = table.column_names.index("image")
    table = table.set_column(place, "image", pyarrow.array([name, "here.jpg", "", ""]))
    pyarrow.parquet.write_table(table, folder / "pairs.parquet")
    review = Review(folder, images)
    assert review.image(0) is None
    assert review.image(1) == b"image"
    assert review.image(9) is None


def test_decisions_go_to_csv_and_come_back(tmp_path: Path) -> None:
    first, second = (Review(write_audit(tmp_path / name)) for name in "ab")
    first.decide([0], Decision("", Verdict.REPAIR, "right", "p5", reviewer="ana"))
    first.decide([1], Decision("", Verdict.REWRITE, caption='=HYPERLINK("x")\n"two lines", and a comma'))
    first.decide([2], KEEP)
    assert write_decisions(first.folder, tmp_path / "d.csv") == 3
    assert "'=HYPERLINK" in (tmp_path / "d.csv").read_text()
    assert read_decisions(second.decisions, tmp_path / "d.csv", "bob") == 3
    kept = [
        {name: (one.verdict, one.replaced, one.partner, one.caption) for name, one in review.decisions.current.items()}
        for review in (first, second)
    ]
    assert kept[0] == kept[1]
    assert second.decisions.current["p0"].reviewer == "ana"
    assert second.decisions.current["p2"].reviewer == "bob"
    assert {one.mode for one in second.decisions.current.values()} == {Mode.IMPORT}


@given(st.text(st.sampled_from("'=+-@\t\rx"), max_size=4))
def test_a_cell_for_a_spreadsheet_comes_back(cell: str) -> None:
    assert not defused_text(cell).startswith(("=", "+", "-", "@", "\t", "\r"))
    assert original(defused_text(cell)) == cell


@pytest.mark.parametrize(
    ("content", "kind", "names"),
    [
        (b"id,answer\n1,yes\n", ShapeError, "id, answer"),
        (b"id,verdict\n1,keep\n2,maybe\n", InvalidValueError, "'maybe' in line 3"),
        (b'id,verdict\np1,keep\n1,keep\n"2, 3",drop\n', NotFoundError, "'1', '2, 3'"),
        (b"id,verdict,replaced,partner\np1,re-pair,left,p99\n", NotFoundError, "'p99'"),
        (b"", ShapeError, ""),
        (b"\xff\xfe\x00", DamagedError, ""),
    ],
)
def test_a_file_that_holds_no_decisions_adds_none(
    tmp_path: Path, content: bytes, kind: type[MispairError], names: str
) -> None:
    review = Review(write_audit(tmp_path / "audit"))
    (tmp_path / "d.csv").write_bytes(content)
    with refused(kind, tmp_path / "d.csv", names):
        read_decisions(review.decisions, tmp_path / "d.csv", table=review.table)
    assert not review.decisions.current


def test_a_new_partner_without_an_id_adds_no_decision(tmp_path: Path) -> None:
    review = Review(write_audit(tmp_path / "audit"))
    (tmp_path / "d.csv").write_text("id,verdict\np0,keep\np1,re-pair\n", encoding="utf-8")
    with refused(InvalidValueError, "partner", "'p1'"):
        read_decisions(review.decisions, tmp_path / "d.csv")
    assert not review.decisions.current


def test_decisions_of_label_studio_and_argilla(tmp_path: Path) -> None:
    def choice(value: str) -> dict[str, object]:
        return {"from_name": "verdict", "to_name": "image", "type": "choices", "value": {"choices": [value]}}

    tasks = [
        {"data": {"id": "p0"}, "annotations": [{"completed_by": {"email": "ana@x"}, "result": [choice("matched")]}]},
        {"data": {"id": "p1"}, "annotations": [{"result": [choice("matched")]}, {"result": [choice("mismatched")]}]},
        {"data": {"id": "p7"}, "annotations": [{"completed_by": None, "result": [choice("matched")]}]},
        {"data": {"id": "p8"}, "annotations": [{"completed_by": {"email": None}, "result": [choice("matched")]}]},
        {"data": {"id": "p2"}, "annotations": []},
        {"data": {"id": "p3"}, "annotations": [{"was_cancelled": True, "result": [choice("matched")]}]},
    ]
    records = [
        {"id": "p4", "fields": {}, "responses": {"verdict": [{"value": "mismatched", "user_id": "7"}]}},
        {"id": "p5", "fields": {}, "responses": {}},
        {"id": "p6", "fields": {}, "responses": None},
    ]
    review = Review(write_audit(tmp_path / "audit"))
    for name, content, count in (("tasks.json", tasks, 4), ("records.json", records, 1)):
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
        assert read_decisions(review.decisions, tmp_path / name, "bob") == count
    found = {name: (str(one.verdict), one.reviewer) for name, one in review.decisions.current.items()}
    unnamed = {"p7": ("keep", "bob"), "p8": ("keep", "bob")}
    assert found == {"p0": ("keep", "ana@x"), "p1": ("drop", "bob"), "p4": ("drop", "7"), **unnamed}


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ("[", DamagedError),
        ("{}", ShapeError),
        ("[1]", ShapeError),
        (
            '[{"data": {}, "annotations": [{"result": [{"type": "choices", "value": {"choices": ["matched"]}}]}]}]',
            ShapeError,
        ),
        ('[{"data": {"id": 1}, "annotations": [{"result": [{"type": "text"}]}]}]', ShapeError),
        ('[{"id": 1, "responses": {"verdict": [{"value": "perhaps"}]}}]', InvalidValueError),
        (r'[{"id": "\ud800", "responses": {"verdict": [{"value": "matched"}]}}]', ShapeError),
        ("[" * 100_000, DamagedError),
    ],
)
def test_json_that_holds_no_decisions_adds_none(tmp_path: Path, content: str, kind: type[MispairError]) -> None:
    review = Review(write_audit(tmp_path / "audit"))
    (tmp_path / "d.json").write_text(content, encoding="utf-8")
    with refused(kind, tmp_path / "d.json"):
        read_decisions(review.decisions, tmp_path / "d.json")
    assert not review.decisions.current
