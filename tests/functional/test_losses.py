import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mispair.functional.losses import (
    adaptive_prediction,
    best_count,
    hard_loss,
    hard_losses,
    meta_margin,
    negatives_at,
    pair_quality,
    sample_losses,
    soft_margin,
    triplet_costs,
    warmup_loss,
)

Costs = list[list[float]]


@st.composite
def matrices(draw: st.DrawFn, smallest: int = 2, largest: int = 7) -> Tensor:
    """Square similarities with ties, zeros and negative scores among them."""
    size = draw(st.integers(smallest, largest))
    score = st.one_of(st.sampled_from([0.0, 0.5, -0.5, 1.0, -1.0]), st.floats(-1, 1, width=32))
    return torch.tensor(draw(st.lists(st.lists(score, min_size=size, max_size=size), min_size=size, max_size=size)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Tensor | float, Tensor | None]:
    S = draw(matrices())
    one = st.floats(0, 0.5, width=32)
    margin = draw(one) if draw(st.booleans()) else torch.tensor(draw(st.lists(one, min_size=len(S), max_size=len(S))))
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=len(S) ** 2, max_size=len(S) ** 2))).view(S.shape)
    return S, margin, mask if draw(st.booleans()) else None


def loop_costs(S: Tensor, margin: Tensor | float, mask: Tensor | None) -> tuple[Costs, Costs]:
    """Double loop: margin of the row's pair for the image anchor, of the column's pair for the text anchor."""
    n = len(S)
    margins = [float(margin)] * n if isinstance(margin, float) else margin.tolist()
    image_cost, text_cost = [[0.0] * n for _ in range(n)], [[0.0] * n for _ in range(n)]
    for i in range(n):
        for j in range(n):
            if i == j or (mask is not None and bool(mask[i, j])):
                continue
            image_cost[i][j] = max(0.0, margins[i] + S[i, j].item() - S[i, i].item())
            text_cost[i][j] = max(0.0, margins[j] + S[i, j].item() - S[j, j].item())
    return image_cost, text_cost


@given(cases())
def test_costs_equal_a_double_loop(case: tuple[Tensor, Tensor | float, Tensor | None]) -> None:
    for ours, expected in zip(triplet_costs(*case), loop_costs(*case), strict=True):
        assert ours.numpy() == pytest.approx(np.array(expected), abs=1e-6)


@given(cases(), st.integers(1, 9))
def test_losses_equal_sums_of_the_loop(case: tuple[Tensor, Tensor | float, Tensor | None], negatives: int) -> None:
    S, margin, mask = case
    B = len(S)
    image_cost, text_cost = loop_costs(*case)
    columns = [[text_cost[i][j] for i in range(B)] for j in range(B)]

    samples = [sum(image_cost[i]) / B + sum(columns[i]) / B for i in range(B)]
    assert sample_losses(S, margin, mask).tolist() == pytest.approx(samples, abs=1e-5)
    assert warmup_loss(S, margin, mask).item() == pytest.approx(sum(samples), abs=1e-5)

    n = min(negatives, B - 1)
    hard = sum(sum(sorted(anchor, reverse=True)[:n]) / n for anchor in (*image_cost, *columns))
    assert hard_loss(S, margin, negatives, mask).item() == pytest.approx(hard, abs=1e-5)
    assert hard_losses(S, margin, negatives, mask).sum().item() == pytest.approx(hard, abs=1e-5)


@given(matrices())
def test_one_hardest_negative_is_the_max_version(S: Tensor) -> None:
    image_cost, text_cost = triplet_costs(S, 0.2)
    expected = image_cost.max(dim=1).values.sum() + text_cost.max(dim=0).values.sum()
    assert hard_loss(S, 0.2).item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-6)
    assert torch.equal(hard_loss(S, 0.2), hard_loss(S, 0.2, 1))


@given(matrices(), st.integers(0, 5))
def test_all_negatives_are_the_mean_over_the_others(S: Tensor, more: int) -> None:
    expected = sum(cost.sum().item() for cost in triplet_costs(S, 0.2)) / (len(S) - 1)
    assert hard_loss(S, 0.2, len(S) - 1 + more).item() == pytest.approx(expected, abs=1e-5)


