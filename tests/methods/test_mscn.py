"""MSCN: the meta step against exact second derivatives, the split against scipy, and who may change what."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

import mispair
from mispair import models
from mispair.compute.devices import autocast
from mispair.config import Config
from mispair.errors import ConflictError, DataError, NonFiniteError, TooFewError
from mispair.functional.losses import hard_loss, meta_margin
from mispair.methods import mscn, mscn_meta
from mispair.methods.base import StepPlan, similarity
from mispair.methods.mscn import (
    Mscn,
    MscnInputs,
    clean_posterior,
    known_loss,
    known_pairs,
    meta_set,
    pair_scores,
)
from mispair.methods.mscn_meta import MetaGradient, body, meta_gradient, score_layer, steady, with_weights
from mispair.models import Encoded, Network, SideSpec, bigru, build
from mispair.pairs.batches import Batch, Items, PairLoader
from mispair.pairs.noise import add_noise
from mispair.pairs.pairs import Pairs
from mispair.settings import SgrafSettings
from mispair.training.events import MethodEvent, StepEvent
from mispair.training.run_folder import Run, read_events
from mispair.training.settings import override
from mispair.training.trainer import Trainer
from refusals import refused
from small_data import chosen, one_to_one, regions, shake, small_config, take_step, tokens
from tiny import tiny_pairs
from training import check_resume

SMALL: dict[str, Any] = {
    "method": "mscn", "model": "sgr", "embed_size": 8, "word_size": 6, "sim_size": 8, "batch_size": 12,
    "warmup_epochs": 1, "epochs": 2, "lr": 1e-3, "meta_lr": 1e-3, "meta_share": 0.1, "dropout": 0.3,
    "hardening_steps": 10, "negatives_start": 5, "negatives_end": 2, "device": "cpu",
}  # fmt: skip
BATCH = np.array([3, 8, 20, 21, 33, 40, 59])


def config(**settings: Any) -> Config:
    return Mscn.adapted(override(Config(data="test"), {**SMALL, **settings}))


def noisy_pairs(images: int = 12) -> Pairs:
    return add_noise(tiny_pairs(images), noise_ratio=0.4, seed=0)


def method(pairs: Pairs | None = None, **settings: Any) -> Mscn:
    """The method with two networks that have not learned anything."""
    chosen, pairs = config(**settings), noisy_pairs() if pairs is None else pairs
    nets = [build(chosen, SideSpec.of(pairs.left), SideSpec.of(pairs.right), seed=seed).train() for seed in (1, 2)]
    for seed, net in enumerate(nets):
        shake(net, seed)
    return Mscn(chosen, nets, PairLoader(pairs, torch.device("cpu")))


def weights_of(net: Network) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Copies of phi and of all the rest, running statistics as well."""
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    phi = {name: tensor for name, tensor in state.items() if name.startswith("score.")}
    return phi, {name: tensor for name, tensor in state.items() if name not in phi}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def flat(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts])


# ---------------------------------------------------------------------- the meta gradient


