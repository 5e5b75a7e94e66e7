"""Ray Data, as encoding and auditing use it. Ray is imported only when it is needed."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mispair.errors import InvalidValueError
from mispair.support.extras import missing_package

MOST_TASKS = 1000  # of one stage: each of them sees to one block after the other
Batch = dict[str, npt.NDArray[Any]]


@contextmanager
def connect(address: str | None = None) -> Iterator[Any]:
    """Connect to a Ray cluster (by default RAY_ADDRESS), or start Ray on this machine; yield the module.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster.
    """
    try:
        ray = importlib.import_module("ray")
        context = importlib.import_module("ray.data").DataContext.get_current()
    except ImportError:
        raise missing_package("ray", "ray") from None
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    if ray.is_initialized():
        yield ray
        return
    where = address or os.environ.get("RAY_ADDRESS") or "local"
    options = {"include_dashboard": False} if where == "local" else {}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=where, logging_level="ERROR", log_to_driver=False, configure_logging=False, **options)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".:")
        raise InvalidValueError(f"Ray at {where} cannot be used ({reason})", where="address") from None
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)  # Ray's own prints the stack of its C++
    try:
        yield ray
    finally:
        ray.shutdown()


def dataset(ray: Any, function: Callable[[Batch], Any], numbers: Sequence[int], actors: int = 0) -> Any:
    """Call a function for each block, in tasks or in as many actors, each with a GPU; return a data set of Ray."""
    data, count = ray.data, min(len(numbers), MOST_TASKS)
    items = data.from_items([{"number": number} for number in numbers], override_num_blocks=count)
    if not actors:
        return items.map_batches(function, batch_size=1, batch_format="numpy")
    pool = data.ActorPoolStrategy(min_size=1, max_size=min(actors, count))
    return items.map_batches(
        _Actor, fn_constructor_args=(function,), compute=pool, num_gpus=1, batch_size=1, batch_format="numpy"
    )


def each(ray: Any, function: Callable[[Batch], Any], numbers: Sequence[int], actors: int = 0) -> Iterator[Batch]:
    if len(numbers):
        data = dataset(ray, function, numbers, actors)
        yield from data.iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=0)


def joined(batches: Iterator[Batch], by: str = "row") -> Batch:
    """Join batches, sorted by row number; nothing without any."""
    found = list(batches)
    if not found:
        return {}
    together = {name: np.concatenate([batch[name] for batch in found]) for name in found[0]}
    order = together[by].argsort()
    return {name: values[order] for name, values in together.items()}


@dataclass
class _Actor:
    """Call a function in a process with its own GPU and caches."""

    function: Callable[[Batch], Batch]

    def __call__(self, batch: Batch) -> Batch:
        return self.function(batch)
