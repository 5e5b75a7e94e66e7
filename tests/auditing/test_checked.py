"""What a person has looked at: it decides that pair, and teaches about the others without overruling them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mispair
from audit_cases import Case, make_case, write_clip
from mispair.auditing import audit as audit_module
from mispair.auditing.audit import Audit, Settings
from mispair.auditing.findings import FOUND_WRONG
from mispair.auditing.folder import audit_path
from mispair.auditing.inputs import AuditInput
from mispair.auditing.report.page import make_page
from mispair.auditing.scoring.calibration import MAX_CHECKED_WEIGHT, _checked_weight
from mispair.errors import InvalidValueError
from refusals import refused

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ROWS = 200
RIGHT, WRONG = 1.0, 0.0


@pytest.fixture(scope="module")
def case() -> Case:
    made = make_case(ROWS, 0.3)
    made.right[9] = 0  # cannot be read, whatever anybody says of it
    return made


@pytest.fixture(scope="module")
def answers(case: Case) -> dict[int, float]:
    """Against what the measures say: the worst two are right, and the best two are wrong."""
    order = mispair.audit(case.left, case.right, device="cpu").match_score.argsort()  # NaN is last
    best = order[order != 9][-2:]
    return {int(order[0]): RIGHT, int(order[1]): RIGHT, int(best[0]): WRONG, int(best[1]): WRONG, 9: RIGHT}


@pytest.fixture(scope="module")
def checked(answers: Mapping[int, float]) -> dict[str, bool]:
    return {f"p{row}": right == RIGHT for row, right in answers.items()}


@pytest.fixture(scope="module")
def folder(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    metadata = {"id": [f"p{row}" for row in range(ROWS)], "caption": [f"text {row}" for row in range(ROWS)]}
    return write_clip(tmp_path_factory.mktemp("in") / "clip", case.left, case.right, metadata)


@pytest.fixture(scope="module")
def audit(case: Case, checked: dict[str, bool]) -> Audit:
    ids = [f"p{row}" for row in range(ROWS)]
    return mispair.audit(case.left, case.right, ids, checked=checked, device="cpu")


def check_decided(columns: Mapping[str, list[Any]], answers: Mapping[int, float]) -> None:
    for row, right in answers.items():
        readable = row != 9
        assert columns["match_score"][row] == (right if readable else None)
        assert columns["is_mismatch"][row] == (right == WRONG if readable else None)
        assert columns["reason"][row] == (FOUND_WRONG if right == WRONG else "")
    assert columns["reason"].count(FOUND_WRONG) == 2


def test_an_answer_decides_its_pair(audit: Audit, answers: dict[int, float]) -> None:
    check_decided(audit.table.to_pydict(), answers)
    assert audit.summary.flagged == int(audit.is_mismatch.sum())
    wrong = {row for row, right in answers.items() if right == WRONG}
    assert wrong <= set(audit.suggested.tolist())
    assert not (answers.keys() - wrong) & set(audit.suggested.tolist())
    assert not {f"p{row}" for row in answers.keys() - wrong} & set(audit.suggestions["id"].to_pylist())
    assert audit.status(np.array([9])) == ["the right vector is zero"]


def test_the_copy_follows_the_answers(audit: Audit, answers: dict[int, float], tmp_path: Path) -> None:
    kept = open_source_ids(audit.write_clean(tmp_path / "clean"))
    for row, right in answers.items():
        assert (f"p{row}" in kept) == (right == RIGHT and row != 9)


def open_source_ids(folder: Path) -> list[str]:
    return [line.split(",")[0].strip('"') for line in (folder / "ids.csv").read_text().splitlines()[1:]]


def test_the_report_shows_what_nobody_has_seen_first(
    audit: Audit, answers: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {f"p{row}" for row, right in answers.items() if right == WRONG}
    page = make_page(audit.reported)
    assert page.summary.flagged == len(page.worst) + max(0, page.summary.flagged - 24)
    assert {pair.id for pair in page.worst[:-2]}.isdisjoint({f"p{row}" for row in answers})
    monkeypatch.setattr("mispair.auditing.findings.WORST", ROWS)
    page = make_page(audit.reported)
    assert {pair.id for pair in page.worst[-2:]} == wrong
    assert len(page.worst) == page.summary.flagged
    for pair in page.worst:
        place = audit.suggested.tolist().index(int(pair.id[1:]))
        assert [one.id for one in pair.new_rights] == [f"p{row}" for row in audit.new_rights.rows[place] if row >= 0]


def test_a_resumed_audit_keeps_the_answers(
    folder: Path, checked: dict[str, bool], answers: dict[int, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(device="cpu", checked=checked)

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(audit_module, "find_partners", stopped)
        with pytest.raises(KeyboardInterrupt):
            audit_path(AuditInput(folder), tmp_path, settings)
    audit_path(AuditInput(folder), tmp_path, settings)
    check_decided(parquet.read_table(tmp_path / "pairs.parquet").to_pydict(), answers)
    assert json.loads((tmp_path / "summary.json").read_text())["flagged"] > 2


def test_checks_that_the_audit_does_not_expect_come_first(case: Case, tmp_path: Path) -> None:
    """People may mean something else by a match: then the noise rate of the audit is not theirs."""
    plain = mispair.audit(case.left, case.right, device="cpu")
    sure = np.flatnonzero(plain.match_score > 0.9)
    assert plain.summary.checked is None
    as_seen = mispair.audit(case.left, case.right, device="cpu", checked={str(row): True for row in sure[:12]})
    assert not as_seen.summary.is_contradicted
    otherwise = {str(row): place % 2 == 0 for place, row in enumerate(sure[:12].tolist())}
    audit = mispair.audit(case.left, case.right, device="cpu", checked=otherwise)
    found = audit.summary.checked
    assert found is not None
    assert (found.pairs, found.mismatched, found.learned) == (12, 6, False)
    assert found.expected < 1.2
    assert audit.summary.rate_sentences[0] == found.sentence
    audit.auditor.save(tmp_path / "a.safetensors")
    assert mispair.Auditor.load(tmp_path / "a.safetensors").checked == found
    many = {str(row): place % 2 == 0 for place, row in enumerate(sure[:40].tolist())}
    fitted = mispair.Auditor(device="cpu").fit(case.left, case.right, checked=many).checked
    assert fitted is not None
    assert (fitted.pairs, fitted.mismatched, fitted.learned) == (40, 20, True)


# ---------------------------------------------------------------------- what the others make of it


def test_one_answer_counts_for_few_pairs_however_many_there_are() -> None:
    for rows in (1000, 100_000):
        assert _checked_weight(np.arange(rows) < 1) == MAX_CHECKED_WEIGHT
    assert _checked_weight(np.arange(1000) < 50) == pytest.approx(2)


def test_one_mistaken_answer_changes_hardly_any_other_pair() -> None:
    case = make_case(800, 0.3, noise=0.3)
    plain = mispair.audit(case.left, case.right, device="cpu")
    order = plain.match_score.argsort()
    for row, right in ((int(order[5]), True), (int(order[-40]), False)):  # surely wrong, and called right; or not
        assert case.mismatched[row] == right
        told = mispair.audit(case.left, case.right, checked={str(row): right}, device="cpu")
        others = np.arange(800) != row
        assert (told.is_mismatch != plain.is_mismatch)[others].mean() < 0.01
        assert np.abs(told.match_score - plain.match_score)[others].mean() < 0.01


# ---------------------------------------------------------------------- answers that are none


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"0": "no"}, "'no'"),
        ({"0": None}, "None"),
        ({"0": float("nan")}, "nan"),
        ({"0": 2}, "2"),
        ({"0": True, 0: False}, "'0'"),
        ([("0", True)], "list"),
    ],
)
def test_what_is_no_answer_is_refused(case: Case, given: Any, words: str) -> None:
    with refused(InvalidValueError, where="checked", names=words):
        mispair.audit(case.left, case.right, checked=given, device="cpu")


def test_numbers_and_numpy_values_are_answers(case: Case) -> None:
    given: Any = {0: 1, 1: 0, "2": np.bool_(True), np.int64(3): np.float32(0)}
    found = mispair.audit(case.left, case.right, checked=given, device="cpu")
    assert found.match_score[:4].tolist() == [1, 0, 1, 0]


def test_halves_of_characters_do_no_harm(case: Case) -> None:
    ids = [f"p{row}\udce9" for row in range(ROWS)]
    texts, given = ["a \ud800"] * ROWS, {"p3\udce9": False}
    found = mispair.audit(case.left, case.right, ids, [f"\ud800{row}" for row in range(ROWS)], texts=texts,
                          checked=given, device="cpu")  # fmt: skip
    assert found.source.ids([3]) == ["p3?"]
    assert found.source.texts([3]) == ["a ?"]
    assert found.match_score[3] == 0
    assert found.summary.scored == ROWS - 1