@given(matrices(), st.integers(1, 6))
def test_more_negatives_make_it_easier(S: Tensor, n: int) -> None:
    assert hard_loss(S, 0.2, n + 1) <= hard_loss(S, 0.2, n) + 1e-5


def test_a_pairs_margin_counts_where_the_pair_is_the_anchor() -> None:
    image_cost, text_cost = triplet_costs(torch.zeros(3, 3), torch.tensor([0.1, 0.2, 0.3]))
    assert image_cost.numpy() == pytest.approx(np.array([[0, 0.1, 0.1], [0.2, 0, 0.2], [0.3, 0.3, 0]]))
    assert text_cost.numpy() == pytest.approx(np.array([[0, 0.2, 0.3], [0.1, 0, 0.3], [0.1, 0.2, 0]]))


def test_a_matrix_of_margins_counts_in_both_directions() -> None:
    margin = torch.tensor([[9, 0.1, 0.2], [0.3, 9, 0.4], [0.5, 0.6, 9]])
    for cost in triplet_costs(torch.zeros(3, 3), margin):
        assert cost.numpy() == pytest.approx(margin.numpy() * (1 - np.eye(3)))
    S = torch.tensor([[0.5, 0.4, 0.1], [0.6, 0.3, 0.2], [0.0, 0.1, 0.7]])
    image_cost, text_cost = triplet_costs(S, margin)
    assert image_cost[1, 2].item() == pytest.approx(0.4 + 0.2 - 0.3)
    assert text_cost[1, 0].item() == pytest.approx(0.3 + 0.6 - 0.5)


def test_warmup_by_hand_divides_by_the_batch_size() -> None:
    S = torch.tensor([[0.5, 0.4], [0.6, 0.3]])
    # image 0: .2+.4-.5 = .1; image 1: .2+.6-.3 = .5; caption 0: .2+.6-.5 = .3; caption 1: .2+.4-.3 = .3
    assert warmup_loss(S, 0.2).item() == pytest.approx((0.1 + 0.5 + 0.3 + 0.3) / 2)
    assert sample_losses(S, 0.2).tolist() == pytest.approx([(0.1 + 0.3) / 2, (0.5 + 0.3) / 2])
    assert hard_loss(S, 0.2).item() == pytest.approx(1.2)


def test_masked_negatives_are_left_out() -> None:
    S = torch.tensor([[0.5, 0.9, 0.4], [0.9, 0.5, 0.1], [0.1, 0.1, 0.5]])
    mask = torch.zeros(3, 3, dtype=torch.bool)
    mask[0, 1] = mask[1, 0] = True
    assert hard_loss(S, 0.2).item() == pytest.approx(4 * 0.6 + 0 + 0.1)
    assert hard_loss(S, 0.2, mask=mask).item() == pytest.approx(0.1 + 0.1)


def test_a_single_pair_has_no_loss() -> None:
    S = torch.tensor([[0.3]])
    assert hard_loss(S, 0.2).item() == warmup_loss(S, 0.2).item() == 0


def test_gradients_pull_the_pair_up_and_its_hardest_negatives_down() -> None:
    S = torch.tensor([[0.5, 0.4, 0.0], [0.1, 0.5, 0.0], [0.0, 0.0, 0.5]], requires_grad=True)
    hard_loss(S, 0.2).backward()  # type: ignore[no-untyped-call]
    assert S.grad is not None
    # [0, 1] violates the margin for image 0 and for caption 1, nothing else does
    assert S.grad.tolist() == [[-1, 2, 0], [0, -1, 0], [0, 0, 0]]


