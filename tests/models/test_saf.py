"""SAF against a caption-by-caption loop written from its description (peers.md 2.4)."""

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import mispair
from mispair.models import SAF, SGR, Encoded, SideSpec, build
from mispair.pairs.batches import Items
from sgraf_loops import check_gradients, is_well_conditioned, linear, loop_nodes, some_regions
from small_data import ZEROS, encoded_sets, gradients, plain_l2norm, shake, small_config, token_items, zeroed
from tiny import tiny_pairs

D = 16
ragged = st.lists(st.one_of(st.sampled_from([1, 2, 3]), st.integers(1, 60)), min_size=1, max_size=5)


def make_saf(regions: int, seed: int = 0, **config: object) -> SAF:
    """SAF over sets of `regions` and texts, away from its initial weights, in evaluation mode."""
    network = SAF(SideSpec("regions", 7, regions), SideSpec("tokens", 30), small_config(embed_size=D, **config))
    shake(network, seed)
    return network.eval()


# ---------------------------------------------------------------- the reference


def loop_similarity(network: SAF, V: Tensor, words: Tensor, lengths: list[int]) -> Tensor:
    """Every image against every caption, a caption at a time.

    In training mode the gate's normalisation has the statistics of all captions: that is ours, not the published one.
    """
    norm, nodes, columns = network.filter.norm, loop_nodes(network, V, words, lengths), []
    assert norm.running_mean is not None
    assert norm.running_var is not None
    gates = [linear(network.filter.gate, X).squeeze(-1) for X in nodes]
    mean, variance = norm.running_mean, norm.running_var
    if network.training:
        every = torch.cat([gate.flatten() for gate in gates])
        mean, variance = every.mean(), every.var(unbiased=False)
    for X, gate in zip(nodes, gates, strict=True):
        beta = torch.sigmoid((gate - mean) / (variance + norm.eps).sqrt() * norm.weight + norm.bias)
        beta = beta / (beta.abs().sum(dim=1, keepdim=True) + 1e-8)
        x = plain_l2norm((beta[..., None] * X).sum(dim=1))
        columns.append(torch.sigmoid(linear(network.score, x)).squeeze(-1))
    return torch.stack(columns, dim=1)


def reference(network: SAF, left: Encoded, right: Encoded) -> Tensor:
    (V, _), (words, lengths) = left.parts(), right.parts()
    assert lengths is not None
    return loop_similarity(network, V, words, lengths.tolist())


def with_capacity(items: Encoded, capacity: int) -> Encoded:
    return Encoded(items.local, items.lengths, items.pooled, capacity)


# ---------------------------------------------------------------- the same numbers as the loop


@given(lengths=ragged, regions=st.integers(8, 64), images=st.integers(1, 4), seed=st.integers(0, 99))
def test_similarity_equals_the_loop(lengths: list[int], regions: int, images: int, seed: int) -> None:
    network = make_saf(regions, seed)
    left, right = some_regions(images, regions, seed), encoded_sets(lengths, max(lengths), D, seed + 1)
    assume(is_well_conditioned(left, right))
    S, expected = network.similarity(left, right), reference(network, left, right)
    assert S.shape == (images, len(lengths))
    assert S.dtype == torch.float32
    assert (S - expected).abs().max() < 1e-5


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("lengths", [[1], [3], [1, 3, 60], [7, 1, 12, 3]], ids=str)
def test_all_gradients_equal_the_loop(lengths: list[int], training: bool) -> None:
    network = make_saf(9, dropout=0.0).train(training)
    left, right = some_regions(3, 9), encoded_sets(lengths, max(lengths), D, 1)
    expected = check_gradients(network, reference, left, right)
    assert expected["filter.gate.weight"].abs().max() > 0  # type: ignore[union-attr]


