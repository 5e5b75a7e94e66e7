"""Bytes of networks, without taking their memory; limits of sizes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mispair.config import WIDEST, Config
from mispair.errors import InvalidValueError
from mispair.models import MODELS, SideSpec, build, weight_bytes
from mispair.training.settings import override
from refusals import refused

LEFT, RIGHT = SideSpec("regions", 6, 3), SideSpec("tokens", 20)
VECTORS = SideSpec("vectors", 6), SideSpec("vectors", 5)


def sides(model: str) -> tuple[SideSpec, SideSpec]:
    return VECTORS if model == "two-tower" else (LEFT, RIGHT)


@settings(max_examples=10)
@given(st.sampled_from(sorted(MODELS)), st.integers(2, 20), st.integers(1, 20), st.integers(1, 4), st.integers(0, 9))
def test_the_bytes_of_weights_are_those_of_the_network(
    model: str, width: int, word: int, steps: int, hidden: int
) -> None:
    chosen = {"model": model, "embed_size": 2 * width, "word_size": word, "sim_size": width}
    config = override(Config(), {**chosen, "graph_steps": steps, "score_hidden": hidden})
    made = build(config, *sides(model), seed=0)
    assert weight_bytes(config, *sides(model)) == sum(weights.nbytes for weights in made.state_dict().values())


@pytest.mark.parametrize("model", sorted(MODELS))
def test_the_widest_networks_take_no_memory_to_be_measured(model: str) -> None:
    config = override(Config(), {"model": model, "embed_size": WIDEST, "word_size": WIDEST, "sim_size": WIDEST})
    assert weight_bytes(config, *sides(model)) > 10e9


@pytest.mark.parametrize("name", ["embed_size", "word_size", "sim_size", "graph_steps", "score_hidden"])
def test_sizes_have_a_limit(name: str) -> None:
    with refused(InvalidValueError, where=name, names="2147483647"):
        override(Config(), {name: 2**31 - 1})