@given(matrices())
def test_gradient_of_the_warmup_equals_the_finite_difference_of_the_loop(S: Tensor) -> None:
    S = S.double() + torch.arange(S.numel(), dtype=torch.float64).view(S.shape) * 1.7e-3  # away from most kinks
    image_cost, text_cost = triplet_costs(S, 0.2)
    near_a_kink = torch.stack([0.2 + S - S.diagonal()[:, None], 0.2 + S - S.diagonal()]).abs() < 1e-5
    if bool(near_a_kink.any()):
        return
    S.requires_grad_()
    warmup_loss(S, 0.2).backward()  # type: ignore[no-untyped-call]
    assert S.grad is not None
    expected = ((image_cost > 0).double() + (text_cost > 0).double()) / len(S)
    pulls = ((image_cost > 0).sum(dim=1) + (text_cost > 0).sum(dim=0)).double() / len(S)
    torch.testing.assert_close(S.grad, expected - pulls.diag())


@given(st.integers(1, 200).flatmap(lambda start: st.tuples(st.just(start), st.integers(1, start))), st.integers(0, 500))
def test_negatives_shrink_from_start_to_end(ends: tuple[int, int], steps: int) -> None:
    start, end = ends
    counts = [negatives_at(step, start, end, steps) for step in range(steps + 3)]
    assert counts[0] == (start if steps else end)
    assert counts[steps:] == [end] * 3
    assert all(a >= b for a, b in pairwise(counts))
    assert all(end <= count <= start for count in counts)


def test_soft_margin() -> None:
    assert soft_margin(torch.tensor([0.0, 0.5, 1.0])).tolist() == pytest.approx([0, 0.2 * (math.sqrt(10) - 1) / 9, 0.2])
    assert soft_margin(torch.tensor(0.5)).item() == pytest.approx(0.04805, abs=1e-5)


@given(st.floats(0, 1), st.floats(0.01, 1), st.floats(1.5, 100))
def test_soft_margin_equals_its_formula(y: float, margin: float, base: float) -> None:
    ours = soft_margin(torch.tensor(y, dtype=torch.float64), margin, base).item()
    assert ours == pytest.approx(margin * (base**y - 1) / (base - 1), abs=1e-9)


def test_meta_margin() -> None:
    p = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0])
    assert meta_margin(p).tolist() == pytest.approx([0, 0.02, 0.1, 0.18, 0.2])
    assert meta_margin(p, 0.5).tolist() == pytest.approx([0, 0.05, 0.25, 0.45, 0.5])


@given(st.floats(1e-6, 1 - 1e-6), st.floats(0.01, 1))
def test_meta_margin_equals_its_published_form(p: float, margin: float) -> None:
    expected = margin / (1 + (p / (1 - p)) ** -2)
    assert meta_margin(torch.tensor(p, dtype=torch.float64), margin).item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("size", [2, 9, 10, 128])
def test_equal_qualities_give_the_label_one(size: int) -> None:
    assert adaptive_prediction(torch.full((size, size), 0.3)).tolist() == pytest.approx([1.0] * size, abs=1e-4)
    assert adaptive_prediction(torch.eye(size)).tolist() == pytest.approx([1.0] * size)


@pytest.mark.parametrize(("pairs", "count"), [(2, 1), (9, 1), (10, 2), (19, 2), (20, 3), (128, 13)])
def test_the_best_are_a_tenth_and_one(pairs: int, count: int) -> None:
    assert best_count(pairs) == count


@given(matrices(smallest=9, largest=11), st.booleans())
def test_adaptive_prediction_equals_the_loop(S: Tensor, masked: bool) -> None:
    B = len(S)
    mask = (torch.arange(B)[:, None] // 2 == torch.arange(B) // 2) if masked else None
    losses = sample_losses(S, 0.2, mask).tolist()
    q = [min(max(0.2 - loss / 2, 0.0), 0.2) for loss in losses]
    assert pair_quality(S, 0.2, mask).tolist() == pytest.approx(q, abs=1e-6)
    best = sorted(q, reverse=True)[: B // 10 + 1]
    scale = sum(best) / len(best)
    p = adaptive_prediction(S, 0.2, mask)
    assert bool(((p >= 0) & (p <= 1)).all())
    if scale > 1e-6:  # 0 / 0 in the published code; here no pair of such a batch is trusted
        assert p.tolist() == pytest.approx([min(1.0, value / scale) for value in q], abs=1e-3)
    elif scale == 0:
        assert p.tolist() == [0.0] * B