@given(lengths=ragged, spare=st.integers(0, 40), seed=st.integers(0, 99))
@settings(max_examples=15)
def test_training_statistics_see_all_real_nodes_and_no_others(lengths: list[int], spare: int, seed: int) -> None:
    network = make_saf(8, seed, dropout=0.0).train()
    left, right = some_regions(3, 8, seed), encoded_sets(lengths, max(lengths), D, seed + 1)
    expected = reference(network, left, right)
    (V, _), (words, _) = left.parts(), right.parts()
    every = torch.cat([linear(network.filter.gate, X).flatten() for X in loop_nodes(network, V, words, lengths)])
    norm = network.filter.norm
    assert norm.running_mean is not None
    assert norm.running_var is not None
    mean, variance = 0.9 * norm.running_mean + 0.1 * every.mean(), 0.9 * norm.running_var + 0.1 * every.var()

    S = network.similarity(left, with_capacity(right, sum(lengths) + spare))
    assert (S - expected).abs().max() < 1e-4  # statistics in another order of summing
    assert len(every) == 3 * (len(lengths) + sum(lengths))
    torch.testing.assert_close(norm.running_mean, mean, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(norm.running_var, variance, rtol=1e-4, atol=1e-6)


def test_published_training_statistics_are_those_of_one_caption() -> None:
    """What the batch changes: alone, a caption has the published numbers; among others it has not."""
    network = make_saf(8, dropout=0.0).train()
    left, right = some_regions(3, 8), encoded_sets([3, 9], 9, D, 1)
    words, _ = right.parts()
    alone = Encoded(words[:1, :3], torch.tensor([3]), right.pooled[:1])
    S = network.similarity(left, right)
    assert (network.similarity(left, alone)[:, 0] - S[:, 0]).abs().max() > 1e-5
    network.eval()
    assert (network.similarity(left, alone)[:, 0] - network.similarity(left, right)[:, 0]).abs().max() < 1e-6


def test_the_shared_parts_are_those_of_sgr() -> None:
    config, specs = small_config(embed_size=D), (SideSpec("regions", 7, 8), SideSpec("tokens", 30))
    names = [set(kind(*specs, config).state_dict()) for kind in (SAF, SGR)]
    own = {"filter.gate.weight", "filter.gate.bias"} | {
        f"filter.norm.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }
    assert names[0] - names[1] == own
    assert all(name.startswith("graph.") for name in names[1] - names[0])


# ---------------------------------------------------------------- what must not matter


@given(lengths=ragged, spare=st.integers(0, 40), seed=st.integers(0, 99), training=st.booleans())
def test_room_to_spare_changes_nothing(lengths: list[int], spare: int, seed: int, training: bool) -> None:
    network, left = make_saf(8, seed=seed, dropout=0.0).train(training), some_regions(3, 8, seed)
    lengths = [*lengths, 4]  # one pair alone has no batch statistics
    tight = encoded_sets(lengths, max(lengths), D, seed + 1)
    own, (V, _), (words, _) = some_regions(len(lengths), 8, seed), left.parts(), tight.parts()
    results = []
    for right in (tight, with_capacity(tight, sum(lengths) + spare)):
        S = network.similarity(left, right)
        pairs = network.pair_similarity(own, right)
        (S.square().sum() + pairs.sum()).backward()  # type: ignore[no-untyped-call]
        results.append(
            {
                "S": S.detach(), "pairs": pairs.detach(), "words": words.grad, "regions": V.grad,
                "own": own.parts()[0].grad, **gradients(network),
            }
        )  # fmt: skip
        words.grad = V.grad = own.parts()[0].grad = None
    for name, expected in results[0].items():
        if expected is not None:
            assert results[1][name].isfinite().all()  # type: ignore[union-attr]
            torch.testing.assert_close(results[1][name], expected, rtol=1e-3, atol=5e-5, msg=name)


# ---------------------------------------------------------------- edges


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("initial", [True, False], ids=["zero biases", "trained"])
@pytest.mark.parametrize("where", ZEROS)
def test_zero_vectors_give_finite_scores_and_gradients(where: str, initial: bool, training: bool) -> None:
    config = small_config(embed_size=D)
    network = SAF(SideSpec("regions", 7, 8), SideSpec("tokens", 30), config) if initial else make_saf(8)
    network.train(training)
    left, right = some_regions(3, 8), with_capacity(encoded_sets([1, 3, 5], 5, D, 1), 12)
    V, words = zeroed(left, right, where)
    for similarity in (network.similarity, network.pair_similarity):
        scores = similarity(left, right)
        assert scores.isfinite().all()
        scores.sum().backward()  # type: ignore[no-untyped-call]
        for gradient in (V.grad, words.grad, *gradients(network).values()):
            assert gradient is None or gradient.isfinite().all()


@pytest.mark.parametrize("bias", [-1e4, 1e4])
def test_a_gate_that_is_shut_or_open_for_all(bias: float) -> None:
    network = make_saf(8)
    with torch.no_grad():
        network.filter.norm.bias.fill_(bias)
    left, right = some_regions(3, 8), encoded_sets([1, 3, 5], 5, D, 1)
    S = network.similarity(left, right)
    S.sum().backward()  # type: ignore[no-untyped-call]
    assert S.isfinite().all()
    assert all(gradient is None or gradient.isfinite().all() for gradient in gradients(network).values())
    if bias < 0:  # nothing passes: the score layer's bias alone speaks
        torch.testing.assert_close(S, torch.sigmoid(network.score.bias).expand(3, 3))  # type: ignore[arg-type]


def test_initial_weights_are_xavier_with_zero_biases() -> None:
    config = small_config(model="saf", embed_size=64, sim_size=32)
    network = build(config, SideSpec("regions", 40, 8), SideSpec("tokens", 30), seed=0)
    layers = [(name, m) for name, m in network.named_modules() if isinstance(m, nn.Linear)]
    assert len(layers) == 1 + 3 + 3 + 2 + 1 + 1
    for name, layer in layers:
        bound = math.sqrt(6 / (layer.in_features + layer.out_features))
        assert 0.8 * bound < layer.weight.abs().max() <= bound, name
        assert (layer.bias == 0).all(), name
    assert isinstance(network, SAF)
    assert network.squashed
    assert network.filter.norm.weight.tolist() == [1]
    assert network.filter.norm.bias.tolist() == [0]


def test_mscns_hidden_layer_before_the_score() -> None:
    network = make_saf(8, score_hidden=5)
    left, right = some_regions(3, 8), encoded_sets([1, 3, 5], 5, D, 1)
    seen: list[Tensor] = []
    network.score.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0]))
    S = network.similarity(left, right)
    assert isinstance(network.score, nn.Sequential)
    into, _, out = network.score
    torch.testing.assert_close(S, torch.sigmoid(linear(out, linear(into, seen[0]).relu())).squeeze(-1))
    torch.testing.assert_close(seen[0].norm(dim=-1), torch.ones(3, 3))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # a CPU without bf16 says so
