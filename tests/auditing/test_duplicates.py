"""Pairs that share items, as on the web: copies, placeholders, boilerplate, several captions an image."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

import mispair
from audit_cases import Case, make_case
from mispair.functional.metrics import auroc

pytest.importorskip("pyarrow")

ROWS = 300
WIDTHS = (40, 32)
Vectors = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def case() -> Case:
    return make_case(ROWS, 0.3, widths=WIDTHS, hidden=20, noise=0.5, seed=2)


@pytest.fixture(scope="module")
def once(case: Case) -> mispair.Audit:
    return mispair.audit(case.left, case.right, device="cpu")


def blurred(vectors: Vectors) -> Vectors:
    noise = np.random.default_rng(0).standard_normal(vectors.shape)
    return np.asarray(vectors + 0.02 * vectors.std() * noise, dtype=np.float32)


def test_copies_of_all_pairs_change_no_verdict(case: Case, once: mispair.Audit) -> None:
    times = 3
    again = np.tile(np.arange(ROWS), times)
    found = mispair.audit(case.left[again], case.right[again], device="cpu")
    assert (found.is_mismatch == once.is_mismatch[again]).all()
    assert found.match_score.tobytes() == once.match_score[again].tobytes()
    assert found.summary.noise_rate == once.summary.noise_rate
    assert f"{ROWS * (times - 1):,} pairs have (nearly) the same two items" in " ".join(found.notes)
    assert not any("same two items" in note for note in once.notes)


def test_copies_beside_their_pair_change_hardly_any_verdict(case: Case, once: mispair.Audit) -> None:
    """The pairs get other row numbers, and so other folds."""
    again = np.repeat(np.arange(ROWS), 2)
    found = mispair.audit(case.left[again], case.right[again], device="cpu")
    assert (found.is_mismatch != once.is_mismatch[again]).mean() < 0.02
    assert found.summary.noise_rate == pytest.approx(once.summary.noise_rate, abs=0.05)


def test_near_duplicates_vouch_no_more_than_copies(case: Case, once: mispair.Audit) -> None:
    again = np.tile(np.arange(ROWS), 3)
    found = mispair.audit(blurred(case.left[again]), blurred(case.right[again]), device="cpu")
    assert (found.is_mismatch != once.is_mismatch[again]).mean() < 0.02
    assert found.summary.noise_rate == pytest.approx(once.summary.noise_rate, abs=0.05)


def test_a_few_copies_are_flagged_as_often_as_the_others(case: Case, once: mispair.Audit) -> None:
    wrong = np.flatnonzero(case.mismatched)[:30]
    again = np.concatenate([np.arange(ROWS), wrong])
    found = mispair.audit(case.left[again], case.right[again], device="cpu")
    assert (found.is_mismatch == once.is_mismatch[again]).all()


def test_several_captions_an_image_need_no_groups() -> None:
    several = make_case(ROWS, 0.0, widths=WIDTHS, hidden=20, noise=0.5)
    images = np.arange(ROWS) // 5
    left, right = several.left[images * 5], several.right.copy()
    right[:] = right[images * 5] + 0.5 * right.std() * np.random.default_rng(1).standard_normal(right.shape)
    given = mispair.audit(left, right, groups=images, device="cpu")
    found = mispair.audit(left, right, device="cpu")
    assert found.match_score.tobytes() == given.match_score.tobytes()
    assert not found.is_mismatch.any()
    assert not found.items.unlike.any()


@pytest.mark.parametrize(("side", "near"), [("left", True), ("right", False)])
def test_placeholders_and_boilerplate_are_flagged(side: str, near: bool) -> None:
    right_pairs = make_case(ROWS, 0.0, widths=WIDTHS, hidden=20, noise=0.5)
    shared = np.random.default_rng(0).permutation(ROWS)[:40]
    sides = {"left": right_pairs.left.copy(), "right": right_pairs.right.copy()}
    sides[side][shared] = sides[side][shared[0]]
    if near:
        sides[side][shared] = blurred(sides[side])[shared]
    found = mispair.audit(sides["left"], sides["right"], device="cpu")
    assert found.is_mismatch[shared].sum() >= 38
    assert found.is_mismatch[np.setdiff1d(np.arange(ROWS), shared)].mean() <= 0.01
    assert found.summary.noise_rate == pytest.approx(39 / ROWS, abs=0.03)
    reasons = found.table["reason"].to_pylist()
    words = f"its {side} item is shared by 40 pairs that have nothing else in common"
    assert [reasons[row] for row in shared[1:]].count(words) >= 37
    assert reasons.count(words) <= 40
    assert f"40 pairs share one {side} item whose partners have nothing in common" in " ".join(found.notes)


def test_a_person_overrules_what_is_shared() -> None:
    right_pairs = make_case(ROWS, 0.0, widths=WIDTHS, hidden=20, noise=0.5)
    left = right_pairs.left.copy()
    left[:40] = left[0]
    found = mispair.audit(left, right_pairs.right, checked={"0": True, "1": False}, device="cpu")
    assert found.match_score[:2].tolist() == [1, 0]
    assert found.reasons(np.arange(3))[:2] == ["", "a person found it wrong"]


def test_class_names_as_captions_are_no_boilerplate() -> None:
    """Each caption is on a tenth of the images: too many for a fold, and their images are alike."""
    rng = np.random.default_rng(0)
    names = rng.integers(10, size=ROWS)
    centres, captions = rng.standard_normal((10, 40)), rng.standard_normal((10, 32)).astype(np.float32)
    left = (centres[names] + 0.4 * rng.standard_normal((ROWS, 40))).astype(np.float32)
    wrong = rng.random(ROWS) < 0.2
    given = np.where(wrong, (names + 1 + rng.integers(9, size=ROWS)) % 10, names)
    found = mispair.audit(left, captions[given], device="cpu")
    assert not found.items.unlike.any()
    assert (auroc(found.match_score.astype(float), ~wrong) or 0) > 0.99
    assert found.is_mismatch[~wrong].mean() < 0.05
    assert any("too many for one fold" in note for note in found.notes)


def test_captions_that_describe_nothing_are_named_and_counted(case: Case) -> None:
    captions = ["A dog runs over the grass ."] * ROWS
    wrong = np.flatnonzero(case.mismatched)
    captions[wrong[0]], captions[wrong[1]] = "IMG_2041.JPG", "https://example.org/a"
    found = mispair.audit(case.left, case.right, texts=captions, device="cpu")
    reasons = found.table["reasons"].to_pylist()
    assert {row: text for row, text in enumerate(reasons) if text} == {
        int(wrong[0]): "caption is a file name",
        int(wrong[1]): "caption is a web address",
    }
    assert found.summary.reasons == {"caption is a file name": 1, "caption is a web address": 1}
    for row, words in ((wrong[0], "its caption is a file name"), (wrong[1], "its caption is a web address")):
        assert found.reasons(np.array([row])) == ([words] if found.is_mismatch[row] else [""])
    assert "its caption is a file name" in found.table["reason"].to_pylist()


def test_captions_that_describe_nothing_match_less(case: Case, once: mispair.Audit) -> None:
    captions = ["A dog runs over the grass ."] * ROWS
    rows = np.where(once.is_mismatch, 1, once.match_score).argsort()[:3]  # of those that are not flagged
    for row, text in zip(rows, ["IMG_2041.JPG", "https://example.org/a", "2041 - 7"], strict=True):
        captions[row] = text
    found = mispair.audit(case.left, case.right, texts=captions, device="cpu")
    assert found.is_mismatch[rows].all()
    expected = (once.summary.noise_rate * (ROWS - 3) + (1 - found.match_score[rows]).sum()) / ROWS
    assert found.summary.noise_rate == pytest.approx(expected)
    assert all(reason.startswith("its caption ") for reason in found.reasons(rows))
    others = np.setdiff1d(np.arange(ROWS), rows)
    assert (found.match_score[others] == once.match_score[others]).all()
    checked = mispair.audit(case.left, case.right, texts=captions, checked={str(rows[0]): True}, device="cpu")
    assert checked.match_score[rows[0]] == 1


def test_file_names_among_right_captions_are_the_noise() -> None:
    """All are much alike, so their vectors say nothing; as all other pairs match, only their texts tell."""
    pairs, rng = make_case(ROWS, 0.0, widths=WIDTHS, hidden=20, noise=0.5), np.random.default_rng(0)
    right, captions = pairs.right.copy(), ["A dog runs over the grass ."] * ROWS
    rows = rng.permutation(ROWS)[: ROWS // 8]
    right[rows] = right.std() * (2 * rng.standard_normal(WIDTHS[1]) + rng.standard_normal((len(rows), WIDTHS[1])))
    for row in rows:
        captions[row] = f"IMG_{row}.JPG"
    found = mispair.audit(pairs.left, right, texts=captions, device="cpu")
    assert found.is_mismatch[rows].mean() > 0.9
    assert np.delete(found.is_mismatch, rows).mean() < 0.02
    assert found.summary.noise_rate == pytest.approx(1 / 8, abs=0.03)


def test_captions_that_describe_nothing_are_no_better_partners(case: Case, once: mispair.Audit) -> None:
    captions = ["A dog runs over the grass ."] * ROWS
    suggested = np.unique(once.new_rights.rows[:, 0])[1:]
    captions[suggested[-1]] = "https://example.org/a"
    found = mispair.audit(case.left, case.right, texts=captions, device="cpu")
    assert suggested[-1] in once.new_rights.rows
    assert suggested[-1] not in found.new_rights.rows
    assert suggested[-2] in found.new_rights.rows


def test_codes_instead_of_captions_change_no_score(case: Case, once: mispair.Audit) -> None:
    found = mispair.audit(case.left, case.right, texts=[f"{row} - 7" for row in range(ROWS)], device="cpu")
    assert found.summary.reasons == {"caption has no words": ROWS}
    assert (found.match_score == once.match_score).all()


@pytest.mark.parametrize("factor", [1e-23, 1e60])
def test_huge_and_tiny_vectors_give_the_same_scores(case: Case, once: mispair.Audit, factor: float) -> None:
    power = 2.0 ** round(np.log2(factor))
    kind = np.float64 if factor > 1e38 else np.float32
    found = mispair.audit((case.left * kind(power)).astype(kind), case.right, device="cpu")
    assert (found.scan.status == 0).all()
    np.testing.assert_allclose(found.match_score, once.match_score, atol=0.02)
    assert (found.is_mismatch == once.is_mismatch).mean() > 0.99


def test_one_huge_vector_harms_no_other(case: Case, once: mispair.Audit) -> None:
    left = case.left.copy()
    left[0] *= np.float32(1e20)
    found = mispair.audit(left, case.right, device="cpu")
    assert np.isfinite(found.match_score).all()
    assert (found.is_mismatch == once.is_mismatch)[1:].mean() > 0.97
