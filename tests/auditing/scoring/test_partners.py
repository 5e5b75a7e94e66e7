from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from audit_cases import Case, make_case
from mispair.auditing.scoring import partners
from mispair.auditing.scoring.folds import fold_numbers
from mispair.auditing.scoring.judge import Judge, learn
from mispair.auditing.scoring.partners import KEPT, Candidates, Odds, Partners, find_partners
from mispair.auditing.scoring.shared_items import SharedItems
from mispair.functional.logistic import probability
from mispair.pairs.layouts.arrays import from_memory
from mispair.pairs.source import Source
from mispair.support.arrays import IntArray

pytest.importorskip("pyarrow")

CPU = torch.device("cpu")
Scores = npt.NDArray[np.float32]


def shared(groups: IntArray) -> SharedItems:
    """Rows of one group share their left item; their right items differ."""
    left = np.unique(groups, return_index=True, return_inverse=True)
    return replace(SharedItems.apart(len(groups)), left=left[1][left[2]], groups=groups)


class World:
    """Pairs, the judge that was learned from them, and what it thinks of each."""

    def __init__(self, case: Case, groups: IntArray | None = None) -> None:
        self.case, self.groups = case, groups
        self.owners = np.arange(len(case)) if groups is None else groups
        self.items, self.fold = shared(self.owners), fold_numbers(self.owners)
        self.source: Source = from_memory(case.left, case.right, groups=groups)
        sides = torch.from_numpy(case.left), torch.from_numpy(case.right)
        self.judge: Judge = learn(*sides, self.fold, self.owners)
        self.match: Scores = probability(self.judge.combination.score(self.judge.measure(*sides, self.fold))).astype(
            np.float32
        )
        self.flagged = np.flatnonzero(self.match < 0.5)

    def find(self, rows: IntArray, *, keep_left: bool, match: Scores | None = None) -> Partners:
        match = self.match if match is None else match
        return find_partners(self.source, self.judge, rows, match, self.items, keep_left=keep_left, device=CPU)


@pytest.fixture(scope="module")
def world() -> World:
    return World(make_case(300, 0.3))


