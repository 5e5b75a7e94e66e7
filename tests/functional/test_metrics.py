import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from torch import Tensor

from mispair.functional import metrics
from mispair.functional.metrics import Recalls, Retrieval, auroc, fold_retrieval, ranks, recalls, retrieval

NAN, INF = math.nan, math.inf
Case = tuple[Tensor, Tensor, Tensor]


def part_of(S: Tensor, left: Tensor, right: Tensor) -> metrics.Part:
    return lambda rows, columns: retrieval(S[rows][:, columns], left[rows], right[columns])


@st.composite
def cases(draw: st.DrawFn, smallest: int = 1, largest: int = 8) -> Case:
    """Ties, negative, infinite and missing scores; groups of several images, several captions, or none."""
    l, r = draw(st.integers(smallest, largest)), draw(st.integers(smallest, largest))  # noqa: E741
    score = st.one_of(st.sampled_from([0.0, -0.0, 0.5, -0.5, NAN, -INF, INF]), st.floats(-1, 1, width=32))
    S = torch.tensor(draw(st.lists(st.lists(score, min_size=r, max_size=r), min_size=l, max_size=l)))
    group = st.integers(0, max(l, r) // 2 + 1)
    left = torch.tensor(draw(st.lists(group, min_size=l, max_size=l)))
    right = torch.tensor(draw(st.lists(group, min_size=r, max_size=r)))
    return S, left, right


def loop_rank(scores: list[float], matches: list[bool]) -> int:
    """Wrong items that the best right one does not beat. A NaN beats nothing, and nothing beats a NaN."""
    good = [score for score, match in zip(scores, matches, strict=True) if match]
    best = -INF
    for score in good:
        if math.isnan(score):
            best = NAN
            break
        best = max(best, score)
    return sum(not best > score for score, match in zip(scores, matches, strict=True) if not match)


def loop_ranks(S: Tensor, left: Tensor, right: Tensor) -> tuple[list[int], list[int]]:
    match = [[a == b for b in right.tolist()] for a in left.tolist()]
    by_row = [loop_rank(S[i].tolist(), match[i]) for i in range(len(S))]
    by_column = [loop_rank(S[:, j].tolist(), [row[j] for row in match]) for j in range(S.shape[1])]
    return by_row, by_column


@given(cases())
def test_ranks_equal_a_loop(case: Case) -> None:
    (left, right), (l, r) = ranks(*case), case[0].shape  # noqa: E741
    # Without any match all are wrong; how far behind the last one such an item stands does not matter.
    assert (left.clamp(max=r).tolist(), right.clamp(max=l).tolist()) == loop_ranks(*case)


@given(cases(), st.integers(1, 20))
def test_chunks_change_nothing(case: Case, elements: int) -> None:
    whole = ranks(*case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "CHUNK_ELEMENTS", elements)
        for ours, expected in zip(ranks(*case), whole, strict=True):
            assert torch.equal(ours, expected)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=20))
def test_recalls_equal_their_definition(values: list[int]) -> None:
    ours = recalls(torch.tensor(values))
    for k, share in ((1, ours.r1), (5, ours.r5), (10, ours.r10)):
        assert share == pytest.approx(100 * sum(value < k for value in values) / len(values))
    ordered, n = sorted(values), len(values)
    median = ordered[n // 2] if n % 2 else (ordered[n // 2 - 1] + ordered[n // 2]) / 2
    assert ours.median_rank == math.floor(median) + 1
    assert ours.mean_rank == pytest.approx(sum(values) / n + 1)


def five_captions(images: int) -> tuple[Tensor, Tensor]:
    return torch.arange(images), torch.arange(5 * images) // 5


def test_a_diagonal_matrix_is_perfect() -> None:
    left, right = five_captions(30)
    result = retrieval((left[:, None] == right).float(), left, right)
    assert result.left_to_right == result.right_to_left == Recalls(100.0, 100.0, 100.0, 1.0, 1.0)
    assert result.rsum == 600


def test_its_reverse_has_a_known_value() -> None:
    """Score = distance from the diagonal: the right answer of query i is behind all others."""
    n = 20
    S = (torch.arange(n)[:, None] - torch.arange(n)).abs().float()
    result = retrieval(S, torch.arange(n), torch.arange(n))
    assert result.rsum == 0
    assert result.left_to_right.mean_rank == n


def test_known_ranks() -> None:
    """Row i scores column j by -|j - i - 3|: for i < n - 3 the right answer is among the ties of distance 3."""
    n = 30
    S = -(torch.arange(n) - torch.arange(n)[:, None] - 3).abs().float()
    left, _ = ranks(S, torch.arange(n), torch.arange(n))
    assert left[:24].tolist() == [6] * 24  # five nearer and one tie
    result = retrieval(S, torch.arange(n), torch.arange(n))
    assert result.left_to_right.r5 == pytest.approx(100 * sum(rank < 5 for rank in left.tolist()) / n)


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, NAN, -INF, INF])
def test_a_collapsed_matrix_scores_nothing(value: float) -> None:
    left, right = five_captions(12)
    assert retrieval(torch.full((12, 60), value), left, right).rsum == 0


def test_one_nan_cannot_help() -> None:
    S = torch.eye(12)
    S[3, 3] = NAN
    left, right = ranks(S, torch.arange(12), torch.arange(12))
    assert left.tolist() == right.tolist() == [11 if i == 3 else 0 for i in range(12)]
    S = torch.eye(12)
    S[3, 4] = NAN
    left, right = ranks(S, torch.arange(12), torch.arange(12))
    assert left.tolist() == [int(i == 3) for i in range(12)]
    assert right.tolist() == [int(i == 4) for i in range(12)]


