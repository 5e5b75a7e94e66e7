"""The loss against plain loops and the losses of libraries, the batches, and exact resume."""

from __future__ import annotations

import io
import math
import warnings
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid

from mispair.errors import (
    ChangedError,
    ConflictError,
    DamagedError,
    InvalidValueError,
    MispairError,
    NonFiniteError,
    NotFoundError,
    ShapeError,
    TooFewError,
)
from mispair.functional.losses import hard_loss
from mispair.functional.rank_correlation import label_bounds, rank_correlation, soft_labels
from mispair.methods.soft_partners import SoftPartners
from mispair.pairs.pairs import Pairs, Vectors
from mispair.robust.robust import GAMMA_SHARE, Robust
from refusals import refused

METHODS = ("weights", "mend", "repair")
LOSSES = ("infonce", "siglip", "triplet")


def vectors(count: int, seed: int = 0, shared: int = 2) -> Pairs:
    """Pairs of vectors with match scores; `shared` of them have one left item."""
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(-(-count // shared), 4))
    link = np.arange(count) // shared
    right = hidden[link] @ rng.normal(size=(4, 6))
    score = rng.random(count).astype(np.float32)
    score[:3] = 0.9
    left, right = hidden.astype(np.float32), right.astype(np.float32)
    return Pairs(Vectors(left), Vectors(right), link, match_score=score)


def cosines(size: int, seed: int = 0) -> Tensor:
    left, right = torch.randn(2, size, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.nn.functional.normalize(left) @ torch.nn.functional.normalize(right).T


@pytest.mark.parametrize("method", METHODS)
def test_of_certain_pairs_it_is_the_usual_loss(method: Any) -> None:
    S, rows, target = cosines(6).float(), torch.arange(6) + 2, torch.arange(6)
    scores = np.ones(9)
    clip = (cross_entropy(S * 20, target) + cross_entropy(S.T * 20, target)) / 2
    assert torch.allclose(Robust(scores, method).loss(S, rows), clip)
    signs = 2 * torch.eye(6) - 1
    siglip = -logsigmoid(signs * (S * 5 - 3)).sum() / 6
    assert torch.allclose(Robust(scores, method, loss="siglip").loss(S, rows, logit_scale=5, logit_bias=-3), siglip)
    assert torch.allclose(Robust(scores, method, loss="triplet").loss(S, rows), hard_loss(S, 0.2) / 6)


def loop(kind: str, S: Tensor, pairs: list[tuple[int, int, float]], lefts: list[int], rights: list[int]) -> float:
    """The loss of (left place, right place, weight), where `lefts` and `rights` number the items of the places."""
    total, weight = 0.0, 0.0
    for i, j, w in pairs:
        own = float(S[i, j])
        negative = [b for a, b, _ in pairs if lefts[a] != lefts[i] and rights[b] != rights[j]]
        positive = [a for a, b, _ in pairs if lefts[a] != lefts[i] and rights[b] != rights[j]]
        row, column = [float(S[i, b]) for b in negative], [float(S[a, j]) for a in positive]
        if kind == "infonce":
            sums = (math.exp(20 * own) + sum(math.exp(20 * s) for s in side) for side in (row, column))
            total += w * sum(math.log(value) - 20 * own for value in sums) / 2
            weight += w
        elif kind == "siglip":
            total += w * math.log1p(math.exp(10 - 10 * own)) + sum(math.log1p(math.exp(10 * s - 10)) for s in row)
            weight += 1
        elif w > 0:
            margin = 0.2 * (10**w - 1) / 9
            total += sum(max([0.0, *(margin + s - own for s in side)]) for side in (row, column))
            weight += 1
    return total / max(weight, 1)


@given(st.sampled_from(LOSSES), st.integers(0, 99), st.integers(4, 9))
def test_the_loss_equals_a_loop(kind: Any, seed: int, size: int) -> None:
    pairs = vectors(24, seed)
    robust = Robust(pairs, "mend", loss=kind, flagged_share=0.5)
    rows = next(iter(robust.sampler(size)))
    S = cosines(len(rows), seed)
    assert robust.partners is not None
    expected, score = [], pairs.match_score
    assert score is not None
    for place, row in enumerate(rows):
        if score[row] >= 0.5:
            expected.append((place, place, float(score[row])))
            continue
        best: tuple[float, int, bool] = (0.0, -1, True)
        for own, keeps, lenders, odds in zip(
            robust.partners.own, robust.partners.keeps_right, robust.partners.lenders, robust.partners.odds, strict=True
        ):
            for lender, odd in zip(lenders, odds, strict=True):
                if own == row and lender in rows and odd > best[0]:
                    best = float(odd), rows.index(lender), bool(keeps)
        odd, lent, keeps = best
        crossed = (place, place, 0.0) if not odd else (lent, place, 0.3) if keeps else (place, lent, 0.3)
        expected.append(crossed)
    items = [int(pairs.link[row]) for row in rows]
    assert robust.loss(S, rows).item() == pytest.approx(loop(kind, S, expected, items, rows), rel=1e-4, abs=1e-5)


def test_pairs_that_share_an_item_are_no_negatives() -> None:
    S = cosines(4).float().requires_grad_()
    loss = Robust(np.ones(9), left_items=[0, 0, 1, 2, 3, 4, 5, 6, 7]).loss(S, [0, 1, 4, 4])
    zero = torch.autograd.grad(loss, S)[0] == 0
    assert torch.equal(zero, torch.tensor([[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]]).bool())


def test_a_flagged_pair_gives_no_gradient_to_its_own_cosine() -> None:
    S = cosines(3).float().requires_grad_()
    robust = Robust([0.9, 0.1, 0.8, 1.0])
    (gradient,) = torch.autograd.grad(robust.loss(S, [0, 1, 2]), S)
    assert gradient[1, 1] == 0
    assert (gradient[0, 0] < 0) & (gradient[2, 2] < 0)
    assert np.allclose(robust.weights, [0.9, 0, 0.8, 1.0])


# ---------------------------------------------------------------------- batches


@given(st.integers(0, 50), st.integers(2, 9), st.integers(1, 3), st.sampled_from(METHODS))
def test_an_epoch_has_each_trusted_pair_once(seed: int, size: int, world: int, method: Any) -> None:
    pairs = vectors(60, seed)
    robust = Robust(pairs, method, flagged_share=0.3, seed=seed)
    samplers = [robust.sampler(size, rank, world) for rank in range(world)]
    batches = [list(sampler) for sampler in samplers]
    assert {len(batch) for part in batches for batch in part} == {samplers[0].batch_size}
    assert [len(part) for part in batches] == [len(samplers[0])] * world
    rows = np.concatenate([row for step in zip(*batches, strict=True) for row in step])
    assert np.array_equal(rows, robust._order(len(samplers) * samplers[0].batch_size)[1][: len(rows)])
    assert pairs.match_score is not None
    trusted = rows[pairs.match_score[rows] >= 0.5]
    assert len(np.unique(trusted)) == len(trusted)
    left = robust.sampled - len(rows)
    assert len(trusted) >= len(robust.trained) - left
    assert left < samplers[0].batch_size * world
    assert list(samplers[0]) == batches[0]
    robust.end_epoch()
    assert list(samplers[0]) != batches[0] or len(rows) < 6


def test_flagged_pairs_come_with_a_pair_that_lends_a_partner() -> None:
    robust = Robust(vectors(400), "mend", flagged_share=0.3)
    count, lent = 0, 0
    for batch in robust.sampler(40):
        lefts, rights, weights = robust._matched(np.array(batch))
        flagged = ~robust._trusted[batch]
        assert np.array_equal(weights[~flagged], robust.weights[batch][~flagged])
        assert np.array_equal((lefts != rights), weights == np.float32(0.3))
        count, lent = count + flagged.sum(), lent + (weights[flagged] > 0).sum()
    assert count >= 0.25 * robust.sampled
    assert lent >= 0.9 * count


def test_a_lender_that_is_flagged_comes_too() -> None:
    robust = Robust(np.r_[np.zeros(4), np.ones(8)], "mend", flagged_share=0.5)
    robust.partners = SoftPartners(np.array([0, 1]), np.array([True, True]), np.array([[2], [7]]), np.ones((2, 1)))
    robust._partner_rows, robust.sampled = robust._places(), 11
    for _ in range(5):
        (order,) = robust.sampler(11)
        assert sorted(order) == sorted([*range(4, 12), 0, 1, 2])
        assert order.index(0) == order.index(2) + 1
        robust.end_epoch()


# ---------------------------------------------------------------------- epochs and checkpoints


def train(robust: Robust, model: Tensor, steps: int, size: int = 8) -> None:
    """Steps of a toy: one cosine a pair, of any two items."""
    while steps:
        for batch in islice(robust.sampler(size), steps):
            S = torch.tanh(model[batch][:, batch])
            loss = robust.loss(S, torch.tensor(batch))
            (gradient,) = torch.autograd.grad(loss, model)
            model.data -= 0.5 * gradient
            steps -= 1
        if steps:
            robust.end_epoch()


@pytest.mark.parametrize("method", METHODS)
def test_resumed_in_the_middle_of_an_epoch_it_is_the_same(method: Any) -> None:
    pairs = vectors(60)
    start = cosines(60).float()

    def fresh() -> tuple[Robust, Tensor]:
        seed: Any = np.int64(3)  # which torch does not load from a file
        return Robust(pairs, method, flagged_share=0.3, seed=seed), start.clone().requires_grad_()

    whole, model = fresh()
    train(whole, model, 17)
    first, resumed = fresh()
    train(first, resumed, 10)
    assert first.epoch >= 1
    assert first.step > 0
    saved = io.BytesIO()
    torch.save(first.state_dict(), saved)
    saved.seek(0)
    second, _ = fresh()
    second.load_state_dict(torch.load(saved, weights_only=True))
    train(second, resumed, 7)
    assert torch.equal(resumed, model)
    assert np.array_equal(second.weights, whole.weights)
    assert second.epoch == whole.epoch


def test_an_epoch_that_was_not_ended_is_noticed() -> None:
    robust = Robust(np.ones(8))
    for batch in robust.sampler(4):
        robust.loss(torch.zeros(4, 4), batch)
    with pytest.warns(UserWarning, match="end_epoch was not called"):
        list(robust.sampler(4))
    robust.load_state_dict(robust.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(robust.sampler(4)) == []  # saved after the last step of an epoch
        robust.end_epoch()
        assert len(list(robust.sampler(4))) == 2


@pytest.mark.parametrize("method", ["weights", "mend"])
def test_only_repair_changes_weights_while_training(method: Any) -> None:
    robust = Robust(np.r_[np.full(30, 0.9), np.zeros(2)], method)
    before = robust.weights
    robust.loss(cosines(32, 5).float(), range(32))
    robust.end_epoch()
    assert np.array_equal(robust.weights, before)


def test_an_evaluation_teaches_nothing() -> None:
    robust = Robust(np.ones(32), "repair")
    S = cosines(32, 5).float()
    with torch.no_grad():
        robust.loss(S, range(32))
    robust.end_epoch()
    assert robust.weights.min() == 1
    robust.loss(S, range(32))
    robust.end_epoch()
    assert robust.weights.min() < 1


def test_repair_labels_by_rank_correlation() -> None:
    robust = Robust(np.r_[np.ones(30), np.zeros(2)], "repair")
    S = cosines(32, 5).float()
    S[:16, :16] = (S[:16, :16] + S[:16, :16].T) / 2  # the first pairs see the others alike from both sides
    robust.loss(S, range(32))
    robust.end_epoch()
    correlation = rank_correlation(-S[:, :30], -S[:30].T)[:30]
    labels = soft_labels(correlation, *label_bounds(correlation, GAMMA_SHARE))
    assert np.allclose(robust.weights[:30], labels, atol=1e-6)
    assert robust.weights[30:].max() == 0


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("similarity", "rows", "kind", "where", "names"),
    [
        (torch.zeros(3, 4), [0, 1, 2], ShapeError, "similarity", "(3, 4)"),
        (np.zeros((3, 3)), [0, 1, 2], ShapeError, "similarity", "(3, 3)"),
        (torch.zeros(3, 3), [0, 1], ShapeError, "rows", "(2,)"),
        (torch.zeros(3, 3), [0.0, 1.0, 2.0], ShapeError, "rows", "float64"),
        (torch.zeros(3, 3), [0, 1, 4], NotFoundError, "rows", "pair 4"),
        (torch.zeros(3, 3), torch.tensor([0, -1, 2]), NotFoundError, "rows", "pair -1"),
    ],
)
def test_wrong_batches_are_refused(
    similarity: Any, rows: Any, kind: type[MispairError], where: str, names: str
) -> None:
    with refused(kind, where, names):
        Robust(np.ones(4)).loss(similarity, rows)


def test_what_is_not_finite_is_named() -> None:
    S = torch.zeros(3, 3)
    S[1] = torch.nan
    with pytest.raises(NonFiniteError, match=r"step 0: .*pairs 7 "):
        Robust(np.ones(9)).loss(S, [4, 7, 2])
    with pytest.raises(NonFiniteError, match=r"step 0: .*logit_scale"):
        Robust(np.ones(9)).loss(torch.zeros(3, 3), [4, 7, 2], logit_scale=math.nan)


@pytest.mark.parametrize(
    "arguments",
    [
        {"method": "osa"},
        {"loss": "clip"},
        {"flag_below": 2},
        {"flagged_weight": -1},
        {"flagged_share": 0.95},
        {"temperature": 0},
        {"temperature": "0.05"},
        {"margin": None},
        {"negatives": 1.5},
        {"seed": -1},
        {"seed": None},
    ],
)
def test_wrong_settings_are_refused(arguments: dict[str, Any]) -> None:
    ((name, value),) = arguments.items()
    with refused(InvalidValueError, name, repr(value)):
        Robust(np.full(4, 0.9), **arguments)


def test_items_and_scores_must_be_of_all_pairs() -> None:
    with refused(ShapeError, "left_items", "(2,)"):
        Robust(np.full(4, 0.9), left_items=[1, 2])
    with refused(TooFewError, names="0 of 4"):
        Robust(np.full(4, 0.9), flag_below=0.99)


def test_wrong_samplers_are_refused() -> None:
    robust = Robust(np.ones(8))
    for size in (1, 0, 2.5, True):
        with refused(InvalidValueError, "batch_size", repr(size)):
            robust.sampler(size)  # type: ignore[arg-type]
    with refused(InvalidValueError, "rank", "2"):
        robust.sampler(4, 2, 2)
    with refused(TooFewError, names="5"):
        robust.sampler(4, 0, 5)


@pytest.mark.parametrize(
    ("other", "where"),
    [
        (Robust(np.ones(8), "mend"), "method"),
        (Robust(np.ones(9)), "pairs"),
        (Robust(np.ones(8), seed=3), "seed"),
    ],
)
def test_states_of_others_are_refused(other: Robust, where: str) -> None:
    with refused(ChangedError, where):
        Robust(np.ones(8)).load_state_dict(other.state_dict())


@pytest.mark.parametrize("state", [{}, None, {"method": "weights"}])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with refused(DamagedError, "state"):
        Robust(np.ones(8)).load_state_dict(state)


def test_in_the_middle_of_an_epoch_batches_keep_their_size() -> None:
    first = Robust(np.ones(24))
    for batch in islice(first.sampler(4), 2):
        first.loss(torch.zeros(4, 4), batch)
    second = Robust(np.ones(24))
    second.load_state_dict(first.state_dict())
    with refused(ConflictError, "batch_size", "8"):
        next(iter(second.sampler(8)))
    assert len(list(second.sampler(np.int64(2), rank=1, world=2))) == 4  # type: ignore[arg-type]
    second.load_state_dict(first.state_dict())
    second.end_epoch()
    assert len(list(second.sampler(8))) == 3


def test_in_the_middle_of_an_epoch_it_keeps_its_length() -> None:
    first, second = (Robust(vectors(60), "mend", flagged_share=share) for share in (0.1, 0.2))
    second.load_state_dict(first.state_dict())  # at the start of one it may change
    first.loss(torch.zeros(4, 4), next(iter(first.sampler(4))))
    with refused(ChangedError, "sampled", f"{first.sampled}, not {second.sampled}"):
        second.load_state_dict(first.state_dict())
