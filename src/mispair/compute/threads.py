"""Several things at a time, each by one thread: so sums do not depend on how many threads there are."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from mispair.support.cores import cores

Item = TypeVar("Item")
Result = TypeVar("Result")


def parallel_map(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int | None = None
) -> Iterator[Result]:
    """The results in the order of the items; when the caller stops, no more of them are begun."""
    with one_thread_each(), ThreadPoolExecutor(workers or cores()) as pool:
        futures = deque(pool.submit(function, item) for item in items)
        try:
            while futures:
                yield futures.popleft().result()
        finally:
            for future in futures:
                future.cancel()


def parallel_each(function: Callable[[Item], None], items: Iterable[Item], workers: int | None = None) -> None:
    """Calls the function with every item."""
    for _ in parallel_map(function, items, workers):
        pass


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Inside, torch uses one thread for each of ours."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
