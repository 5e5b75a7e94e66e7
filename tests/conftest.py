"""Settings of all tests: nothing depends on the clock or on what ran before."""

import os
import sys
import uuid
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, register_random, settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are imported: they run on the CPU, step by step


# One thread for each process, also for those that tests start: the cores are for pytest's workers.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MISPAIR_THREADS"] = "2"  # of our own, so that what runs side by side does so in tests
torch.set_num_threads(1)

# What tests write need not outlast a power cut, and a disk may take long for each file.
os.fsync = lambda fd: None  # noqa: ARG005

# No deadline: cores are shared, and a test must not fail because it was slow. Few examples: six minutes for all.
settings.register_profile(
    "mispair", deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.load_profile("mispair")


# Without a GPU, torch.manual_seed formats the whole stack for each kind of device, milliseconds in a test.
manual_seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


class TorchRandom:
    """Lets hypothesis seed torch for every example, so that what failed fails again."""

    seed = staticmethod(manual_seed)
    setstate = staticmethod(torch.set_rng_state)

    def getstate(self) -> Any:
        return torch.get_rng_state()


torch_random = TorchRandom()
register_random(torch_random)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if sys.platform == "win32" and item.get_closest_marker("posix"):
            item.add_marker(pytest.mark.skip(reason="Windows has no such signals"))


@pytest.fixture(autouse=True)
def seed() -> None:
    manual_seed(0)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each test has its own cache of encodings, which is made only when it is used."""
    monkeypatch.setenv("MISPAIR_CACHE", str(tmp_path_factory.getbasetemp() / f"cache-{uuid.uuid4().hex}"))
