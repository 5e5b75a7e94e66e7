"""VSE-inf against a loop over items and channels written from its description (peers.md 2.5)."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mispair.models import SideSpec
from mispair.models.base import Encoded
from mispair.models.vse import GPO, VSE, position_codes
from mispair.pairs.batches import Items
from reference_loops import gpo_pool, vse_similarity
from small_data import plain_gru, plain_l2norm, shake, small_config, token_items

ragged = st.lists(st.one_of(st.sampled_from([1, 2]), st.integers(1, 40)), min_size=1, max_size=4)


def code(position: int, channel: int, size: int) -> float:
    angle = position / 10000 ** (channel // 2 * 2 / size)
    return math.sin(angle) if channel % 2 == 0 else math.cos(angle)


def plain_weights(gpo: GPO, length: int) -> Tensor:
    codes = torch.tensor([[code(position, channel, 32) for channel in range(32)] for position in range(length)])
    scores = plain_gru(gpo.rnn, codes) @ gpo.score.weight[0]
    return torch.softmax(scores / 0.1, dim=0)


def plain_pool(gpo: GPO, x: Tensor, lengths: list[int]) -> Tensor:
    """Item by item, channel by channel, sorted by Python."""
    items = []
    for row, length in enumerate(lengths):
        weights = plain_weights(gpo, length)
        channels = []
        for channel in range(x.shape[2]):
            order = sorted(range(length), key=lambda k, row=row, channel=channel: -x[row, k, channel].item())  # type: ignore[misc]
            channels.append(sum(weights[place] * x[row, k, channel] for place, k in enumerate(order)))
        items.append(torch.stack(channels))  # type: ignore[arg-type]
    return torch.stack(items)


def make_gpo(seed: int = 0) -> GPO:
    gpo = GPO()
    shake(gpo, seed)
    return gpo


def padded(lengths: list[int], size: int = 3, extra: int = 0, seed: int = 0) -> Tensor:
    x = torch.randn(len(lengths), max(lengths) + extra, size, generator=torch.Generator().manual_seed(seed))
    for row, length in enumerate(lengths):
        x[row, length:] = 0
    return x


@given(lengths=ragged, extra=st.integers(0, 3), seed=st.integers(0, 99))
def test_gpo_equals_the_loop(lengths: list[int], extra: int, seed: int) -> None:
    gpo, x = make_gpo(seed), padded(lengths, extra=extra, seed=seed)
    expected = plain_pool(gpo, x, lengths)
    torch.testing.assert_close(gpo(x, torch.tensor(lengths)), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gpo_pool(gpo, x, lengths), expected, rtol=1e-4, atol=1e-5)


def test_all_gradients_of_gpo_equal_the_loop() -> None:
    lengths, gpo = [1, 7, 4], make_gpo()
    x = padded(lengths).requires_grad_()
    factors = torch.randn(3, 3)
    results: list[list[Tensor]] = []
    for pooled in (gpo(x, torch.tensor(lengths)), plain_pool(gpo, x, lengths)):
        results.append(list(torch.autograd.grad((pooled * factors).sum(), [x, *gpo.parameters()])))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-5)
    assert all((gradient != 0).any() for gradient in results[0])


@given(lengths=ragged, seed=st.integers(0, 99))
def test_gpo_with_equal_scores_is_the_mean(lengths: list[int], seed: int) -> None:
    gpo, x = make_gpo(seed), padded(lengths, seed=seed)
    nn.init.zeros_(gpo.score.weight)
    pooled = gpo(x, torch.tensor(lengths))
    for row, length in enumerate(lengths):
        torch.testing.assert_close(pooled[row], x[row, :length].mean(dim=0), rtol=1e-5, atol=1e-6)


@given(lengths=ragged, seed=st.integers(0, 99))
def test_gpo_with_all_weight_on_the_first_place_is_the_maximum(lengths: list[int], seed: int) -> None:
    gpo, x = make_gpo(seed), padded(lengths, extra=2, seed=seed) - 5  # all below zero: padding must not win
    with pytest.MonkeyPatch.context() as patch:
        first = torch.zeros(len(lengths), x.shape[1])
        first[:, 0] = 1
        patch.setattr(gpo, "weights", lambda *_: first)
        pooled = gpo(x, torch.tensor(lengths))
    for row, length in enumerate(lengths):
        assert torch.equal(pooled[row], x[row, :length].amax(dim=0))


@given(lengths=ragged, extra=st.integers(0, 4))
def test_weights_sum_to_one_and_depend_on_the_length_alone(lengths: list[int], extra: int) -> None:
    gpo, width = make_gpo(), max(lengths) + extra
    weights = gpo.weights(torch.tensor(lengths), width)
    assert weights.shape == (len(lengths), width)
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(len(lengths)))
    for row, length in enumerate(lengths):
        assert (weights[row, length:] == 0).all()
        torch.testing.assert_close(weights[row, :length], plain_weights(gpo, length), rtol=1e-4, atol=1e-6)


def test_position_codes() -> None:
    codes = position_codes(40, 32, torch.device("cpu"))
    expected = [[code(position, channel, 32) for channel in range(32)] for position in range(40)]
    torch.testing.assert_close(codes, torch.tensor(expected), rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_gpo_is_float32_under_autocast() -> None:
    gpo, x = make_gpo(), padded([2, 5])
    expected = gpo(x, torch.tensor([2, 5]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(gpo(x, torch.tensor([2, 5])), expected)


# ---------------------------------------------------------------- the two branches


def make_vse(left: SideSpec | None = None, right: SideSpec | None = None, **config: object) -> VSE:
    torch.manual_seed(0)
    network = VSE(left or SideSpec("regions", 7, 5), right or SideSpec("tokens", 30), small_config(**config))
    shake(network)
    return network


def plain_regions(network: VSE, rows: Tensor) -> Tensor:
    """Linear plus MLP of real region rows (T, F) to (T, D), with the batch's own statistics in training mode."""
    state: dict[str, Tensor] = network.left.state_dict()
    hidden = rows @ state["mlp.0.weight"].T + state["mlp.0.bias"]
    if network.training:
        mean, variance = hidden.mean(dim=0), hidden.var(dim=0, unbiased=False)
    else:
        mean, variance = state["mlp.1.running_mean"], state["mlp.1.running_var"]
    hidden = (hidden - mean) / (variance + 1e-5).sqrt() * state["mlp.1.weight"] + state["mlp.1.bias"]
    mapped = rows @ state["fc.weight"].T + state["fc.bias"]
    return mapped + hidden.clamp(min=0) @ state["mlp.3.weight"].T + state["mlp.3.bias"]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("lengths", "width"), [([5, 5, 5], 5), ([3, 1, 5], 5), ([3, 1, 2], 9)])
