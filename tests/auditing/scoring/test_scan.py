from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from audit_cases import Case, make_case, write_clip
from mispair.auditing.scoring import scan as module
from mispair.auditing.scoring.folds import fold_numbers
from mispair.auditing.scoring.judge import Judge, learn
from mispair.auditing.scoring.scan import BAD_IN_TABLE, FAULTS, READABLE, Scan, faults, scan
from mispair.pairs.layouts.arrays import from_memory
from mispair.pairs.layouts.opening import open_source
from mispair.pairs.source import Source

pytest.importorskip("pyarrow")

CPU = torch.device("cpu")
ROWS = 130
ROW_NUMBERS = np.arange(ROWS)


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", 16)
        patch.setattr(module, "PART", 32)
        yield


@pytest.fixture(scope="module")
def case() -> Case:
    made = make_case(ROWS)
    made.left[7, 3] = np.nan
    made.right[[20, 21]] = 0
    made.right[40, 0] = -np.inf
    return made


@pytest.fixture(scope="module")
def judge(case: Case) -> Judge:
    good = np.setdiff1d(np.arange(ROWS), [7, 20, 21, 40])
    sides = torch.from_numpy(case.left[good]), torch.from_numpy(case.right[good])
    return learn(*sides, fold_numbers(good), good)


@pytest.fixture(scope="module")
def source(case: Case) -> Source:
    names = [f"p{row}" for row in range(ROWS)]
    names[100] = names[99]
    return from_memory(case.left, case.right, names)


@pytest.fixture(scope="module")
def whole(source: Source, judge: Judge) -> Scan:
    return scan(source, judge, ROW_NUMBERS, workers=1, device=CPU)


def same(one: Scan, other: Scan) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(vars(one).values(), vars(other).values(), strict=True))


odd_numbers = st.sampled_from([0.0, -0.0, 1.0, -2.5, 3e38, -3e38, math.nan, math.inf, -math.inf])
vectors = arrays.arrays(np.float32, (6, 3), elements=odd_numbers)


@given(vectors, vectors)
def test_faults_by_a_loop(left: npt.NDArray[np.float32], right: npt.NDArray[np.float32]) -> None:
    found = faults(torch.from_numpy(left), torch.from_numpy(right))
    for code, one, other in zip(found, left.tolist(), right.tolist(), strict=True):
        expected = "ok"
        for side, vector in (("right", other), ("left", one)):
            if not all(map(math.isfinite, vector)):
                expected = f"the {side} vector has numbers that are not finite"
            elif not any(vector):
                expected = f"the {side} vector is zero"
        assert FAULTS[code] == expected


def test_every_row_is_measured_or_has_a_status(case: Case, judge: Judge, whole: Scan) -> None:
    bad = {7: 1, 20: 4, 21: 4, 40: 2, 100: BAD_IN_TABLE}
    assert {row: int(code) for row, code in enumerate(whole.status) if code != READABLE} == bad
    good = np.setdiff1d(np.arange(ROWS), list(bad))
    assert np.isnan(whole.measures[list(bad)]).all()
    sides = torch.from_numpy(case.left[good]), torch.from_numpy(case.right[good])
    np.testing.assert_allclose(whole.measures[good], judge.measure(*sides, fold_numbers(good)), atol=2e-5)


