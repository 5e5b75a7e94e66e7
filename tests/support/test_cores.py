"""The cores of a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mispair.errors import InvalidValueError
from mispair.support import cores as module
from mispair.support.cores import cores, share_cores
from refusals import refused


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine of eight cores on which nothing is limited."""
    for name in (module.OWN, *module.LIMITS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(module, "CGROUPS", tmp_path)
    monkeypatch.setattr(module, "CGROUP", tmp_path / "cgroup")


def group(tmp_path: Path, path: str, **limits: str) -> None:
    (tmp_path / "cgroup").write_text(f"0::{path}\n")
    for folder, limit in limits.items():
        file = tmp_path / folder.replace("_", "/").strip("/") / "cpu.max"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{limit} 100000\n")


def test_all_cores_where_nothing_is_limited() -> None:
    assert cores() == 8


def test_the_affinity_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {1, 5}, raising=False)
    assert cores() == 2


@pytest.mark.parametrize(
    ("path", "limits", "expected"),
    [
        ("/", {"_": "300000"}, 3),
        ("/", {"_": "50000"}, 1),  # half a core
        ("/", {"_": "250000"}, 3),
        ("/", {"_": "max"}, 8),
        ("/", {"_": "9900000"}, 8),
        ("/a/b", {"a_b": "max", "a": "200000"}, 2),  # the limit of a group holds for all in it
        ("/not/seen", {"_": "400000"}, 4),  # the group by its name outside the container
    ],
)
def test_containers_are_limits(path: str, limits: dict[str, str], expected: int, tmp_path: Path) -> None:
    group(tmp_path, path, **limits)
    assert cores() == expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "3,2"}, 3),
        ({"OMP_NUM_THREADS": "16"}, 8),
        ({"OMP_NUM_THREADS": "", "SLURM_CPUS_PER_TASK": "5"}, 5),
        ({"OMP_NUM_THREADS": "4", "SLURM_CPUS_PER_TASK": "5"}, 4),
        ({"OMP_NUM_THREADS": "0"}, 8),
        ({"OMP_NUM_THREADS": "some"}, 8),  # OpenMP warns of it and goes on
        ({"MISPAIR_THREADS": "12", "OMP_NUM_THREADS": "2"}, 12),
    ],
)
def test_variables_are_limits(variables: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cores() == expected


@pytest.mark.parametrize("threads", ["0", "-1", "two", "1.5", ""])
def test_a_wrong_number_is_refused(threads: str) -> None:
    with refused(InvalidValueError, where="threads"):
        share_cores(threads)


def test_a_wrong_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(module.OWN, "many")
    with refused(InvalidValueError, where=module.OWN):
        cores()


@pytest.mark.parametrize(
    ("words", "threads"),
    [
        (["--threads", "1", "--version"], "import torch; print(torch.get_num_threads())"),
        (["--version", "--threads=1"], "import os; print(os.environ['OMP_NUM_THREADS'])"),
    ],
)
def test_the_command_line_limits_its_libraries(words: list[str], threads: str) -> None:
    code = f"from mispair.cli.main import main; main(); {threads}"
    environment = {name: value for name, value in os.environ.items() if name not in (module.OWN, *module.LIMITS)}
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "1"
