"""Half-replacing against loops over single pairs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mispair.methods import half_replacing
from mispair.methods.epoch_view import EpochView, encode_items, epoch_view
from mispair.methods.half_replacing import best_partners, find_partners, nearest
from mispair.methods.memory_bank import Bank
from mispair.models import Encoded, SideSpec, build
from mispair.pairs.batches import PairLoader, random_batches
from mispair.pairs.pairs import Pairs
from mispair.support.arrays import IntArray
from small_data import regions, shake, small_config, tokens, vectors

MODELS = ("vse", "sgr", "saf", "scan", "two-tower")
DIRECTIONS = pytest.mark.parametrize("keep_left", [True, False], ids=["keep left", "keep right"])
COUNT = 20


def case(model: str, link: IntArray | None = None, groups: IntArray | None = None) -> EpochView:
    """What a network in training mode says about 20 pairs, by default with a left item each."""
    link = np.arange(COUNT) if link is None else link
    if model == "two-tower":
        pairs = Pairs(vectors(COUNT, width=5), vectors(COUNT, width=9, seed=1), link, groups=groups)
    else:
        pairs = Pairs(regions(COUNT), tokens([1 + i * 7 % 11 for i in range(COUNT)]), link, groups=groups)
    network = build(
        small_config(model=model, dropout=0.5), SideSpec.of(pairs.left), SideSpec.of(pairs.right), seed=1
    ).train()
    shake(network)
    loader = PairLoader(pairs, torch.device("cpu"))
    return epoch_view(network, loader, 0.2, random_batches(COUNT, 7, np.random.default_rng(0)), mask=True)


def bank_of(view: EpochView, pairs: IntArray, size: int | None = None) -> Bank:
    """In full precision, so that a loop finds the same best one."""
    bank = Bank(size or len(pairs), dtype=torch.float32)
    bank.push(view.encoded(pairs, left=True), view.encoded(pairs, left=False), pairs)
    return bank


def one(items: Encoded, row: int) -> Encoded:
    """One item, cut to its own length."""
    alone = items.take(torch.tensor([row]))
    if alone.local is None or alone.lengths is None:
        return alone
    return Encoded(alone.local[:, : alone.lengths[0]], alone.lengths, alone.pooled)


def loop_score(view: EpochView, left: Encoded, right: Encoded) -> float:
    """Similarity of one left with one right item in evaluation mode, by the other of the two ways to score."""
    view.network.eval()
    with torch.no_grad():
        score = view.network.similarity(left, right).item()
    view.network.train()
    return score


def loop_nearest(kept: np.ndarray, bank: np.ndarray, count: int, barred: np.ndarray) -> list[int]:
    apart = {slot: float(((kept - item) ** 2).sum()) for slot, item in enumerate(bank) if not barred[slot]}
    found = sorted(apart, key=lambda slot: apart[slot])[:count]
    return found + [-1] * (min(count, len(bank)) - len(found))


@given(st.integers(0, 6), st.integers(1, 12), st.integers(1, 15), st.floats(0, 1), st.integers(0, 10**6))
def test_nearest_equals_a_loop(n: int, size: int, count: int, share: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    kept, bank = (rng.normal(size=(rows, 3)).astype(np.float32) for rows in (n, size))
    barred = rng.random((n, size)) < share
    found = nearest(torch.from_numpy(kept), torch.from_numpy(bank), count, torch.from_numpy(barred))
    assert found.shape == (n, min(count, size))
    assert found.tolist() == [loop_nearest(kept[row], bank, count, barred[row]) for row in range(n)]


def test_nearest_with_ties_and_nothing_left() -> None:
    kept, bank = torch.zeros(2, 2), torch.tensor([[1.0, 0], [0, 1.0], [3.0, 0]])
    barred = torch.tensor([[True, True, True], [False, False, True]])
    found = nearest(kept, bank, 2, barred)
    assert found[0].tolist() == [-1, -1]
    assert set(found[1].tolist()) == {0, 1}


@DIRECTIONS
@pytest.mark.parametrize("model", MODELS)
def test_the_best_of_the_candidates_is_taken(model: str, keep_left: bool) -> None:
    view = case(model)
    bank = bank_of(view, np.array([4, 9, 2, 17, 0, 13, 11]))
    pairs = np.array([1, 3, 5, 7, 19, 9])
    kept = view.encoded(pairs, left=keep_left)
    slots = np.array([[0, 1, 2], [6, -1, 5], [3, 3, 4], [-1, -1, -1], [-1, 2, -1], [5, 4, 3]])
    expected = []
    for row, candidates in enumerate(slots):
        scores = {}
        for slot in candidates[candidates >= 0]:
            pair = bank.ids[[slot]]  # encoded again, not read from the bank
            if keep_left:
                other = encode_items(view.network, view.loader, pair, left=False)
                scores[int(slot)] = loop_score(view, one(kept, row), other)
            else:
                other = encode_items(view.network, view.loader, pair, left=True)
                scores[int(slot)] = loop_score(view, other, one(kept, row))
        expected.append(max(scores, key=lambda slot: scores[slot]) if scores else -1)
    found = best_partners(view.network, kept, bank, slots, keep_left=keep_left)
    assert found.tolist() == expected
    assert expected != slots[:, 0].tolist()  # the nearest is not always the best here
    assert view.network.training


def loop_correlation(bank: Bank, left: np.ndarray, right: np.ndarray) -> float:
    """Eq. 3-5 for one pair: Pearson of the ranks of the Euclidean distances."""
    ranks = []
    for item, items in zip((left, right), bank.pooled(), strict=True):
        apart = [float(np.linalg.norm(item - other)) for other in items.double().numpy()]
        ranks.append([sum(other <= value for other in apart) for value in apart])
    return float(np.asarray(np.corrcoef(ranks))[0, 1])


@DIRECTIONS
@pytest.mark.parametrize("model", MODELS)
def test_partners_equal_a_loop_over_pairs(model: str, keep_left: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_replacing, "PAIRS_AT_ONCE", 9)  # two pairs at a time
    monkeypatch.setattr(half_replacing, "SCORED_AT_ONCE", 3)
    view = case(model)
    bank = bank_of(view, np.array([4, 9, 2, 17, 0, 13, 11, 6, 15]))
    pairs, count = np.array([1, 4, 5, 7, 17, 9, 3]), 4  # some of them are in the bank themselves
    found = find_partners(view, bank, pairs, count, keep_left=keep_left)
    kept = view.encoded(pairs, left=keep_left)
    bank_left, bank_right = (side.numpy() for side in bank.pooled())
    for row, pair in enumerate(pairs):
        own = kept.pooled[row].numpy()
        candidates = loop_nearest(own, bank_left if keep_left else bank_right, count, bank.ids == pair)
        scores = {
            slot: loop_score(view, one(kept, row), one(bank.right.take(np.array([slot])), 0))
            if keep_left
            else loop_score(view, one(bank.left.take(np.array([slot])), 0), one(kept, row))
            for slot in candidates
        }
        best = max(candidates, key=lambda slot: scores[slot])
        assert found.ids[row] == bank.ids[best]
        new = (own, bank_right[best]) if keep_left else (bank_left[best], own)
        assert found.correlation[row].item() == pytest.approx(loop_correlation(bank, *new), abs=1e-5)


@DIRECTIONS
@pytest.mark.parametrize("model", ["sgr", "two-tower"])
def test_what_is_known_to_be_wrong_never_comes_back(model: str, keep_left: bool) -> None:
    link = np.arange(COUNT) // 4  # four pairs share an image
    view = case(model, link)
    bank, pairs = bank_of(view, np.arange(COUNT)), np.arange(COUNT)
    found = find_partners(view, bank, pairs, 2 * COUNT, keep_left=keep_left)
    assert (found.ids >= 0).all()
    assert (found.ids != pairs).all()
    if not keep_left:
        assert (link[found.ids] != link).all()
    else:  # another text of the same image is welcome, and the images in the bank are the nearest
        near = find_partners(view, bank, pairs, 3, keep_left=True)
        assert (link[near.ids] == link).all()


@pytest.mark.parametrize("model", MODELS)
def test_no_copy_of_the_mismatched_image_comes_back(model: str) -> None:
    """Rows 0 to 9 and 10 to 19 are of ten images, by their groups."""
    view = case(model, groups=np.arange(COUNT) % 10)
    found = find_partners(view, bank_of(view, np.arange(10, COUNT)), np.arange(10), 20, keep_left=False)
    assert (found.ids >= 10).all()
    assert (found.ids % 10 != np.arange(10)).all()
    only_copies = find_partners(view, bank_of(view, np.array([13])), np.array([3, 4]), 20, keep_left=False)
    assert only_copies.ids.tolist() == [-1, 13]


@DIRECTIONS
@pytest.mark.parametrize("model", ["sgr", "two-tower"])
def test_a_bank_of_one_pair(model: str, keep_left: bool) -> None:
    view = case(model, np.arange(COUNT) // 2)
    bank = bank_of(view, np.array([6]))
    found = find_partners(view, bank, np.array([6, 7, 8]), 32, keep_left=keep_left)
    # 7 has the image of 6: its text may come, the image may not.
    assert found.ids.tolist() == ([-1, 6, 6] if keep_left else [-1, -1, 6])
    assert found.correlation.tolist() == [0.0] * 3  # one entry says nothing


@DIRECTIONS
@pytest.mark.parametrize("model", ["sgr", "two-tower"])
def test_more_neighbours_than_pairs_in_the_bank(model: str, keep_left: bool) -> None:
    view = case(model)
    bank = bank_of(view, np.array([4, 9, 2]), size=10)  # not full
    pairs = np.array([2, 5, 9])
    found = [find_partners(view, bank, pairs, count, keep_left=keep_left) for count in (3, 1000)]
    assert found[0].ids.tolist() == found[1].ids.tolist()
    assert torch.equal(found[0].correlation, found[1].correlation)
    assert set(found[0].ids.tolist()) <= {4, 9, 2}


@DIRECTIONS
def test_no_pairs(keep_left: bool) -> None:
    view = case("two-tower")
    bank = bank_of(view, np.array([4, 9, 2]))
    found = find_partners(view, bank, np.empty(0, dtype=np.int64), 32, keep_left=keep_left)
    assert found.ids.shape == (0,)
    assert found.ids.dtype == np.int64
    assert found.correlation.shape == (0,)
