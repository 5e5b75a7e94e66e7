"""Each measure against a plain reference, one pair at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import multivariate_normal
from torch import Tensor
from torch.nn.functional import normalize

from made_pairs import fitted_spaces, made_pairs, quality
from mispair.auditing.scoring import measures
from mispair.auditing.scoring.common_space import CommonSpace
from mispair.auditing.scoring.folds import FOLDS
from mispair.auditing.scoring.measures import (
    NATURAL,
    Bank,
    largest,
    make_bank,
    measure,
    names,
    rivals,
)
from mispair.functional.logistic import FloatArray

CORRELATIONS = torch.tensor([0.9, 0.6, 0.3, 0.05])
COLUMN = {name: number for number, name in enumerate(names(joint=True))}


def vectors(n: int, width: int, seed: int) -> Tensor:
    return normalize(torch.randn(n, width, generator=torch.Generator().manual_seed(seed)), dim=1)


def a_space(width: tuple[int, int] = (7, 5)) -> CommonSpace:
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randn(side, len(CORRELATIONS), generator=generator) for side in width)
    return CommonSpace(left, right, CORRELATIONS)


def each_pair(
    space: CommonSpace, bank: Bank, left: torch.Tensor, right: torch.Tensor, joint: bool = False
) -> torch.Tensor:
    rows = torch.arange(len(left))
    return measure(space, bank, left, right, rows, rows, joint=joint)


def measured(bank_size: int, joint: bool = False) -> tuple[CommonSpace, Bank, FloatArray, FloatArray, FloatArray]:
    """A space, a bank, pairs, and their measures."""
    width = (5, 5) if joint else (7, 5)
    space = a_space(width)
    bank = make_bank(space, vectors(bank_size, width[0], 2), vectors(bank_size, width[1], 3))
    left, right = vectors(20, width[0], 4), vectors(20, width[1], 5)
    return space, bank, left.numpy(), right.numpy(), each_pair(space, bank, left, right, joint=joint).numpy()


def cosine(a: FloatArray, b: FloatArray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def test_evidence_is_the_log_ratio_of_partners_to_strangers() -> None:
    """Of standard normal variates with these correlations, but for a constant."""
    r = CORRELATIONS.double().numpy()
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 30, len(r)))
    expected = np.zeros(30)
    for k, correlation in enumerate(r):
        together = multivariate_normal(mean=[0, 0], cov=[[1, correlation], [correlation, 1]])
        alone = multivariate_normal(mean=0, cov=1)
        both = np.column_stack([x[:, k], y[:, k]])
        expected += together.logpdf(both) - alone.logpdf(x[:, k]) - alone.logpdf(y[:, k])
    worth = torch.from_numpy(np.diag(np.sqrt(r / (1 - r * r))))
    space = CommonSpace(worth, worth, torch.from_numpy(r))
    bank = make_bank(space, torch.eye(4, dtype=torch.float64), torch.eye(4, dtype=torch.float64))
    each = torch.arange(len(x))
    measured = measure(space, bank, torch.from_numpy(x), torch.from_numpy(y), each, each, joint=False)
    found = measured[:, COLUMN["evidence"]].numpy()
    assert found - 0.5 * np.log(1 - r * r).sum() == pytest.approx(expected)


@pytest.mark.parametrize("bank_size", [3, 10, 40, 1500])
def test_contrast(bank_size: int) -> None:
    space, bank, left, right, found = measured(bank_size)
    a, b = left @ space.left.numpy(), right @ space.right.numpy()
    bank_a, bank_b = bank.left.numpy() @ space.left.numpy(), bank.right.numpy() @ space.right.numpy()
    count = {3: 3, 10: 10, 40: 10, 1500: 15}[bank_size]
    for pair in range(len(left)):
        similarity = cosine(a[pair], b[pair])
        to_right = sorted((cosine(a[pair], other) for other in bank_b), reverse=True)[:count]
        to_left = sorted((cosine(b[pair], other) for other in bank_a), reverse=True)[:count]
        expected = 2 * similarity - np.mean(to_right) - np.mean(to_left)
        assert found[pair, COLUMN["contrast"]] == pytest.approx(expected, abs=1e-5)


def test_a_joint_model_adds_its_cosine() -> None:
    *_, left, right, found = measured(40, joint=True)
    assert found.shape == (20, len(names(joint=True)) - len(NATURAL))
    expected = [cosine(a, b) for a, b in zip(left, right, strict=True)]
    assert found[:, COLUMN["joint"]] == pytest.approx(expected, abs=1e-5)


def test_the_contrast_of_a_joint_model() -> None:
    """negCLIPLoss, one exponential at a time."""
    _, bank, left, right, found = measured(40, joint=True)
    bank_left, bank_right = bank.left.double().numpy(), bank.right.double().numpy()
    strangers = [cosine(bank_left[i], bank_right[i - 1]) for i in range(40)]
    t = 0.25 * math.sqrt(sum((one - sum(strangers) / 40) ** 2 for one in strangers) / 40)
    for pair in range(len(left)):
        to_right = sum(math.exp(cosine(left[pair], other) / t) for other in bank_right) / 40
        to_left = sum(math.exp(cosine(right[pair], other) / t) for other in bank_left) / 40
        expected = cosine(left[pair], right[pair]) - t / 2 * (math.log(to_right) + math.log(to_left))
        assert found[pair, COLUMN["joint_contrast"]] == pytest.approx(expected, abs=1e-5)


def test_names_go_with_the_columns() -> None:
    assert names(joint=False) == ["contrast", "evidence"]
    assert names(joint=True) == [*names(joint=False), "joint", "joint_contrast", *NATURAL]
    assert names(joint=True, networks=True) == [*names(joint=True), "networks"] == list(measures.MEANINGS)
    assert measured(40)[-1].shape[1] == len(names(joint=False))


def test_the_best_rivals_are_as_many_as_the_bank_gives() -> None:
    items = torch.tensor([[1.0, 0.0]])
    others = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    assert rivals(items, others).tolist() == [0.0]
    many = torch.cat([torch.tensor([[0.5, 0.0]]).expand(10, 2), torch.tensor([[-1.0, 0.0]]).expand(90, 2)])
    assert rivals(items, many).tolist() == [0.5]


def test_measures_are_one_pair_at_a_time() -> None:
    space, bank, left, right, found = measured(40)
    rows = slice(3, 9)
    part = each_pair(space, bank, torch.from_numpy(left[rows]), torch.from_numpy(right[rows]))
    assert part.numpy() == pytest.approx(found[rows], abs=1e-5)


def test_vectors_of_nothing_give_finite_measures() -> None:
    space, bank, *_ = measured(40)
    found = each_pair(space, bank, torch.zeros(2, 7), vectors(2, 5, 6))
    assert torch.isfinite(found).all()


def test_a_bank_of_equal_pairs_gives_finite_measures() -> None:
    space = a_space()
    bank = make_bank(space, vectors(1, 7, 2).expand(20, 7), vectors(1, 5, 3).expand(20, 5))
    found = each_pair(space, bank, vectors(4, 7, 4), vectors(4, 5, 5))
    assert torch.isfinite(found).all()


def test_every_measure_tells_right_pairs_from_wrong_ones() -> None:
    pairs = made_pairs(600, 0.3)
    left, right = (normalize(side - side.mean(0), dim=1) for side in pairs.tensors)
    fold = np.arange(len(pairs)) % FOLDS
    trust = torch.from_numpy(np.where(pairs.mismatched, 0.01, 1.0))
    space = fitted_spaces(left, right, fold, trust, 1.0)[0]
    own = np.flatnonzero(fold == 0)
    known = np.flatnonzero((fold != 0) & ~pairs.mismatched)
    found = each_pair(space, make_bank(space, left[known], right[known]), left[own], right[own]).numpy()
    for name, column in zip(names(joint=False), found.T, strict=True):
        assert quality(column, pairs.mismatched[own]) > 0.9, name


@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(12, 500))
def test_the_largest_are_those_of_a_sort(seed: int, count: int, columns: int) -> None:
    scores = np.random.default_rng(seed).permutation(3 * columns).reshape(3, columns).astype("f4")
    scores[scores % 7 == 0] = -np.inf
    scores[:, :count] = np.arange(count) - 0.5  # so many are finite
    values, places = largest(torch.from_numpy(scores), count)
    np.testing.assert_array_equal(values.numpy(), -np.sort(-scores, axis=1)[:, :count])
    np.testing.assert_array_equal(np.take_along_axis(scores, places.numpy(), axis=1), values.numpy())
