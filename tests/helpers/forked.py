"""Processes that need not import torch, which takes seconds: they are forked from one that has."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

PRELOADED = ["mispair.bench.suite.runner", "mispair.cli.main", "mispair.training.fit", "torch._dynamo"]


def fork_server() -> ForkServerContext:
    """Starts processes as "spawn" does, with the modules loaded. They have the environment of the first one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context
