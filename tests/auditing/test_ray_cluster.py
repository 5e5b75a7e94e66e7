"""Audits on Ray itself: workers, a machine and the driver are killed in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ray_workers
from audit_cases import ENVIRONMENT, make_case, write_clip
from mispair.auditing import folder as folder_module
from mispair.auditing.audit import Settings
from mispair.auditing.folder import audit_path
from mispair.auditing.inputs import AuditInput
from mispair.auditing.ray_engine import RayEngine
from mispair.auditing.scoring import scan

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.posix]

TABLES = ("pairs.parquet", "pairs.csv", "suggestions.csv", "suggestions.parquet")
CPU = Settings(device="cpu", workers=2)
PARTS = 12
DRIVER = """
import ray, sys
import ray_workers
from pathlib import Path
from mispair.auditing import folder, ray_engine
from mispair.auditing.audit import Settings
from mispair.auditing.inputs import AuditInput
from mispair.auditing.scoring import scan

scan.BLOCK, scan.PART, folder.PART = 10, 20, 20
source, out, notes, seconds = sys.argv[1:]
ray.init(address="local", num_cpus=2, include_dashboard=False,
         runtime_env=ray_workers.environment(Path(notes), float(seconds)))
with ray_engine.connect() as engine:
    folder.audit_path(AuditInput(Path(source)), Path(out), Settings(device="cpu", workers=2, engine=engine))
"""


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "BLOCK", ray_workers.BLOCK)
    for module in (scan, folder_module):
        monkeypatch.setattr(module, "PART", ray_workers.PART)


@pytest.fixture
def data(tmp_path: Path) -> AuditInput:
    case = make_case(PARTS * ray_workers.PART - 3, 0.3)
    return AuditInput(write_clip(tmp_path / "in", case.left, case.right, cuts=[33, 190]))


@pytest.fixture
def whole(data: AuditInput, tmp_path: Path) -> Path:
    audit_path(data, tmp_path / "whole", CPU)
    return tmp_path / "whole"


def same_tables(one: Path, other: Path) -> bool:
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in TABLES)


def wait_for(happened: Callable[[], bool]) -> None:
    until = time.monotonic() + 300
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.fixture
def notes(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "notes"
    ray.shutdown()


def measured(notes: Path) -> Counter[str]:
    return Counter(name for name, _ in ray_workers.read(notes))


def in_background(data: AuditInput, out: Path) -> threading.Thread:
    engine = RayEngine(ray)
    thread = threading.Thread(target=audit_path, args=(data, out, replace(CPU, engine=engine)))
    thread.start()
    return thread


def test_a_worker_is_killed(data: AuditInput, whole: Path, notes: Path, tmp_path: Path) -> None:
    environment = ray_workers.environment(notes, 0.3)
    ray.init(address="local", num_cpus=2, include_dashboard=False, runtime_env=environment)
    audit = in_background(data, tmp_path / "out")
    wait_for(lambda: len(ray_workers.read(notes)) >= 3)
    os.kill(ray_workers.read(notes)[-1][1], signal.SIGKILL)
    audit.join()
    counts = measured(notes)
    assert len(counts) == PARTS
    assert sum(counts.values()) <= PARTS + 1
    assert same_tables(whole, tmp_path / "out")


def test_a_machine_is_removed(data: AuditInput, whole: Path, notes: Path, tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        second = cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, runtime_env=ray_workers.environment(notes, 0.3))
        audit = in_background(data, tmp_path / "out")
        wait_for(lambda: len({process for _, process in ray_workers.read(notes)}) == 2)
        cluster.remove_node(second)
        audit.join()
    finally:
        ray.shutdown()
        cluster.shutdown()
    counts = measured(notes)
    assert len(counts) == PARTS
    assert sum(counts.values()) <= PARTS + 1
    assert same_tables(whole, tmp_path / "out")


def test_the_driver_is_killed(data: AuditInput, whole: Path, notes: Path, tmp_path: Path) -> None:
    helpers = Path(ray_workers.__file__).parent
    paths = f"{helpers.parents[1] / 'src'}:{helpers}"

    def start(seconds: float) -> subprocess.Popen[bytes]:
        arguments: list[Any] = [sys.executable, "-c", DRIVER, data.source, tmp_path / "out", notes, str(seconds)]
        return subprocess.Popen(arguments, env={**ENVIRONMENT, "PYTHONPATH": paths})

    first = start(0.5)
    wait_for(lambda: len(ray_workers.read(notes)) >= 4)
    first.kill()
    first.wait()
    assert start(0.0).wait() == 0
    counts = measured(notes)
    assert len(counts) == PARTS
    assert sum(counts.values()) <= PARTS + 2  # that of each worker had not been saved
    assert same_tables(whole, tmp_path / "out")