class Toy(Network):
    """A small network of torch's own operations."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(7, 6), nn.Linear(5, 6)
        self.mix = nn.Linear(6, 4)
        self.score = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        self.unused = nn.Linear(2, 2)

    def encode_left(self, items: Items) -> Encoded:
        return Encoded(None, None, self.left(items.values).tanh())

    def encode_right(self, items: Items) -> Encoded:
        return Encoded(None, None, self.right(items.values).tanh())

    def _score(self, products: Tensor) -> Tensor:
        scores: Tensor = self.score(self.mix(products).tanh()).squeeze(-1).sigmoid()
        return scores

    def similarity(self, left: Encoded, right: Encoded) -> Tensor:
        return self._score(left.pooled[:, None] * right.pooled)

    def pair_similarity(self, left: Encoded, right: Encoded) -> Tensor:
        return self._score(left.pooled * right.pooled)


Problem = tuple[Network, Callable[[Network], Tensor], Callable[[Tensor], Tensor], Callable[[Network], Tensor]]


def triplet(S: Tensor) -> Tensor:
    return hard_loss(S, meta_margin(S.detach().diagonal()), 2)


def crossed(left: Items, right: Items) -> Batch:
    numbers = torch.arange(len(left))
    return Batch(left, right, numbers, numbers, numbers)


def toy_problem() -> Problem:
    torch.manual_seed(1)
    left, right = (Items(torch.randn(9, size).double()) for size in (7, 5))
    meta_left, meta_right = (Items(torch.randn(10, size).double()) for size in (7, 5))
    labels = (torch.arange(10) % 2).double()

    def scores(network: Network) -> Tensor:
        return network.similarity(network.encode_left(left), network.encode_right(right))

    return Toy().double(), scores, triplet, lambda network: known_loss(network, crossed(meta_left, meta_right), labels)


def network_problem(model: str) -> Problem:
    """SGR or SAF on eight pairs, with eight known ones."""
    chosen = small_config(model=model, score_hidden=16, dropout=0.3)
    pairs = one_to_one(regions(16, 6, 9), tokens([3 + i * 7 % 9 for i in range(16)]))
    network = build(chosen, SideSpec.of(pairs.left), SideSpec.of(pairs.right), seed=1).train()
    shake(network)
    loader = PairLoader(pairs, torch.device("cpu"))
    batch, known = loader.batch(np.arange(8)), loader.batch(np.arange(8, 16))
    labels = (torch.arange(8) % 2).float()

    def meta_loss(network: Network) -> Tensor:
        kind = next(network.parameters()).dtype
        return known_loss(network, known, labels.to(kind))

    return network, lambda network: similarity(network, batch), triplet, meta_loss


def exact(problem: Problem, lr: float) -> tuple[Tensor, list[Tensor]]:
    """The same by torch's own second derivatives."""
    network, scores, loss, meta_loss = problem
    with steady(network):
        theta = body(network)
        slope = torch.autograd.grad(
            loss(scores(network)), list(theta.values()), create_graph=True, materialize_grads=True
        )
        there = {name: part - lr * g for (name, part), g in zip(theta.items(), slope, strict=True)}
        M = with_weights(network, there, meta_loss)
        return M.detach(), list(torch.autograd.grad(M, list(score_layer(network).parameters())))


def mixed_error(found: MetaGradient, expected: tuple[Tensor, list[Tensor]]) -> float:
    """Of the second-order term, the smaller one, as a share of its length."""
    mixed = flat(expected[1]) - flat(found.direct)
    assert found.loss.item() == pytest.approx(expected[0].item(), rel=1e-9)
    return float((flat(found.mixed) - mixed).norm() / mixed.norm())