def test_image_branch_equals_the_loop(lengths: list[int], width: int, training: bool) -> None:
    network = make_vse().train(training)
    values = torch.randn(3, width, 7)
    rows = torch.cat([values[row, :length] for row, length in enumerate(lengths)])
    mapped = plain_regions(network, rows)
    local = torch.zeros(3, width, 16)
    for row, part in enumerate(torch.split(mapped, lengths)):
        local[row, : lengths[row]] = part
        values[row, lengths[row] :] = 1e3  # whatever stands in the padding
    expected = plain_l2norm(plain_pool(network.left.pool, local, lengths))  # type: ignore[arg-type]
    encoded = network.encode_left(Items(values, torch.tensor(lengths)))
    torch.testing.assert_close(encoded.pooled, expected, rtol=1e-4, atol=1e-5)
    assert encoded.local is None
    torch.testing.assert_close(encoded.pooled.norm(dim=1), torch.ones(3))


def test_padding_does_not_reach_the_running_statistics() -> None:
    states = []
    values = torch.randn(3, 5, 7)
    for more in (0, 4):
        network = make_vse().train()
        wide = torch.cat([values, torch.zeros(3, more, 7)], dim=1)
        network.encode_left(Items(wide, torch.tensor([5, 2, 4])))
        states.append(network.left.state_dict())
    for name in ("mlp.1.running_mean", "mlp.1.running_var"):
        torch.testing.assert_close(states[0][name], states[1][name])


@given(lengths=ragged, extra=st.integers(0, 3))
@settings(max_examples=10)
def test_text_branch_equals_the_loop(lengths: list[int], extra: int) -> None:
    network = make_vse()
    items = token_items(lengths, extra=extra)
    encoded = network.encode_right(items)
    words = network.right.words
    hidden = torch.zeros(len(lengths), max(lengths), 16)
    for row, length in enumerate(lengths):
        hidden[row, :length] = plain_gru(words.rnn, words.embed.weight[items.values[row, :length]])  # type: ignore[union-attr, arg-type, index]
    expected = plain_l2norm(plain_pool(network.right.pool, hidden, lengths))  # type: ignore[arg-type]
    torch.testing.assert_close(encoded.pooled, expected, rtol=1e-4, atol=1e-5)


def test_there_is_no_dropout_on_the_words_and_no_shared_pooling() -> None:
    network = make_vse(dropout=0.4).train()
    items = token_items([3, 8])
    assert torch.equal(network.encode_right(items).pooled, network.encode_right(items).pooled)
    assert network.left.pool is not network.right.pool


def test_the_mask_word_has_an_embedding_of_its_own() -> None:
    network = make_vse(right=SideSpec("tokens", 30))
    masked = network.encode_right(Items(torch.tensor([[1, 30, 2]]), torch.tensor([3])))
    assert masked.pooled.isfinite().all()
    with pytest.raises(IndexError):
        network.encode_right(Items(torch.tensor([[31]]), torch.tensor([1])))


@pytest.mark.parametrize("augment", [True, False])
def test_augmentation_can_be_switched_off(augment: bool) -> None:
    assert make_vse(augment=augment).augments is augment


def test_any_two_sides_and_cosine_scores() -> None:
    network = make_vse(SideSpec("tokens", 30), SideSpec("vectors", 7)).eval()
    left, right = network.encode_left(token_items([1, 4, 9])), network.encode_right(Items(torch.randn(3, 7)))
    S = network.similarity(left, right)
    expected = [[(a @ b).item() for b in right.pooled] for a in left.pooled]
    torch.testing.assert_close(S, torch.tensor(expected))
    torch.testing.assert_close(network.pair_similarity(left, right), S.diagonal())


def test_every_parameter_learns() -> None:
    network = make_vse().train()
    left: Encoded = network.encode_left(Items(torch.randn(4, 5, 7), torch.full((4,), 5)))
    right = network.encode_right(token_items([1, 2, 6, 9]))
    (network.similarity(left, right) * torch.randn(4, 4)).sum().backward()  # type: ignore[no-untyped-call]
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert (parameter.grad != 0).any() or name == "left.mlp.0.bias", name  # normalised away


def test_the_benchmarks_loop_is_the_network() -> None:
    network = make_vse().eval()
    images, texts = Items(torch.randn(3, 5, 7)), token_items([1, 4, 9])
    S = network.similarity(network.encode_left(images), network.encode_right(texts))
    torch.testing.assert_close(vse_similarity(network, images, texts), S, rtol=1e-4, atol=1e-5)
