"""Work side by side."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event

import pytest
import torch

from mispair.compute import threads
from mispair.compute.threads import one_thread_each, parallel_each, parallel_map


class StoppedError(Exception):
    pass


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_results_come_in_the_order_of_the_items() -> None:
    def work(number: int) -> tuple[int, int]:
        time.sleep(0.01 * (number % 3 == 0))
        return number, torch.get_num_threads()

    assert list(parallel_map(work, range(20), workers=4)) == [(number, 1) for number in range(20)]


def test_every_item_is_seen() -> None:
    seen: list[int] = []
    parallel_each(seen.append, range(20), workers=4)
    assert sorted(seen) == list(range(20))


def test_what_has_not_begun_is_not_begun_after_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, busy, stopping = [], Barrier(3), Event()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            stopping.set()
            super().shutdown(wait, cancel_futures=cancel_futures)

    def work(number: int) -> int:
        begun.append(number)
        if number in (4, 5):  # keep both workers until all others are called off
            busy.wait()
            stopping.wait()
        return number

    monkeypatch.setattr(threads, "ThreadPoolExecutor", Pool)
    for number in parallel_map(work, range(1000), workers=2):
        if number == 3:
            busy.wait()
            break
    assert {*begun} == {*range(6)}


def test_what_breaks_is_told() -> None:
    def work(number: int) -> int:
        if number == 2:
            raise StoppedError
        return number

    results = parallel_map(work, range(1000), workers=2)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(StoppedError):
        next(results)


def test_threads_are_given_back() -> None:
    seen = []

    def work() -> None:
        with one_thread_each():
            seen.append(torch.get_num_threads())
            raise StoppedError

    with pytest.raises(StoppedError):
        work()
    assert (seen, torch.get_num_threads()) == ([1], 2)
