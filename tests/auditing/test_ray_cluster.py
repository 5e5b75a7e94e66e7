"""An audit on Ray itself, on two simulated machines, of which a worker is killed in the middle."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import mispair
from audit_cases import make_case, write_clip
from mispair.auditing.audit import Settings
from mispair.auditing.folder import audit_path
from mispair.auditing.inputs import AuditInput
from mispair.auditing.ray_engine import connect
from ray_stand_in import StandIn

ray = pytest.importorskip("ray")
parquet = pytest.importorskip("pyarrow.parquet")
pytestmark = [pytest.mark.slow, pytest.mark.posix]

ROWS, BLOCKS = 600, 12
CPU = Settings(device="cpu", workers=2)


def workers() -> set[int]:
    """The processes that see to blocks now."""
    found = set()
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            try:
                line = (place / "cmdline").read_bytes()
            except OSError:
                continue
            if line.startswith(b"ray::") and b"IDLE" not in line:
                found.add(int(place.name))
    return found


def test_two_machines_of_which_a_worker_is_killed(tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    case = make_case(ROWS, 0.3, widths=(40, 32), hidden=12)
    case.left[590] = case.left[3]
    cuts = list(range(ROWS // BLOCKS, ROWS, ROWS // BLOCKS))
    data = AuditInput(write_clip(tmp_path / "in", case.left, case.right, cuts=cuts))
    expected = audit_path(data, tmp_path / "expected", CPU, cluster=StandIn())
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        before = workers()

        def kill() -> None:
            until = time.monotonic() + 200
            while time.monotonic() < until:
                if new := workers() - before:
                    os.kill(min(new), signal.SIGKILL)
                    killed.append(min(new))
                    return
                time.sleep(0.02)

        killed: list[int] = []
        killer = threading.Thread(target=kill)
        killer.start()
        with connect() as module:
            summary = audit_path(data, tmp_path / "out", CPU, cluster=module)
        killer.join()
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert killed
    ignored = {"seconds", "stages"}
    assert summary.model_dump(exclude=ignored) == expected.model_dump(exclude=ignored)
    tables = [parquet.read_table(tmp_path / name / "pairs.parquet") for name in ("out", "expected")]
    assert tables[0].equals(tables[1])
    score = mispair.Auditor.load(tmp_path / "out/auditor.safetensors", "cpu").score(case.left, case.right)
    assert np.array_equal(tables[0]["match_score"].to_numpy(), score)
    assert tables[0]["left_item"][590].as_py() == 3
