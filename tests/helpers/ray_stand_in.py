"""As much of Ray as an audit uses, in this process. What goes to workers is pickled, as Ray does."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow


def sent(value: Any) -> Any:
    """What another process gets of it."""
    return pickle.loads(pickle.dumps(value))


@dataclass
class StandIn:
    """Ray whose workers are this process.

    Attributes:
        calls: How often each function was called.
        fails: Raises where a call shall not be done; gets the name of the function and the number of the block.
    """

    fails: Callable[[str, int], None] = lambda *_: None
    calls: Counter[str] = field(default_factory=Counter)

    @property
    def data(self) -> Any:
        return SimpleNamespace(from_items=lambda items: Rows(self, items))

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def put(self, value: Any) -> Any:
        return value

    def get(self, found: Any) -> Any:
        return found

    def remote(self, **_: Any) -> Any:
        return lambda function: SimpleNamespace(remote=lambda *given: self.call(function, *given))

    def call(self, function: Any, *given: Any) -> Any:
        name = getattr(function, "func", function).__name__
        self.calls[name] += 1
        self.fails(name, given[-1] if isinstance(given[-1], int) else -1)
        return sent(function)(*sent(given))


@dataclass
class Rows:
    """A data set of Ray, in batches."""

    ray: StandIn
    batches: list[Any]

    def map_batches(self, function: Any, *, batch_size: int, batch_format: str) -> Rows:
        assert (batch_size, batch_format) == (1, "numpy")
        batches = ({name: np.array([value]) for name, value in item.items()} for item in self.batches)
        return Rows(self.ray, [self.ray.call(function, batch) for batch in batches])

    def groupby(self, key: str, num_partitions: int) -> Any:
        assert num_partitions > 0
        return SimpleNamespace(map_groups=partial(self._map_groups, key))

    def _map_groups(self, key: str, function: Any, batch_format: str) -> Rows:
        assert batch_format == "numpy"
        whole = {name: np.concatenate([batch[name] for batch in self.batches]) for name in self.batches[0]}
        order = np.random.default_rng(0).permutation(len(whole[key]))  # a shuffle keeps no order
        whole = {name: values[order] for name, values in whole.items()}
        groups = [{name: values[whole[key] == one] for name, values in whole.items()} for one in np.unique(whole[key])]
        return Rows(self.ray, [self.ray.call(function, group) for group in groups])

    def to_arrow_refs(self) -> list[Any]:
        return [pyarrow.table(batch) for batch in self.batches]
