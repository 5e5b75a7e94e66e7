"""Measures the parts of an audit on a Ray cluster. Ray is imported only when it is asked for.

The driver learns, and keeps what was learned in Ray's object store. Each worker measures one part of the rows at a
time, by the function that audits of one process call, and keeps it in the folder of the audit, or in the object store
that the audit is written to. A part there is whole or absent: whatever was killed, the same command measures the rest.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from mispair.auditing.auditor import GPU_WORKERS
from mispair.auditing.scoring.judge import Judge
from mispair.auditing.scoring.scan import PART, missing_parts, part_name, scan
from mispair.compute.devices import pick_device
from mispair.errors import ConflictError, DataError, InvalidValueError
from mispair.pairs.pairs import IntArray
from mispair.pairs.remote import Store
from mispair.pairs.source import Source
from mispair.support.extras import missing_package
from mispair.support.owned_folder import WORK

MOST_ATTEMPTS = 3  # for a part whose workers were killed
MOST_FAILED_STARTS = 8  # of workers in a row, with no part measured in between

Job = TypeVar("Job", bound=Hashable)
Item = TypeVar("Item")
Given = TypeVar("Given", contravariant=True)


class Pool(Protocol[Job, Given]):
    """Workers that do one job at a time."""

    def start(self) -> tuple[Any, Job]:
        """A new worker, and a job that ends when it is ready."""

    def submit(self, worker: Any, item: Given) -> Job:
        """Gives an item to a worker."""

    def stop(self, worker: Any) -> None:
        """Ends a worker that is not needed any more."""

    def wait(self, jobs: list[Job]) -> Job:
        """The first of these jobs to end."""

    def death(self, job: Job) -> str | None:
        """Why the worker of an ended job is dead; None if the job ended well. Raises what the job has raised."""


def run_all(pool: Pool[Job, Item], items: Iterable[Item], workers: int, done: Callable[[Item], object]) -> None:
    """Gives all items to a pool of workers, never more than one to a worker, and replaces workers that die.

    Neither finished items nor those that come later are kept. A worker gets its first item when it has started, so
    that no item waits for a machine that never comes.

    Args:
        pool: The workers.
        items: What is to be done; taken one by one.
        workers: How many of them at most.
        done: Called with each item that was done.

    Raises:
        DataError: The workers of one item, or workers that were starting, died too often.
    """
    queue = ((item, 1) for item in items)
    again: deque[tuple[Item, int]] = deque()  # with the number of the attempt
    starting: dict[Job, Any] = {}
    running: dict[Job, tuple[Any, Item, int]] = {}
    following: tuple[Item, int] | None = None
    failed_starts = 0
    try:
        while True:
            following = following or (again.popleft() if again else next(queue, None))
            if following is None and not running:
                return
            while following is not None and len(starting) + len(running) < workers:
                worker, job = pool.start()
                starting[job] = worker
            job = pool.wait([*starting, *running])
            death = pool.death(job)
            if job in starting:
                worker = starting.pop(job)
                failed_starts = 0 if death is None else failed_starts + 1
                if failed_starts == MOST_FAILED_STARTS:
                    raise DataError(
                        f"{failed_starts} workers died when they started ({death}); look whether mispair is installed "
                        "on all machines of the cluster, in the same version."
                    )
            else:
                worker, item, attempt = running.pop(job)
                if death is None:
                    done(item)
                elif attempt < MOST_ATTEMPTS:
                    again.append((item, attempt + 1))
                else:
                    raise DataError(
                        f"{attempt} workers died while they measured the same pairs ({death}); give workers more "
                        "memory, then start the same command again: what was measured is kept."
                    )
            if death is None:
                following = following or (again.popleft() if again else next(queue, None))
                if following is None:
                    pool.stop(worker)
                else:
                    running[pool.submit(worker, following[0])] = (worker, *following)
                    following = None
    finally:
        for worker in (*starting.values(), *(task[0] for task in running.values())):
            pool.stop(worker)


@dataclass(frozen=True)
class Part:
    """Consecutive rows that one worker measures."""

    start: int
    source: Source
    groups: IntArray


class PartWorker:
    """Measures parts, in a process of its own."""

    def __init__(self, state: dict[str, torch.Tensor], device: str, folder: Path, store: str | None) -> None:
        self.device, self.folder = pick_device(device), folder
        self.store = None if store is None else Store(store)
        self.judge = Judge.of(state, self.device)

    def ready(self) -> None:
        """Returns when the worker has started."""

    def measure(self, part: Part) -> None:
        """Measures a part, unless the folder has it; where there is a store, the part goes to it."""
        if self.store is None:
            self._scan(part, self.folder)
            return
        with tempfile.TemporaryDirectory() as folder:
            self._scan(part, Path(folder))
            self.store.put(Path(folder) / part_name(part.start), f"{WORK}/{part_name(part.start)}")

    def _scan(self, part: Part, folder: Path) -> None:
        workers = GPU_WORKERS if self.device.type == "cuda" else 1
        scan(
            part.source, self.judge, part.groups, workers=workers, device=self.device, folder=folder, first=part.start
        )  # fmt: skip


class RayPool:
    """Workers that Ray starts, each on a core, or on a GPU, of its own."""

    def __init__(self, ray: Any, *state: Any, gpu: bool) -> None:
        self._ray, self._state = ray, [ray.put(value) for value in state]
        self._actor = ray.remote(num_cpus=1, num_gpus=int(gpu), max_restarts=0)(PartWorker)

    def start(self) -> tuple[Any, Any]:
        worker = self._actor.remote(*self._state)
        return worker, worker.ready.remote()

    def submit(self, worker: Any, item: Part) -> Any:
        return worker.measure.remote(item)

    def stop(self, worker: Any) -> None:
        self._ray.kill(worker)

    def wait(self, jobs: list[Any]) -> Any:
        return self._ray.wait(jobs, num_returns=1)[0][0]

    def death(self, job: Any) -> str | None:
        try:
            self._ray.get(job)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except self._ray.exceptions.RayError as error:
            return _first_line(error)
        return None


@dataclass(frozen=True)
class RayEngine:
    """Measures pairs by the workers of a Ray cluster.

    Attributes:
        ray: The module.
        store: URL of the audit, where it is written to an object store; workers leave what they have measured there.
            By default the folder of the audit is one that all machines share.
    """

    ray: Any
    store: str | None = None

    def measure(
        self,
        source: Source,
        judge: Judge,
        groups: IntArray,
        *,
        workers: int | None,
        device: torch.device,
        folder: Path,
        step: Callable[[int], None],
    ) -> None:
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
        missing = sum(stop - start for start, stop in missing_parts(folder, len(source)))
        step(len(source) - missing)
        parts = (
            Part(start, source.part(start, stop), groups[start:stop])
            for start, stop in missing_parts(folder, len(source))
        )
        # The number of a GPU is not the same on other machines; Ray shows each worker its own as the first.
        state = {name: value.cpu() for name, value in judge.state().items()}
        pool = RayPool(self.ray, state, device.type, folder.absolute(), self.store, gpu=kind == "GPU")
        store = None if self.store is None else Store(self.store)

        def done(part: Part) -> None:
            if store is not None:
                store.get(f"{WORK}/{part_name(part.start)}", folder / part_name(part.start))
            step(len(part.source))

        run_all(pool, parts, min(count, -(-missing // PART)), done)


@contextlib.contextmanager
def connect(address: str | None = None, store: str | None = None) -> Iterator[RayEngine]:
    """Connects to a Ray cluster, or starts Ray on this machine, until the block ends.

    Args:
        address: Of the cluster; by default RAY_ADDRESS, else only this machine is used.
        store: URL of the audit, where it is written to an object store.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster.
    """
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise missing_package("ray", "ray") from None
    if ray.is_initialized():
        yield RayEngine(ray, store)
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
        yield RayEngine(ray, store)
    finally:
        ray.shutdown()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".:")
