"""Audits by the workers of Ray; without Ray a stand-in calls the same code in this process."""

from __future__ import annotations

import pickle
import random
import signal
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from audit_cases import make_case, write_clip
from mispair.auditing import folder as folder_module
from mispair.auditing.audit import Settings
from mispair.auditing.folder import audit_path
from mispair.auditing.inputs import AuditInput
from mispair.auditing.ray_engine import MOST_ATTEMPTS, MOST_FAILED_STARTS, RayEngine, connect, run_all
from mispair.auditing.scoring import scan
from mispair.auditing.scoring.scan import Scan
from mispair.cli.main import main
from mispair.errors import ConfigError, ConflictError, DataError, MissingPackageError
from mispair.pairs.layouts.opening import open_source
from mispair.pairs.npy import Header
from mispair.pairs.row_ids import RowIds
from mispair.pairs.shards import File, Side
from mispair.pairs.source import Source
from refusals import refused

pytest.importorskip("pyarrow")

TABLES = ("pairs.parquet", "pairs.csv", "suggestions.csv", "suggestions.parquet")
CPU = Settings(device="cpu", workers=2)


class DeadError(Exception):
    """Of the stand-in: a worker has died."""


class TaskError(DeadError):
    """Of the stand-in: a job has raised `cause`."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Simulated:
    """Ray with workers of which a share dies at each job, and that end their jobs in any order."""

    exceptions = SimpleNamespace(RayTaskError=TaskError, RayError=DeadError)

    def __init__(self, deaths: float = 0.0, seed: int = 0) -> None:
        self.deaths, self.random = deaths, random.Random(seed)
        self.jobs = self.most = self.workers = 0
        self.given: Counter[Any] = Counter()
        self.count = False

    def start(self) -> Any:
        self.workers += 1
        ready, measure = partial(self._job, self.workers, None), partial(self._job, self.workers)
        return SimpleNamespace(ready=SimpleNamespace(remote=ready), measure=SimpleNamespace(remote=measure))

    def _job(self, worker: int, item: Any) -> tuple[int, int, Any]:
        self.jobs += 1
        if self.count and item is not None:
            self.given[item] += 1
        return self.jobs, worker, item

    def kill(self, worker: Any) -> None:
        pass

    def wait(self, jobs: list[tuple[int, int, Any]], num_returns: int) -> tuple[list[Any], list[Any]]:
        assert num_returns == 1
        self.most = max(self.most, len(jobs))
        assert len({worker for _, worker, _ in jobs}) == len(jobs)  # one job a worker
        return [self.choice(jobs)], []

    def choice(self, jobs: list[tuple[int, int, Any]]) -> tuple[int, int, Any]:
        return self.random.choice(jobs)

    def get(self, _job: tuple[int, int, Any]) -> None:
        if self.random.random() < self.deaths:
            raise DeadError("killed")

    def run(self, items: Iterable[Any], workers: int, done: Callable[[Any], object]) -> None:
        for item, _ in run_all(self, self.start, items, workers):
            done(item)


@given(st.integers(0, 30), st.integers(1, 5), st.sampled_from([0.0, 0.05, 0.2]), st.integers(0, 1000))
def test_every_item_is_done_once_whoever_dies(items: int, workers: int, deaths: float, seed: int) -> None:
    done: list[int] = []
    ray = Simulated(deaths, seed)
    ray.count = True
    try:
        ray.run(range(items), workers, done.append)
        complete = True
    except DataError:
        complete = False
    assert sorted(done) == list(range(items)) if complete else deaths > 0
    assert ray.most <= workers
    assert max(ray.given.values(), default=1) <= MOST_ATTEMPTS
    assert len(set(done)) == len(done)


def test_what_kills_every_worker_is_given_up() -> None:
    ray = Simulated(1.0)
    with refused(DataError, names=str(MOST_FAILED_STARTS)):
        ray.run(range(3), 2, print)
    assert ray.jobs <= MOST_FAILED_STARTS + 1

    class Small(Simulated):
        def get(self, job: tuple[int, int, Any]) -> None:
            if job[2] == 5:
                raise DeadError("no memory")

    done: list[int] = []
    with refused(DataError, names="no memory"):
        Small().run(range(100), 2, done.append)
    assert 5 not in done


def test_nothing_waits_for_workers_that_never_start() -> None:
    class OnlyFirst(Simulated):
        def choice(self, jobs: list[tuple[int, int, Any]]) -> tuple[int, int, Any]:
            return next(job for job in jobs if job[1] == 1)

    done: list[int] = []
    OnlyFirst().run(range(10), 3, done.append)
    assert done == list(range(10))


def peak_memory(items: int) -> int:
    """Bytes that the driver needs for so many items."""
    ray = Simulated(0.001)  # so that no item has bad luck three times
    tracemalloc.start()
    try:
        ray.run((f"{item:0>1000}" for item in range(items)), 8, len)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("items", [2_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_memory_of_the_driver_does_not_grow(items: int) -> None:
    least = 100 if items < 10_000 else 10_000
    peak_memory(least)  # what is imported or compiled on first use
    assert peak_memory(items) < peak_memory(least) + 20_000


@dataclass
class StandIn:
    """As much of Ray as is used, in this process. Arguments are pickled, as Ray does."""

    deaths: int = 0
    measured: int = 0
    exceptions = SimpleNamespace(RayTaskError=TaskError, RayError=DeadError)

    def put(self, value: Any) -> Any:
        return pickle.loads(pickle.dumps(value))

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 3.0}

    def kill(self, worker: Any) -> None:
        worker.kept = None

    def wait(self, jobs: list[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        return jobs[:num_returns], jobs[num_returns:]

    def get(self, job: Any) -> Any:
        return job()

    def remote(self, **options: Any) -> Any:
        assert options == {"num_cpus": 1, "num_gpus": 0, "max_restarts": 0}

        def method(function: Any) -> Any:
            def submitted(*arguments: Any) -> Any:
                sent = pickle.loads(pickle.dumps(arguments))
                return lambda: self._run(function, sent)

            return SimpleNamespace(remote=submitted)

        def actor(kind: Any) -> Any:
            def started(*arguments: Any) -> Any:
                kept = kind(*arguments)
                return SimpleNamespace(kept=kept, ready=method(kept.ready), measure=method(kept.measure))

            return SimpleNamespace(remote=started)

        return actor

    def _run(self, function: Any, arguments: Any) -> Any:
        if arguments:
            self.measured += 1
            if self.measured == self.deaths:
                raise DeadError("The worker was killed.\nAnd more.")
        try:
            return pickle.loads(pickle.dumps(function(*arguments)))
        except Exception as error:
            raise TaskError(error) from None


@pytest.fixture
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "BLOCK", 10)
    for module in (scan, folder_module):
        monkeypatch.setattr(module, "PART", 20)


@pytest.fixture
def data(tmp_path: Path) -> AuditInput:
    case = make_case(130, 0.3)
    case.left[7] = 0
    metadata = {
        "id": [f"p{row}" for row in range(130)],
        "status": ["failed" if row == 55 else "" for row in range(130)],
    }
    return AuditInput(write_clip(tmp_path / "in", case.left, case.right, metadata, [33, 90]))


def same_tables(one: Path, other: Path) -> bool:
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in TABLES)


@pytest.mark.usefixtures("_small_parts")
def test_the_tables_are_those_of_one_process(data: AuditInput, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    audit_path(data, whole, CPU)
    ray = StandIn(deaths=3)
    audit_path(data, out, replace(CPU, engine=RayEngine(ray)))
    assert ray.measured == 7 + 1  # one part twice
    assert same_tables(whole, out)


@pytest.mark.usefixtures("_small_parts")
def test_what_a_killed_driver_has_is_not_measured_again(data: AuditInput, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    audit_path(data, whole, CPU)
    first = StandIn()

    class Killed(RayEngine):
        def measure(self, *arguments: Any) -> Generator[tuple[int, Scan], None, None]:
            yield from islice(super().measure(*arguments), 4)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audit_path(data, out, replace(CPU, engine=Killed(first)))
    kept = {path: path.stat().st_mtime_ns for path in (out / "unfinished").glob("part-*.npz")}
    assert len(kept) == first.measured == 4
    second = StandIn()
    audit_path(data, out, replace(CPU, engine=RayEngine(second)))
    assert second.measured == 7 - 4
    assert same_tables(whole, out)


@pytest.mark.usefixtures("_small_parts")
def test_what_a_worker_cannot_read_is_said(data: AuditInput, tmp_path: Path) -> None:
    ray = StandIn()

    class Cut(RayEngine):
        def measure(self, *arguments: Any) -> Generator[tuple[int, Scan], None, None]:
            assert data.source is not None
            (data.source / "text_emb" / "text_emb_1.npy").unlink()
            return super().measure(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mispair.pairs.shards._SMALL", 0)  # files stay on disk
        with pytest.raises(DataError, match=r"text_emb_1.npy: no such file"):
            audit_path(data, tmp_path / "out", replace(CPU, engine=Cut(ray)))


def test_a_part_holds_nothing_of_the_others(data: AuditInput) -> None:
    assert data.source is not None
    source = open_source(data.source)
    for start, stop in ((0, 130), (0, 20), (20, 40), (33, 90), (89, 91), (40, 60), (129, 130)):
        part = pickle.loads(pickle.dumps(source.part(start, stop)))
        for found, expected in zip(part.block(0, stop - start), source.block(start, stop), strict=True):
            np.testing.assert_array_equal(found, expected)
        rows = np.arange(stop - start)[::-1]
        for found, expected in zip(part.gather(rows), source.gather(start + rows), strict=True):
            np.testing.assert_array_equal(found, expected)
        assert part.known == ({55 - start: "failed"} if start <= 55 < stop else {})


@pytest.mark.parametrize("files", [10_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_memory_of_a_worker_does_not_grow(files: int) -> None:
    def sent(count: int) -> int:
        """Bytes that a worker gets for one part of so many files of 1,000 rows each."""
        header = Header((1_000, 8), by_column=False, dtype=np.dtype(np.float32), start=bytes(128))
        side = Side.of([File(Path(f"/data/{number:09d}.npy"), header) for number in range(count)])
        source = Source(side, side, "clip", "many", RowIds())
        return len(pickle.dumps(source.part(50 * 65_536, 51 * 65_536)))

    assert sent(files) == sent(5_000)


def test_a_part_of_what_is_in_memory_is_small() -> None:
    from mispair.pairs.layouts.arrays import from_memory

    case = make_case(10_000)
    part = from_memory(case.left * 1e30, case.right).scaled().part(100, 110)
    assert len(pickle.dumps(part)) < 5_000
    np.testing.assert_array_equal(part.block(0, 10)[1], case.right[100:110])


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with refused(MissingPackageError, names="[ray]"), connect():
        pass


@pytest.fixture
def ray_module(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    calls: dict[str, Any] = {"shutdown": 0}

    def init(**options: Any) -> None:
        calls["init"] = options
        signal.signal(signal.SIGTERM, lambda *_: None)
        if options["address"] == "nowhere":
            raise ConnectionError("Could not find it.\nAt all.")

    def shutdown() -> None:
        calls["shutdown"] += 1

    fake = SimpleNamespace(is_initialized=lambda: calls.get("user", False), init=init, shutdown=shutdown)
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return calls


def test_ray_is_started_where_no_cluster_is_named(ray_module: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with connect():
        assert ray_module["init"]["address"] == "local"
    assert ray_module["shutdown"] == 1
    monkeypatch.setenv("RAY_ADDRESS", "there:6379")
    with connect():
        assert ray_module["init"]["address"] == "there:6379"
    with connect("here:6379"):
        assert ray_module["init"]["address"] == "here:6379"
    with pytest.raises(ConfigError, match=r"Ray at nowhere cannot be used .Could not find it"), connect("nowhere"):
        pass
    ray_module.update(user=True, shutdown=0)
    with connect():
        pass
    assert not ray_module["shutdown"]  # it is not ours


@pytest.mark.usefixtures("ray_module")
def test_asked_to_end_an_audit_ends_as_without_ray() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with connect():
        assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--engine", "ray", "--shard", "1/2"], ("--engine", "--shard")),
        (["--address", "auto"], ("--address", "--engine")),
    ],
)
def test_options_that_contradict_each_other(
    options: list[str], named: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", "in", *options]) == 2
    error = capsys.readouterr().err
    assert all(name in error for name in named)


def test_images_and_captions_are_encoded_first(tmp_path: Path) -> None:
    table = tmp_path / "pairs.csv"
    table.write_text("image_path,caption\na.jpg,a\n")
    (tmp_path / "a.jpg").write_bytes(b"")
    with refused(ConflictError, "engine"):
        audit_path(AuditInput(table), tmp_path / "out", replace(CPU, engine=RayEngine(StandIn())))


def test_networks_are_asked_on_one_machine(data: AuditInput) -> None:
    assert data.source is not None
    source = replace(open_source(data.source), network_score=lambda lefts, rights: 0.0 * lefts * rights)
    nothing: Any = None
    with refused(ConflictError, "engine"):
        next(RayEngine(StandIn()).measure(source, nothing, np.arange(130), 1, nothing, [(0, 130)]))
    assert source.part(20, 30).network_score is not None