@pytest.fixture(scope="module")
def grouped() -> World:
    """Three captions an image; a tenth of the captions is wrong."""
    case = make_case(240, 0.1)
    left = np.repeat(case.left[::3], 3, axis=0)
    right = np.random.default_rng(1).standard_normal(case.right.shape).astype(np.float32) * 0.1
    right += make_case(240, 0.0).right[(np.arange(240) // 3 * 3)[case.holder]]
    return World(Case(left, right, case.holder), np.arange(240) // 3)


@pytest.mark.parametrize("keep_left", [True, False])
def test_exchanged_partners_are_found(world: World, keep_left: bool) -> None:
    wrong = np.flatnonzero(world.case.mismatched)
    found = world.find(wrong, keep_left=keep_left)
    truth = world.case.holder[wrong]
    assert (found.rows[:, 0] == truth).mean() > 0.5  # by chance 1 in 299
    assert (found.rows == truth[:, None]).any(axis=1).mean() > 0.7


@pytest.mark.parametrize("keep_left", [True, False])
def test_items_that_have_another_partner_are_left_to_it(world: World, keep_left: bool) -> None:
    wrong = np.flatnonzero(world.case.mismatched)
    truth = world.case.holder[wrong]
    known, others = wrong[: len(wrong) // 2], wrong[len(wrong) // 2 :]
    found = [
        find_partners(
            world.source,
            world.judge,
            others,
            world.match,
            world.items,
            keep_left=keep_left,
            device=CPU,
            partnered=partnered,
        )
        for partnered in ((), world.case.holder[known])
    ]
    taken = [np.isin(one.rows, world.case.holder[known]).mean() for one in found]
    right = [(one.rows[:, 0] == truth[len(known) :]).mean() for one in found]
    assert taken[1] < taken[0] / 2
    assert right[1] >= right[0]


@pytest.mark.parametrize("keep_left", [True, False])
def test_no_more_than_three_others_that_fit_in_falling_order(world: World, grouped: World, keep_left: bool) -> None:
    for pairs in (world, grouped):
        every = np.arange(len(pairs.case))
        found = pairs.find(every, keep_left=keep_left)
        assert found.rows.shape == found.scores.shape == (len(every), KEPT) == (len(every), 3)
        assert found.scores.dtype == np.float32
        given = found.rows >= 0
        assert given.any()
        assert (np.isnan(found.scores) == ~given).all()
        assert ((found.scores[given] >= 0) & (found.scores[given] <= 1)).all()
        assert (np.nansum(found.scores, axis=1) <= 1 + 1e-6).all()  # only one of them can be the missing one
        assert (given[:, :-1] >= given[:, 1:]).all()  # what there is comes first
        own = pairs.owners[found.rows] == pairs.owners[every][:, None]
        assert not (own & given).any()
        for row, fits in zip(found.rows, found.scores, strict=True):
            chosen = row[row >= 0]
            assert len(set(chosen)) == len(chosen)
            assert (np.diff(fits[: len(chosen)]) <= 1e-6).all()


def searched(pairs: World, *, keep_left: bool) -> partners.Search:
    free = np.maximum(1 - pairs.match.astype(np.float64), partners.LEAST_FREE)
    pool = partners.pool_of(pairs.match, None if keep_left else pairs.items.left)
    return partners.Search(pairs.source, pairs.judge, pairs.items, pool, free, keep_left=keep_left, device=CPU)


def best_rivals(pairs: World, row: int, side: int, number: int) -> float:
    """Mean similarity of an item to the ten most similar of the other side, in the space and the bank of a fold."""
    space, bank = pairs.judge.spaces[number], pairs.judge.banks[number]
    vector = torch.from_numpy((pairs.case.left, pairs.case.right)[side][[row]])
    item = (space.compared_left, space.compared_right)[side](pairs.judge.transforms[side](vector))
    others = (bank.space_right, bank.space_left)[side]
    return float(np.sort((others @ item[0]).numpy())[-10:].mean())


@pytest.mark.parametrize("keep_left", [True, False])
def test_candidates_are_those_of_the_largest_contrast_that_is_left(keep_left: bool) -> None:
    pairs, side = World(make_case(60, 0.3, seed=3)), int(keep_left)
    pairs.match[[5, 17]] = np.nan  # could not be read
    search = searched(pairs, keep_left=keep_left)
    for row in (40, 3, 22):
        number = int(pairs.fold[row])
        measured, worth = {}, {}
        for other in np.flatnonzero(~np.isnan(pairs.match)).tolist():
            left, right = (row, other) if keep_left else (other, row)
            sides = torch.from_numpy(pairs.case.left[[left]]), torch.from_numpy(pairs.case.right[[right]])
            evidence = pairs.judge.measure(*sides, pairs.fold[[row]])[0, 1]
            x, y = (transform(vectors) for transform, vectors in zip(pairs.judge.transforms, sides, strict=True))
            space = pairs.judge.spaces[number]
            similarity = float((space.compared_left(x) * space.compared_right(y)).sum())
            # The rivals of a new partner are those of its own fold.
            mine = best_rivals(pairs, row, 1 - side, number)
            contrast = 2 * similarity - mine - best_rivals(pairs, other, side, int(pairs.fold[other]))
            measured[other] = contrast, evidence, similarity
            worth[other] = contrast + partners.WORTH * np.log(max(1 - pairs.match[other], partners.LEAST_FREE))
        best = sorted(worth, key=lambda other: -worth[other])[: partners.TRIED]
        kept = search.items(np.array([row]), number, 1 - side)
        found = search.candidates(number, kept, search.pool_in(number))
        rows = search.pool[found.places[0]]
        assert rows.tolist() == best
        for other, free, measures in zip(rows, found.free[0], found.measures[0], strict=True):
            assert free == pytest.approx(0 if other == row else max(1 - pairs.match[other], partners.LEAST_FREE))
            assert measures == pytest.approx(measured[other], abs=1e-4)


def test_the_weights_are_those_of_the_highest_likelihood() -> None:
    rng = np.random.default_rng(0)
    x, prior, worth = rng.standard_normal((50, 4, 2)), np.log(rng.random((50, 4))), rng.random(50)
    x[:, 0, 0] += 1
    prior[3, 2] = -np.inf

    def loss(weights: np.ndarray) -> float:
        total = partners.RIDGE / 2 * (weights**2).sum()
        for row in range(50):
            odds = [np.exp(prior[row, t] + x[row, t] @ weights) for t in range(4)]
            total -= worth[row] * np.log(odds[0] / sum(odds))
        return float(total)

    assert partners.conditional_logit(x, prior, worth) == pytest.approx(minimize(loss, np.zeros(2)).x, abs=1e-4)


def test_the_item_of_a_matched_pair_is_given_once_and_others_move_up() -> None:
    rows = np.array([[7, 1, 2], [7, 3, -1], [1, -1, -1], [3, 7, 8]])
    scores = np.array([[0.2, 0.1, 0.1], [0.6, 0.1, np.nan], [0.3, np.nan, np.nan], [0.5, 0.1, 0.1]], dtype=np.float32)
    match = np.zeros(10)
    match[[7, 8]] = 0.9  # 1 and 3 are of flagged pairs, and may be anybody's
    found = partners.given_once(Partners(rows, scores), match)
    assert found.rows.tolist() == [[1, 2, -1], [7, 3, -1], [1, -1, -1], [3, 8, -1]]
    assert np.isnan(found.scores).tolist() == (found.rows < 0).tolist()
    assert found.scores[0, :2] == pytest.approx([0.1, 0.1])


def test_chances_are_those_of_a_loop() -> None:
    rng = np.random.default_rng(0)
    strangers = np.sort(rng.random(30))
    odds = Odds(np.array([1.0]), np.array([2.0]), np.array([0.7]), np.array([0.0, 1.0]), strangers, 40.0)
    places = np.array([[0, 1, 2, 3], [0, 1, 4, 5], [-1, 6, 7, 8]])
    candidates = Candidates(places, rng.normal(0, 2, (3, 4, 1)), rng.random((3, 4)))
    found = odds.chances(candidates)
    for row in range(3):
        each = [np.exp(0.7 * (value - 1) / 2) for value in candidates.measures[row, :, 0]]
        rest = sum(value for value in strangers if value < min(each)) / 30 * 40
        weight = [value * free for value, free in zip(each, candidates.free[row], strict=True)]
        assert found[row] == pytest.approx([value / (sum(weight) + rest) for value in weight])
    flagged = replace(candidates, places=np.abs(places))
    wanted = odds.wanted(flagged, np.arange(9) == 0)
    assert wanted[0] == 0  # several pairs may have it
    assert wanted[1] == pytest.approx(found[:2, 1].sum() + found[2, 0])
    # The chance of item 1 is shared. The hidden partner, at place -1, is shared with nobody.
    wanted = np.where(np.arange(9) == 1, 4.0, 0.5)
    wanted[8] = 9.0
    shared = found / np.where(places == 1, 4, np.where(places == 8, 9, 1))
    best, chance = odds.best(candidates, wanted)
    order = np.argsort(-shared, axis=1)[:, :KEPT]
    assert best.tolist() == np.take_along_axis(places, order, axis=1).tolist()
    assert chance == pytest.approx(np.take_along_axis(shared, order, axis=1))
    never = replace(odds, fits=np.array([0.0, -1.0]))
    assert (never.best(candidates, wanted)[1] == 0).all()


def test_probabilities_claim_no_more_than_is_right() -> None:
    """On pairs as easy as these they claim less."""
    claimed, right = [], []
    for seed in range(3):
        pairs = World(make_case(300, 0.3, seed=seed))
        rows = np.flatnonzero(pairs.case.mismatched)
        found = pairs.find(rows, keep_left=True)
        given = found.rows[:, 0] >= 0
        claimed += found.scores[given, 0].tolist()
        right += (found.rows[given, 0] == pairs.case.holder[rows[given]]).tolist()
    assert np.mean(right) - 0.3 < np.mean(claimed) < np.mean(right) + 0.02


def test_few_candidates_are_those_of_flagged_pairs(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partners, "POOL", 20)
    found = world.find(world.flagged, keep_left=True)
    lenders = np.unique(found.rows[found.rows >= 0])
    assert 0 < len(lenders) <= 20
    assert (world.match[lenders] < 0.5).all()
    monkeypatch.setattr(partners, "POOL", len(world.flagged) + 10)
    lenders = np.unique(world.find(np.arange(300), keep_left=False).rows)
    assert (world.match[lenders[lenders >= 0]] >= 0.5).sum() <= 10


def test_a_left_item_of_several_rows_is_suggested_once(grouped: World) -> None:
    found = grouped.find(grouped.flagged, keep_left=False)
    assert (found.rows[found.rows >= 0] % 3 == 0).all()  # by the first row of its group
    wrong = np.flatnonzero(grouped.case.mismatched)
    found = grouped.find(wrong, keep_left=False)
    truth = grouped.owners[grouped.case.holder[wrong]]
    given = found.rows[:, 0] >= 0
    assert (grouped.owners[found.rows[given, 0]] == truth[given]).mean() > 0.5


def test_a_copy_of_a_pair_changes_no_suggestions(world: World) -> None:
    left, right = (np.vstack([side, side[:1]]) for side in (world.case.left, world.case.right))
    groups, match = np.append(np.arange(300), 0), np.append(world.match, world.match[0])
    wrong = np.flatnonzero(world.case.mismatched)
    found = find_partners(
        from_memory(left, right, groups=groups), world.judge, wrong, match, replace(shared(groups), first=groups),
        keep_left=False, device=CPU,
    )  # fmt: skip
    alone = world.find(wrong, keep_left=False)
    assert (found.rows[:, 0] == alone.rows[:, 0]).mean() > 0.9
    np.testing.assert_allclose(np.nanmean(found.scores[:, 0]), np.nanmean(alone.scores[:, 0]), atol=0.05)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.sampled_from([0.1, 0.9, np.nan])), min_size=1))
def test_items_with_several_partners_and_copies_are_those_of_a_loop(rows: list[tuple[int, int, float]]) -> None:
    groups, match = np.array([row[0] for row in rows]), np.array([row[2] for row in rows])
    first = np.array([[row[:2] for row in rows].index(row[:2]) for row in rows])
    partners_of: dict[int, set[int]] = {}
    highest: dict[int, float] = {}
    for place, (left, _, value) in enumerate(rows):
        if not np.isnan(value):
            partners_of.setdefault(left, set()).update({place} & {first[place]})
            highest[left] = max(value, highest.get(left, 0))
    items = replace(shared(groups), first=first)
    several = partners._with_several_partners(items, ~np.isnan(match))
    assert several.tolist() == [len(partners_of.get(left, ())) > 1 for left in groups]
    found = partners._of_whole_items(match, items.left, several)
    expected = [
        value if np.isnan(value) or several[place] else highest[groups[place]] for place, value in enumerate(match)
    ]
    np.testing.assert_array_equal(found, expected)


def test_nothing_to_mend_and_nobody_to_lend(world: World) -> None:
    assert world.find(np.arange(0), keep_left=True).rows.shape == (0, KEPT)
    alone = np.full(300, np.nan, dtype=np.float32)
    assert (world.find(world.flagged, keep_left=True, match=alone).rows == -1).all()
    alone[[3, 4]] = 0.1  # fewer than three candidates
    found = world.find(np.array([3]), keep_left=False, match=alone)
    assert found.rows.shape == (1, KEPT)
    assert set(found.rows[0]) <= {4, -1}


def test_the_order_of_the_rows_does_not_matter(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = world.find(world.flagged, keep_left=True)
    monkeypatch.setattr(partners, "AT_ONCE", 7)
    back = world.find(world.flagged[::-1], keep_left=True)
    assert (back.rows[::-1] == straight.rows).mean() > 0.99
    np.testing.assert_allclose(back.scores[::-1][:, 0], straight.scores[:, 0], atol=1e-3)


def test_right_pairs_of_all_rows_lend_their_items(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partners, "POOL", len(world.flagged) + 40)
    pool = partners.pool_of(world.match, None)
    lenders = pool[world.match[pool] >= 0.5]
    assert len(lenders) == 40
    assert lenders.max() > 200
    assert 75 < lenders.mean() < 225


@pytest.mark.parametrize("keep_left", [True, False])
def test_networks_are_asked_by_the_size_of_the_data(
    world: World, keep_left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def score(lefts: IntArray, rights: IntArray) -> npt.NDArray[np.float64]:
        asked.append(len(lefts))
        return np.zeros(len(rights))

    monkeypatch.setattr(partners, "NETWORK_HIDDEN", 20)
    source, few = replace(world.source, network_score=score), world.flagged[:5]
    find_partners(source, world.judge, few, world.match, world.items, keep_left=keep_left, device=CPU)
    assert sum(asked) == 20 * (partners.TRIED + partners.STRANGERS + 1) + 5 * partners.TRIED