@pytest.mark.parametrize("lr", [1e-3, 0.1, 1.0])
def test_the_meta_gradient_is_the_exact_second_derivative(lr: float, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = toy_problem()
    expected = exact(problem, lr)
    assert mixed_error(meta_gradient(*problem, lr), expected) < 1e-7
    monkeypatch.setattr(mscn_meta, "REACH", 1e-2)
    assert mixed_error(meta_gradient(*problem, lr), expected) < 1e-4


@pytest.mark.parametrize("share", [0.1, 0.9, 1.1])
def test_a_long_gradient_is_clipped_before_the_virtual_step(share: float) -> None:
    problem = network, scores, loss, _ = toy_problem()
    whole = float(
        flat(
            list(torch.autograd.grad(loss(scores(network)), list(body(network).values()), materialize_grads=True))
        ).norm()
    )
    found = meta_gradient(*problem, lr=0.5, clip=share * whole)
    assert mixed_error(found, exact(problem, 0.5 * min(1.0, share))) < 1e-7


def test_a_gradient_of_nothing_is_not_clipped() -> None:
    network, scores, loss, meta_loss = toy_problem()
    found = meta_gradient(network, scores, lambda S: 0 * loss(S), meta_loss, lr=0.5, clip=2.0)
    assert all(torch.isfinite(part).all() for part in found.total)
    assert not flat(found.mixed).any()


@pytest.mark.parametrize("model", ["sgr", "saf"])
def test_it_is_exact_through_the_whole_network(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64 with torch's GRU, which can be differentiated twice."""
    if model not in models.MODELS:
        pytest.skip(f"there is no {model} yet")
    single = meta_gradient(*network_problem(model), lr=0.05)
    monkeypatch.setattr(bigru, "scans", lambda _: False)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    problem = network_problem(model)
    problem[0].double()
    expected = exact(problem, lr=0.05)
    found = meta_gradient(*problem, lr=0.05)
    assert mixed_error(found, expected) < 1e-4
    as_used = found._replace(mixed=[part.double() for part in single.mixed])  # in float32, with our own GRU
    assert mixed_error(as_used, expected) < 1e-2
    monkeypatch.setattr(mscn_meta, "REACH", 1e-6)
    assert mixed_error(meta_gradient(*problem, lr=0.05), expected) < 1e-7


def test_it_changes_nothing() -> None:
    problem = network_problem("sgr")
    network = problem[0]
    phi, theta = weights_of(network)
    random = torch.get_rng_state()
    meta_gradient(*problem, lr=0.05)
    assert equal(weights_of(network)[0], phi)
    assert equal(weights_of(network)[1], theta)
    assert all(parameter.grad is None for parameter in network.parameters())
    assert all(module.training for module in network.modules())
    assert torch.equal(torch.get_rng_state(), random)


def test_without_any_pull_there_is_no_second_term() -> None:
    network, scores, loss, meta_loss = toy_problem()
    found = meta_gradient(network, scores, loss, lambda network: 0 * meta_loss(network), lr=0.1)
    assert flat(found.total).tolist() == [0.0] * len(flat(found.total))


# ---------------------------------------------------------------------- the split


def test_the_split_equals_a_loop_with_scipy() -> None:
    rng = np.random.default_rng(0)
    right, wrong = rng.beta(8, 4, 40), rng.beta(2, 6, 40)
    known, labels = np.concatenate([right, wrong]), np.repeat([1, 0], 40)
    x = np.concatenate([rng.beta(9, 3, 300), rng.beta(2, 7, 200)])

    def moments(values: np.ndarray, share: np.ndarray) -> tuple[float, float]:
        mean = np.average(values, weights=share)
        variance = np.average((values - mean) ** 2, weights=share)
        alpha = mean * (mean * (1 - mean) / variance - 1)
        return alpha, alpha * (1 - mean) / mean

    parts, shares = [moments(group, np.ones(40)) for group in (wrong, right)], [0.5, 0.5]
    for _ in range(10):
        r = np.stack([share * stats.beta.pdf(x, *part) for part, share in zip(parts, shares, strict=True)])
        r /= r.sum(axis=0)
        parts, shares = [moments(x, row) for row in r], [row.mean() for row in r]
    joint = [share * stats.beta.pdf(x, *part) for part, share in zip(parts, shares, strict=True)]
    expected = joint[1] / (joint[0] + joint[1])
    between = (x > 0.25) & (x < 0.7)  # beyond the means ours is kept from turning round
    w = clean_posterior(known, labels, x)
    assert w[between] == pytest.approx(expected[between], abs=1e-9)
    assert ((w > 0.5) == (expected > 0.5)).all()


@given(st.integers(0, 999), st.booleans())
def test_higher_similarities_are_never_less_clean(seed: int, swapped: bool) -> None:
    """Even where the network has not learned anything and known wrong pairs have the higher similarities."""
    rng = np.random.default_rng(seed)
    known, labels = np.concatenate([rng.beta(5, 4, 20), rng.beta(4, 5, 20)]), np.repeat([1, 0], 20)
    x = np.sort(np.concatenate([rng.beta(6, 4, 100), rng.beta(3, 6, 100), [0.0, 1.0]]))
    w = clean_posterior(known, 1 - labels if swapped else labels, x)
    assert np.isfinite(w).all()
    assert (np.diff(w) >= -1e-12).all()


def test_each_network_drops_pairs_for_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = method()
    link, rng = ours.loader.pairs.link, np.random.default_rng(0)
    fits = np.arange(12)[:, None] == np.arange(60) // 5
    tables = [np.where(fits, rng.beta(6, 3, fits.shape), rng.beta(3, 5, fits.shape)) for _ in ours.nets]
    monkeypatch.setattr(
        mscn, "pair_scores", lambda net, _, left, right: tables[0 if net is ours.nets[0] else 1][link[left], right]
    )
    parts, report = ours.begin_epoch(3), ours.report()
    assert report is not None
    metrics = report.model_dump()
    for net, part in enumerate(parts):
        judge = 1 - net
        table, known = tables[judge], ours.known[judge]
        of_known = np.array([table[link[a], b] for a, b in zip(known.left, known.right, strict=True)])
        w = clean_posterior(of_known, known.labels, np.array([table[link[pair], pair] for pair in ours.rest]))
        expected = [pair for pair, value in zip(ours.rest, w, strict=True) if value > 0.5]
        assert 5 < len(expected) < len(ours.rest)
        assert part.clean.tolist() == expected
        assert not part.noisy.size
        right = link == np.arange(60) // 5
        assert metrics["clean_share"][judge] == pytest.approx(len(expected) / len(ours.rest))
        assert metrics["clean_precision"][judge] == pytest.approx(right[expected].mean())
        assert metrics["clean_recall"][judge] == pytest.approx(right[expected].sum() / right[ours.rest].sum())
    assert parts[0].clean.tolist() != parts[1].clean.tolist()


def test_scores_of_pairs_equal_a_loop_in_any_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = method()
    link, left, right = ours.loader.pairs.link, np.arange(60)[::-1].copy(), np.arange(60)
    whole = mscn.pair_scores(ours.nets[0], ours.loader, left, right)
    assert ours.nets[0].training
    monkeypatch.setattr(mscn, "CHUNK", 7)
    assert mscn.pair_scores(ours.nets[0], ours.loader, left, right) == pytest.approx(whole, abs=1e-6)
    net = ours.nets[0].eval()
    with torch.no_grad():
        for pair in (0, 17, 59):
            a = net.encode_left(ours.loader.left.items(link[left[[pair]]]))
            b = net.encode_right(ours.loader.right.items(right[[pair]]))
            assert whole[pair] == pytest.approx(net.similarity(a, b).item(), abs=1e-5)


@given(st.integers(0, 50), st.floats(0.3, 20), st.floats(-3, 3))
def test_scores_become_odds_whatever_the_warmup_left(seed: int, slope: float, shift: float) -> None:
    """The scores follow from true odds by some slope and shift; a known label is a soft one for scikit-learn, too."""
    rng = np.random.default_rng(seed)
    odds = rng.normal(0, 2, 2000)
    labels = (rng.random(2000) < special.expit(odds)).astype(np.int64)
    scores = special.expit(np.clip((odds - shift) / slope, -9, 9))
    right = np.where(labels == 1, (labels.sum() + 1) / (labels.sum() + 2), 1 / ((1 - labels).sum() + 2))
    x = np.tile(special.logit(scores), 2)[:, None]
    model = LogisticRegression(C=1e6, tol=1e-10, max_iter=10_000)
    model.fit(x, np.repeat([1, 0], 2000), sample_weight=np.concatenate([right, 1 - right]))
    assert mscn.log_odds(scores, labels) == pytest.approx((model.coef_[0, 0], model.intercept_[0]), rel=1e-3, abs=1e-3)


def test_similarities_of_known_pairs_are_probabilities_when_the_main_epochs_begin() -> None:
    made = method()
    for net in made.nets:
        score_layer(net)[-1].bias.data -= 4  # type: ignore[index]
    before = [
        pair_scores(net, made.loader, known.left, known.right) for net, known in zip(made.nets, made.known, strict=True)
    ]
    made.begin_epoch(0)
    for net, known, low in zip(made.nets, made.known, before, strict=True):
        scores = pair_scores(net, made.loader, known.left, known.right)
        if mscn.log_odds(low, known.labels)[0] <= 0:
            np.testing.assert_array_equal(scores, low)
            continue
        assert low.mean() < 0.1
        assert scores.mean() == pytest.approx(0.5, abs=0.02)
        assert (np.argsort(scores) == np.argsort(low)).mean() > 0.9  # but for rounding


@pytest.mark.parametrize("epoch", [0, 1])
def test_only_the_last_layer_is_scaled_and_only_once(epoch: int) -> None:
    made = method()
    net, known = made.nets[0], made.known[0]
    last = "score.2."
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    scores = np.where(known.labels == mscn.RIGHT, 0.2, 0.1)  # by which right pairs have higher ones
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mscn, "pair_scores", lambda _net, _loader, left, _right: np.resize(scores, len(left)))
        made.begin_epoch(epoch)
    changed = {name for name, tensor in net.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == ({f"{last}weight", f"{last}bias"} if epoch == 0 else set())


def test_scores_that_mean_the_opposite_stay() -> None:
    net = method().nets[0]
    before = weights_of(net)
    mscn.scale_to_odds(net, np.linspace(0.1, 0.9, 40), np.repeat([1, 0], 20))
    assert all(equal(a, b) for a, b in zip(weights_of(net), before, strict=True))


# ---------------------------------------------------------------------- known pairs


@given(st.integers(0, 99), st.sampled_from([0.05, 0.1, 0.4]))
def test_the_meta_set_is_right_and_not_trained_on(seed: int, share: float) -> None:
    pairs = noisy_pairs(40)
    chosen = meta_set(pairs, share, np.random.default_rng(seed))
    assert len(set(chosen.tolist())) == len(chosen) == round(share * 200)
    assert (pairs.link[chosen] == np.arange(200)[chosen] // 5).all()


def test_no_step_trains_on_the_meta_set(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[int, set[int]] = {}
    used: list[Mscn] = []
    steps = Trainer.steps

    def noting_steps(trainer: Trainer) -> Iterator[StepPlan]:
        assert isinstance(trainer.method, Mscn)
        used.append(trainer.method)
        for plan in steps(trainer):
            seen.setdefault(trainer.cursor.epoch, set()).update(plan.pairs.tolist())
            yield plan

    monkeypatch.setattr(Trainer, "steps", noting_steps)
    mispair.fit(noisy_pairs(), **{**SMALL, "epochs": 1})
    left_out = set(used[0].meta_set.tolist())
    assert len(left_out) == 6
    assert len(seen[0]) >= 53  # a last batch of one pair is left out
    assert not seen[0] & left_out
    assert seen[1]
    assert not seen[1] & left_out


@given(st.integers(0, 99))
def test_known_pairs_are_right_and_wrong_ones(seed: int) -> None:
    pairs = noisy_pairs(4)
    chosen = meta_set(pairs, 0.2, np.random.default_rng(0))
    known = known_pairs(pairs, chosen, np.random.default_rng(seed))
    true_image = known.right // 5
    assert known.labels.tolist() == [1] * 4 + [0] * 4
    assert known.right[:4].tolist() == chosen.tolist()
    images = pairs.link[known.left]
    assert (images[:4] == true_image[:4]).all()
    assert (images[4:] != true_image[4:]).all()
    assert len(set(known.right[4:].tolist())) == 4


def test_copies_of_an_image_are_not_taken_for_mismatched() -> None:
    pairs = replace(noisy_pairs(6), groups=np.arange(6) // 3)
    for seed in range(20):
        known = known_pairs(pairs, np.arange(10), np.random.default_rng(seed))
        assert (pairs.link[known.left[10:]] // 3 != known.right[10:] // 15).all()


def test_left_items_that_no_pair_uses_are_not_known() -> None:
    pairs = chosen(noisy_pairs(12), np.arange(20))
    for seed in range(20):
        known = known_pairs(pairs, np.arange(6), np.random.default_rng(seed))
        assert set(pairs.link[known.left].tolist()) <= set(pairs.link.tolist())


def test_wrong_pairs_are_drawn_anew_for_each_epoch_and_network() -> None:
    ours, same = method(), method()
    draws = []
    for epoch in (0, 1):
        for each in (ours, same):
            each.begin_epoch(epoch)
        for net in range(2):
            a, b = ours.known[net], same.known[net]
            assert np.array_equal(a.right, b.right)
            assert np.array_equal(a.left, b.left)
            assert a.right[:6].tolist() == ours.meta_set.tolist()
            draws.append((*a.left[6:], *a.right[6:]))
    assert len(set(draws)) == 4


def test_known_batches_go_round() -> None:
    ours = method(meta_share=0.3, batch_size=10)  # 36 known pairs, three batches of ten a round
    first = [ours.known_rows(0, position).tolist() for position in range(3)]
    assert len({row for batch in first for row in batch}) == 30
    assert ours.known_rows(0, 1).tolist() == first[1]
    assert ours.known_rows(0, 3).tolist() != first[0]
    assert ours.known_rows(1, 0).tolist() != first[0]
    assert sorted(method(meta_share=0.1, batch_size=50).known_rows(0, 7).tolist()) == list(range(12))


def test_a_steps_known_batch_holds_these_pairs() -> None:
    ours = method()
    inputs = ours.inputs(1, StepPlan(2, 0, BATCH), None)
    assert isinstance(inputs, MscnInputs)
    rows, known = ours.known_rows(1, 2), ours.known[1]
    assert torch.equal(
        inputs.known.left.values, ours.loader.left.items(ours.loader.pairs.link[known.left[rows]]).values
    )
    assert torch.equal(inputs.known.right.values, ours.loader.right.items(known.right[rows]).values)
    assert inputs.labels.tolist() == known.labels[rows].tolist()
    assert not isinstance(ours.inputs(1, StepPlan(2, None, BATCH), None), MscnInputs)


# ---------------------------------------------------------------------- a step


def test_the_loss_by_a_loop() -> None:
    ours = method(dropout=0.0)
    step = take_step(ours, 0, 5, BATCH)  # three negatives
    S, total = step.S.detach().double().numpy(), 0.0
    rows = ours.loader.pairs.link[BATCH]
    margin = [0.2 / (1 + (p / (1 - p)) ** -2) for p in S.diagonal()]
    for i in range(len(S)):
        others = [j for j in range(len(S)) if j != i]
        image = [max(0, margin[i] + S[i, j] - S[i, i]) * (rows[i] != rows[j]) for j in others]
        text = [max(0, margin[i] + S[j, i] - S[i, i]) * (rows[i] != rows[j]) for j in others]
        total += sum(sorted(image)[-3:]) / 3 + sum(sorted(text)[-3:]) / 3
    assert step.loss.item() == pytest.approx(total, rel=1e-5)


def test_a_margin_gives_no_gradient() -> None:
    ours = method()
    inputs = ours.inputs(0, StepPlan(0, 99, BATCH[:2]), None)  # two pairs: one negative each
    S = torch.tensor([[0.6, 0.55], [0.1, 0.7]], requires_grad=True)
    ours.triplet(S, inputs).backward()  # type: ignore[no-untyped-call]
    assert S.grad is not None
    assert S.grad.tolist() == [[-1, 2], [0, -1]]  # [0, 1] costs image 0 and text 1, nothing else does


@pytest.mark.parametrize("net", [0, 1])
def test_the_meta_step_changes_phi_alone_and_the_loss_the_rest_alone(net: int) -> None:
    ours = method(dropout=0.0)
    before = [weights_of(each) for each in ours.nets]
    inputs = ours.inputs(net, StepPlan(0, 0, BATCH), None)
    assert isinstance(inputs, MscnInputs)
    expected = meta_gradient(
        ours.nets[net], lambda network: similarity(network, inputs.batch), lambda S: ours.triplet(S, inputs),
        lambda network: known_loss(network, inputs.known, inputs.labels), lr=1e-3,
    )  # fmt: skip
    step = ours.loss(net, inputs)
    phi, theta = weights_of(ours.nets[net])
    assert equal(weights_of(ours.nets[1 - net])[0], before[1 - net][0])
    parameters = {name: value for name, value in theta.items() if "running" not in name and "tracked" not in name}
    assert equal(parameters, {name: before[net][1][name] for name in parameters})
    for name, gradient in zip(phi, expected.total, strict=True):  # Adam's first step is the sign of the gradient
        clear = gradient.abs() > 1e-5
        assert clear.any()
        moved = (phi[name] - before[net][0][name])[clear]
        assert torch.allclose(moved, -1e-3 * gradient[clear].sign(), atol=2e-5)
    assert step.metrics["meta_loss"].item() == pytest.approx(expected.loss.item())
    assert step.S[0, 0].item() == pytest.approx(
        similarity(ours.nets[net], inputs.batch)[0, 0].item(), abs=1e-6
    )  # with the new phi
    step.loss.backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is None for parameter in score_layer(ours.nets[net]).parameters())
    without = {name for name, parameter in body(ours.nets[net]).items() if parameter.grad is None}
    assert all(name.endswith("key.bias") for name in without)  # which changes no softmax
    assert all(parameter.requires_grad for parameter in ours.nets[net].parameters())


def test_the_engine_leaves_phi_alone_in_main_epochs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    at_start: list[dict[str, Tensor]] = []
    begin = Mscn.begin_epoch

    def noting_begin(self: Mscn, epoch: int) -> Any:
        at_start.extend(weights_of(net)[0] for net in self.nets)
        return begin(self, epoch)

    monkeypatch.setattr(Mscn, "begin_epoch", noting_begin)
    monkeypatch.setattr(Mscn, "_correct", lambda *_: (torch.zeros(()), torch.zeros(())))
    settings = config(epochs=1)
    run = Run(tmp_path, settings)
    trainer = Trainer(settings, noisy_pairs(), None, run)
    first = [weights_of(net) for net in trainer.nets]
    trainer.fit()
    run.close()
    for net in range(2):
        phi, theta = weights_of(trainer.nets[net])
        assert not equal(first[net][0], at_start[net])  # the warm-up trains it
        assert equal(phi, at_start[net])
        assert not equal(theta, first[net][1])


def test_known_pairs_that_are_not_finite_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mscn, "known_loss", lambda *known: float("inf") * known_loss(*known))
    ours = method()
    phi = weights_of(ours.nets[0])[0]
    assert not torch.isfinite(take_step(ours, 0, 0, BATCH).loss)
    assert equal(weights_of(ours.nets[0])[0], phi)
    with refused(NonFiniteError):
        mispair.fit(noisy_pairs(), **SMALL)


def test_half_precision() -> None:
    ours = method(dropout=0.0)
    inputs = ours.inputs(0, StepPlan(0, 0, BATCH), None)
    phi, _ = weights_of(ours.nets[0])
    with autocast(torch.device("cpu"), "bf16"):
        step = ours.loss(0, inputs)  # type: ignore[arg-type]
        ours.begin_epoch(0)
    step.loss.backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(step.loss)
    assert torch.isfinite(step.metrics["meta_loss"])
    assert not equal(weights_of(ours.nets[0])[0], phi)


def test_learning_rates_fall_together(monkeypatch: pytest.MonkeyPatch) -> None:
    virtual: list[float] = []

    def noting(network: Network, **parts: Any) -> MetaGradient:
        virtual.append(parts["lr"])
        return meta_gradient(network, **parts)

    monkeypatch.setattr(mscn, "meta_gradient", noting)
    ours = method(lr_decay_epochs=3, lr=1e-2, meta_lr=1e-4)
    for epoch, factor in ((0, 1), (2, 1), (3, 0.1), (6, 0.01)):
        ours.begin_epoch(epoch)
        take_step(ours, 0, 0, BATCH)
        assert virtual[-1] == pytest.approx(1e-2 * factor)
        for optimizer in ours.meta_optimizers:
            assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-4 * factor)


# ---------------------------------------------------------------------- state


def test_the_state_survives_a_checkpoint() -> None:
    ours, copy = method(lr_decay_epochs=1), method(lr_decay_epochs=1)
    ours.begin_epoch(1)
    take_step(ours, 0, 0, BATCH)
    buffer = io.BytesIO()
    torch.save([ours.state_dict(), [net.state_dict() for net in ours.nets], torch.get_rng_state()], buffer)
    buffer.seek(0)
    state, networks, random = torch.load(buffer, weights_only=True)
    losses = [take_step(ours, net, 1, BATCH).loss for net in range(2)]
    copy.load_state_dict(state)
    for net, saved in zip(copy.nets, networks, strict=True):
        net.load_state_dict(saved)
    torch.set_rng_state(random)
    assert all(torch.equal(take_step(copy, net, 1, BATCH).loss, losses[net]) for net in range(2))
    assert all(equal(weights_of(a)[0], weights_of(b)[0]) for a, b in zip(ours.nets, copy.nets, strict=True))


@pytest.mark.slow
def test_resume_is_exact_wherever_it_stopped(tmp_path: Path) -> None:
    settings = config(batch_size=8, checkpoint_seconds=1000.0, lr_decay_epochs=1)
    stops = [(0, 1, 1), (1, 0, 1), (1, 1, 1), (2, 1, 1)]  # warm-up, main epochs, after the learning rate has fallen
    _, (whole, broken) = check_resume(settings, noisy_pairs(7), tmp_path, stops)
    for a, b in zip(whole["meta_optimizers"], broken["meta_optimizers"], strict=True):
        assert all(torch.equal(a["state"][i][key], b["state"][i][key]) for i in a["state"] for key in a["state"][i])
        assert a["state"]
    assert read_events(tmp_path / "whole", MethodEvent) == read_events(tmp_path / "broken", MethodEvent)
    main_steps = [event for event in read_events(tmp_path / "whole", StepEvent) if event.epoch > 0]
    assert all("meta_loss" in event.metrics for event in main_steps)


# ---------------------------------------------------------------------- what it is good for, and what it refuses


@pytest.mark.slow
def test_it_learns_from_noisy_pairs(tmp_path: Path) -> None:
    """40 % wrong pairs, tested on the right ones: chance is an rSum of about 130; it reaches 331."""
    result = mispair.fit(
        noisy_pairs(24), out=tmp_path, method="mscn", model="sgr", embed_size=32, word_size=16, sim_size=16,
        batch_size=30, dropout=0.1, lr=8e-3, meta_lr=1e-3, meta_share=0.1, warmup_epochs=6, epochs=2, lr_decay_epochs=1,
        negatives_start=16, negatives_end=8, hardening_steps=20, device="cpu",
    )  # fmt: skip
    assert result.evaluate(tiny_pairs(24)).averaged.rsum > 200
    last = read_events(tmp_path, MethodEvent)[-1].model_dump()
    assert sum(last["clean_precision"]) / 2 > 0.62  # 0.6 of all pairs are right
    assert sum(last["auroc_similarity"]) / 2 > 0.6
    assert result.config.of(SgrafSettings).score_hidden == 64


def test_the_meta_network_is_64_wide_if_nothing_else_is_said() -> None:
    assert config().of(SgrafSettings).score_hidden == 64
    assert config(score_hidden=5).of(SgrafSettings).score_hidden == 5
    layer = score_layer(method().nets[0])
    assert isinstance(layer, nn.Sequential)
    assert [tuple(part.weight.shape) for part in layer if isinstance(part, nn.Linear)] == [(64, 8), (1, 64)]


@pytest.mark.parametrize("model", ["vse", "two-tower", "scan"])
def test_models_without_similarity_vectors_are_refused(model: str) -> None:
    with refused(ConflictError, where="model", names="sgr or saf"):
        mispair.fit(noisy_pairs(), **{**SMALL, "model": model})


def test_one_network_is_refused() -> None:
    with refused(ConflictError, where="networks", names="mscn"):
        mispair.fit(noisy_pairs(), networks=1, **SMALL)


@pytest.mark.parametrize(
    ("pairs", "share", "kind", "names"),
    [
        (tiny_pairs(12), 0.1, DataError, "`noise_ratio`"),
        (noisy_pairs(12), 0.01, TooFewError, "1 of 60"),
        (noisy_pairs(12), 0.99, TooFewError, "59 of 60"),
        (noisy_pairs(12), 0.9, TooFewError, "54"),
    ],
)
def test_pairs_without_a_meta_set_are_refused(pairs: Pairs, share: float, kind: type[DataError], names: str) -> None:
    with refused(kind, where="tiny", names=names):
        mispair.fit(pairs, **{**SMALL, "meta_share": share})


def test_pairs_that_are_all_known_to_be_right_will_do() -> None:
    pairs = tiny_pairs(12)
    matcher = mispair.fit(replace(pairs, truth=pairs.link), **{**SMALL, "epochs": 1})
    assert np.isfinite(matcher.score(pairs.left, pairs.right)).all()
