"""Ray, as encoding and auditing use it. It is imported only when it is needed."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from mispair.errors import InvalidValueError, MispairError
from mispair.support.extras import missing_package

MOST = 1000  # blocks that are given to workers at a time
PER_GPU = 4  # processes: it encodes thousands of photos a second, and one process decodes hundreds


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


def task(ray: Any, function: Callable[..., Any], *, gpu: bool = False) -> Any:
    """Return a task: `remote` calls the function in a process of the cluster, and returns a reference to its result."""
    # A process stays, with its encoders, also where it has a GPU; lost calls are repeated.
    return ray.remote(**_part_of_gpu(ray) if gpu else {}, max_calls=0, max_retries=-1)(function)


def _part_of_gpu(ray: Any) -> dict[str, float]:
    """A share of a GPU, and of the cores beside it, in Ray's words."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]
    cores = min(node.get("CPU", 1) / node["GPU"] for node in machines)
    return {"num_gpus": 1 / PER_GPU, "num_cpus": max(1, int(cores / PER_GPU))}


def result(ray: Any, reference: Any) -> Any:
    """Return the result of a call.

    Raises:
        MispairError: The function raised it.
    """
    try:
        return ray.get(reference)
    except MispairError as error:
        raise getattr(error, "cause", error) from None  # without the stack of the worker


def each(
    ray: Any,
    function: Callable[..., Any],
    numbers: Iterable[int],
    *given: Any,
    workers: int | None = None,
    gpu: bool = False,
) -> Iterator[Any]:
    """Call a function for each block, with its number as the last argument; yield the results in their order."""
    remote, shared, waiting = task(ray, function, gpu=gpu).remote, [ray.put(one) for one in given], iter(numbers)
    running = deque(remote(*shared, number) for number in islice(waiting, workers or MOST))
    while running:
        yield result(ray, running.popleft())
        running += [remote(*shared, number) for number in islice(waiting, 1)]
