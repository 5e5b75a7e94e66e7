from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mispair
from audit_cases import Case, contents, make_case, write_clip
from kernel_marks import needs_gpu
from mispair.auditing import audit as audit_module
from mispair.auditing import folder as audit_folder
from mispair.auditing.audit import Audit, Settings, audit_source
from mispair.auditing.folder import audit_path
from mispair.auditing.inputs import AuditInput
from mispair.auditing.scoring import scan
from mispair.auditing.summary import AuditSummary
from mispair.errors import ConfigError, ConflictError, DataError, ExistsError, InvalidValueError, TooFewError
from mispair.functional.metrics import auroc
from mispair.pairs.layouts.arrays import from_memory
from mispair.pairs.layouts.opening import open_source
from mispair.pairs.source import Source
from refusals import refused

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

CPU = Settings(device="cpu")
ROWS = 120
FILES = [
    "audit.json", "pairs.csv", "pairs.parquet", "report.html", "suggestions.csv", "suggestions.parquet", "summary.json",
]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def quickly() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "BLOCK", 40)
        patch.setattr(scan, "PART", 40)
        yield


@pytest.fixture(scope="module")
def case() -> Case:
    return make_case(ROWS, 0.3, seed=4)


@pytest.fixture(scope="module")
def plain(case: Case) -> Audit:
    return mispair.audit(case.left, case.right, device="cpu")


