"""Eq. 3-6 of the paper against scipy, loops and hand values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from mispair.functional import rank_correlation as rank_correlation_module
from mispair.functional.rank_correlation import (
    bank_correlation,
    distances,
    label_bounds,
    rank_correlation,
    ranks,
    soft_labels,
)

SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 40))
TIED = hnp.arrays(np.float32, SHAPES, elements=st.integers(-3, 3).map(float))


@given(TIED)
def test_ranks_count_what_is_not_greater(values: np.ndarray) -> None:
    expected = [[sum(other <= value for other in row) for value in row] for row in values]
    assert ranks(torch.from_numpy(values)).tolist() == expected


@given(st.integers(0, 10**6), st.integers(2, 200))
def test_without_ties_it_is_spearman(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    left, right = (rng.permutation(size).astype(np.float32) for _ in range(2))
    expected = stats.spearmanr(left, right).statistic
    found = rank_correlation(torch.from_numpy(left[None]), torch.from_numpy(right[None]))
    assert found.item() == pytest.approx(expected, abs=1e-5)


@given(hnp.arrays(np.float32, st.tuples(st.just(2), st.integers(2, 40)), elements=st.integers(-3, 3).map(float)))
def test_with_ties_it_is_pearson_of_the_ranks(values: np.ndarray) -> None:
    a, b = (np.array([sum(other <= value for other in row) for value in row], dtype=float) for row in values)
    found = rank_correlation(*torch.from_numpy(values)[:, None]).item()
    if a.std() == 0 or b.std() == 0:
        assert found == 0
    else:
        assert found == pytest.approx(np.corrcoef(a, b)[0, 1], abs=1e-5)


def test_a_hand_value_with_ties() -> None:
    # Ranks 1 3 3 4 and 2 2 3 4: deviations (-7, 1, 1, 5)/4 and (-3, -3, 1, 5)/4, so 44 / sqrt(76 * 44).
    left, right = torch.tensor([[1.0, 2.0, 2.0, 3.0]]), torch.tensor([[5.0, 5.0, 6.0, 7.0]])
    assert rank_correlation(left, right).item() == pytest.approx(44 / (76 * 44) ** 0.5)


def test_a_large_bank_keeps_its_precision() -> None:
    rng = np.random.default_rng(0)
    left = rng.normal(size=65536).astype(np.float32)
    right = (left + rng.normal(size=65536)).astype(np.float32)
    found = rank_correlation(torch.from_numpy(left[None]), torch.from_numpy(right[None])).item()
    assert found == pytest.approx(stats.spearmanr(left, right).statistic, abs=1e-5)


def test_against_a_bank_with_euclidean_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    left, right, bank_left, bank_right = (
        torch.from_numpy(rng.normal(size=shape).astype(np.float32)) for shape in ((9, 4), (9, 7), (30, 4), (30, 7))
    )
    expected = [
        stats.spearmanr(
            np.linalg.norm(bank_left.numpy() - x, axis=1), np.linalg.norm(bank_right.numpy() - y, axis=1)
        ).statistic
        for x, y in zip(left.numpy(), right.numpy(), strict=True)
    ]
    assert bank_correlation(left, right, bank_left, bank_right).tolist() == pytest.approx(expected, abs=1e-5)
    monkeypatch.setattr(rank_correlation_module, "CPU_ELEMENTS", 60)  # two pairs at a time
    assert bank_correlation(left, right, bank_left, bank_right).tolist() == pytest.approx(expected, abs=1e-5)
    assert bank_correlation(left[:0], right[:0], bank_left, bank_right).shape == (0,)
    assert bank_correlation(left, right, bank_left[:1], bank_right[:1]).tolist() == [0.0] * 9  # one entry says nothing


def test_distances_rank_like_euclidean_ones() -> None:
    rng = np.random.default_rng(1)
    items, bank = rng.normal(size=(5, 3)).astype(np.float32), rng.normal(size=(20, 3)).astype(np.float32)
    ours = distances(torch.from_numpy(items), torch.from_numpy(bank)).argsort(dim=1)
    assert ours.tolist() == torch.cdist(torch.from_numpy(items), torch.from_numpy(bank)).argsort(dim=1).tolist()


@pytest.mark.parametrize("size", [48, 512])
def test_a_common_offset_does_not_change_the_correlation(size: int) -> None:
    rng = np.random.default_rng(3)
    left, right = (5 + rng.normal(size=(size + 20, 16)) for _ in range(2))
    expected = [
        stats.spearmanr(np.linalg.norm(left[20:] - x, axis=1), np.linalg.norm(right[20:] - y, axis=1)).statistic
        for x, y in zip(left[:20], right[:20], strict=True)
    ]
    a, b = (torch.from_numpy(side.astype(np.float32)) for side in (left, right))
    found = bank_correlation(a[:20], b[:20], a[20:], b[20:])
    assert found.tolist() == pytest.approx(expected, abs=1e-5)


def test_bounds_are_means_of_the_extremes() -> None:
    correlation = torch.linspace(-1, 1, 1000)[torch.randperm(1000)]
    ordered = np.sort(correlation.numpy())
    gamma, mu = label_bounds(correlation, 0.1)
    assert gamma == pytest.approx(ordered[-100:].mean())
    assert mu == pytest.approx(ordered[:10].mean())
    assert label_bounds(torch.tensor([0.3]), 0.1) == pytest.approx((0.3, 0.3))


@given(
    st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=20),
    st.floats(-1, 1, width=32),
    st.floats(-1, 1, width=32),
)
def test_labels_follow_the_three_cases(values: list[float], gamma: float, mu: float) -> None:
    low = max(0.0, mu)
    labels = soft_labels(torch.tensor(values), gamma, mu).tolist()
    for value, label in zip(values, labels, strict=True):
        if value <= low and gamma > low:
            assert label == 0
        elif value > gamma and value > 0:
            assert label == 1
        elif gamma > low:
            assert label == pytest.approx((value - low) / (gamma - low), abs=1e-4)
        else:
            assert label == 0


def test_label_boundaries() -> None:
    labels = soft_labels(torch.tensor([0.2, 0.5, 0.8, 0.8001]), gamma=0.8, mu=0.2)
    assert labels.tolist() == pytest.approx([0, 0.5, 1, 1])


@given(hnp.arrays(np.float32, st.integers(1, 300), elements=st.floats(-1, 1, width=32)), st.floats(0.001, 1))
def test_bounds_of_any_share(values: np.ndarray, share: float) -> None:
    ordered = sorted(values.tolist())
    gamma, mu = label_bounds(torch.from_numpy(values), share)
    top, bottom = max(1, round(share * len(values))), max(1, round(0.01 * len(values)))
    assert gamma == pytest.approx(sum(ordered[-top:]) / top, abs=1e-5)
    assert mu == pytest.approx(sum(ordered[:bottom]) / bottom, abs=1e-5)
    assert gamma >= mu - 1e-6


def test_labels_of_a_set_that_says_nothing() -> None:
    """All coefficients equal, or all negative: gamma does not lie above max(0, mu)."""
    assert soft_labels(torch.tensor([0.4, 0.4]), 0.4, 0.4).tolist() == [0, 0]
    assert soft_labels(torch.tensor([-0.4, -0.1]), *label_bounds(torch.tensor([-0.4, -0.1]), 0.1)).tolist() == [0, 0]


def test_distances_are_not_rounded_under_autocast() -> None:
    rng = np.random.default_rng(2)
    items, bank = (torch.from_numpy(rng.normal(size=(n, 8)).astype(np.float32)) for n in (4, 300))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = bank_correlation(items, items, bank, bank)
        apart = distances(items.half(), bank.half())
    assert found.tolist() == pytest.approx([1.0] * 4)
    assert apart.dtype == torch.float32
    assert all(len(row.unique()) == 300 for row in apart)


@given(st.integers(1, 9), st.integers(1, 30), st.integers(0, 99))
def test_shared_left_items_are_ranked_once_with_the_same_result(items: int, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    left, bank_left = torch.randn(items, 3, generator=generator), torch.randn(12, 3, generator=generator)
    right, bank_right = torch.randn(count, 4, generator=generator), torch.randn(12, 4, generator=generator)
    link = torch.randint(items, (count,), generator=generator)
    expected = torch.stack(
        [
            rank_correlation(distances(left[row][None], bank_left), distances(item[None], bank_right))[0]
            for row, item in zip(link, right, strict=True)
        ]
    )
    found = bank_correlation(left, right, bank_left, bank_right, link)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
