"""Processes that need not import torch, which takes seconds: they are forked from one that has, or are threads."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from mispair.cli.main import main

PRELOADED = ["mispair.bench.suite.runner", "mispair.cli.main", "mispair.training.fit", "torch._dynamo"]


def fork_server() -> ForkServerContext:
    """Starts processes as "spawn" does, with the modules loaded. They have the environment of the first one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def start_command(*words: str, errors: Path | None = None) -> BaseProcess:
    """Starts `mispair WORDS` in a process of its own; `errors` gets what it prints to stderr."""
    process = fork_server().Process(target=_command, args=(words, errors))
    process.start()
    return process


def _command(words: Sequence[str], errors: Path | None) -> None:
    with Path(os.devnull).open("w") as sys.stdout, (errors or Path(os.devnull)).open("w") as sys.stderr:
        sys.exit(main(list(words)))


class ThreadsForProcesses(ThreadPoolExecutor):
    """Runs in this process what a pool of processes would run, pickled as for them: imports take seconds each."""

    def __init__(self, workers: int, _context: object = None) -> None:
        super().__init__(workers)

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        return super().submit(_unpickled, pickle.dumps((function, arguments, named)))


def _unpickled(call: bytes) -> Any:
    function, arguments, named = pickle.loads(call)
    return pickle.loads(pickle.dumps(function(*arguments, **named)))
