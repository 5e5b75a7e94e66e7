"""Contrastive losses against plain loops in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mispair.functional.contrastive import (
    distillation,
    info_nce,
    match_probabilities,
    sigmoid_losses,
)

SIZES = st.integers(1, 7)
SEEDS = st.integers(0, 999)
TEMPERATURES = st.sampled_from([0.05, 0.2, 1.0])


def scores(size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(size, size, generator=generator, dtype=torch.float64) * 2 - 1


def shared(size: int, seed: int) -> Tensor:
    """Pairs that share an image."""
    images = torch.randint(3, (size,), generator=torch.Generator().manual_seed(seed))
    return images[:, None] == images


def softmax(values: list[float], temperature: float) -> list[float]:
    top = max(values)
    powers = [math.exp((value - top) / temperature) for value in values]
    return [power / sum(powers) for power in powers]


@given(SIZES, SEEDS, TEMPERATURES, st.booleans())
def test_info_nce_equals_a_loop(size: int, seed: int, temperature: float, masked: bool) -> None:
    t, mask = scores(size, seed), shared(size, seed) if masked else None
    expected = []
    for i in range(size):
        there = [j for j in range(size) if j == i or mask is None or not mask[i, j]]
        place = there.index(i)
        image = softmax([float(t[i, j]) for j in there], temperature)[place]
        text = softmax([float(t[j, i]) for j in there], temperature)[place]
        expected.append(-math.log(image) - math.log(text))
    assert info_nce(t, temperature, mask).tolist() == pytest.approx(expected, abs=1e-9)


@given(SIZES, SEEDS, TEMPERATURES, st.integers(1, 3))
def test_distillation_equals_a_loop(size: int, seed: int, temperature: float, networks: int) -> None:
    t = scores(size, seed)
    teachers = [scores(size, seed + 1 + number) for number in range(networks)]
    rows, columns = match_probabilities(teachers, temperature)
    found = distillation(t, temperature, rows, columns)
    for i in range(size):
        total = 0.0
        for matrices, own in (
            ([m.tolist() for m in teachers], t.tolist()),
            ([m.T.tolist() for m in teachers], t.T.tolist()),
        ):
            wanted = [softmax(matrix[i], temperature) for matrix in matrices]
            mean = [sum(one[j] for one in wanted) / networks for j in range(size)]
            mine = softmax(own[i], temperature)
            total += sum(p * (math.log(p) - math.log(q)) for p, q in zip(mean, mine, strict=True) if p > 0)
        assert float(found[i]) == pytest.approx(total, abs=1e-8)
    assert torch.allclose(rows.sum(dim=1), torch.ones(size, dtype=torch.float64))
    assert torch.allclose(columns.sum(dim=0), torch.ones(size, dtype=torch.float64))


def test_distillation_is_finite_where_a_teacher_is_sure() -> None:
    sure = torch.eye(4) * 2 - 1
    t = (torch.zeros(4, 4)).requires_grad_()
    loss = distillation(t, 0.005, *match_probabilities([sure], 0.005)).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.isfinite()
    assert t.grad is not None
    assert t.grad.isfinite().all()


@given(SIZES, SEEDS, st.booleans())
def test_sigmoid_losses_equal_a_loop(size: int, seed: int, masked: bool) -> None:
    z, mask = 5 * scores(size, seed), shared(size, seed) if masked else None
    positive, negative = sigmoid_losses(z, mask)
    for i in range(size):
        others = [j for j in range(size) if j != i and not (mask is not None and mask[i, j])]
        assert positive[i].item() == pytest.approx(math.log1p(math.exp(-z[i, i])))
        assert negative[i].item() == pytest.approx(sum(math.log1p(math.exp(z[i, j])) for j in others))
