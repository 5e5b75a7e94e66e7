"""Random matchings of a graph: each node has at most one edge, and an edge multiplies the probability by its weight."""

from __future__ import annotations

import numpy as np

from mispair.functional.logistic import FloatArray
from mispair.pairs.pairs import IntArray

DAMPING = 0.5  # share of the last messages that is kept, so that they settle in graphs with circles
SETTLED = 1e-9  # change of the messages below which they stay as they are


class Matchings:
    """Belief propagation over the matchings of a graph; exact if the graph is a tree.

    A message to an edge is the probability that its node has no other edge.

    Attributes:
        single: (n,) probability that each node has no edge.
        chosen: (e,) probability of each edge.
    """

    def __init__(self, first: IntArray, second: IntArray, nodes: int) -> None:
        self._ends, self._nodes = (first, second), nodes
        self._free = [np.ones(len(first)), np.ones(len(first))]
        self.single, self.chosen = np.ones(nodes), np.zeros(len(first))
        self.log_partition = 0.0  # Bethe's approximation of the logarithm of the sum over all matchings

    def copy(self) -> Matchings:
        """The same messages, to go on from with other weights."""
        other = Matchings(*self._ends, self._nodes)
        other._free = [*self._free]
        return other

    def update(self, weight: FloatArray, passes: int) -> None:
        """Pass messages, from where they were, with these weights (e,)."""
        for _ in range(passes):
            parts = self._parts(weight)
            total = self._total(parts)
            new = [1 / (1 + np.maximum(total[end] - part, 0)) for end, part in parts]
            last, self._free = (
                self._free,
                [DAMPING * old + (1 - DAMPING) * now for old, now in zip(self._free, new, strict=True)],
            )
            if all(np.allclose(old, now, rtol=0, atol=SETTLED) for old, now in zip(last, self._free, strict=True)):
                break
        total, both = self._total(self._parts(weight)), weight * self._free[0] * self._free[1]
        self.single, self.chosen = 1 / (1 + total), both / (1 + both)
        self.log_partition = float(np.log1p(total).sum() - np.log1p(both).sum())

    def _parts(self, weight: FloatArray) -> list[tuple[IntArray, FloatArray]]:
        """Both ends of all edges, and what each edge adds to the odds that its end has one."""
        return [(self._ends[0], weight * self._free[1]), (self._ends[1], weight * self._free[0])]

    def _total(self, parts: list[tuple[IntArray, FloatArray]]) -> FloatArray:
        total = np.zeros(self._nodes)
        for end, part in parts:
            total += np.bincount(end, part, self._nodes)
        return total
