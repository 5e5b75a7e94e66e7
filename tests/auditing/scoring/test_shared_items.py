"""Which pairs share items, against loops and simulations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.special import betaincinv

from mispair.auditing.scoring import shared_items as module
from mispair.auditing.scoring.shared_items import SharedItems, find_shared_items, likeness, near_enough
from mispair.pairs.layouts.arrays import from_memory
from mispair.support.arrays import IntArray

pytest.importorskip("pyarrow")

CPU = torch.device("cpu")
WIDTH = 30


def found(left: IntArray, right: IntArray, groups: IntArray | None = None, seed: int = 0) -> SharedItems:
    """The shared items of pairs of these items; each item is a random vector."""
    rng = np.random.default_rng(seed)
    lefts, rights = (rng.standard_normal((int(side.max()) + 1, WIDTH))[side] for side in (left, right))
    return find_shared_items(from_memory(lefts, rights, groups=groups), workers=2, device=CPU)


def lowest(*labels: IntArray) -> list[int]:
    """The first row with the same labels as each row."""
    rows = list(zip(*(label.tolist() for label in labels), strict=True))
    return [rows.index(row) for row in rows]


def connected(*labels: IntArray) -> list[int]:
    """The first row that each row is connected to by equal labels, one step at a time."""
    tops = list(range(len(labels[0])))
    while True:
        before = list(tops)
        for label in labels:
            for row in range(len(tops)):
                tops[row] = min(top for other, top in enumerate(tops) if label[other] == label[row])
        if tops == before:
            return tops


ITEMS = hnp.arrays(np.int64, 24, elements=st.integers(0, 40))


@given(ITEMS, ITEMS)
@settings(max_examples=12)
def test_items_pairs_and_groups_by_a_loop(left: IntArray, right: IntArray) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_OF_ALL", 1.0)
        patch.setattr(module, "MANY", 100)  # no placeholders
        shared = found(left, right)
    assert shared.left.tolist() == lowest(left)
    assert shared.right.tolist() == lowest(right)
    assert shared.first.tolist() == lowest(left, right)
    assert lowest(shared.groups) == connected(left, right)
    assert shared.split == 0


@given(ITEMS, ITEMS, st.booleans())
@settings(max_examples=12)
def test_no_group_outgrows_a_fold_and_given_groups_stay_whole(left: IntArray, right: IntArray, give: bool) -> None:
    groups = np.arange(len(left)) // 2 if give else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_OF_ALL", 0.2)
        patch.setattr(module, "MANY", 100)
        shared = found(left, right, groups)
    sizes = np.bincount(shared.groups[shared.is_first])
    most = max(1, int(0.2 * shared.is_first.sum()))
    assert (sizes <= most).all() or give
    whole = connected(shared.left, shared.right)
    assert all(whole[row] == whole[first] for row, first in enumerate(lowest(shared.groups)))
    assert lowest(shared.groups, shared.first) == lowest(shared.first)  # copies are in one fold
    if groups is not None:  # but for copies, which are with the pair that they are copies of
        different = shared.is_first
        assert lowest(shared.groups[different], groups[different]) == lowest(groups[different])
    if shared.split == 0:
        assert lowest(shared.groups) == whole


def test_less_shared_items_are_joined_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caption on every other image; each image has two captions."""
    left = np.arange(200) // 2
    right = np.where(np.arange(200) % 2 == 0, 0, np.arange(200))
    monkeypatch.setattr(module, "MANY", 1000)
    shared = found(left, right)
    assert lowest(shared.groups) == lowest(left)
    assert shared.split == 200


