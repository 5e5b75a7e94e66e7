"""SCAN against a caption-by-caption loop written from its description (peers.md 2.3)."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import mispair
from mispair.models import SCAN, Encoded, SideSpec, build
from mispair.pairs.batches import Items
from small_data import ZEROS, encoded_sets, gradients, plain_gru, plain_l2norm, shake, small_config, token_items, zeroed
from tiny import tiny_pairs

D = 16
LOOKS = ("t2i", "i2t")
AGGREGATES = ("lse", "mean", "max", "sum")
all_kinds = pytest.mark.parametrize(("attend", "aggregate"), [(a, b) for a in LOOKS for b in AGGREGATES])
both_ways = pytest.mark.parametrize("attend", LOOKS)
kinds = st.tuples(st.sampled_from(LOOKS), st.sampled_from(AGGREGATES))
ragged = st.lists(st.one_of(st.sampled_from([1, 2, 3]), st.integers(1, 60)), min_size=1, max_size=5)


def make_scan(attend: str = "t2i", aggregate: str = "lse", seed: int = 0, **config: object) -> SCAN:
    """SCAN over sets of regions and texts, with the published sharpness, away from its initial weights."""
    sharpness = {"attend_sharpness": 9.0, "lse_sharpness": 6.0} if attend == "t2i" else {"attend_sharpness": 4.0}
    known = small_config(embed_size=D, attend=attend, aggregate=aggregate, **{**sharpness, **config})
    network = SCAN(SideSpec("regions", 7, 8), SideSpec("tokens", 30), known)
    shake(network, seed)
    return network.eval()


def some_regions(items: int, regions: int, seed: int = 0) -> Encoded:
    return encoded_sets([regions] * items, regions, D, seed)


# ---------------------------------------------------------------- the reference


def cosine(x: Tensor, y: Tensor) -> Tensor:
    lengths = x.pow(2).sum(-1).sqrt() * y.pow(2).sum(-1).sqrt()
    return (x * y).sum(-1) / lengths.clamp(min=1e-8)


def bend(A: Tensor) -> Tensor:
    """LeakyReLU 0.1, then norm 1 over the last axis."""
    return plain_l2norm(torch.where(A > 0, A, 0.1 * A))


def together(r: Tensor, network: SCAN) -> Tensor:
    """(..., n) to (...)."""
    match network.aggregation:
        case "lse":
            return (network.lse_sharpness * r).exp().sum(-1).log() / network.lse_sharpness
        case "mean":
            return r.mean(-1)
        case "max":
            return r.max(-1).values
    return r.sum(-1)


def loop_similarity(network: SCAN, V: Tensor, words: Tensor, lengths: list[int]) -> Tensor:
    """Every image (B, R, D) against every caption, a caption at a time; all contexts are computed."""
    columns = []
    for j, n in enumerate(lengths):
        W = words[j, :n]
        if network.attend == "t2i":
            A = bend(V @ W.T)  # (B, R, n), norm over words
            P = torch.softmax(network.sharpness * A, dim=1).transpose(1, 2)  # over regions
            r = cosine(W.expand(len(V), -1, -1), P @ V)
        else:
            A = bend(W @ V.transpose(1, 2))  # (B, n, R), norm over regions
            P = torch.softmax(network.sharpness * A, dim=1).transpose(1, 2)  # over words
            r = cosine(V, P @ W)
        columns.append(together(r, network))
    return torch.stack(columns, dim=1)


def reference(network: SCAN, left: Encoded, right: Encoded) -> Tensor:
    (V, _), (words, lengths) = left.parts(), right.parts()
    assert lengths is not None
    return loop_similarity(network, V, words, lengths.tolist())


def close(S: Tensor, expected: Tensor) -> bool:
    """To 1e-5, relative where sums are larger than 1."""
    return bool(((S - expected).abs() / expected.abs().clamp(min=1)).max() < 1e-5)


# ---------------------------------------------------------------- the same numbers as the loop


@given(kind=kinds, lengths=ragged, regions=st.integers(8, 64), images=st.integers(1, 4), seed=st.integers(0, 99))
def test_similarity_equals_the_loop(
    kind: tuple[str, str], lengths: list[int], regions: int, images: int, seed: int
) -> None:
    network = make_scan(*kind)
    left, right = some_regions(images, regions, seed), encoded_sets(lengths, max(lengths), D, seed + 1)
    S, expected = network.similarity(left, right), reference(network, left, right)
    assert S.shape == (images, len(lengths))
    assert S.dtype == torch.float32
    assert close(S, expected)


@all_kinds
@pytest.mark.parametrize("lengths", [[1], [1, 3, 60], [7, 1, 12, 3]], ids=str)
def test_all_gradients_equal_the_loop(attend: str, aggregate: str, lengths: list[int]) -> None:
    network = make_scan(attend, aggregate)
    left, right = some_regions(3, 9), encoded_sets(lengths, max(lengths), D, 1)
    (V, _), (words, _) = left.parts(), right.parts()
    weights = torch.randn(3, len(lengths), generator=torch.Generator().manual_seed(2))
    found = torch.autograd.grad((network.similarity(left, right) * weights).sum(), [V, words])
    expected = torch.autograd.grad((reference(network, left, right) * weights).sum(), [V, words])
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    torch.testing.assert_close(found[0], expected[0], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(found[1][real], expected[1][real], rtol=1e-3, atol=1e-5)
    assert (found[1][~real] == 0).all()
    assert all(gradient.abs().max() > 1e-3 for gradient in expected)


@all_kinds
def test_all_parameters_get_the_gradients_of_the_loop(attend: str, aggregate: str) -> None:
    network, lengths = make_scan(attend, aggregate), [4, 1, 11]
    images, texts = Items(torch.randn(3, 8, 7)), token_items(lengths)
    results = []
    for similarity in (network.similarity, lambda *sides: reference(network, *sides)):
        S = similarity(network.encode_left(images), network.encode_right(texts))
        (S * torch.arange(9.0).view(3, 3)).sum().backward()  # type: ignore[no-untyped-call]
        results.append(gradients(network))
    ours, expected = results
    for name, gradient in expected.items():
        assert gradient is not None, name
        torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=1e-5, msg=name)


def test_encoders_equal_a_loop_and_have_no_dropout() -> None:
    network = make_scan(dropout=0.4).train()
    assert all(module.p == 0 for module in network.modules() if isinstance(module, nn.Dropout))
    values = torch.randn(3, 8, 7)
    expected = plain_l2norm(values @ network.left.fc.weight.T + network.left.fc.bias)  # type: ignore[union-attr, operator]
    torch.testing.assert_close(network.encode_left(Items(values)).local, expected)
    texts = token_items([4, 1, 11])
    words, (local, _) = network.right.words, network.encode_right(texts).parts()
    for row, n in enumerate([4, 1, 11]):
        hidden = plain_gru(words.rnn, words.embed.weight[texts.values[row, :n]])  # type: ignore[union-attr, arg-type, index]
        torch.testing.assert_close(local[row, :n], plain_l2norm(hidden))
        assert (local[row, n:] == 0).all()


def test_a_value_by_hand() -> None:
    """One word between two orthogonal regions: each gets half of the attention."""
    word, half = torch.tensor([[[1.0, 1.0]]]) / math.sqrt(2), math.sqrt(0.5)
    left = Encoded(torch.eye(2)[None], None, torch.tensor([[half, half]]))
    right = Encoded(word, torch.tensor([1]), torch.tensor([[half, half]]))
    config = small_config(embed_size=2, lse_sharpness=6.0)
    network = SCAN(SideSpec("regions", 7, 2), SideSpec("tokens", 30), config)
    assert network.similarity(left, right).item() == pytest.approx(1)  # the context is the word, half as long
    network.attend = "i2t"  # both regions see the word, at 45 degrees: (1 / 6) log(2 exp(6 sqrt(1/2)))
    assert network.similarity(left, right).item() == pytest.approx(half + math.log(2) / 6)


@both_ways
def test_a_sharp_log_sum_exp_is_the_maximum(attend: str) -> None:
    left, right = some_regions(3, 8), encoded_sets([1, 4, 9], 9, D, 1)
    sharp = make_scan(attend, "lse", lse_sharpness=1e4).similarity(left, right)
    torch.testing.assert_close(sharp, make_scan(attend, "max").similarity(left, right), rtol=0, atol=1e-3)


# ---------------------------------------------------------------- what must not matter


def outcome(network: SCAN, left: Encoded, right: Encoded) -> dict[str, Tensor]:
    """Scores of all and of pairs, and the gradients of both."""
    (V, _), (words, _) = left.parts(), right.parts()
    found: dict[str, Tensor] = {}
    for name, scores in {"all": network.similarity(left, right), "pairs": network.pair_similarity(left, right)}.items():
        to_regions, to_words = torch.autograd.grad(scores.square().sum(), [V, words])
        found |= {name: scores.detach(), f"{name}, regions": to_regions, f"{name}, words": to_words}
    return found


@given(kind=kinds, lengths=ragged, spare=st.integers(0, 40), seed=st.integers(0, 99))
def test_room_to_spare_changes_nothing(kind: tuple[str, str], lengths: list[int], spare: int, seed: int) -> None:
    network, left = make_scan(*kind), some_regions(len(lengths), 8, seed)
    tight = encoded_sets(lengths, max(lengths), D, seed + 1)
    loose = Encoded(tight.local, tight.lengths, tight.pooled, capacity=sum(lengths) + spare)
    found, expected = outcome(network, left, loose), outcome(network, left, tight)
    for name, value in expected.items():
        assert found[name].isfinite().all()
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)


@all_kinds
def test_ragged_region_sets_do_not_feel_their_padding(attend: str, aggregate: str) -> None:
    network, right = make_scan(attend, aggregate), encoded_sets([1, 3, 7], 7, D, 1)
    values = torch.randn(3, 6, 7, generator=torch.Generator().manual_seed(0))
    counts = [6, 4, 1]
    left = network.encode_left(Items(values, torch.tensor(counts)))
    S, pairs = network.similarity(left, right), network.pair_similarity(left, right)
    torch.testing.assert_close(pairs, S.diagonal(), rtol=0, atol=1e-5)
    for row, count in enumerate(counts):
        alone = network.encode_left(Items(values[row : row + 1, :count]))  # without counts: all are real
        torch.testing.assert_close(network.similarity(alone, right)[0], S[row], rtol=0, atol=1e-5)


# ---------------------------------------------------------------- edges


@all_kinds
@pytest.mark.parametrize("where", ZEROS)
def test_zero_vectors_give_finite_scores_and_gradients(attend: str, aggregate: str, where: str) -> None:
    network = make_scan(attend, aggregate)
    left, right = some_regions(3, 8), encoded_sets([1, 3, 5], 5, D, 1)
    zeroed(left, right, where)
    for name, value in outcome(network, left, right).items():
        assert value.isfinite().all(), name
        assert value.abs().max() < 1e4, name  # and does not drown those of the others
    if aggregate != "lse" and where in ("all words", "all regions", "everything"):
        assert (network.similarity(left, right) == 0).all()


@both_ways
def test_regions_that_cancel_out(attend: str) -> None:
    """The length of a context that is nearly zero comes out as the root of something around zero."""
    one = torch.nn.functional.normalize(torch.randn(1, 1, D), dim=-1)
    local = torch.cat([one, -one], dim=1).requires_grad_()
    pooled = torch.zeros(1, D)
    network = make_scan(attend)
    left, right = Encoded(local, None, pooled), Encoded(local.detach().clone().requires_grad_(), None, pooled)
    assert all(value.isfinite().all() for value in outcome(network, left, right).values())


@both_ways
@pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # a CPU without bf16 says so
def test_bf16_scores_are_float32_and_close(attend: str) -> None:
    network = make_scan(attend)
    images, texts = Items(torch.randn(5, 8, 7)), token_items([1, 3, 12, 5, 2])
    full = network.similarity(network.encode_left(images), network.encode_right(texts))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        left, right = network.encode_left(images), network.encode_right(texts)
        half, pairs = network.similarity(left, right), network.pair_similarity(left, right)
    assert left.parts()[0].dtype == torch.bfloat16
    assert half.dtype == pairs.dtype == torch.float32
    assert (half - full).abs().max() < 0.02
    torch.testing.assert_close(pairs, half.diagonal(), rtol=0, atol=1e-5)
    assert len(set(half.flatten().tolist())) > 20  # scores do not tie as bf16 numbers would
    half.sum().backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in network.parameters())


def test_a_seed_gives_the_same_network() -> None:
    specs = SideSpec("regions", 7, 8), SideSpec("tokens", 30)
    a, b, c = (build(small_config(model="scan"), *specs, seed=seed).state_dict() for seed in (5, 5, 6))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["left.fc.weight"], c["left.fc.weight"])


@pytest.mark.slow
@both_ways
def test_training_learns(attend: str) -> None:
    pairs = tiny_pairs(40)
    settings: dict[str, Any] = {
        "model": "scan", "attend": attend, "attend_sharpness": 9.0 if attend == "t2i" else 4.0, "embed_size": 32,
        "word_size": 8, "batch_size": 16, "warmup_epochs": 5, "epochs": 8, "lr": 3e-3, "negatives_start": 8,
        "negatives_end": 4, "hardening_steps": 10, "device": "cpu",
    }  # fmt: skip
    by_luck = 100 * (1 + 5 + 10) * (1 / 40 + 1 / 40)
    assert mispair.fit(pairs, **settings).evaluate(pairs).averaged.rsum > 3 * by_luck
