"""Functions run by several processes that are connected as torchrun connects them."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from mispair.compute.distributed import Ranks, connect

SECONDS = 120.0  # after which processes that wait for each other are a failure
KILLED = "killed"
AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": 0}


def on_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Gives by rank what `function(ranks, *arguments)` gave, the exception that it raised, or `KILLED`.

    The function must be one of a module in tests/helpers, because the processes import it by its name.
    """
    kind = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(kind)
    if kind == "forkserver":
        context.set_forkserver_preload(["rank_work"])  # what takes seconds to import is imported once
    # It outlives the ranks, as torchrun's store does.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = []
    found = os.pathsep.join(path for path in sys.path if path)  # where the server looks for what it imports
    with patch.dict(os.environ, {"PYTHONPATH": found}):
        for rank in range(size):
            receiving, sending = context.Pipe(duplex=False)
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, **AGENT}
            process = context.Process(target=_run, args=(sending, {**place, **where}, function, arguments))
            process.start()
            sending.close()
            started.append((process, receiving))
    return [_outcome(process, receiving) for process, receiving in started]


def _outcome(process: Any, receiving: Connection) -> Any:
    try:
        result = receiving.recv() if receiving.poll(SECONDS) else "stuck"
    except EOFError:
        result = KILLED
    process.join(SECONDS)
    if process.exitcode is None:
        process.kill()
    return result


def _run(sending: Connection, environment: dict[str, int | str], function: Any, arguments: tuple[Any, ...]) -> None:
    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.set_num_threads(1)
    try:
        with connect("cpu") as ranks:
            result = function(ranks, *arguments)
    except BaseException as error:
        result = error
    sending.send(result)


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """The same in this process."""
    return function(Ranks(), *arguments)
