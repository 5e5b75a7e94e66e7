"""Matchings of graphs, against all of them one by one."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mispair.auditing.scoring.exchanges import Matchings


def every_matching(first: list[int], second: list[int], weight: np.ndarray) -> dict[tuple[int, ...], float]:
    """The weight of each set of edges that share no node."""
    found = {}
    for count in range(len(first) + 1):
        for edges in combinations(range(len(first)), count):
            nodes = [node for edge in edges for node in (first[edge], second[edge])]
            if len(set(nodes)) == len(nodes):
                found[edges] = float(np.prod(weight[list(edges)]))
    return found


@given(st.integers(0, 10_000), st.integers(2, 8))
def test_trees_are_exact(seed: int, nodes: int) -> None:
    rng = np.random.default_rng(seed)
    first = [int(rng.integers(node)) for node in range(1, nodes)]  # the parent of each node but the first
    second, weight = list(range(1, nodes)), np.exp(2 * rng.standard_normal(nodes - 1))
    graph = Matchings(np.array([first, second]), nodes)
    graph.update(weight, 100)
    expected = every_matching(first, second, weight)
    total = sum(expected.values())
    for edge in range(nodes - 1):
        assert graph.chosen[edge] == pytest.approx(sum(w for e, w in expected.items() if edge in e) / total, abs=1e-6)
    for node in range(nodes):
        own = [edge for edge in range(nodes - 1) if node in (first[edge], second[edge])]
        alone = sum(w for edges, w in expected.items() if not set(own) & set(edges))
        assert graph.single[node] == pytest.approx(alone / total, abs=1e-6)
    assert graph.log_partition == pytest.approx(np.log(total), abs=1e-6)


def test_a_triangle_settles_near_the_truth() -> None:
    graph = Matchings(np.array([[0, 0, 1], [1, 2, 2]]), 3)
    graph.update(np.array([3.0, 0.5, 0.5]), 100)
    assert graph.chosen == pytest.approx([0.6, 0.1, 0.1], abs=0.03)


def test_without_edges_all_are_single() -> None:
    graph = Matchings(np.empty((2, 0), dtype=np.int64), 4)
    graph.update(np.array([]), 5)
    assert graph.single.tolist() == [1] * 4
    assert graph.log_partition == 0
