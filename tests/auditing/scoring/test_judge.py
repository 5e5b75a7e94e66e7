"""What the audit learns: good on made pairs, the same every time, and sensible where there is little to learn."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from made_pairs import MadePairs, learned, made_pairs, quality, scores
from mispair.auditing.scoring import judge as judging
from mispair.auditing.scoring.calibration import noise_rate, separation
from mispair.auditing.scoring.common_space import CommonSpace
from mispair.auditing.scoring.folds import FOLDS, fold_numbers, shuffled
from mispair.auditing.scoring.judge import (
    Judge,
    SideTransform,
    learn,
    look_alikes,
    measure_by_fold,
    neighbours_partners,
)
from mispair.auditing.scoring.measures import Bank
from mispair.errors import DataError
from mispair.functional.logistic import FloatArray, probability
from mispair.support.arrays import IntArray

CPU = torch.device("cpu")


@cache
def easy() -> MadePairs:
    return made_pairs(400, 0.3)


@cache
def easy_judge() -> Judge:
    return learned(easy())


@cache
def few() -> MadePairs:
    return made_pairs(120, 0.3)


@cache
def few_judge() -> Judge:
    return learned(few())


def match(pairs: MadePairs) -> FloatArray:
    """Learns from pairs and judges them."""
    found = probability(scores(learned(pairs), pairs))
    assert found.shape == (len(pairs),)
    assert np.isfinite(found).all()
    return found


# ---------------------------------------------------------------------- quality


@pytest.mark.parametrize("seed", [0, 1])
def test_it_finds_the_wrong_pairs(seed: int) -> None:
    pairs = made_pairs(400, 0.3, seed=seed)
    judge = easy_judge() if seed == 0 else learned(pairs)
    measured = judge.measure(*pairs.tensors, pairs.fold)
    score = judge.combination.score(measured)
    found = quality(score, pairs.mismatched)
    assert found > 0.95
    assert found > max(quality(column, pairs.mismatched) for column in measured.T) - 0.01
    assert judge.combination.rate == pytest.approx(pairs.mismatched.mean(), abs=0.06)
    assert judge.combination.low <= pairs.mismatched.mean() <= judge.combination.high
    assert np.mean((probability(score) < 0.5) == pairs.mismatched) > 0.9


def test_several_captions_of_one_item_are_judged_as_well() -> None:
    pairs = made_pairs(300, 0.3, per_left=5)
    judge = learned(pairs)
    assert quality(scores(judge, pairs), pairs.mismatched) > 0.95
    assert judge.combination.rate == pytest.approx(pairs.mismatched.mean(), abs=0.1)


def test_separations_are_aurocs_against_shuffled_pairs() -> None:
    judge, pairs = easy_judge(), easy()
    partner = shuffled(pairs.fold, pairs.groups)
    wrong = np.flatnonzero(partner >= 0)
    left, right = pairs.tensors
    seen = judge.measure(left, right, pairs.fold)
    null = judge.measure(left[wrong], right[partner[wrong]], pairs.fold[wrong])
    for column, found in enumerate(judge.separations):
        above = (seen[:, None, column] > null[None, :, column]).mean()
        assert found == pytest.approx(above, abs=1e-3)
    assert judge.observed == pytest.approx(judge.combination.sums(seen), abs=1e-3)
    assert judge.null == pytest.approx(judge.combination.sums(null), abs=1e-3)
    assert judge.combination.rate == pytest.approx(noise_rate(judge.observed, judge.null), abs=1e-9)


def test_separation_of_what_lies_apart() -> None:
    low, high = np.array([0.0, 1.0]), np.array([2.0, 3.0])
    assert separation(high, low) == 1
    assert separation(low, high) == 0
    assert separation(low, low) == 0.5


# ---------------------------------------------------------------------- the same every time


def test_learning_is_deterministic() -> None:
    first, second = few_judge().state(), learned(few()).state()
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.parametrize(("widest", "joint"), [(512, False), (10, True)])
def test_it_comes_back_from_its_state_exactly(widest: int, joint: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "WIDEST", widest)
    pairs = made_pairs(100, 0.3, widths=(16, 16) if joint else (24, 16))
    judge = learned(pairs, joint=joint)
    again = Judge.of(safetensors.torch.load(safetensors.torch.save(judge.state())), CPU)
    first, second = judge.state(), again.state()
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert again.joint == joint
    assert again.names == judge.names
    for name, value in vars(judge.combination).items():
        assert np.array_equal(getattr(again.combination, name), value), name
        assert type(getattr(again.combination, name)) is type(value)
    for side in range(2):
        one, other = judge.transforms[side], again.transforms[side]
        assert (one.directions is None) == (other.directions is None) == (widest == 512)
    assert scores(again, pairs).tolist() == scores(judge, pairs).tolist()


@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)))
def test_rows_that_were_measured_while_learning(learned_from: set[int], asked: set[int]) -> None:
    rows, some = (np.array(sorted(part), dtype=np.int64) for part in (learned_from, asked))
    judge = replace(few_judge(), rows=rows, measured=np.repeat(rows[:, None], 5, axis=1).astype(np.float32))
    places, found = judge.known(some)
    assert some[places].tolist() == sorted(learned_from & asked)
    assert found[:, 0].tolist() == some[places].tolist()


def test_it_judges_a_pair_the_same_among_any_others() -> None:
    judge, pairs = few_judge(), few()
    rows = np.arange(5, 115, 7)
    left, right = pairs.tensors
    alone = judge.measure(left[rows], right[rows], pairs.fold[rows])
    assert alone == pytest.approx(judge.measure(*pairs.tensors, pairs.fold)[rows], abs=1e-4)


@pytest.mark.parametrize(("left", "right"), [(1e6, 1e-6), (1e-6, 1e6)])
def test_the_length_of_vectors_does_not_matter(left: float, right: float) -> None:
    plain, other = scores(few_judge(), few()), match(few().scaled(left, right))
    assert spearmanr(plain, other).statistic > 0.9999


def test_a_common_shift_and_constant_columns_do_not_matter() -> None:
    moved = replace(few(), left=few().left + np.float32(5), right=few().right - np.float32(3))
    assert spearmanr(scores(few_judge(), few()), match(moved.with_constant_columns())).statistic > 0.995


def test_broken_vectors_spoil_only_their_own_pairs() -> None:
    broken = replace(few(), left=few().left.copy(), right=few().right.copy())
    broken.left[7] *= np.float32(1e20)  # its square overflows
    broken.right[30] *= np.float32(1e3)
    others = np.setdiff1d(np.arange(len(broken)), [7, 30])
    assert spearmanr(scores(few_judge(), few())[others], match(broken)[others]).statistic > 0.98


# ---------------------------------------------------------------------- where there is little to learn


def test_fifty_pairs_are_enough_for_an_order() -> None:
    pairs = made_pairs(50, 0.3)
    assert quality(match(pairs), pairs.mismatched) > 0.85


def test_pairs_that_are_all_right_are_left_alone_and_still_have_an_order() -> None:
    pairs = made_pairs(300, 0.0)
    judge = learned(pairs)
    found = probability(scores(judge, pairs))
    assert judge.combination.rate < 0.03
    assert judge.combination.low == 0
    assert (found < 0.5).mean() < 0.02
    assert len(np.unique(found.astype(np.float32))) > 30  # or nobody could look at the worst ones first


def test_pairs_that_are_all_wrong_are_mostly_flagged() -> None:
    pairs = made_pairs(400, 1.0)
    judge = learned(pairs)
    assert judge.combination.rate > 0.6
    assert (probability(scores(judge, pairs)) < 0.5).mean() > 0.7
    assert judge.separations.max() < 0.6


@pytest.mark.parametrize("widths", [(1, 1), (8, 1)])
def test_vectors_of_one_number(widths: tuple[int, int]) -> None:
    pairs = made_pairs(400, 0.3, widths=widths, hidden=1, noise=0.1)
    judge = learned(pairs)
    assert quality(scores(judge, pairs), pairs.mismatched) > 0.65  # a sign is all that is left of them
    assert judge.combination.rate == pytest.approx(0.3, abs=0.12)


def test_a_single_direction_in_wide_vectors() -> None:
    pairs = made_pairs(300, 0.3, hidden=1)
    assert quality(match(pairs), pairs.mismatched) > 0.75


def test_more_dimensions_than_pairs() -> None:
    pairs = made_pairs(80, 0.25, widths=(120, 100))
    assert quality(match(pairs), pairs.mismatched) > 0.9


def test_wide_vectors_are_cut_to_their_main_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = made_pairs(200, 0.3, widths=(30, 14), noise=0.1)
    monkeypatch.setattr(judging, "WIDEST", 12)
    judge = learned(pairs)
    assert [space.left.shape[0] for space in judge.spaces] == [12] * FOLDS
    assert quality(scores(judge, pairs), pairs.mismatched) > 0.95


def test_a_joint_cosine_outlives_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "WIDEST", 10)
    pairs = made_pairs(200, widths=(30, 30), hidden=8, noise=0.05)
    left = pairs.tensors[0]
    right = left[torch.randperm(200)] + 1  # a common space but for where its middle is
    transforms = SideTransform.both(left, right, joint=True)
    assert transforms[0](left).shape == (200, 10)
    found = (transforms[0](left) * transforms[1](right)).sum(1)
    expected = torch.cosine_similarity(left - left.mean(0), right - right.mean(0))
    assert found.numpy() == pytest.approx(expected.numpy(), abs=0.02)


def test_a_frame_centres_and_keeps_the_main_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "WIDEST", 3)
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((500, 6)) * [9, 8, 7, 0.1, 0.1, 0.1] + 4
    frame = SideTransform.both(torch.from_numpy(vectors.astype(np.float32)), torch.eye(4), joint=False)[0]
    assert frame.mean.numpy() == pytest.approx(vectors.mean(0), abs=1e-4)
    centred = vectors - vectors.mean(0)
    expected = np.linalg.svd(centred, full_matrices=False)[2][:3].T
    assert frame.directions is not None
    assert np.abs(expected.T @ frame.directions.numpy()) == pytest.approx(np.eye(3), abs=1e-3)
    found = frame(torch.from_numpy(vectors.astype(np.float32))).numpy()
    assert np.linalg.norm(found, axis=1) == pytest.approx(np.ones(500), abs=1e-5)
    projected = centred @ expected
    projected /= np.linalg.norm(projected, axis=1, keepdims=True)
    assert np.abs(found @ found.T - projected @ projected.T).max() < 1e-3


# ---------------------------------------------------------------------- copies and groups


@pytest.mark.parametrize("grouped", [True, False])
def test_copies_of_every_row_change_little(grouped: bool) -> None:
    pairs = made_pairs(60, 0.2).take(np.repeat(np.arange(60), 5), grouped=grouped)
    found = match(pairs)
    assert quality(found, pairs.mismatched) > 0.9
    assert (found[~pairs.mismatched] < 0.5).mean() < 0.05
    if grouped:
        assert np.ptp(found.reshape(60, 5), axis=1).max() < 1e-4


@pytest.mark.parametrize("grouped", [True, False])
def test_copies_are_not_flagged_for_being_copies(grouped: bool) -> None:
    rows = np.concatenate([np.arange(300), np.repeat(np.arange(40), 4)])
    pairs = made_pairs(300, 0.3).take(rows, grouped=grouped)
    found, copied = match(pairs), rows < 40
    flagged = [(found[copied_or_not & ~pairs.mismatched] < 0.5).mean() for copied_or_not in (copied, ~copied)]
    assert flagged[0] <= flagged[1] + 0.02
    assert max(flagged) < 0.06
    assert quality(found, pairs.mismatched) > 0.95


def test_groups_may_be_larger_than_a_neighbourhood() -> None:
    pairs = made_pairs(300, 0.3, per_left=12)
    assert (
        neighbours_partners(
            pairs.tensors[0], pairs.fold, np.arange(len(pairs.fold)), np.ones(len(pairs.fold), dtype=bool), pairs.groups
        )
        == -1
    ).all()
    assert quality(match(pairs), pairs.mismatched) > 0.85


@pytest.mark.parametrize("groups", [np.zeros(100, dtype=np.int64), np.arange(100) // 50, np.arange(100) // 25])
def test_too_few_groups_are_a_mistake_in_words(groups: np.ndarray) -> None:
    pairs = replace(made_pairs(100), groups=groups)
    with pytest.raises(DataError, match=rf"^The 100 pairs are of {groups.max() + 1} groups; expected at least 20"):
        learned(pairs)


def test_a_swapped_partner_is_of_a_neighbour_in_the_fold_and_never_of_the_group() -> None:
    pairs = made_pairs(300, per_left=3)
    x = torch.nn.functional.normalize(pairs.tensors[0], dim=1)
    partner = neighbours_partners(x, pairs.fold, np.arange(len(x)), np.ones(len(x), dtype=bool), pairs.groups)
    lent = np.flatnonzero(partner >= 0)
    assert len(lent) > 100
    assert (pairs.fold[partner[lent]] == pairs.fold[lent]).all()
    assert (pairs.groups[partner[lent]] != pairs.groups[lent]).all()
    similarity = (x @ x.T).numpy()
    for row in lent:
        others = np.flatnonzero((pairs.fold == pairs.fold[row]) & (np.arange(300) != row))
        nearer = (similarity[row, others] > similarity[row, partner[row]] + 1e-6).sum()
        assert nearer < judging.CLOSE_BY


def test_a_row_alone_in_its_fold_borrows_from_nobody() -> None:
    fold = np.array([0, 1, 1], dtype=np.uint8)
    assert neighbours_partners(torch.eye(3), fold, np.arange(3), np.ones(3, dtype=bool), np.arange(3)).tolist() == [
        -1,
        2,
        1,
    ]


def test_each_pair_is_measured_by_its_own_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(
        space: CommonSpace, _: Bank, left: torch.Tensor, right: torch.Tensor, *which: torch.Tensor, **options: bool
    ) -> torch.Tensor:
        assert options == {"joint": False}
        return torch.column_stack([left[which[0]], right[which[1]], space.left.expand(len(which[0]))])

    monkeypatch.setattr(judging, "measure", own)
    x, rows = torch.arange(50.0)[:, None], np.arange(50)
    fold, rights = fold_numbers(rows), np.random.default_rng(0).integers(0, 50, 50)
    spaces = [CommonSpace(torch.tensor(float(number)), torch.empty(0), torch.empty(0)) for number in range(FOLDS)]
    banks = [Bank(*[torch.empty(0)] * 4)] * FOLDS
    found = measure_by_fold(spaces, banks, x, 2 * x, rows, rights, fold, joint=False, size=4)
    assert found.tolist() == np.column_stack([rows, 2 * rights, fold]).tolist()


# ---------------------------------------------------------------------- checked pairs


def test_checked_pairs_help_where_the_rest_is_hard() -> None:
    pairs = made_pairs(200, 0.6, noise=0.9)
    checked = np.where(np.arange(200) < 80, (~pairs.mismatched).astype(float), np.nan)
    rest = np.isnan(checked)
    plain, told = (scores(judge, pairs) for judge in (learned(pairs), learned(pairs, checked=checked)))
    assert quality(told[rest], pairs.mismatched[rest]) > quality(plain[rest], pairs.mismatched[rest]) + 0.01
    sure, doubtful = (score[~rest] for score in (told, plain))
    assert quality(sure, pairs.mismatched[~rest]) > quality(doubtful, pairs.mismatched[~rest])


def test_nothing_checked_changes_nothing() -> None:
    pairs = few()
    judge = learn(*pairs.tensors, pairs.fold, pairs.groups, checked=np.full(len(pairs), np.nan))
    assert scores(judge, pairs).tolist() == scores(few_judge(), pairs).tolist()


def test_network_scores_are_a_measure_and_never_computed_for_no_pairs() -> None:
    pairs = few()
    calls: list[int] = []

    def network_score(lefts: IntArray, rights: IntArray) -> FloatArray:
        calls.append(len(lefts))
        return np.asarray(lefts == rights, dtype=np.float64)

    judge = learn(*pairs.tensors, pairs.fold, pairs.groups, network_score=network_score)
    assert (judge.networks, judge.names[-1]) == (True, "networks")
    assert judge.separations[-1] == 1  # it knows the shuffled pairs
    assert calls[0] >= 2 * len(pairs)  # observed and shuffled ones together
    assert all(calls)
    assert not learned(pairs).networks


def test_look_alikes_are_as_right_as_their_partner_is_like_the_own_one() -> None:
    pairs = made_pairs(300, per_left=3)
    x, y = (torch.nn.functional.normalize(side, dim=1) for side in pairs.tensors)
    lefts, rights, alike = look_alikes(judging.Sample.of(x, y, pairs.fold, pairs.groups), pairs.groups)
    assert len(lefts) > 100
    assert (pairs.fold[lefts] == pairs.fold[rights]).all()
    assert (pairs.groups[lefts] != pairs.groups[rights]).all()
    keeps_left = [(x[a] @ x[b], max(float(y[a] @ y[b]), 0)) for a, b in zip(lefts, rights, strict=True)]
    near = [(y[a] @ y[b], max(float(x[a] @ x[b]), 0)) for a, b in zip(lefts, rights, strict=True)]
    first = sum(1 for a in lefts if a % 2 == 0)
    assert 0 < first < len(lefts)
    for place, found in enumerate(alike):
        expected = {round(keeps_left[place][1], 4), round(near[place][1], 4)}
        assert min(abs(found - value) for value in expected) < 1e-3


def test_few_wide_vectors_have_as_few_directions_and_keep_their_cosines() -> None:
    vectors = torch.randn(40, 1100, generator=torch.Generator().manual_seed(0))
    frame = SideTransform.both(vectors, vectors, joint=False)[0]
    assert frame.directions is not None
    assert frame.directions.shape == (1100, 39)  # one is lost to the mean
    found, centred = frame(vectors), torch.nn.functional.normalize(vectors - vectors.mean(0), dim=1)
    torch.testing.assert_close(found @ found.T, centred @ centred.T, atol=1e-4, rtol=0)


def test_the_highest_place_of_a_parabola_lies_between_those_that_were_tried() -> None:
    places = np.array([-2.0, -1.0, 0.0, 1.0, 3.0])
    assert judging.highest(places, 5 - np.square(places - 0.3)) == pytest.approx(0.3)
    assert judging.highest(places, places) == 3  # not beyond the ends
    assert judging.highest(places, -places) == -2
    assert judging.highest(places, np.zeros(5)) == -2
