import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mispair.errors import ConflictError
from mispair.models import SideSpec, build
from mispair.models.two_tower import TwoTower
from mispair.pairs.batches import Items
from refusals import refused
from small_data import shake, small_config


@given(st.integers(1, 40), st.integers(1, 40), st.integers(2, 6), st.integers(2, 6))
def test_any_two_widths(left: int, right: int, l: int, r: int) -> None:  # noqa: E741 - counts of the two sides
    network = TwoTower(SideSpec("vectors", left), SideSpec("vectors", right), small_config())
    shake(network)
    for mode in (network.train, network.eval):
        mode()
        a, b = network.encode_left(Items(torch.randn(l, left))), network.encode_right(Items(torch.randn(r, right)))
        S = network.similarity(a, b)
        assert S.shape == (l, r)
        assert S.dtype == torch.float32
        assert S.abs().max() <= 1 + 1e-5
        for encoded in (a, b):
            torch.testing.assert_close(encoded.pooled.norm(dim=1), torch.ones(len(encoded)))
    n = min(l, r)
    expected = torch.tensor([(x @ y).item() for x, y in zip(a.pooled[:n], b.pooled[:n], strict=True)])
    torch.testing.assert_close(S.diagonal(), expected)


def test_a_tower_is_what_its_name_says() -> None:
    network = TwoTower(SideSpec("vectors", 5), SideSpec("vectors", 4), small_config(dropout=0.3)).eval()
    shake(network)
    tower, x = network.left, torch.randn(3, 5)
    state = tower.state_dict()
    z = (x - state["standardise.running_mean"]) / (state["standardise.running_var"] + 1e-5).sqrt()
    hidden = (z @ state["mlp.0.weight"].T + state["mlp.0.bias"]).relu()
    y = z @ state["fc.weight"].T + state["fc.bias"] + hidden @ state["mlp.3.weight"].T + state["mlp.3.bias"]
    torch.testing.assert_close(network.encode_left(Items(x)).pooled, y / y.norm(dim=1, keepdim=True))


def test_half_precision_features_are_welcome() -> None:
    network = TwoTower(SideSpec("vectors", 5), SideSpec("vectors", 4), small_config()).eval()
    x = torch.randn(3, 5).half()
    assert torch.equal(network.encode_left(Items(x)).pooled, network.encode_left(Items(x.float())).pooled)


def test_scale_and_offset_of_foreign_embeddings_do_not_matter() -> None:
    network = TwoTower(SideSpec("vectors", 5), SideSpec("vectors", 4), small_config(dropout=0.0)).train()
    x = torch.randn(50, 5)
    torch.testing.assert_close(
        network.encode_left(Items(x)).pooled, network.encode_left(Items(7 * x + 3)).pooled, rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("other", [SideSpec("regions", 8, 4), SideSpec("tokens", 30)], ids=str)
@pytest.mark.parametrize("name", ["left", "right"])
def test_other_sides_are_refused(other: SideSpec, name: str) -> None:
    vectors = SideSpec("vectors", 8)
    sides = (other, vectors) if name == "left" else (vectors, other)
    with refused(ConflictError, where="model", names=f"{other}, as the {name} side"):
        build(small_config(model="two-tower"), *sides, seed=0)