def test_pairs_that_were_learned_from_are_not_measured_again(
    case: Case, source: Source, whole: Scan, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = np.setdiff1d(np.arange(0, ROWS, 2), [7, 20, 21, 40, 100])
    sides = torch.from_numpy(case.left[rows]), torch.from_numpy(case.right[rows])
    judge = learn(*sides, fold_numbers(rows), rows, numbers=rows)
    again, measured = Judge.of(judge.state(), CPU), []
    measure = Judge.measure
    monkeypatch.setattr(Judge, "measure", lambda self, left, *rest: measured.append(left) or measure(self, left, *rest))  # type: ignore[func-returns-value]
    found = scan(source, again, ROW_NUMBERS, workers=1, device=CPU)
    good = np.flatnonzero(whole.status == READABLE)
    assert np.array_equal(found.status, whole.status)
    assert np.array_equal(torch.cat(measured).numpy(), case.left[np.setdiff1d(good, rows)])
    every = torch.from_numpy(case.left[good]), torch.from_numpy(case.right[good])
    np.testing.assert_allclose(found.measures[good], measure(judge, *every, fold_numbers(good)), atol=2e-5)


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_and_parts_change_no_bit(
    source: Source, judge: Judge, whole: Scan, workers: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert same(scan(source, judge, ROW_NUMBERS, workers=workers, device=CPU), whole)
    for part in (16, 48, 1600):
        monkeypatch.setattr(module, "PART", part)
        folder = tmp_path / str(part)
        for _ in range(2):  # measured, then as it was saved
            assert same(scan(source, judge, ROW_NUMBERS, workers=workers, device=CPU, folder=folder), whole)
        assert len(list(folder.iterdir())) == math.ceil(ROWS / part)


@given(st.lists(st.integers(1, ROWS - 1), max_size=4), st.integers(1, 3))
@settings(max_examples=5)
def test_shards_change_no_bit(
    tmp_path_factory: pytest.TempPathFactory, source: Source, judge: Judge, whole: Scan, cuts: list[int], workers: int
) -> None:
    metadata = {"id": source.ids(range(ROWS))}
    sides = source.block(0, ROWS)
    files = open_source(write_clip(tmp_path_factory.mktemp("clip"), *sides, metadata, cuts))
    assert same(scan(files, judge, ROW_NUMBERS, workers=workers, device=CPU), whole)


def test_groups_choose_the_fold(case: Case, judge: Judge) -> None:
    groups = np.arange(ROWS) // 2
    found = scan(from_memory(case.left, case.right), judge, groups, workers=1, device=CPU)
    good = np.flatnonzero(found.status == READABLE)
    sides = torch.from_numpy(case.left[good]), torch.from_numpy(case.right[good])
    np.testing.assert_allclose(found.measures[good], judge.measure(*sides, fold_numbers(groups[good])), atol=2e-5)


class StoppedError(Exception):
    pass


@given(st.integers(0, 8), st.integers(1, 3))
@settings(max_examples=5)
def test_what_was_saved_is_not_measured_again(
    tmp_path_factory: pytest.TempPathFactory, source: Source, judge: Judge, whole: Scan, stop: int, workers: int
) -> None:
    folder, measure, measured = tmp_path_factory.mktemp("work"), module._measured, []

    def watched(source: Source, judge: Judge, start: int, *rest: Any) -> Scan:
        measured.append(start)
        return measure(source, judge, start, *rest)

    def stopping(source: Source, judge: Judge, start: int, *rest: Any) -> Scan:
        if start == 16 * stop:
            raise StoppedError
        return measure(source, judge, start, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_measured", stopping)
        with pytest.raises(StoppedError):
            scan(source, judge, ROW_NUMBERS, workers=workers, device=CPU, folder=folder)
        saved = stop // 2  # parts of two blocks
        assert sorted(path.name for path in folder.iterdir()) == [f"part-{part:06d}.npz" for part in range(saved)]
        patch.setattr(module, "_measured", watched)
        steps: list[int] = []
        found = scan(source, judge, ROW_NUMBERS, workers=workers, device=CPU, folder=folder, step=steps.append)
    assert same(found, whole)
    assert sorted(measured) == list(range(32 * saved, ROWS, 16))
    assert sum(steps) == ROWS


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, source: Source, judge: Judge) -> bytes:
    folder = tmp_path_factory.mktemp("work")
    scan(source, judge, ROW_NUMBERS, workers=1, device=CPU, folder=folder)
    return (folder / "part-000001.npz").read_bytes()


@given(st.data())
def test_a_damaged_part_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, saved: bytes, whole: Scan, data: st.DataObject
) -> None:
    content = bytearray(saved)
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    folder, part = tmp_path_factory.getbasetemp(), Scan.empty(32, whole.measures.shape[1])
    (folder / "part-000001.npz").write_bytes(content)
    # A byte that says nothing, such as one of a date, may be damaged without harm.
    assert not module._loaded(folder, 32, part) or same(part, Scan(whole.measures[32:64], whole.status[32:64]))


def test_a_part_that_is_cut_or_of_another_size_is_made_again(
    source: Source, judge: Judge, whole: Scan, saved: bytes, tmp_path: Path
) -> None:
    (tmp_path / "part-000001.npz").write_bytes(saved[:-9])
    path = tmp_path / "part-000000.npz"
    for name, value in (("measures", np.zeros((3, 5), np.float32)), ("status", np.zeros(3, np.uint8))):
        scan(source, judge, ROW_NUMBERS, workers=1, device=CPU, folder=tmp_path)
        with np.load(path) as archive:
            parts = dict(archive)
        np.savez(path, **{**parts, name: value})
        assert same(scan(source, judge, ROW_NUMBERS, workers=1, device=CPU, folder=tmp_path), whole)
