"""Processes that need not import torch, which takes seconds: they are forked from one that has, or are threads."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.context import ForkServerContext
from typing import Any

PRELOADED = ["mispair.bench.suite.runner", "mispair.cli.main", "mispair.training.fit", "torch._dynamo"]


def fork_server() -> ForkServerContext:
    """Starts processes as "spawn" does, with the modules loaded. They have the environment of the first one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class ThreadsForProcesses(ThreadPoolExecutor):
    """Runs in this process what a pool of processes would run, pickled as for them: imports take seconds each."""

    def __init__(self, workers: int, _context: object = None) -> None:
        super().__init__(workers)

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        return super().submit(_unpickled, pickle.dumps((function, arguments, named)))


def _unpickled(call: bytes) -> Any:
    function, arguments, named = pickle.loads(call)
    return pickle.loads(pickle.dumps(function(*arguments, **named)))
