"""The pass over all pairs against plain loops that encode and score one item at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mispair.methods.epoch_view import EpochView, epoch_view
from mispair.models import Encoded, Network, SideSpec, build
from mispair.pairs.batches import PairLoader, random_batches
from mispair.pairs.pairs import Pairs, select
from mispair.support.arrays import IntArray
from small_data import lengths_of, regions, shake, small_config, tokens, vectors

MODELS = ("vse", "sgr", "saf", "scan", "two-tower")
SETS = ("sgr", "saf", "scan")  # models with a vector for each region and word
LENGTHS = (3, 9, 4, 1, 7, 7, 2, 12, 5, 3, 6, 1, 8, 4, 10, 3, 5)
LINK = np.array([0, 0, 1, 2, 3, 3, 3, 4, 5, 0, 1, 2, 3, 4, 5, 5, 1])
MARGIN = 0.2


def case(model: str) -> tuple[Network, PairLoader]:
    """A network in training mode, with dropout and moved statistics, and 17 pairs of 6 left items."""
    if model == "two-tower":
        pairs = Pairs(vectors(6, width=5), vectors(17, width=9, seed=1), LINK)
    else:
        pairs = Pairs(regions(6), tokens(LENGTHS), LINK)
    config = small_config(model=model, dropout=0.5)
    network = build(config, SideSpec.of(pairs.left), SideSpec.of(pairs.right), seed=1)
    shake(network)
    return network.train(), PairLoader(pairs, torch.device("cpu"))


def pairs_used(network: Network, loader: PairLoader, batches: list[IntArray], *, mask: bool = True) -> EpochView:
    return epoch_view(network, loader, MARGIN, batches, mask=mask)


def one_by_one(network: Network, loader: PairLoader) -> tuple[list[Encoded], list[Encoded]]:
    """Both items of each pair, each encoded alone in evaluation mode."""
    network.eval()
    with torch.no_grad():
        left = [network.encode_left(loader.left.items(np.array([row]))) for row in loader.pairs.link]
        right = [network.encode_right(loader.right.items(np.array([pair]))) for pair in range(len(loader.pairs))]
    network.train()
    return left, right


@pytest.mark.parametrize("model", MODELS)
def test_losses_equal_a_plain_loop(model: str) -> None:
    network, loader = case(model)
    batches = [np.array(b) for b in ([3, 0, 16, 9, 5, 1], [2, 4, 6, 7, 8, 10], [11, 12, 13, 14, 15])]
    views = {mask: pairs_used(network, loader, batches, mask=mask) for mask in (True, False)}

    left, right = one_by_one(network, loader)
    network.eval()
    spreads = []
    for batch in batches:
        with torch.no_grad():
            S = {(i, j): network.pair_similarity(left[i], right[j]).item() for i in batch for j in batch}
        spreads.append(np.std(list(S.values()), ddof=1))
        for mask, view in views.items():
            expected = []
            for i in batch:
                others = [j for j in batch if j != i and not (mask and LINK[i] == LINK[j])]
                costs = [max(0.0, MARGIN + S[i, j] - S[i, i]) + max(0.0, MARGIN + S[j, i] - S[i, i]) for j in others]
                expected.append(sum(costs) / len(batch))
            # Vectors of the networks with a cosine are in half precision.
            tolerance = 1e-5 if model in SETS else 2e-3
            assert [view.losses[i].item() for i in batch] == pytest.approx(expected, abs=tolerance)
            assert np.ptp(expected) > 10 * tolerance
    assert views[True].spread == pytest.approx(float(np.mean(spreads)), rel=2e-3)


def told_by_groups(pairs: Pairs) -> Pairs:
    """The same pairs with a left row each, and groups that say which rows are copies of one item."""
    return Pairs(select(pairs.left, pairs.link), pairs.right, np.arange(len(pairs)), groups=pairs.link)


@pytest.mark.parametrize("model", MODELS)
def test_copies_of_an_item_that_groups_tell_of_are_one_item(model: str) -> None:
    network, loader = case(model)
    copies = PairLoader(told_by_groups(loader.pairs), torch.device("cpu"))
    batches = random_batches(len(LINK), 9, np.random.default_rng(0))
    expected, found = (pairs_used(network, one, batches).losses for one in (loader, copies))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(pairs_used(network, copies, batches, mask=False).losses, expected, rtol=1e-3)


@pytest.mark.parametrize("model", MODELS)
def test_vectors_are_those_of_the_evaluation_mode(model: str) -> None:
    network, loader = case(model)
    view = pairs_used(network, loader, random_batches(17, 5, np.random.default_rng(0)))
    left, right = one_by_one(network, loader)
    assert view.left.shape[0] == 6
    for pair, (a, b) in enumerate(zip(left, right, strict=True)):
        assert view.left[LINK[pair]].tolist() == pytest.approx(a.pooled[0].tolist(), abs=1e-3)
        assert view.right[pair].tolist() == pytest.approx(b.pooled[0].tolist(), abs=1e-3)


@pytest.mark.parametrize("model", MODELS)
def test_items_of_pairs_equal_direct_encoding(model: str) -> None:
    network, loader = case(model)
    view = pairs_used(network, loader, random_batches(17, 5, np.random.default_rng(0)))
    chosen = np.array([7, 3, 3, 16, 0])
    left, right = one_by_one(network, loader)
    for found, alone in ((view.encoded(chosen, left=True), left), (view.encoded(chosen, left=False), right)):
        assert not found.pooled.requires_grad
        assert found.pooled.dtype == torch.float32
        assert len(found) == 5
        for row, pair in enumerate(chosen):
            assert found.pooled[row].tolist() == pytest.approx(alone[pair].pooled[0].tolist(), abs=1e-3)
            if model in SETS:
                (local, _), (expected, _), (length,) = found.parts(), alone[pair].parts(), lengths_of(alone[pair])
                assert lengths_of(found)[row] == length
                assert torch.allclose(local[row, :length], expected[0], atol=1e-5)
    assert network.training


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_the_network_is_left_as_it_was(model: str, training: bool) -> None:
    network, loader = case(model)
    network.train(training)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    state = torch.get_rng_state()
    view = pairs_used(network, loader, random_batches(17, 5, np.random.default_rng(0)))
    assert not any(t.requires_grad for t in (view.losses, view.left, view.right))
    assert all(module.training is training for module in network.modules())
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)  # nor does it draw from the training's random numbers


def test_the_generator_decides() -> None:
    network, loader = case("two-tower")
    views = [pairs_used(network, loader, random_batches(17, 5, np.random.default_rng(s))).losses for s in (4, 4, 5)]
    assert torch.equal(views[0], views[1])
    assert not torch.equal(views[0], views[2])


@given(st.integers(1, 400), st.integers(2, 150), st.integers(0, 9))
def test_batches_are_a_partition_into_nearly_equal_parts(count: int, size: int, seed: int) -> None:
    batches = random_batches(count, size, np.random.default_rng(seed))
    assert sorted(np.concatenate(batches).tolist()) == list(range(count))
    sizes = [len(batch) for batch in batches]
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) < 2 * size
    if count >= size:
        assert min(sizes) >= size // 2
    again = random_batches(count, size, np.random.default_rng(seed))
    assert all(np.array_equal(a, b) for a, b in zip(batches, again, strict=True))


def test_batches_are_shuffled() -> None:
    assert np.concatenate(random_batches(100, 10, np.random.default_rng(0))).tolist() != list(range(100))


@pytest.mark.parametrize("count", [3, 7, 11, 203])
def test_no_pair_is_alone_in_its_batch(count: int) -> None:
    """Alone it has no negatives: its loss is 0, so that it counts as clean, and the spread is NaN."""
    assert min(len(batch) for batch in random_batches(count, 2, np.random.default_rng(0))) >= 2
