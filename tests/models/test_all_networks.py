"""What must not matter to a network that compares regions and words: to SGR, SAF and every kind of SCAN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mispair.models import Encoded, Network, SideSpec, build
from mispair.pairs.batches import Items
from small_data import encoded_sets, shake, small_config, token_items

D = 16
KINDS: dict[str, dict[str, object]] = {
    "sgr": {"model": "sgr"},
    "saf": {"model": "saf"},
    **{
        f"scan {attend} {aggregate}": {"model": "scan", "attend": attend, "aggregate": aggregate}
        for attend in ("t2i", "i2t")
        for aggregate in ("lse", "mean", "max", "sum")
    },
}
kinds = st.sampled_from(list(KINDS))
every_kind = pytest.mark.parametrize("kind", list(KINDS))
ragged = st.lists(st.one_of(st.sampled_from([1, 2, 3]), st.integers(1, 60)), min_size=1, max_size=5)
SPECS = {"vectors": SideSpec("vectors", 7), "regions": SideSpec("regions", 7, 6), "tokens": SideSpec("tokens", 30)}


def make(kind: str, left: SideSpec, right: SideSpec = SPECS["tokens"], seed: int = 0) -> Network:
    """Away from its initial weights, in evaluation mode."""
    network = build(small_config(embed_size=D, dropout=0.0, **KINDS[kind]), left, right, seed=0)
    shake(network, seed)
    return network.eval()


def some_regions(items: int, regions: int, seed: int = 0) -> Encoded:
    return encoded_sets([regions] * items, regions, D, seed)


def assert_close(found: Tensor, expected: Tensor) -> None:
    """To 1e-5, relative where sums are larger than 1."""
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    assert ((found - expected).abs() / expected.abs().clamp(min=1)).max() < 1e-5


@given(kind=kinds, lengths=ragged, regions=st.integers(8, 64), seed=st.integers(0, 99))
def test_pair_similarity_is_the_diagonal(kind: str, lengths: list[int], regions: int, seed: int) -> None:
    network = make(kind, SideSpec("regions", 7, regions), seed=seed)
    left, right = some_regions(len(lengths), regions, seed), encoded_sets(lengths, max(lengths), D, seed + 1)
    assert_close(network.pair_similarity(left, right), network.similarity(left, right).diagonal())


@given(kind=kinds, lengths=ragged, extra=st.integers(1, 9), seed=st.integers(0, 99))
def test_padding_beyond_the_longest_caption(kind: str, lengths: list[int], extra: int, seed: int) -> None:
    network = make(kind, SideSpec("regions", 7, 8), seed=seed)
    left = some_regions(len(lengths), 8, seed)
    tight, loose = (network.encode_right(token_items(lengths, extra=more)) for more in (0, extra))
    for similarity in (network.similarity, network.pair_similarity):
        assert_close(similarity(left, loose), similarity(left, tight))


@given(kind=kinds, lengths=ragged, seed=st.integers(0, 99))
def test_other_captions(kind: str, lengths: list[int], seed: int) -> None:
    """In evaluation mode: in training SAF's gate is normalised over all of them."""
    network, left = make(kind, SideSpec("regions", 7, 8), seed=seed), some_regions(3, 8, seed)
    texts = token_items(lengths)
    S = network.similarity(left, network.encode_right(texts))
    for row, length in enumerate(lengths):
        alone = network.encode_right(Items(texts.values[row : row + 1, :length], torch.tensor([length])))
        assert_close(network.similarity(left, alone)[:, 0], S[:, row])


@every_kind
def test_other_images(kind: str) -> None:
    network, left = make(kind, SideSpec("regions", 7, 8)), some_regions(4, 8)
    right, (V, _) = encoded_sets([1, 3, 5], 5, D, 1), left.parts()
    S = network.similarity(left, right)
    for row in range(4):
        alone = Encoded(V[row : row + 1], torch.tensor([8]), left.pooled[row : row + 1])
        assert_close(network.similarity(alone, right)[0], S[row])


@pytest.mark.parametrize("kind", ["sgr", "saf", "scan t2i lse", "scan i2t lse"])
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("vectors", "tokens"),
        ("regions", "vectors"),
        ("vectors", "vectors"),
        ("tokens", "tokens"),
        ("tokens", "regions"),
    ],
)
def test_which_kinds_of_sides_there_are(kind: str, left: str, right: str) -> None:
    texts = token_items([1, 3, 9, 2])
    items = {"vectors": Items(torch.randn(4, 7)), "regions": Items(torch.randn(4, 6, 7)), "tokens": texts}
    network = make(kind, SPECS[left], SPECS[right])
    for training in (True, False):
        network.train(training)
        a, b = network.encode_left(items[left]), network.encode_right(items[right])
        S = network.similarity(a, b)
        assert S.shape == (4, 4)
        assert S.isfinite().all()
    assert_close(network.pair_similarity(a, b), S.diagonal())
    for row in range(4):  # ragged sets on the left too: nobody feels the padding of the others
        values, lengths = items[left].values[row : row + 1], items[left].lengths
        alone = Items(values) if lengths is None else Items(values[:, : lengths[row]], lengths[row : row + 1])
        assert_close(network.similarity(network.encode_left(alone), b)[0], S[row])


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what would wait for a GPU: values that go back to the host, and shapes that depend on them."""

    kinds = torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.masked_select

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in self.kinds:
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_waiting_is_noticed() -> None:
    with Waits() as waits:
        int(torch.ones(2).sum())
        torch.ones(2).nonzero()
    assert waits.seen == ["aten._local_scalar_dense.default", "aten.nonzero.default"]


@every_kind
@pytest.mark.parametrize("training", [True, False])
def test_nothing_waits_for_the_device(kind: str, training: bool) -> None:
    """Else a GPU could not record the step."""
    network = make(kind, SideSpec("regions", 7, 8)).train(training)
    left, right = some_regions(3, 8), encoded_sets([1, 3, 5], 7, D, 1)
    right = Encoded(right.local, right.lengths, right.pooled, capacity=20)
    with Waits() as waits:
        for similarity in (network.similarity, network.pair_similarity):
            similarity(left, right).sum().backward()  # type: ignore[no-untyped-call]
    assert waits.seen == []