@pytest.mark.parametrize("training", [True, False])
def test_bf16_scores_are_float32_and_close(training: bool) -> None:
    network = make_saf(8, dropout=0.0).train(training)
    images, texts = Items(torch.randn(5, 8, 7)), token_items([1, 3, 12, 5, 2])
    full = network.similarity(network.encode_left(images), network.encode_right(texts))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        left, right = network.encode_left(images), network.encode_right(texts)
        half, pairs = network.similarity(left, right), network.pair_similarity(left, right)
    assert half.dtype == pairs.dtype == torch.float32
    assert (half - full).abs().max() < 0.02
    if not training:
        assert (pairs - full.diagonal()).abs().max() < 0.02
    assert len(set(half.flatten().tolist())) > 15  # scores do not tie as bf16 numbers would
    half.sum().backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in network.parameters())


@pytest.mark.slow
def test_training_learns() -> None:
    pairs = tiny_pairs(40)
    settings: dict[str, Any] = {
        "model": "saf", "embed_size": 32, "word_size": 8, "sim_size": 8, "batch_size": 16, "warmup_epochs": 4,
        "epochs": 6, "lr": 3e-3, "negatives_start": 8, "negatives_end": 8, "hardening_steps": 10, "dropout": 0.1,
        "device": "cpu",
    }  # fmt: skip
    by_luck = 100 * (1 + 5 + 10) * (1 / 40 + 1 / 40)
    assert mispair.fit(pairs, **settings).evaluate(pairs).averaged.rsum > 3 * by_luck