def test_rows_that_cannot_be_read_share_nothing() -> None:
    left = np.random.default_rng(0).standard_normal((60, WIDTH))[np.arange(60) // 2]
    left[::2] = 0
    right = np.random.default_rng(1).standard_normal((60, WIDTH))
    shared = find_shared_items(from_memory(left, right), workers=1, device=CPU)
    assert shared.groups.tolist() == list(range(60))
    nothing = find_shared_items(from_memory(np.zeros((60, 4)), right), workers=1, device=CPU)
    assert nothing.groups.tolist() == list(range(60))


def test_a_given_group_shares_with_others_by_its_first_readable_row() -> None:
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((60, WIDTH)), rng.standard_normal((60, WIDTH))
    left[10] = np.nan
    left[20] = left[11]  # both are the first readable rows of their groups
    shared = find_shared_items(from_memory(left, right, groups=np.arange(60) // 10), workers=1, device=CPU)
    assert shared.left.tolist() == lowest(np.array([0, 1, 1, 3, 4, 5])[np.arange(60) // 10])


@pytest.mark.parametrize("directions", [3, 5, 8])
def test_near_enough_is_rare_by_accident(directions: int) -> None:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((2000, directions))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    threshold = near_enough(vectors, 100)
    cosines = (vectors @ vectors.T)[np.triu_indices(2000, 1)]
    expected = module.BY_ACCIDENT / 100
    if threshold > module.NEAR:
        assert (cosines >= threshold).mean() == pytest.approx(expected, rel=0.25)
    else:
        assert (cosines >= threshold).mean() <= expected


def test_how_near_is_near_enough_by_a_loop() -> None:
    rng = np.random.default_rng(0)
    vectors = np.eye(6)[rng.integers(6, size=40)] + 0.3 * (rng.random((40, 1)) < 0.3) * rng.standard_normal((40, 6))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)  # some are equal, some at right angles
    cosines = [float(a @ b) for i, a in enumerate(vectors) for j, b in enumerate(vectors) if i != j]
    square = np.mean([cosine**2 for cosine in cosines if cosine < 1 - 1e-6])
    sine = betaincinv((1 / square - 1) / 2, 0.5, min(1.0, 2 * module.BY_ACCIDENT / 40))
    assert near_enough(vectors, 40) == pytest.approx(max(module.NEAR, np.sqrt(1 - sine)), abs=1e-6)


def test_few_directions_leave_only_equal_vectors() -> None:
    angles = np.random.default_rng(0).uniform(0, 2 * np.pi, 500)
    circle = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    assert near_enough(circle, 500) > 0.999999
    assert near_enough(np.ones((50, 3)) / np.sqrt(3), 50) == 1
    shared = find_shared_items(from_memory(circle, circle[::-1].copy()), workers=1, device=CPU)
    assert shared.is_first.mean() > 0.9


def test_likeness_by_a_loop() -> None:
    rng = np.random.default_rng(0)
    these, others = rng.standard_normal((6, 5)), rng.standard_normal((9, 5))
    wins = [
        float(these[i] @ these[j] > these[i] @ other) for i in range(6) for j in range(6) for other in others if i != j
    ]
    assert likeness(these, others) == pytest.approx(np.mean(wins))
    assert likeness(np.ones((8, 5)), rng.standard_normal((50, 5)) - 3) == 1


def test_unlike_partners_of_one_item() -> None:
    left = np.concatenate([np.zeros(30, dtype=np.int64), np.arange(1, 271)])
    shared = found(left, np.arange(300))
    assert shared.unlike[0].tolist() == [30] * 30 + [0] * 270
    assert not shared.unlike[1].any()
    assert len(np.unique(shared.groups)) == 300  # they are not learned from
    few = found(np.where(np.arange(300) < 7, 0, np.arange(300)), np.arange(300))
    assert not few.unlike.any()


def test_one_item_may_be_in_most_pairs() -> None:
    right = np.maximum(np.arange(300) - 199, 0)
    assert found(np.arange(300), right).unlike[1].tolist() == [200] * 200 + [0] * 100
    assert not found(np.arange(300), np.arange(300) // 200).unlike.any()  # two names of classes


def test_partners_that_are_alike_belong_together() -> None:
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((300, WIDTH)), rng.standard_normal((300, WIDTH))
    left[:30] = left[0]
    right[:30] = right[0] + 0.8 * right[:30]
    assert not find_shared_items(from_memory(left, right), workers=1, device=CPU).unlike.any()


def test_where_most_items_are_shared_none_is_a_placeholder() -> None:
    assert not found(np.arange(300) // 10, np.arange(300)).unlike.any()


def test_a_chain_of_near_duplicates_is_not_one_item() -> None:
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((300, WIDTH)), rng.standard_normal((300, WIDTH))
    angle = np.linspace(0, 3, 60)[:, None]
    left[:60] = 5 * (np.cos(angle) * np.eye(WIDTH)[0] + np.sin(angle) * np.eye(WIDTH)[1])
    shared = find_shared_items(from_memory(left, right), workers=1, device=CPU)
    assert len(np.unique(shared.left[:60])) == 1
    assert not shared.unlike.any()


def test_saved_and_loaded(tmp_path: Path) -> None:
    shared = found(np.arange(100) // 3, np.arange(100) // 2)
    path = tmp_path / "items.npz"
    shared.save(path)
    again = SharedItems.load(path, 100)
    assert again is not None
    for name in ("left", "right", "first", "groups", "unlike"):
        assert (getattr(again, name) == getattr(shared, name)).all()
    assert [group.tolist() for group in again.near_duplicates[0]] == [
        group.tolist() for group in shared.near_duplicates[0]
    ]
    assert SharedItems.load(path, 99) is None
    path.write_bytes(path.read_bytes()[:-50])
    assert SharedItems.load(path, 100) is None
    assert SharedItems.load(tmp_path / "no.npz", 100) is None