@pytest.fixture(scope="module")
def folder(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    metadata = {"id": [f"p{row}" for row in range(ROWS)], "caption": ["a"] * ROWS}
    return write_clip(tmp_path_factory.mktemp("in") / "clip", case.left, case.right, metadata)


@pytest.fixture(scope="module")
def unbroken(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "unbroken"
    audit_path(AuditInput(folder), out, CPU)
    return out


# ---------------------------------------------------------------------- in memory


def test_it_finds_the_wrong_pairs(plain: Audit, case: Case) -> None:
    assert (auroc(plain.match_score.astype(float), ~case.mismatched) or 0) > 0.95
    assert plain.is_mismatch[case.mismatched].mean() > 0.7
    assert plain.is_mismatch[~case.mismatched].mean() < 0.05
    assert any("are few" in note for note in plain.notes)


def test_audit_is_the_function_whatever_was_imported() -> None:
    assert mispair.audit is audit_module.audit
    importlib.import_module("mispair.auditing.scoring.scan")
    assert mispair.audit is audit_module.audit
    assert mispair.Audit is Audit


def test_arrays_of_any_kind_give_the_same(plain: Audit, case: Case) -> None:
    strided, double = np.repeat(case.left, 2, axis=1)[:, ::2], case.left.astype(np.float64)
    for side in (strided, double, torch.from_numpy(case.left).clone().requires_grad_()):
        np.testing.assert_array_equal(from_memory(side, case.right).block(0, ROWS)[0], case.left)
    found = mispair.audit(double, torch.from_numpy(case.right), ids=np.arange(ROWS), device="cpu")
    assert found.match_score.tobytes() == plain.match_score.tobytes()
    assert found.table["id"].to_pylist() == plain.table["id"].to_pylist() == [str(row) for row in range(ROWS)]


def test_halves_are_close(plain: Audit, case: Case) -> None:
    halves = case.left.astype(np.float16), torch.from_numpy(case.right).half()
    found = mispair.audit(*halves, texts=["a"] * ROWS, device="cpu")
    assert np.abs(found.match_score - plain.match_score).mean() < 0.02
    assert found.source.texts([3]) == ["a"]


def test_groups_are_never_each_others_partners(case: Case) -> None:
    groups = [f"photo {row // 2}" for row in range(ROWS)]
    left = np.repeat(case.left[::2], 2, axis=0)
    found = mispair.audit(left, case.right, groups=groups, device="cpu")
    own = np.array([row // 2 for row in range(ROWS)])
    for partners in (found.new_rights, found.new_lefts):
        given = partners.rows >= 0
        assert not (given & (own[partners.rows] == own[found.suggested][:, None])).any()
    assert found.summary.near_duplicates_left == 0  # known to share their left item
    assert mispair.audit(left, case.right, device="cpu").summary.near_duplicates_left == ROWS


def test_a_group_whose_first_row_is_bad_is_still_searched(case: Case) -> None:
    left, groups = case.left.copy(), np.arange(ROWS) // 2
    left[1::2] = left[::2]
    left[40:44] = left[40]  # groups 20 and 21 have the same left item
    right = case.right.copy()
    right[40] = 0
    found = mispair.audit(left, right, groups=groups, device="cpu")
    assert [group.tolist() for group in found.near_duplicates[0]] == [[41, 42]]


def test_many_rows_of_one_group(case: Case) -> None:
    """More captions an image than neighbours are asked."""
    rows = np.repeat(np.arange(25), 12)
    noise = 0.1 * np.random.default_rng(0).standard_normal((300, case.right.shape[1]))
    right = make_case(ROWS, 0.0).right[rows] + noise
    found = mispair.audit(case.left[rows], right, groups=rows, device="cpu")
    assert np.isfinite(found.match_score).all()
    with pytest.raises(DataError, match="groups"):
        mispair.audit(case.left[rows], right, groups=[0] * 300, device="cpu")


def test_checked_pairs_are_believed(case: Case, plain: Audit) -> None:
    rows = np.flatnonzero(plain.is_mismatch)[:5]
    checked = {int(row): True for row in rows}  # numbers, as the ids are
    found = mispair.audit(case.left, case.right, checked=checked, device="cpu")  # type: ignore[arg-type]
    assert found.score.mean() > plain.score.mean()
    with pytest.raises(DataError, match="no pair has the id 'x', '120'"):
        mispair.audit(case.left, case.right, checked={"x": True, "120": False, "3": True}, device="cpu")


def test_mistakes_are_sentences(case: Case) -> None:
    left, right = case.left, case.right
    with refused(TooFewError, names="49"):
        mispair.audit(left[:49], right[:49])
    with refused(ConflictError, where="joint", names="16"):
        mispair.audit(left, right, joint=True)
    with refused(DataError, names="right"):
        mispair.audit(left, np.ones_like(right))
    with refused(TooFewError, names="0 of 120"):
        mispair.audit(left, np.zeros_like(right))
    for words in ("40 of 120", "duplicate id"):
        with refused(TooFewError, names=words):
            mispair.audit(left, right, ids=[str(min(row, 39)) for row in range(ROWS)])
    with pytest.raises(DataError, match="120 vectors on the left side and 119 on the right"):
        mispair.audit(left, right[1:])
    with pytest.raises(DataError, match="numpy array or a torch tensor"):
        mispair.audit({"left": 1}, right)
    with pytest.raises(ConfigError, match="gpu"):
        mispair.audit(left, right, device="gpu")
    with refused(InvalidValueError, where="workers", names="0"):
        audit_source(from_memory(left, right), Settings(workers=0))


def test_a_common_space_is_used_where_there_is_one() -> None:
    case = make_case(120, 0.3, widths=(12, 12))
    found = mispair.audit(case.left, case.right, joint=True, device="cpu")
    assert found.table.column_names[-4:] == ["joint", "joint_contrast", "cosine", "expected"]
    assert found.table.num_rows == 120


FAULTS = ("nan left", "inf right", "zero left", "zero right", "huge", "missing id", "duplicate id")


@given(
    planted=st.dictionaries(st.integers(1, 89), st.sampled_from(FAULTS), max_size=25),
    widths=st.tuples(st.integers(2, 9), st.integers(2, 9)),
    captions=st.integers(1, 3),
    share=st.sampled_from([0.0, 0.4, 1.0]),
)
@settings(max_examples=5)
def test_rows_in_are_rows_out(planted: dict[int, str], widths: tuple[int, int], captions: int, share: float) -> None:
    case = make_case(90, share, widths=widths)
    left, right = case.left.astype(np.float64), case.right.astype(np.float64)
    ids = [f"p{row}" for row in range(90)]
    expected = ["ok"] * 90
    for row, fault in planted.items():
        if fault == "nan left":
            left[row, -1], expected[row] = math.nan, "the left vector has numbers that are not finite"
        elif fault == "inf right":  # too large for float32
            right[row, 0], expected[row] = -1e300, "the right vector has numbers that are not finite"
        elif fault == "huge":  # finite, but its square is not
            right[row] *= 1e25
        elif fault.startswith("zero"):
            (left if fault == "zero left" else right)[row] = 0
            expected[row] = f"the {fault[5:]} vector is zero"
        else:
            ids[row], expected[row] = {"missing id": ("", fault), "duplicate id": ("p0", fault)}[fault]
    found = mispair.audit(left, right, ids, np.arange(90) // captions, device="cpu")
    columns = found.table.to_pydict()
    assert columns["id"] == ids
    assert columns["status"] == expected
    for row, status in enumerate(expected):
        for name in ("match_score", "is_mismatch", "contrast"):
            assert (columns[name][row] is None) == (status != "ok")
        assert status == "ok" or not columns["reason"][row]
        assert status != "ok" or 0 <= columns["match_score"][row] <= 1
    bad = {row for row, status in enumerate(expected) if status != "ok"}
    assert set(found.bad_rows.tolist()) == bad
    assert not bad & set(found.suggested.tolist())
    for partners in (found.new_rights, found.new_lefts):
        assert not bad & set(partners.rows.reshape(-1).tolist())
    json.loads(json.dumps(found.summary.model_dump(), allow_nan=False))


# ---------------------------------------------------------------------- folders


def test_what_is_written(unbroken: Path, folder: Path) -> None:
    assert sorted(contents(unbroken)) == FILES
    found = audit_source(open_source(folder), CPU)
    assert parquet.read_table(unbroken / "pairs.parquet").equals(found.table)
    timed = {"seconds", "stages"}
    summary = AuditSummary.read(unbroken / "summary.json")
    assert summary.model_dump(exclude=timed) == found.summary.model_dump(exclude=timed)
    assert (unbroken / "suggestions.csv").read_text().splitlines()[0] == '"id","replaced","rank","suggested_id","score"'
    assert len((unbroken / "suggestions.csv").read_text().splitlines()) == 1 + found.suggestions.num_rows


@pytest.mark.parametrize(("cuts", "workers"), [((1, 50, 119), 3), (tuple(range(9, 120, 9)), 2)])
def test_shards_and_workers_change_no_byte(
    case: Case, folder: Path, unbroken: Path, tmp_path: Path, cuts: tuple[int, ...], workers: int
) -> None:
    metadata = parquet.read_table(folder / "metadata/metadata_0.parquet").to_pydict()
    data = AuditInput(write_clip(tmp_path / "in", case.left, case.right, metadata, cuts))
    audit_path(data, tmp_path / "out", Settings(device="cpu", workers=workers))
    for name in ("pairs.parquet", "pairs.csv", "suggestions.csv"):
        assert (tmp_path / "out" / name).read_bytes() == (unbroken / name).read_bytes()


class Stopped(BaseException):
    pass


def stop_after(blocks: int, patch: pytest.MonkeyPatch) -> None:
    """Ends the pass over all pairs as a signal would."""
    measured = scan._measured
    done: list[int] = []

    def stopping(*arguments: Any) -> scan.Scan:
        if len(done) == blocks:
            raise Stopped
        done.append(0)
        return measured(*arguments)

    patch.setattr(scan, "_measured", stopping)


def interrupt(folder: Path, out: Path, blocks: int = 2, settings: Settings = CPU) -> Path:
    """An audit that was stopped; the folder of its unfinished work."""
    with pytest.MonkeyPatch.context() as patch:
        stop_after(blocks, patch)
        with pytest.raises(Stopped):
            audit_path(AuditInput(folder), out, replace(settings, device="cpu", workers=1))
    return out / "unfinished"


@pytest.mark.parametrize("damage", ["none", "part", "judge"])
def test_a_stopped_audit_goes_on(folder: Path, unbroken: Path, tmp_path: Path, damage: str) -> None:
    work = interrupt(folder, tmp_path)
    assert sorted(path.name for path in work.iterdir()) == [
        "auditor.safetensors", "items.npz", "part-000000.npz", "part-000001.npz",
    ]  # fmt: skip
    judge, part = work / "auditor.safetensors", work / "part-000001.npz"
    if damage == "part":
        part.write_bytes(part.read_bytes()[:-100])
    elif damage == "judge":
        judge.write_bytes(judge.read_bytes()[:-100])
    again: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        measured = scan._measured
        patch.setattr(scan, "_measured", lambda *all_: again.append(all_[2]) or measured(*all_))  # type: ignore[func-returns-value]
        audit_path(AuditInput(folder), tmp_path, CPU)
    # What a lost judge has measured is measured again.
    first = {"none": 80, "part": 40}.get(damage, 0)
    assert sorted(again) == list(range(first, ROWS, 40))
    assert sorted(contents(tmp_path)) == FILES
    for name in ("pairs.parquet", "pairs.csv", "suggestions.csv"):
        assert (tmp_path / name).read_bytes() == (unbroken / name).read_bytes()


def test_a_stop_while_the_tables_are_written(folder: Path, unbroken: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit_folder, "render", lambda *_: (_ for _ in ()).throw(Stopped))
        with pytest.raises(Stopped):
            audit_path(AuditInput(folder), tmp_path, CPU)
    assert (tmp_path / "pairs.csv").exists()
    with pytest.MonkeyPatch.context() as patch:
        stop_after(0, patch)  # nothing is measured again
        audit_path(AuditInput(folder), tmp_path, CPU)
    assert contents(tmp_path).keys() == contents(unbroken).keys()


def test_other_unfinished_work_is_refused(case: Case, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    interrupt(folder, out, 1)
    before = contents(out)
    mine, other = AuditInput(folder), AuditInput(write_clip(tmp_path / "other", case.left[::-1].copy(), case.right))
    for data, settings_ in ((other, CPU), (mine, Settings(device="cpu", checked={"p1": True}))):
        with pytest.raises(DataError, match="holds a part of an audit with other settings"):
            audit_path(data, out, settings_)
    assert contents(out) == before
    (out / "audit.json").write_text("{")
    with pytest.raises(DataError, match=r"audit\.json: "):
        audit_path(AuditInput(folder), out, CPU)
    audit_path(other, out, CPU, overwrite=True)
    assert sorted(contents(out)) == FILES
    assert parquet.read_table(out / "pairs.parquet")["id"].to_pylist()[:2] == ["0", "1"]


def test_a_finished_folder_is_kept_without_overwrite(folder: Path, unbroken: Path) -> None:
    before = contents(unbroken)
    audit_path(AuditInput(folder), unbroken, CPU)
    assert contents(unbroken) == before
    (unbroken / "mine.txt").write_text("stays")
    audit_path(AuditInput(folder), unbroken, CPU, overwrite=True)
    after = contents(unbroken)
    assert after.pop("mine.txt") == b"stays"
    (unbroken / "mine.txt").unlink()
    assert after["pairs.parquet"] == before["pairs.parquet"]
    assert after["summary.json"] != b""
    with refused(ExistsError, unbroken / "pairs.csv"):
        audit_path(AuditInput(folder), unbroken / "pairs.csv", CPU, overwrite=True)


def test_the_input_is_never_replaced(folder: Path, tmp_path: Path) -> None:
    before = contents(folder)
    for out in (folder, folder.parent):
        with refused(ExistsError, where=out):
            audit_path(AuditInput(folder), out, CPU, overwrite=True)
    audit_path(AuditInput(folder), tmp_path / "out", CPU)
    assert contents(folder) == before


def test_a_mistake_leaves_nothing_that_is_in_the_way(case: Case, tmp_path: Path) -> None:
    """The audit of the corrected input must not be refused for that of the broken one."""
    data, out = AuditInput(write_clip(tmp_path / "in", case.left, case.right)), tmp_path / "out"
    broken = AuditInput(write_clip(tmp_path / "broken", case.left, np.ones_like(case.right)))
    for pairs, settings_ in (
        (data, Settings(checked={"nobody": True})),
        (data, Settings(device="gpu")),
        (data, Settings(workers=-1)),
        (data, Settings(joint=True)),
        (broken, CPU),
    ):
        with pytest.raises((DataError, ConfigError)):
            audit_path(pairs, out, settings_)
        assert not contents(out)
    audit_path(data, out, CPU)
    assert sorted(contents(out)) == FILES


def test_the_lowest_scores_get_suggestions(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_module, "MAX_SUGGESTED", 5)
    found = mispair.audit(case.left, case.right, device="cpu")
    assert len(found.suggested) == 5
    others = found.match_score[np.setdiff1d(np.flatnonzero(found.is_mismatch), found.suggested)]
    assert found.match_score[found.suggested].max() <= others.min()
    assert any("Only the 5 lowest match scores" in note for note in found.notes)
    assert found.summary.flagged > 5
    assert {row["id"] for row in found.suggestions.to_pylist()} <= {str(row) for row in found.suggested}


def test_noise_is_noticed() -> None:
    rng = np.random.default_rng(2)
    found = mispair.audit(rng.standard_normal((200, 8)), rng.standard_normal((200, 8)), device="cpu")
    assert any("No measure separates" in note for note in found.notes)


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_gives_the_same_scores_whether_the_vectors_stay_on_it_or_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stayed = audit_source(open_source(folder), Settings(device="cuda"))
    monkeypatch.setattr(Source, "loaded", lambda source, *_: source)
    sent = audit_source(open_source(folder), Settings(device="cuda"))
    assert "loading the vectors" in stayed.stages
    assert stayed.match_score.tobytes() == sent.match_score.tobytes()
