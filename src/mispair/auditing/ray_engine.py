"""Measure the parts of an audit on a Ray cluster. Ray is imported only when it is asked for.

The driver learns, and puts what it learned into Ray's object store. Each worker measures one part of the rows at a
time, with the function of an audit in one process. The driver saves the results in the folder of the audit. A part
there is whole or absent: the same command again measures the rest.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from mispair.auditing.auditor import GPU_WORKERS
from mispair.auditing.scoring.judge import Judge
from mispair.auditing.scoring.scan import Scan, scan
from mispair.compute.devices import pick_device
from mispair.errors import ConflictError, DataError, InvalidValueError
from mispair.pairs.pairs import IntArray
from mispair.pairs.source import Source
from mispair.support.extras import missing_package

MOST_ATTEMPTS = 3  # for a part whose workers were killed
MOST_FAILED_STARTS = 8  # of workers in a row, with no part measured in between

Item = TypeVar("Item")


def run_all(
    ray: Any, start: Callable[[], Any], items: Iterable[Item], workers: int
) -> Generator[tuple[Item, Any], None, None]:
    """Give items to workers, one at a time to each, and replace workers that die.

    Neither finished items nor those that come later are kept. A worker gets its first item when it has started, so
    that no item waits for a machine that never comes.

    Args:
        ray: The module.
        start: Starts a worker, an actor like `PartWorker`.
        items: What is to be done; taken one by one.
        workers: How many of them at most.

    Yields:
        Each item and its result, in the order in which they are done.

    Raises:
        DataError: The workers of one item, or workers that were starting, died too often.
    """
    queue = ((item, 1) for item in items)
    again: list[tuple[Item, int]] = []  # with the number of the attempt
    jobs: dict[Any, tuple[Any, tuple[Item, int] | None]] = {}  # the worker of each, and its item unless it is starting
    following: tuple[Item, int] | None = None
    failed_starts = 0
    try:
        while True:
            following = following or (again.pop() if again else next(queue, None))
            if following is None and all(task is None for _, task in jobs.values()):
                return
            while following is not None and len(jobs) < workers:
                worker = start()
                jobs[worker.ready.remote()] = worker, None
            job = ray.wait(list(jobs), num_returns=1)[0][0]
            worker, task = jobs.pop(job)
            try:
                result, death = ray.get(job), None
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except ray.exceptions.RayError as error:
                death = _first_line(error)
            if death is None:
                failed_starts = 0
                if following is None:
                    ray.kill(worker)
                else:
                    jobs[worker.measure.remote(following[0])] = worker, following
                    following = None
                if task is not None:
                    yield task[0], result
            elif task is None:
                failed_starts += 1
                if failed_starts == MOST_FAILED_STARTS:
                    what = f"{failed_starts} workers died when they started ({death})"
                    advice = "Look whether mispair is installed on all machines of the cluster, in the same version."
                    raise DataError(what, advice=advice)
            else:
                item, attempt = task
                if attempt == MOST_ATTEMPTS:
                    what = f"{attempt} workers died while they measured the same pairs ({death})"
                    advice = "Give workers more memory, and run the same command again: what was measured is kept."
                    raise DataError(what, advice=advice)
                again.append((item, attempt + 1))
    finally:
        for worker, _ in jobs.values():
            ray.kill(worker)


@dataclass(frozen=True)
class Part:
    """Consecutive rows that one worker measures."""

    start: int
    source: Source
    groups: IntArray


class PartWorker:
    """Measure parts, in a process of its own."""

    def __init__(self, state: dict[str, torch.Tensor], device: str) -> None:
        self.device = pick_device(device)
        self.judge = Judge.of(state, self.device)

    def ready(self) -> None:
        """Return when the worker has started."""

    def measure(self, part: Part) -> Scan:
        """Measure a part."""
        workers = GPU_WORKERS if self.device.type == "cuda" else 1
        return scan(part.source, self.judge, part.groups, workers=workers, device=self.device, first=part.start)


@dataclass(frozen=True)
class RayEngine:
    """Measure pairs with the workers of a Ray cluster.

    Attributes:
        ray: The module.
    """

    ray: Any

    def measure(
        self,
        source: Source,
        judge: Judge,
        groups: IntArray,
        workers: int | None,
        device: torch.device,
        missing: Sequence[tuple[int, int]],
    ) -> Generator[tuple[int, Scan], None, None]:
        """See `scan.Engine`.

        Raises:
            ConfigError: Networks score the pairs.
            DataError: Workers die again and again, or pairs cannot be read.
        """
        if source.network_score is not None:
            raise ConflictError(
                "the networks of a training run score pairs of items",
                where="engine",
                expected="vectors",
                advice="Leave `engine` out, or give `shard`.",
            )
        kind = "GPU" if device.type == "cuda" else "CPU"
        count = workers or max(1, int(self.ray.cluster_resources().get(kind, 0)))
        parts = (Part(start, source.part(start, stop), groups[start:stop]) for start, stop in missing)
        # The number of a GPU is not the same on other machines; Ray shows each worker its own as the first.
        state = {name: value.cpu() for name, value in judge.state().items()}
        shared = [self.ray.put(value) for value in (state, device.type)]
        actor = self.ray.remote(num_cpus=1, num_gpus=int(kind == "GPU"), max_restarts=0)(PartWorker)
        with contextlib.closing(
            run_all(self.ray, lambda: actor.remote(*shared), parts, min(count, len(missing)))
        ) as done:
            for part, result in done:
                yield part.start, result


@contextlib.contextmanager
def connect(address: str | None = None) -> Iterator[RayEngine]:
    """Connect to a Ray cluster, or start Ray on this machine, until the block ends.

    Args:
        address: Of the cluster; by default RAY_ADDRESS, else only this machine is used.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster.
    """
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise missing_package("ray", "ray") from None
    if ray.is_initialized():
        yield RayEngine(ray)
        return
    where = address or os.environ.get("RAY_ADDRESS") or "local"
    options = {"include_dashboard": False} if where == "local" else {}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=where, logging_level="ERROR", log_to_driver=False, configure_logging=False, **options)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise InvalidValueError(f"Ray at {where} cannot be used ({_first_line(error)})", where="address") from None
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)  # Ray's own prints the stack of its C++
    try:
        yield RayEngine(ray)
    finally:
        ray.shutdown()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".:")
