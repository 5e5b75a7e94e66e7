"""Where to compute."""

from __future__ import annotations

import os
import weakref

import pytest
import torch

from mispair.compute.devices import ALLOCATOR, give_back_memory, pick_device
from mispair.errors import InvalidValueError
from refusals import refused


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with one GPU where nobody has said anything about its memory."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ALLOCATOR:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("name", ["auto", "cuda", "cuda:0"])
def test_recorded_steps_share_their_memory(name: str) -> None:
    assert pick_device(name).type == "cuda"
    assert os.environ[ALLOCATOR[0]] == "expandable_segments:True"


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("name", ALLOCATOR)
def test_what_the_user_says_about_memory_holds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:128")
    pick_device("auto")
    assert {name: os.environ.get(name) for name in ALLOCATOR if name in os.environ} == {name: "max_split_size_mb:128"}


@pytest.mark.usefixtures("one_gpu")
def test_a_cpu_needs_no_such_setting() -> None:
    assert pick_device("cpu").type == "cpu"
    assert not set(ALLOCATOR) & set(os.environ)


@pytest.mark.usefixtures("one_gpu")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with refused(InvalidValueError, where="device", names="cuda:1"):
        pick_device("cuda:1")


@pytest.mark.parametrize("name", ["gpu", "meta", "cuda:x"])
def test_names_that_are_no_device(name: str) -> None:
    with refused(InvalidValueError, where="device", names=name):
        pick_device(name)


def test_what_refers_to_itself_is_given_back() -> None:
    class Ring:
        def __init__(self) -> None:
            self.own = self

    gone = weakref.ref(Ring())
    give_back_memory()
    assert gone() is None
