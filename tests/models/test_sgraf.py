"""SGR against a caption-by-caption loop written from its description (peers.md 2.4)."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mispair.models import Encoded, SideSpec, build
from mispair.models.sgraf import LONG, SGR
from mispair.pairs.batches import Items
from reference_loops import sgr_similarity
from sgraf_loops import check_gradients, is_well_conditioned, linear, loop_nodes, some_regions
from small_data import ZEROS, encoded_sets, gradients, plain_gru, plain_l2norm, shake, small_config, token_items, zeroed

D = 16


def make_sgr(regions: int, seed: int = 0, **config: object) -> SGR:
    """SGR over sets of `regions` and texts, away from its initial weights, in evaluation mode."""
    network = SGR(SideSpec("regions", 7, regions), SideSpec("tokens", 30), small_config(embed_size=D, **config))
    shake(network, seed)
    return network.eval()


# ---------------------------------------------------------------- the reference


def loop_similarity(network: SGR, V: Tensor, words: Tensor, lengths: Tensor) -> Tensor:
    """Every image against every caption, a caption at a time."""
    columns = []
    for X in loop_nodes(network, V, words, lengths.tolist()):
        for layer in network.graph:
            q, k = linear(layer.query, X), linear(layer.key, X)  # type: ignore[arg-type]
            E = torch.softmax(q @ k.transpose(1, 2), dim=-1)
            X = torch.relu(linear(layer.out, E @ X))  # type: ignore[arg-type]
        columns.append(torch.sigmoid(linear(network.score, X[:, 0])).squeeze(-1))
    return torch.stack(columns, dim=1)


def reference(network: SGR, left: Encoded, right: Encoded) -> Tensor:
    (V, _), (words, lengths) = left.parts(), right.parts()
    assert lengths is not None
    return loop_similarity(network, V, words, lengths)


def test_the_benchmarks_loop_is_this_loop() -> None:
    network, left, right = make_sgr(9), some_regions(3, 9), encoded_sets([1, 5, 12], 12, D, 1)
    (V, _), (words, _) = left.parts(), right.parts()
    found = sgr_similarity(network, V, words, [1, 5, 12])
    torch.testing.assert_close(found, reference(network, left, right), rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- the same numbers as the loop

ragged = st.lists(st.one_of(st.sampled_from([1, 2, 3]), st.integers(1, 60), st.just(LONG + 2)), min_size=1, max_size=5)


@given(lengths=ragged, regions=st.integers(8, 64), images=st.integers(1, 4), seed=st.integers(0, 99))
def test_similarity_equals_the_loop(lengths: list[int], regions: int, images: int, seed: int) -> None:
    network = make_sgr(regions, seed)
    left, right = some_regions(images, regions, seed), encoded_sets(lengths, max(lengths), D, seed + 1)
    assume(is_well_conditioned(left, right))
    S, expected = network.similarity(left, right), reference(network, left, right)
    assert S.shape == (images, len(lengths))
    assert S.dtype == torch.float32
    assert (S - expected).abs().max() < 1e-5


@pytest.mark.parametrize("graph_steps", [1, 3])
@pytest.mark.parametrize("lengths", [[1], [3], [1, 3, 60], [7, 1, 12, 3], [2, LONG + 6, 5]])
def test_all_gradients_equal_the_loop(lengths: list[int], graph_steps: int) -> None:
    network = make_sgr(9, graph_steps=graph_steps)
    left, right = some_regions(3, 9), encoded_sets(lengths, max(lengths), D, 1)
    expected = check_gradients(network, reference, left, right)
    assert expected["graph.0.query.weight"].abs().max() > 0  # type: ignore[union-attr]


def test_training_mode_uses_batch_statistics_a_region_slot_a_channel() -> None:
    network = make_sgr(9, dropout=0.0).train()
    left, right = some_regions(6, 9), encoded_sets([1, 3, 8], 8, D, 1)
    expected = reference(network, left, right)
    assert (network.similarity(left, right) - expected).abs().max() < 1e-5
    assert (network.eval().similarity(left, right) - expected).abs().max() > 1e-4


def test_encoders_equal_a_loop() -> None:
    network = make_sgr(9)
    images = Items(torch.randn(3, 9, 7), torch.full((3,), 9))
    encoder = network.left
    encoded = network.encode_left(images)
    expected = plain_l2norm(linear(encoder.fc, images.values))  # type: ignore[arg-type]
    torch.testing.assert_close(encoded.local, expected)
    torch.testing.assert_close(encoded.pooled, plain_l2norm(expected.mean(dim=1)))

    texts = token_items([4, 1, 11])
    encoded = network.encode_right(texts)
    local, lengths = encoded.parts()
    words = network.right.words
    assert lengths is not None
    assert lengths.tolist() == [4, 1, 11]
    for row, n in enumerate([4, 1, 11]):
        hidden = plain_gru(words.rnn, words.embed.weight[texts.values[row, :n]])  # type: ignore[union-attr, arg-type, index]
        torch.testing.assert_close(local[row, :n], plain_l2norm(hidden))
        assert (local[row, n:] == 0).all()
        torch.testing.assert_close(encoded.pooled[row], plain_l2norm(plain_l2norm(hidden).mean(dim=0)))


# ---------------------------------------------------------------- what must not matter


@given(lengths=ragged, spare=st.integers(0, 40), seed=st.integers(0, 99))
@settings(max_examples=10)
def test_room_to_spare_changes_nothing(lengths: list[int], spare: int, seed: int) -> None:
    network, left = make_sgr(8, seed=seed), some_regions(3, 8, seed)
    tight = encoded_sets(lengths, max(lengths), D, seed + 1)
    loose = Encoded(tight.local, tight.lengths, tight.pooled, capacity=sum(lengths) + spare)
    results = []
    for right in (tight, loose):
        S = network.similarity(left, right)
        S.square().sum().backward()  # type: ignore[no-untyped-call]
        results.append(
            {"S": S.detach(), "words": tight.parts()[0].grad, "regions": left.parts()[0].grad, **gradients(network)}
        )
        tight.parts()[0].grad = left.parts()[0].grad = None
    for name, expected in results[0].items():
        if expected is not None:
            torch.testing.assert_close(results[1][name], expected, rtol=1e-4, atol=1e-6, msg=name)
    own = some_regions(len(lengths), 8, seed)
    torch.testing.assert_close(network.pair_similarity(own, tight), network.pair_similarity(own, loose))


# ---------------------------------------------------------------- edges


@pytest.mark.parametrize("initial", [True, False], ids=["zero biases", "trained"])
@pytest.mark.parametrize("where", ZEROS)
def test_zero_vectors_give_finite_scores_and_gradients(where: str, initial: bool) -> None:
    config = small_config(embed_size=D)
    network = SGR(SideSpec("regions", 7, 8), SideSpec("tokens", 30), config).eval() if initial else make_sgr(8)
    left, right = some_regions(3, 8), encoded_sets([1, 3, 5], 5, D, 1)
    V, words = zeroed(left, right, where)
    for similarity in (network.similarity, network.pair_similarity):
        scores = similarity(left, right)
        assert scores.isfinite().all()
        scores.sum().backward()  # type: ignore[no-untyped-call]
        for gradient in (V.grad, words.grad, *gradients(network).values()):
            assert gradient is None or gradient.isfinite().all()


def test_zero_features_do_not_drown_the_gradient_of_the_others() -> None:
    """Detectors write all-zero regions where they found too few; the new network maps them to exactly zero."""
    network = build(small_config(model="sgr", dropout=0.0), SideSpec("regions", 7, 6), SideSpec("tokens", 30), seed=0)
    values, texts = torch.randn(4, 6, 7, generator=torch.Generator().manual_seed(0)), token_items([3, 4, 5, 6])
    norms = []
    for without in (False, True):
        features = values.clone()
        if without:
            features[0, 5] = 0
        left = network.encode_left(Items(features, torch.full((4,), 6)))
        network.similarity(left, network.encode_right(texts)).diagonal().sum().backward()  # type: ignore[no-untyped-call]
        found = [gradient for gradient in gradients(network).values() if gradient is not None]
        norms.append(torch.cat([gradient.flatten() for gradient in found]).norm().item())
    assert norms[1] < 100 * norms[0]


def test_initial_weights_are_xavier_with_zero_biases() -> None:
    config = small_config(model="sgr", embed_size=64, sim_size=32)
    network = build(config, SideSpec("regions", 40, 8), SideSpec("tokens", 30), seed=0)
    layers = [(name, m) for name, m in network.named_modules() if isinstance(m, nn.Linear)]
    assert len(layers) == 1 + 3 + 3 + 2 + 3 * 3 + 1
    for name, layer in layers:
        bound = math.sqrt(6 / (layer.in_features + layer.out_features))
        largest = layer.weight.abs().max().item()
        assert largest <= bound, name
        assert largest > 0.8 * bound, name  # PyTorch's own start is narrower or wider
        assert layer.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.25), name
        assert (layer.bias == 0).all(), name
    words = network.right.words.embed.weight  # type: ignore[union-attr]
    assert isinstance(words, Tensor)
    assert 0.09 < words.abs().max() <= 0.1


def test_dropout_is_where_the_published_code_has_it() -> None:
    network = build(small_config(model="sgr", dropout=0.4), SideSpec("regions", 7, 8), SideSpec("tokens", 30), seed=0)
    shapes = []
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            assert module.p == 0.4
            module.register_forward_hook(lambda _module, inputs, _output: shapes.append(tuple(inputs[0].shape)))
    left = network.encode_left(Items(torch.randn(2, 8, 7), torch.full((2,), 8)))
    network.similarity(left, network.encode_right(token_items([3, 5, 2])))
    assert sorted(shapes) == sorted([(3, 5, 6), (2, 8, 16), (2, 16), (3, 5, 16), (3, 16)])


def test_ragged_region_sets_do_not_feel_their_padding() -> None:
    """`Encoded.local` promises zeros where padded."""
    network = make_sgr(6)
    values = torch.randn(3, 6, 7, generator=torch.Generator().manual_seed(0))
    values[1, 4:] = 0
    encoded = network.encode_left(Items(values, torch.tensor([6, 4, 6])))
    local, _ = encoded.parts()
    assert (local[1, 4:] == 0).all()
    alone = network.encode_left(Items(values[1:2, :4], torch.tensor([4])))
    torch.testing.assert_close(encoded.pooled[1], alone.pooled[0])


def test_another_number_of_regions_is_refused() -> None:
    """The normalisation of region slots fixes their number, as in the published code."""
    network = make_sgr(8)
    left, right = some_regions(3, 9), encoded_sets([1, 3], 3, D, 1)
    with pytest.raises(RuntimeError, match="9"):
        network.similarity(left, right)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # a CPU without bf16 says so
def test_bf16_scores_are_float32_and_close() -> None:
    network = make_sgr(8)
    images, texts = Items(torch.randn(5, 8, 7), torch.full((5,), 8)), token_items([1, 3, 12, 5, 2])
    full = network.similarity(network.encode_left(images), network.encode_right(texts))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        left, right = network.encode_left(images), network.encode_right(texts)
        half, pairs = network.similarity(left, right), network.pair_similarity(left, right)
    assert half.dtype == pairs.dtype == torch.float32
    assert (half - full).abs().max() < 0.02
    assert (pairs - full.diagonal()).abs().max() < 0.02
    assert len(set(half.flatten().tolist())) > 15  # scores do not tie as bf16 numbers would
    half.sum().backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in network.parameters())


def test_a_seed_gives_the_same_network() -> None:
    specs = SideSpec("regions", 7, 8), SideSpec("tokens", 30)
    before = torch.get_rng_state()
    a, b, c = (build(small_config(model="sgr"), *specs, seed=seed).state_dict() for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["score.weight"], c["score.weight"])
