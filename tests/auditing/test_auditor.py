"""`mispair.Auditor`: what it learns from some pairs holds for others, and survives a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mispair
from audit_cases import Case, make_case
from mispair.auditing.auditor import FORMAT, Auditor
from mispair.errors import ConflictError, DamagedError, DataError, InvalidValueError, ShapeError, TooFewError
from mispair.functional.metrics import auroc
from mispair.pairs.pairs import Pairs, Vectors
from mispair.support.formatting import percent
from mispair.support.tensor_files import load_tensors, save_tensors
from refusals import refused

ROWS, FITTED = 400, 280


@pytest.fixture(scope="module")
def case() -> Case:
    return make_case(ROWS, 0.3, noise=1.0, hidden=8)


@pytest.fixture(scope="module")
def auditor(case: Case) -> Auditor:
    return Auditor(device="cpu").fit(case.left[:FITTED], case.right[:FITTED])


@pytest.fixture(scope="module")
def unseen(case: Case) -> tuple[Any, Any]:
    return case.left[FITTED:], case.right[FITTED:]


@pytest.fixture(scope="module")
def scores(auditor: Auditor, unseen: tuple[Any, Any]) -> Any:
    return auditor.score(*unseen)


def test_unseen_pairs_are_told_apart_as_well_as_audited_ones(case: Case, scores: Any) -> None:
    audited = mispair.audit(case.left, case.right, device="cpu").match_score[FITTED:]
    matched = ~case.mismatched[FITTED:]
    both = [auroc(found.astype(float), matched) or 0 for found in (scores, audited)]
    assert both[0] == pytest.approx(both[1], abs=0.005)
    assert both[0] > 0.9
    assert scores.dtype == np.float32
    assert ((scores >= 0) & (scores <= 1)).all()


def test_mismatched_pairs_are_found_after_a_fit_to_matched_ones() -> None:
    clean = make_case(ROWS, 0.0, noise=0.3, hidden=8)
    auditor = Auditor(device="cpu").fit(clean.left[:FITTED], clean.right[:FITTED])
    left, right = clean.left[FITTED:], clean.right[FITTED:]
    assert auditor.score(left, right).min() > 0.5
    assert np.median(auditor.score(left, np.roll(right, 1, axis=0))) < 0.1


def test_what_was_learned(auditor: Auditor, case: Case) -> None:
    low, high = auditor.noise_interval_
    assert low <= case.mismatched[:FITTED].mean() <= high
    assert low <= auditor.noise_rate_ <= high
    assert sum(auditor.measures_.values()) == pytest.approx(1)
    assert not auditor.joint_


@pytest.mark.parametrize("size", [1, 7, 100])
def test_the_size_of_a_batch_changes_no_score(
    auditor: Auditor, unseen: tuple[Any, Any], scores: Any, size: int
) -> None:
    left, right = (side[:120] for side in unseen)
    parts = [auditor.score(left[start : start + size], right[start : start + size]) for start in range(0, 120, size)]
    assert np.concatenate(parts).tobytes() == scores[:120].tobytes()


def test_the_order_and_the_kind_of_rows_change_no_score(
    auditor: Auditor, unseen: tuple[Any, Any], scores: Any, tmp_path: Path
) -> None:
    left, right = unseen
    order = np.random.default_rng(0).permutation(len(left))
    assert auditor.score(left[order], right[order]).tobytes() == scores[order].tobytes()
    assert auditor.score(torch.from_numpy(left.copy()), right.tolist()).tobytes() == scores.tobytes()
    np.save(tmp_path / "left.npy", left)
    mapped = np.load(tmp_path / "left.npy", mmap_mode="r")
    assert auditor.score(mapped, right).tobytes() == scores.tobytes()
    pairs = Pairs(Vectors(left), Vectors(right), np.arange(len(left)))
    assert auditor.score(pairs).tobytes() == scores.tobytes()


def test_fitted_pairs_are_scored_by_folds_that_have_not_seen_them(auditor: Auditor, case: Case) -> None:
    audited = mispair.audit(case.left[:FITTED], case.right[:FITTED], device="cpu").match_score
    assert auditor.score(case.left[:FITTED], case.right[:FITTED]) == pytest.approx(audited, abs=1e-5)


def test_saved_and_loaded_it_gives_the_same_bytes(
    auditor: Auditor, unseen: tuple[Any, Any], scores: Any, tmp_path: Path
) -> None:
    auditor.save(tmp_path / "a.safetensors")
    loaded = Auditor.load(tmp_path / "a.safetensors", device="cpu")
    assert loaded.score(*unseen).tobytes() == scores.tobytes()
    assert (loaded.noise_rate_, loaded.measures_) == (auditor.noise_rate_, auditor.measures_)
    loaded.save(tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_damaged_files_and_those_of_other_versions_are_refused(auditor: Auditor, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    auditor.save(path)
    content, (state, about) = path.read_bytes(), load_tensors(path)
    assert about is not None
    state = {name: tensor.clone() for name, tensor in state.items()}  # those of a file are a map of it
    for broken in (content[:-100], content[:-1] + b"\xff", b"", b"PK\x03\x04"):
        path.write_bytes(broken)
        with pytest.raises(mispair.DataError) as caught:
            Auditor.load(path)
        assert str(path) in str(caught.value)
    lacking = {name: value for name, value in state.items() if name != "spaces.3.left"}
    for tensors, known in (
        (state, {**about, "auditor": FORMAT + 1}),
        (state, {}),
        (lacking, about),
        (state, {**about, "factors": 1}),
    ):
        save_tensors(path, tensors, known)
        with refused(DamagedError, where=path):
            Auditor.load(path)


def test_numbers_of_unusual_sizes_are_scaled_as_in_the_fit(case: Case) -> None:
    """A batch does not choose its own scale."""
    left = case.left.astype(np.float64) * 2.0**80
    huge = Auditor(device="cpu").fit(left[:FITTED], case.right[:FITTED])
    found = huge.score(left[FITTED:], case.right[FITTED:])
    assert (auroc(found.astype(float), ~case.mismatched[FITTED:]) or 0) > 0.9
    assert huge.score(left[-1:], case.right[-1:]).tobytes() == found[-1:].tobytes()


def test_rows_that_cannot_be_read_have_no_score(auditor: Auditor, unseen: tuple[Any, Any], scores: Any) -> None:
    left, right = (side.copy() for side in unseen)
    left[2, 0], right[5], left[7] = np.nan, 0, np.inf
    found = auditor.score(left, right)
    assert np.flatnonzero(np.isnan(found)).tolist() == [2, 5, 7]
    others = np.delete(np.arange(len(found)), [2, 5, 7])
    assert found[others].tobytes() == scores[others].tobytes()
    assert np.isnan(auditor.score(left[2:3], right[2:3])).all()


def test_checked_pairs_and_groups_count(case: Case) -> None:
    left, right = case.left[:200], case.right[:200]
    checked = {str(row): False for row in range(0, 100)}
    plain, strict = Auditor(device="cpu").fit(left, right), Auditor(device="cpu").fit(left, right, checked=checked)
    assert strict.score(left, right).mean() < plain.score(left, right).mean()
    grouped = Auditor(device="cpu").fit(left, right, groups=np.arange(200) // 2)
    assert grouped.score(left, right).tobytes() != plain.score(left, right).tobytes()


def test_decisions_order_new_pairs_and_are_saved(case: Case, unseen: tuple[Any, Any], tmp_path: Path) -> None:
    """People call a match what the audit cannot see: a direction of the left item."""
    wanted = case.left[:, 0] > np.median(case.left[:, 0])
    decided = {str(row): bool(wanted[row]) for row in range(150)}
    plain, taught = (
        Auditor(device="cpu").fit(case.left[:FITTED], case.right[:FITTED], checked=checked)
        for checked in (None, decided)
    )
    assert plain.recalibration is None
    before, after = (auroc(one.score(*unseen), wanted[FITTED:]) or 0.0 for one in (plain, taught))
    assert before < 0.65
    assert after > 0.8
    left, right = unseen
    found = taught.score(left, right)
    assert taught.score(left[::-1], right[::-1]).tobytes() == found[::-1].tobytes()
    taught.save(tmp_path / "a.safetensors")
    loaded = Auditor.load(tmp_path / "a.safetensors", device="cpu")
    assert loaded.score(left, right).tobytes() == found.tobytes()
    audited = mispair.audit(case.left[:FITTED], case.right[:FITTED], checked=decided, device="cpu")
    undecided = np.arange(150, FITTED)
    again = audited.auditor.score(case.left[undecided], case.right[undecided])
    assert again == pytest.approx(audited.match_score[undecided], abs=1e-4)


def test_mistakes_are_refused(auditor: Auditor, case: Case) -> None:
    left, right = case.left, case.right
    with refused(ConflictError):
        Auditor().score(left, right)
    with refused(ConflictError):
        _ = Auditor().noise_rate_
    with refused(ConflictError):
        Auditor().save("none.safetensors")
    with refused(ShapeError, names="12"):
        auditor.score(right, left)
    with refused(ShapeError):
        auditor.score(left)
    with refused(TooFewError, names="49"):
        Auditor().fit(left[:49], right[:49])
    with pytest.raises(DataError, match="'x'"):
        Auditor(device="cpu").fit(left[:60], right[:60], checked={"x": True})
    with refused(InvalidValueError, where="checked", names="'maybe'"):
        Auditor(device="cpu").fit(left[:60], right[:60], checked={"1": "maybe"})  # type: ignore[dict-item]


def test_what_a_notebook_shows(auditor: Auditor) -> None:
    assert percent(auditor.noise_rate_) in repr(auditor)
    page = auditor._repr_html_()
    assert all(name in page for name in auditor.measures_)
    assert "not fitted" in repr(Auditor())
    assert "not fitted" in Auditor()._repr_html_()


def rate_and_interval(left: Any, right: Any) -> Any:
    auditor = Auditor(device="cpu").fit(left, right)
    return np.array([auditor.noise_rate_, *auditor.noise_interval_])


@pytest.fixture(scope="module")
def unmoved(case: Case) -> Any:
    return rate_and_interval(case.left, case.right)


@pytest.mark.parametrize("seed", range(3))
def test_the_last_digits_of_vectors_hardly_move_the_interval(case: Case, unmoved: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    moved = [side * (1 + 1e-6 * rng.standard_normal(side.shape)).astype(np.float32) for side in (case.left, case.right)]
    np.testing.assert_allclose(rate_and_interval(*moved), unmoved, atol=0.01)


@pytest.mark.parametrize("place", [3, 50])
def test_one_more_near_duplicate_hardly_moves_the_interval(case: Case, unmoved: Any, place: int) -> None:
    left, right = case.left.copy(), case.right.copy()
    left[place + 1] = left[place]  # now in the fold of that pair
    found = rate_and_interval(left, right)
    right[place + 1] = right[place]  # now a copy, which is not learned from
    for one in (found, rate_and_interval(left, right)):
        np.testing.assert_allclose(one, unmoved, atol=0.03)
