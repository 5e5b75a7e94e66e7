"""Audits whose pairs are measured in several pieces."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from audit_cases import make_case, write_clip
from mispair.auditing import auditor
from mispair.auditing import folder as folder_module
from mispair.auditing.audit import Settings
from mispair.auditing.folder import audit_path, audit_shard, merge_shards
from mispair.auditing.inputs import AuditInput
from mispair.auditing.scoring import exchanges, scan
from mispair.auditing.scoring.judge import learn
from mispair.auditing.scoring.scan import Shard
from mispair.errors import ConflictError, InvalidValueError, NotFoundError
from refusals import refused

parquet = pytest.importorskip("pyarrow.parquet")

TABLES = ("pairs.parquet", "pairs.csv", "suggestions.csv", "suggestions.parquet")
CPU = Settings(device="cpu", workers=1)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "BLOCK", 10)
    for module in (scan, folder_module):
        monkeypatch.setattr(module, "PART", 20)
    monkeypatch.setattr(folder_module, "POLL_SECONDS", 0.01)


@pytest.fixture
def data(tmp_path: Path) -> AuditInput:
    case = make_case(130, 0.3)
    return AuditInput(write_clip(tmp_path / "in", case.left, case.right))


def same_tables(one: Path, other: Path) -> bool:
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in TABLES)


@pytest.mark.parametrize("count", [1, 3, 7, 20])
def test_each_part_is_in_one_shard(count: int) -> None:
    shards = [Shard(number, count) for number in range(1, count + 1)]
    for parts in (1, 5, 7, 100):
        rows = [shard.rows(parts * 20 - 3) for shard in shards]
        assert (rows[0][0], rows[-1][1]) == (0, parts * 20 - 3)
        assert all(one[1] == other[0] for one, other in pairwise(rows))
        assert all(start % 20 == 0 or start == stop for start, stop in rows)


@pytest.mark.parametrize("text", ["3", "0/4", "5/4", "a/4", "3/", "-1/4", "1/2/3", ""])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with refused(InvalidValueError, where="shard", names=text):
        Shard.of(text)


def test_shards_make_the_tables_of_one_process(data: AuditInput, tmp_path: Path) -> None:
    audit_path(data, tmp_path / "whole", CPU)
    learned = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auditor, "learn", lambda *a, **k: learned.append(0) or learn(*a, **k))  # type: ignore[func-returns-value]
        for number in (3, 1, 4):
            audit_shard(data, tmp_path / "out", CPU, Shard(number, 4))
        with refused(NotFoundError, where=tmp_path / "out", names="2 of 7"):
            merge_shards(tmp_path / "out", "cpu")
        audit_shard(data, tmp_path / "out", CPU, Shard(2, 4))
        summary = merge_shards(tmp_path / "out", "cpu")
    assert len(learned) == 1
    assert summary.pairs == 130
    assert same_tables(tmp_path / "whole", tmp_path / "out")
    audit_shard(data, tmp_path / "out", CPU, Shard(2, 4))  # has nothing to do
    assert same_tables(tmp_path / "whole", tmp_path / "out")


def test_exchanges_are_those_of_one_process(data: AuditInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "LEAST", 50)
    monkeypatch.setattr(exchanges, "LEAST_RATE", 0.0)
    monkeypatch.setattr(exchanges, "CHANCE", float("-inf"))
    audit_path(data, tmp_path / "whole", CPU)
    for number in (1, 2):
        audit_shard(data, tmp_path / "out", CPU, Shard(number, 2))
    merge_shards(tmp_path / "out", "cpu")
    assert same_tables(tmp_path / "whole", tmp_path / "out")
    column = parquet.read_table(tmp_path / "out/pairs.parquet", columns=["exchanged"])["exchanged"]
    assert max(column.drop_null().to_pylist()) > 0.1


def test_a_killed_shard_goes_on(data: AuditInput, tmp_path: Path) -> None:
    measured = scan._measured
    done: list[int] = []

    def killed(*arguments: Any) -> scan.Scan:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(arguments[2])
        return measured(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "_measured", killed)
        with pytest.raises(KeyboardInterrupt):
            audit_shard(data, tmp_path / "out", CPU, Shard(1, 1))
    done.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "_measured", lambda *all_: done.append(all_[2]) or measured(*all_))  # type: ignore[func-returns-value]
        audit_shard(data, tmp_path / "out", CPU, Shard(1, 1))
    assert sorted(done) == list(range(20, 130, 10))
    merge_shards(tmp_path / "out", "cpu")
    audit_path(data, tmp_path / "whole", CPU)
    assert same_tables(tmp_path / "whole", tmp_path / "out")


def test_shards_wait_for_the_one_that_learns(data: AuditInput, tmp_path: Path) -> None:
    order: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def slow(*arguments: Any, **options: Any) -> Any:
        order.append("learned")
        begun.set()
        assert go_on.wait(20)
        return learn(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auditor, "learn", slow)
        threads = [
            threading.Thread(target=audit_shard, args=(data, tmp_path / "out", CPU, Shard(number, 2)))
            for number in (1, 2)
        ]
        threads[0].start()
        assert begun.wait(20)
        threads[1].start()
        go_on.set()
        for thread in threads:
            thread.join(60)
    assert order == ["learned"]
    merge_shards(tmp_path / "out", "cpu")
    audit_path(data, tmp_path / "whole", CPU)
    assert same_tables(tmp_path / "whole", tmp_path / "out")


def test_what_cannot_be_merged_is_refused(data: AuditInput, tmp_path: Path) -> None:
    with refused(NotFoundError, where=tmp_path / "out"):
        merge_shards(tmp_path / "out")
    audit_shard(data, tmp_path / "out", Settings(checked={"0": True}, device="cpu"), Shard(1, 1))
    with refused(ConflictError, where="merge", names=str(tmp_path / "out")):
        merge_shards(tmp_path / "out")
