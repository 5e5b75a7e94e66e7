from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from audit_cases import Case, make_case
from mispair.auditing.scoring import partners
from mispair.auditing.scoring.folds import fold_numbers
from mispair.auditing.scoring.judge import Judge, learn
from mispair.auditing.scoring.partners import ATTACHED, KEPT, Partners, find_partners
from mispair.auditing.sources.source import Source, from_memory
from mispair.data.pairs import IntArray
from mispair.functional.logistic import probability

pytest.importorskip("pyarrow")

CPU = torch.device("cpu")
Scores = npt.NDArray[np.float32]


class World:
    """Pairs, the judge that was learned from them, and what it thinks of each."""

    def __init__(self, case: Case, groups: IntArray | None = None) -> None:
        self.case, self.groups = case, groups
        self.owners = np.arange(len(case)) if groups is None else groups
        self.fold = fold_numbers(self.owners)
        self.source: Source = from_memory(case.left, case.right, groups=groups)
        sides = torch.from_numpy(case.left), torch.from_numpy(case.right)
        self.judge: Judge = learn(*sides, self.fold, self.owners)
        self.match: Scores = probability(self.judge.combination.score(self.judge.measure(*sides, self.fold))).astype(
            np.float32
        )
        self.flagged = np.flatnonzero(self.match < 0.5)

    def find(self, rows: IntArray, *, keep_left: bool, match: Scores | None = None) -> Partners:
        match = self.match if match is None else match
        return find_partners(self.source, self.judge, rows, match, self.groups, keep_left=keep_left, device=CPU)

    def by_a_loop(self, row: int, *, keep_left: bool) -> list[tuple[float, int]]:
        """What the best new partners of a row are worth and their rows, one candidate at a time."""
        found, seen = [], {self.owners[row]}
        for other in np.flatnonzero(~np.isnan(self.match)).tolist():
            if self.owners[other] == self.owners[row] or (not keep_left and self.owners[other] in seen):
                continue
            seen.add(self.owners[other])  # a left item that several rows share is one item
            left, right = (row, other) if keep_left else (other, row)
            measures = self.judge.measure(
                torch.from_numpy(self.case.left[[left]]), torch.from_numpy(self.case.right[[right]]), self.fold[[row]]
            )
            score = float(self.judge.combination.score(measures)[0])
            loss = ATTACHED * self.match[other] if keep_left or self.groups is None else 0
            if score >= 0:  # rather right than wrong
                found.append((score + loss, other))
        return sorted(found, reverse=True)[:KEPT]


pytestmark = pytest.mark.usefixtures("hurried")


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
def test_no_more_than_three_others_that_fit_in_falling_order(world: World, grouped: World, keep_left: bool) -> None:
    for pairs in (world, grouped):
        every = np.arange(len(pairs.case))
        found = pairs.find(every, keep_left=keep_left)
        assert found.rows.shape == found.scores.shape == (len(every), KEPT) == (len(every), 3)
        assert found.scores.dtype == np.float32
        given = found.rows >= 0
        assert given.any()
        assert (np.isnan(found.scores) == ~given).all()
        assert ((found.scores[given] > 0) & (found.scores[given] < 1)).all()
        assert (np.nansum(found.scores, axis=1) <= 1 + 1e-6).all()  # only one of them can be the missing one
        assert (given[:, :-1] >= given[:, 1:]).all()  # what there is comes first
        own = pairs.owners[found.rows] == pairs.owners[every][:, None]
        assert not (own & given).any()
        for row, fits in zip(found.rows, found.scores, strict=True):
            chosen = row[row >= 0]
            assert len(set(chosen)) == len(chosen)
            assert (np.diff(fits[: len(chosen)]) <= 1e-6).all()


@pytest.mark.parametrize("keep_left", [True, False])
@pytest.mark.parametrize("several", [False, True])
def test_of_all_candidates_the_best(several: bool, keep_left: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = World(make_case(60, 0.3, seed=3), np.arange(60) // 2 if several else None)
    pairs.match[[5, 17]] = np.nan  # could not be read
    monkeypatch.setattr(partners, "TRIED", 60)
    rows = np.array([40, 3, 22])
    for row in rows:
        found = pairs.find(np.array([row]), keep_left=keep_left)
        assert not np.isin(found.rows, [5, 17]).any()
        best = pairs.by_a_loop(int(row), keep_left=keep_left)
        assert found.rows[0][found.rows[0] >= 0].tolist() == [other for _, other in best]


def test_the_item_of_a_matched_pair_is_given_once_and_others_move_up() -> None:
    rows = np.array([[7, 1, 2], [7, 3, -1], [1, -1, -1], [3, 7, 8]])
    scores = np.array([[0.2, 0.1, 0.1], [0.6, 0.1, np.nan], [0.3, np.nan, np.nan], [0.5, 0.1, 0.1]], dtype=np.float32)
    match = np.zeros(10)
    match[[7, 8]] = 0.9  # 1 and 3 are of flagged pairs, and may be anybody's
    found = partners.given_once(Partners(rows, scores), match)
    assert found.rows.tolist() == [[1, 2, -1], [7, 3, -1], [1, -1, -1], [3, 8, -1]]
    assert np.isnan(found.scores).tolist() == (found.rows < 0).tolist()
    assert found.scores[0, :2] == pytest.approx([0.1, 0.1])


def test_weights_are_those_of_a_loop(world: World) -> None:
    search = partners.Search(world.source, world.judge, world.match, None, keep_left=True, device=CPU)
    rng = np.random.default_rng(0)
    score, prior = rng.normal(2, 2, (4, 5)), rng.random((4, 5))
    found, rest = search.weights(score, prior, 0.5)
    rate = world.judge.combination.rate
    null = [np.exp(odds) * rate / (1 - rate) for odds in world.judge.combination.log_odds(world.judge.null)]
    taken = sum(np.exp(0.5 * ATTACHED * match) for match in world.match)
    for row in range(4):
        ratio = [np.exp(odds) * rate / (1 - rate) for odds in score[row]]
        assert found[row] == pytest.approx([(r * p) ** 0.5 for r, p in zip(ratio, prior[row], strict=True)])
        lower = sum(value**0.5 for value in null if value < min(ratio)) / len(null)
        assert rest[row] == pytest.approx(lower * taken, rel=1e-4)


def test_probabilities_are_about_the_share_that_is_right() -> None:
    claimed, right = [], []
    for seed in range(3):
        pairs = World(make_case(300, 0.3, seed=seed))
        rows = np.flatnonzero(pairs.case.mismatched)
        found = pairs.find(rows, keep_left=True)
        given = found.rows[:, 0] >= 0
        claimed += found.scores[given, 0].tolist()
        right += (found.rows[given, 0] == pairs.case.holder[rows[given]]).tolist()
    assert np.mean(claimed) == pytest.approx(np.mean(right), abs=0.2)


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
    search = partners.Search(world.source, world.judge, world.match, None, keep_left=True, device=CPU)
    lenders = search.pool[world.match[search.pool] >= 0.5]
    assert len(lenders) == 40
    assert lenders.max() > 200
    assert 75 < lenders.mean() < 225