@given(cases(smallest=2))
def test_only_the_order_of_scores_matters(case: Case) -> None:
    """All scores below zero rank as before: the metric does not take 0 for "not found"."""
    S, left, right = case
    S = S.nan_to_num(0.1, 2, -2)
    order = torch.unique(S)
    dense = torch.searchsorted(order, S).float()
    for ours, expected in zip(ranks(dense - len(order) - 1, left, right), ranks(S, left, right), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_precision(dtype: Any) -> None:
    S = (1 + torch.randn(6, 6, dtype=torch.float64) * 1e-9).to(dtype)  # of which most cannot tell the numbers apart
    ours = ranks(S, torch.arange(6), torch.arange(6))
    assert [rank.tolist() for rank in ours] == list(loop_ranks(S.double(), torch.arange(6), torch.arange(6)))


def test_the_smallest_sets() -> None:
    one = torch.zeros(1, dtype=torch.long)
    assert retrieval(torch.tensor([[-5.0]]), one, one).rsum == 600
    assert retrieval(torch.tensor([[NAN]]), one, one).rsum == 600  # nothing to confuse it with
    assert retrieval(torch.tensor([[0.1, 0.9]]), one, torch.tensor([0, 0])).rsum == 600


def test_an_item_without_a_match_gets_the_last_rank() -> None:
    left, right = ranks(torch.eye(20), torch.arange(20), torch.arange(20) + 5)
    assert left[:5].min() >= 20
    assert right[-5:].min() >= 20
    assert retrieval(torch.eye(20), torch.arange(20), torch.arange(20) + 100).rsum == 0


def test_an_item_without_a_match_is_never_found_in_a_tiny_set() -> None:
    """Though a rank of the size of the set would be among the first 5."""
    assert retrieval(torch.eye(3), torch.arange(3), torch.arange(3) + 100).rsum == 0


@given(st.integers(4, 12), st.integers(1, 4), st.integers(1, 3), st.sampled_from([0.0, 0.5]))
def test_folds_equal_direct_computation(images: int, folds: int, captions: int, grain: float) -> None:
    S = torch.randn(images, images * captions)
    S = (S / grain).round() if grain else S  # with ties or without
    left, right = torch.arange(images), torch.arange(images * captions) // captions
    size, rest = divmod(images, folds)
    expected: dict[str, float] = {}
    start = 0
    for fold in range(folds):
        stop = start + size + (fold < rest)
        columns = slice(start * captions, stop * captions)
        part = retrieval(S[start:stop, columns], left[start:stop], right[columns])
        for name, value in part.metrics().items():
            expected[name] = expected.get(name, 0) + value / folds
        start = stop
    assert fold_retrieval(part_of(S, left, right), left, right, folds).metrics() == pytest.approx(expected)


def test_folds_take_the_captions_of_their_images_wherever_they_stand() -> None:
    left, right = five_captions(10)
    order = torch.randperm(50)
    S = torch.randn(10, 50)
    S[left[:, None] == right] += 1
    straight = fold_retrieval(part_of(S, left, right), left, right, 5)
    mixed = fold_retrieval(part_of(S[:, order], left, right[order]), left, right[order], 5)
    assert mixed.metrics() == pytest.approx(straight.metrics())
    direct = [
        retrieval(S[2 * f : 2 * f + 2, 10 * f : 10 * f + 10], left[2 * f : 2 * f + 2], right[10 * f : 10 * f + 10]).rsum
        for f in range(5)
    ]
    assert straight.rsum == pytest.approx(sum(direct) / 5)


def test_metrics_are_flat_and_their_sum_is_of_six() -> None:
    result = Retrieval(Recalls(1.0, 2.0, 3.0, 40.0, 50.0), Recalls(6.0, 7.0, 8.0, 90.0, 100.0))
    metrics = result.metrics()
    assert metrics["i2t_r1"] == 1
    assert metrics["t2i_r10"] == 8
    assert metrics["t2i_mean_rank"] == 100
    assert metrics["rsum"] == result.rsum == 27
    assert len(metrics) == 11


def test_the_average_of_two_equal_matrices_ranks_the_same() -> None:
    S = torch.randn(8, 40)
    left, right = five_captions(8)
    assert retrieval(torch.stack([S, S]).mean(dim=0), left, right) == retrieval(S, left, right)


@given(st.lists(st.tuples(st.sampled_from([-1.5, 0.0, 0.25, 0.5, 3.0]) | st.floats(-1, 1), st.booleans()), max_size=60))
def test_auroc_equals_scikit_learn_with_ties(items: list[tuple[float, bool]]) -> None:
    scores, positive = np.array([score for score, _ in items]), np.array([kind for _, kind in items], dtype=bool)
    found = auroc(scores, positive)
    if positive.all() or not positive.any():
        assert found is None
    else:
        expected = roc_auc_score(positive, scores)
        assert found == pytest.approx(expected, abs=1e-12)
        assert auroc(-scores, positive) == pytest.approx(1 - expected, abs=1e-12)


def test_auroc_of_many_single_precision_scores() -> None:
    rng = np.random.default_rng(0)
    positive = rng.random(150_000) < 0.6
    scores = (positive + rng.normal(size=len(positive))).astype(np.float32)
    assert auroc(scores, positive) == pytest.approx(roc_auc_score(positive, scores), abs=1e-9)
    assert auroc(np.zeros(5), np.array([True, False, False, True, False])) == 0.5
