"""Soft partners against plain loops, and what is drawn of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mispair.functional.canonical_correlation import canonical_directions
from mispair.methods import soft_partners
from mispair.methods.soft_partners import ACROSS, NEIGHBOURS, TEMPERATURE, SoftPartners, find_soft_partners
from mispair.pairs.pairs import Pairs, Vectors
from tiny import tiny_pairs

CPU = torch.device("cpu")


def alike_pairs(seed: int, count: int, shared: int) -> Pairs:
    """Vectors of which both sides say the same in their own way."""
    rng = np.random.default_rng(seed)
    images = -(-count // shared)
    hidden = rng.normal(size=(images, 3))
    link = np.arange(count) // shared
    left = hidden @ rng.normal(size=(3, 5)) + 0.1 * rng.normal(size=(images, 5))
    right = hidden[link] @ rng.normal(size=(3, 4)) + 0.1 * rng.normal(size=(count, 4))
    return Pairs(Vectors(left.astype(np.float32)), Vectors(right.astype(np.float32)), link)


@given(st.integers(0, 99), st.integers(6, 24), st.integers(1, 3), st.floats(0.2, 0.9))
def test_partners_equal_a_loop(seed: int, count: int, shared: int, share: float) -> None:
    pairs = alike_pairs(seed, count, shared)
    trusted = np.random.default_rng(seed).random(count) < share
    trusted[0], trusted[1] = True, False
    found = find_soft_partners(pairs, trusted, CPU)
    good = [i for i in range(count) if trusted[i]]
    x = np.asarray(pairs.left.features, dtype=np.float64)  # type: ignore[union-attr]
    y = np.asarray(pairs.right.features, dtype=np.float64)  # type: ignore[union-attr]
    x, y = x - x[pairs.link[good]].mean(0), y - y[good].mean(0)
    a, b = canonical_directions(x[pairs.link[good]], y[good])

    def unit(v: np.ndarray) -> np.ndarray:
        return v / max(float(np.linalg.norm(v)), 1e-12)

    left, right = [unit(x[pairs.link[i]] @ a) for i in range(count)], [unit(y[i] @ b) for i in range(count)]
    flagged = [i for i in range(count) if not trusted[i]]
    images = {int(pairs.link[i]) for i in good}
    alone = [
        i for n, i in enumerate(flagged) if pairs.link[i] not in images and pairs.link[i] not in pairs.link[flagged[:n]]
    ]
    assert found.own.tolist() == flagged + alone
    assert found.keeps_right.tolist() == [True] * len(flagged) + [False] * len(alone)
    for row, (i, keeps_right) in enumerate(zip(found.own, found.keeps_right, strict=True)):
        mine, other = (right, left) if keeps_right else (left, right)
        likeness = {j: float(mine[i] @ mine[j] + ACROSS * mine[i] @ other[j]) for j in good}
        best = sorted(likeness.values(), reverse=True)[:NEIGHBOURS]
        assert [likeness[j] for j in found.lenders[row]] == pytest.approx(best, abs=1e-4)
        powers = np.exp((np.array(best) - best[0]) / TEMPERATURE)
        assert found.odds[row] == pytest.approx(powers / powers.sum(), abs=0.01)


def test_flagged_captions_find_images_like_theirs() -> None:
    pairs = alike_pairs(0, 200, 4)
    trusted = np.arange(200) % 4 > 0  # the first caption of each image is flagged, though right
    found = find_soft_partners(pairs, trusted, CPU)
    hits = pairs.link[found.lenders] == pairs.link[found.own][:, None]
    assert (found.odds * hits).sum(axis=1).mean() > 0.5  # chance: 0.02


def test_all_flagged_images_have_a_trusted_caption() -> None:
    found = find_soft_partners(alike_pairs(0, 30, 3), np.arange(30) % 3 > 0, CPU)
    assert found.keeps_right.all()
    assert len(found) == 10


def test_of_many_trusted_pairs_some_lend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search is linear in the pairs, and items are moved to the common space some at a time."""
    pairs, trusted = alike_pairs(0, 60, 2), np.arange(60) % 10 > 3
    before = find_soft_partners(pairs, trusted, CPU)
    monkeypatch.setattr(soft_partners, "BLOCK", 7)
    assert (find_soft_partners(pairs, trusted, CPU).lenders == before.lenders).all()
    monkeypatch.setattr(soft_partners, "LENDERS", 12)
    found = find_soft_partners(pairs, trusted, CPU)
    assert found.own.tolist() == before.own.tolist()
    assert NEIGHBOURS < len(np.unique(found.lenders)) <= 12
    assert trusted[found.lenders].all()
    again = find_soft_partners(pairs, trusted, CPU)
    assert (again.lenders == found.lenders).all()


def test_texts_and_regions_have_partners() -> None:
    pairs = tiny_pairs(12)
    found = find_soft_partners(pairs, np.arange(60) % 5 > 1, CPU)
    assert found.lenders.shape == (24, NEIGHBOURS)
    assert found.odds.sum(axis=1) == pytest.approx(np.ones(24))


@pytest.mark.parametrize("trusted", [1, 2, 3])
def test_few_trusted_pairs_lend_what_they_have(trusted: int) -> None:
    found = find_soft_partners(alike_pairs(0, 8, 1), np.arange(8) < trusted, CPU)
    assert found.lenders.shape[1] == trusted
    assert np.isfinite(found.odds).all()


def table(rows: int, seed: int = 0) -> SoftPartners:
    rng = np.random.default_rng(seed)
    odds = rng.random((rows, 3))
    keeps_right = rng.random(rows) < 0.7
    return SoftPartners(np.arange(rows), keeps_right, 1000 + rng.integers(0, 9, (rows, 3)), odds / odds.sum(1)[:, None])


@given(st.integers(1, 20), st.integers(0, 30), st.integers(0, 99))
def test_what_is_drawn_keeps_one_item_of_each(rows: int, count: int, seed: int) -> None:
    partners = table(rows, seed)
    lefts, rights = partners.draw(count, np.random.default_rng(seed))
    assert len(lefts) == len(rights) == min(count, rows)
    own = np.where(lefts < 1000, lefts, rights)
    assert len(set(own.tolist())) == len(own)
    for left, right in zip(lefts, rights, strict=True):
        row = min(left, right)
        assert (right == row) == partners.keeps_right[row]
        assert max(left, right) in partners.lenders[row]


def test_lenders_are_drawn_by_their_odds() -> None:
    odds = np.array([[0.7, 0.2, 0.1]])
    partners = SoftPartners(np.array([0]), np.array([True]), np.array([[1, 2, 3]]), odds)
    rng = np.random.default_rng(0)
    lefts = [int(partners.draw(1, rng)[0][0]) for _ in range(2000)]
    assert [lefts.count(pair) / 2000 for pair in (1, 2, 3)] == pytest.approx([0.7, 0.2, 0.1], abs=0.04)
