"""Vectors of encoders with a common space, of several qualities."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from made_pairs import MadePairs, learned, made_pairs, quality, scores
from mispair.auditing.audit import COMMON_SPACE, audit
from mispair.auditing.scoring import joint, judge
from mispair.auditing.scoring.folds import fold_numbers, in_random_order
from mispair.auditing.scoring.joint import normalised_cosine, normalised_cosines, share_a_space
from mispair.auditing.scoring.judge import FitRound
from mispair.auditing.scoring.measures import names


def common_space(n: int, share: float, noise: float, *, gap: float = 0.0, width: int = 24, seed: int = 0) -> MadePairs:
    """Pairs of one space: what both items show, what only one shows, and a gap between the two sides as CLIP has it."""
    rng = np.random.default_rng(seed)
    seen = rng.standard_normal((n, width)) * np.linspace(1.5, 0.3, width)
    moved = rng.permutation(n)[: round(share * n)]
    shown = seen.copy()
    shown[moved] = seen[np.roll(moved, 1)]
    mismatched = np.zeros(n, dtype=bool)
    mismatched[moved] = True
    sides = [
        side + noise * rng.standard_normal((n, width)) + gap * rng.standard_normal(width) for side in (seen, shown)
    ]
    left, right = ((side / np.linalg.norm(side, axis=1, keepdims=True)).astype(np.float32) for side in sides)
    return MadePairs(left, right, mismatched, np.arange(n))


@pytest.mark.parametrize(
    ("n", "share", "noise", "gap"), [(120, 0.3, 1.2, 0.0), (300, 0.6, 0.9, 1.0), (400, 0.2, 2.0, 2.0)]
)
def test_the_match_score_is_never_worse_than_the_cosine(n: int, share: float, noise: float, gap: float) -> None:
    pairs = common_space(n, share, noise, gap=gap)
    found = learned(pairs)
    assert found.names == names(joint=True)
    cosine = quality((pairs.left * pairs.right).sum(1), pairs.mismatched)
    assert quality(scores(found, pairs), pairs.mismatched) >= cosine - 0.003


def test_a_common_space_is_noticed_and_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = common_space(150, 0.3, 1.2)
    with_it = quality(scores(learned(pairs), pairs), pairs.mismatched)
    monkeypatch.setattr(judge, "share_a_space", lambda *_: False)
    without = learned(pairs)
    assert without.names == names(joint=False)
    assert with_it > quality(scores(without, pairs), pairs.mismatched) + 0.02


@pytest.mark.parametrize("seed", range(3))
def test_spaces_of_the_same_width_are_not_taken_for_one(seed: int) -> None:
    pairs = made_pairs(300, 0.3, widths=(16, 16), seed=seed)
    right = pairs.tensors[1] @ torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(seed))).Q
    assert not share_a_space(pairs.tensors[0], right, pairs.fold, pairs.groups)
    assert not share_a_space(pairs.tensors[0], right[:, :8], pairs.fold, pairs.groups)
    one = np.zeros(300, dtype=np.int64)
    assert not share_a_space(pairs.tensors[0], pairs.tensors[0], fold_numbers(one), one)  # nothing to shuffle


def test_the_notes_say_that_a_common_space_was_noticed() -> None:
    pairs = common_space(150, 0.2, 0.8)
    found, said = (audit(pairs.left, pairs.right, joint=joint) for joint in (False, True))
    assert COMMON_SPACE in found.notes
    assert COMMON_SPACE not in said.notes
    assert found.match_score.tolist() == said.match_score.tolist()


def test_normalised_cosines_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = (torch.nn.functional.normalize(torch.randn(60, 8), dim=1) for _ in range(2))
    lefts, rights = np.arange(40), np.arange(20, 60)
    own, strange = normalised_cosines(x, y, lefts, rights, np.arange(60))
    monkeypatch.setattr(joint, "PIECE", 7)
    again = normalised_cosines(x, y, lefts, rights, np.arange(60))
    np.testing.assert_allclose(again[0], own, atol=1e-6)
    np.testing.assert_allclose(again[1], strange, atol=1e-6)
    chosen = in_random_order(np.arange(60), np.arange(60))
    rows = torch.arange(60)
    expected = normalised_cosine(x, y, x[chosen], y[chosen], rows, rows)
    np.testing.assert_allclose(own, expected.numpy(), atol=1e-6)
    assert strange[0] == pytest.approx(
        float(normalised_cosine(x[:1], y[20:21], x[chosen], y[chosen], rows[:1], rows[:1])), abs=1e-6
    )


def test_an_item_that_is_like_everything_loses() -> None:
    others = torch.nn.functional.normalize(torch.tensor([[1.0, 0.1], [1.0, -0.1], [1.0, 0.2]]), dim=1)
    left = right = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    common, special = normalised_cosine(left, right, others, others, torch.arange(2), torch.arange(2)).tolist()
    assert special > common


def test_two_scores_count_as_much_as_they_say() -> None:
    rng = np.random.default_rng(0)
    null, useless, useful = rng.standard_normal((3, 400))
    found = FitRound([], useless, null).beside((useful + 2, null[::-1].copy()))
    assert np.corrcoef(found.observed, useful)[0, 1] > 0.99
    assert FitRound([], useless, null).beside(None).observed is useless
