"""`mispair bench run`: what is missing is trained, by one process or several, and nothing twice."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from forked import fork_server
from mispair.bench.suite import record as record_module
from mispair.bench.suite import runner
from mispair.bench.suite.record import ETAS, RECORD, RUN, Record, noise_hash, read_record, run_cell, write_record
from mispair.bench.suite.results_folder import (
    CELLS,
    LOCK,
    cell_folder,
    check_data,
    check_folder,
    claimed,
    is_claimed,
    read_results,
    write_info,
)
from mispair.bench.suite.runner import CellState, run_cells, seconds_left, state
from mispair.bench.suite.suite import Cell, Suite, digest, read_suite
from mispair.cli.main import main
from mispair.config import Config, find_packaged, to_toml
from mispair.errors import ChangedError, DataError, ExistsError, NotFoundError
from mispair.pairs.shapes import dataset
from mispair.support.cores import OWN
from mispair.training.settings import complete, override, read_recipe
from refusals import refused

SMALL = "embed_size = 8, word_size = 8, epochs = 2, warmup_epochs = 1, batch_size = 16, bank_size = 32"


@pytest.fixture(scope="module", autouse=True)
def _workers_start_at_once() -> Iterator[None]:
    """In this process; one that a test starts as a user does starts its workers as they are started for users."""
    with pytest.MonkeyPatch.context() as patch:
        if sys.platform != "win32":
            patch.setattr(runner, "CONTEXT", fork_server())
        yield


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("suite")
    data = dataset.make(folder / "shapes", train=16, dev=6, test=6)
    path = folder / "tiny.toml"
    path.write_text(
        f'title = "Tiny"\ndata = "{data}"\n'
        '[[part]]\nname = "noise"\nkind = "retrieval"\nnoise_ratio = [0.4]\n[part.rows]\n'
        f'plain = {{ recipe = "shapes/plain", {SMALL} }}\nREPAIR = {{ recipe = "shapes/repair", {SMALL} }}\n'
    )
    return path


@pytest.fixture(scope="module")
def suite(file: Path) -> Suite:
    return replace(read_suite(file), device="cpu")


@pytest.fixture(scope="module")
def done(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results folder in which everything has ended."""
    out = tmp_path_factory.mktemp("done") / "results"
    assert main(["bench", "run", str(file), "--device", "cpu", "--out", str(out), "--jobs", "2"]) == 0
    return out


def record_of(cell: Cell, **values: object) -> Record:
    content: dict[str, Any] = {"status": "done", "test": {"network": {"rsum": 100.0}}, **values}
    return Record.of(cell, **content)


def test_alone_is_the_student_where_there_is_one(suite: Suite) -> None:
    cell = suite.cells(1)[0]
    metrics = {f"network {name}": {"rsum": rsum} for name, rsum in (("A", 90.0), ("B", 60.0), ("C", 30.0))}
    tested = {**metrics, "averaged": {"rsum": 95.0}}
    assert record_of(cell, test=tested).single() == {"rsum": 60.0}
    student = replace(cell, config=override(cell.config, {"method": "mend"}))
    assert record_of(student, test=tested).single() == {"rsum": 90.0}


def test_everything_is_trained_and_described(suite: Suite, done: Path) -> None:
    found = read_results(done)
    assert (found.suite.name, found.seeds, found.suite.data) == ("tiny", 1, suite.data)
    records = found.records
    plain, repair = (records[cell.name] for cell in suite.cells(1))
    assert (plain.status, repair.status) == ("done", "done")
    assert set(plain.test) == {"network"}
    assert set(repair.test) == {"network A", "network B", "averaged"}
    assert len(repair.validation) == 3
    assert repair.data.mismatch == pytest.approx(0.4, abs=0.05)
    assert repair.data.noise_file is None
    assert repair.environment is not None
    assert repair.environment.device == "cpu"
    assert repair.single()["rsum"] == pytest.approx(
        np.mean([repair.test[name]["rsum"] for name in ("network A", "network B")])
    )
    assert [point.eta for point in repair.eta] == list(ETAS)
    assert all(0 <= getattr(point, name) <= 1 for point in repair.eta for name in ("accuracy", "recall"))
    assert all(point.precision is None or 0 <= point.precision <= 1 for point in repair.eta)
    assert {example.kind for example in repair.examples} >= {"matched", "mismatched"}
    assert not plain.eta
    assert not plain.examples


def test_what_has_ended_is_not_trained_again(file: Path, done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in done.glob(f"{CELLS}/*/{RECORD}")}
    assert main(["bench", "run", str(file), "--device", "cpu", "--out", str(done), "--json"]) == 0
    assert {path: path.stat().st_mtime_ns for path in done.glob(f"{CELLS}/*/{RECORD}")} == before
    assert len(json.loads(capsys.readouterr().out)["trainings"]) == 2


def test_the_result_is_that_of_an_ordinary_training(suite: Suite, done: Path, tmp_path: Path) -> None:
    cell = suite.cells(1)[1]
    again = run_cell(cell, tmp_path)
    found = read_record(cell_folder(done, cell))
    assert found is not None
    assert (again.test, again.eta, again.examples) == (found.test, found.eta, found.examples)


def run_with_forks(command: list[str]) -> None:
    """A command whose workers are of its own process group."""
    os.setsid()
    runner.CONTEXT = multiprocessing.get_context("fork")  # type: ignore[assignment]
    sys.exit(main(command))


def test_killed_half_way_and_started_again_it_runs_what_is_missing(file: Path, done: Path, tmp_path: Path) -> None:
    out = tmp_path / "results"
    command = ["bench", "run", str(file), "--device", "cpu", "--out", str(out)]
    process = fork_server().Process(target=run_with_forks, args=(command,))
    process.start()
    until = time.monotonic() + 120
    while not list(out.glob(f"{CELLS}/repair*/run/checkpoints/*.pt")) and time.monotonic() < until:
        time.sleep(0.02)
    assert process.pid is not None
    os.killpg(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    ended = {path.parent.name: path.stat().st_mtime_ns for path in out.glob(f"{CELLS}/*/{RECORD}")}
    assert main(command) == 0
    for name, moment in ended.items():
        assert (out / CELLS / name / RECORD).stat().st_mtime_ns == moment
    unbroken = read_results(done).records
    for name, record in read_results(out).records.items():
        assert record.test == unbroken[name].test


@pytest.mark.slow
def test_sigterm_stops_the_workers_which_save(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "results"
    command = [sys.executable, "-m", "mispair", "bench", "run", str(file), "--device", "cpu", "--out", str(out)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 120
    while not list(out.glob(f"{CELLS}/repair*/run/metrics.jsonl")) and time.monotonic() < until:
        time.sleep(0.02)
    process.terminate()
    _, output = process.communicate(timeout=60)
    assert "Run the command again to resume" in output
    assert process.returncode == 143
    assert not any(state(out, cell).status == "running" for cell in read_suite(file).cells(1))


def test_a_claim_is_exclusive_and_released(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "cell"
    assert not is_claimed(folder)
    with claimed(folder) as ours:
        assert ours
        assert is_claimed(folder)
        with claimed(folder) as theirs:
            assert not theirs
        assert is_claimed(folder)  # the second did not release it
    assert not is_claimed(folder)


def test_a_claim_is_released_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), claimed(tmp_path):
        raise RuntimeError
    assert not is_claimed(tmp_path)


def hold(folder: Path, answer: Connection) -> None:
    with claimed(folder) as ours:
        answer.send(ours)
        time.sleep(600)


def test_the_claim_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    answer, theirs = multiprocessing.Pipe(duplex=False)
    process = runner.CONTEXT.Process(target=hold, args=(tmp_path, theirs))
    process.start()
    assert answer.recv()
    assert is_claimed(tmp_path)
    with claimed(tmp_path) as ours:
        assert not ours
    process.kill()
    process.join()
    assert (tmp_path / LOCK).exists()
    assert not is_claimed(tmp_path)
    with claimed(tmp_path) as ours:
        assert ours


def test_of_many_processes_one_gets_a_claim(tmp_path: Path) -> None:
    def attempt(_: int) -> bool:
        with claimed(tmp_path) as ours:
            barrier.wait()  # nobody releases it before all have tried
            return ours

    barrier = threading.Barrier(8)
    for _ in range(5):
        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(attempt, range(8))) == 1


def test_asking_for_a_claim_does_not_take_it_away(tmp_path: Path) -> None:
    """A process that shows the progress locks a cell for a moment; a worker waits for it."""
    (tmp_path / LOCK).touch()
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            is_claimed(tmp_path)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for _ in range(20):
            with claimed(tmp_path) as ours:
                assert ours
            (tmp_path / LOCK).touch()
    finally:
        stop.set()
        asking.join()


def test_two_processes_share_a_folder(suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells, trained = suite.cells(1), []
    errors = multiprocessing.get_context("spawn").SimpleQueue()

    def train(cell: Cell, folder: Path) -> None:
        trained.append(cell.name)
        if len(trained) == 1:
            runner._work(list(cells), tmp_path, 1, errors)  # another process that comes while the first cell is trained
        write_record(folder, record_of(cell))

    monkeypatch.setattr(runner, "run_cell", train)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    monkeypatch.setenv(OWN, "2")  # restored in the end
    runner._work(list(cells), tmp_path, 1, errors)
    assert errors.empty()
    assert sorted(trained) == sorted(cell.name for cell in cells)


def test_a_cell_that_another_process_holds_is_named_and_not_waited_for(
    file: Path, suite: Suite, done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, cell = shutil.copytree(done, tmp_path / "results"), suite.cells(1)[1]
    (cell_folder(out, cell) / RECORD).unlink()
    with claimed(cell_folder(out, cell)):
        assert main(["bench", "run", str(file), "--device", "cpu", "--out", str(out)]) == 1
    assert "1 done, 1 running in another process." in capsys.readouterr().out


def test_a_failure_is_written_down_and_the_rest_goes_on(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = file.read_text().replace("REPAIR =", 'broken = { recipe = "shapes/plain", model = "two-tower" }\nREPAIR =')
    broken, out = tmp_path / "broken.toml", tmp_path / "results"
    broken.write_text(text)
    command = ["bench", "run", str(broken), "--device", "cpu", "--out", str(out), "--only", "plain"]
    assert main(command) == 1
    output = capsys.readouterr().out
    assert "1 failed" in output
    assert "1 done" in output
    states = {cell.label: state(out, cell) for cell in read_suite(broken).cells(1)}
    assert [states[name].status for name in ("broken", "plain", "REPAIR")] == ["failed", "done", "waiting"]
    assert states["broken"].record is not None
    assert states["broken"].record.error
    record = cell_folder(out, states["broken"].cell) / RECORD
    before = record.stat().st_mtime_ns
    assert main(command) == 1
    assert record.stat().st_mtime_ns == before
    assert main([*command, "--retry"]) == 1
    assert record.stat().st_mtime_ns > before


def test_state_of_a_cell(suite: Suite, tmp_path: Path) -> None:
    cell = suite.cells(1)[0]
    folder = cell_folder(tmp_path, cell)
    assert state(tmp_path, cell) == CellState(cell, "waiting")
    (folder / "run").mkdir(parents=True)
    (folder / "run" / "metrics.jsonl").write_text('{"event": "validation", "rsum": 1}\n{"event": "method"}\n')
    with claimed(folder):
        running = state(tmp_path, cell)
        assert (running.status, running.epochs, str(running)) == ("running", 1, "epoch 2 of 3")
        write_record(folder, record_of(cell, status="failed", error="It broke."))
        assert str(state(tmp_path, cell)) == "failed: It broke."
        (folder / RECORD).write_text("{")
        assert state(tmp_path, cell).status == "running"  # a damaged record does not count
    assert state(tmp_path, cell).status == "waiting"


def test_time_left() -> None:
    def one(method: str, seconds: float | None, epochs: int = 0, status: str = "waiting") -> CellState:
        config = replace(Config(), method=method, warmup_epochs=0, epochs=10)
        cell = Cell(method, method, config)
        epoch = {"epoch": 0, "rsum": 1.0, "seconds": seconds}
        record = None if seconds is None else record_of(cell, validation=[epoch])
        return CellState(cell, "done" if record else status, record, epochs)  # type: ignore[arg-type]

    assert seconds_left([one("plain", None)]) is None
    states = [one("plain", 10.0), one("ncr", 30.0), one("plain", None), one("decl", None), one("ncr", None, 5)]
    assert seconds_left(states) == pytest.approx(10 + 20 + 15)
    running = [one("plain", 10.0), one("plain", None, 5, "running"), one("plain", None, 0, "running")]
    assert seconds_left(running) == pytest.approx((5 + 10) / 2)


def test_nothing_to_do_starts_nothing(suite: Suite, done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(runner, "_work", refuse)
    states = run_cells(suite.cells(1), done, jobs=4, console=Console(quiet=True))
    assert [one.status for one in states] == ["done", "done"]


def test_folders_of_something_else_are_refused(suite: Suite, done: Path, tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_text("")
    with refused(ExistsError, tmp_path):
        check_folder(tmp_path, suite)
    with refused(ChangedError, done, "tiny"):
        check_folder(done, read_suite("shapes"))
    with refused(NotFoundError, tmp_path):
        read_results(tmp_path)


@pytest.mark.parametrize("there", [[], ["suite.toml"], ["suite.toml", "cells"], [".suite.json.1.tmp"]])
def test_a_folder_that_another_process_has_just_begun_is_accepted(
    suite: Suite, tmp_path: Path, there: list[str]
) -> None:
    for name in there:
        (tmp_path / name).touch()
    assert check_folder(tmp_path, suite) == suite


def test_noise_files_are_kept_and_cannot_be_added_later(file: Path, suite: Suite, done: Path, tmp_path: Path) -> None:
    named = replace(suite, noise_file="{ratio}.npy")
    write_info(tmp_path / "r", str(file), named, 1)
    assert check_folder(tmp_path / "r", suite) == named
    with refused(ChangedError, done, "`noise_file`"):
        check_folder(done, named)


def test_other_noise_files_are_refused(suite: Suite, tmp_path: Path) -> None:
    first, second = replace(suite, noise_file=str(tmp_path / "{ratio}.npy")).cells(1)
    np.save(tmp_path / "0.4.npy", np.arange(3))
    data = {"pairs": 80, "noise_file": noise_hash(first.config.noise_file)}
    write_record(cell_folder(tmp_path, first), record_of(first, data=data))
    check_data(tmp_path, [first, second], 80)
    np.save(tmp_path / "0.4.npy", np.arange(4))
    with refused(ChangedError, tmp_path, str(tmp_path / "0.4.npy")):
        check_data(tmp_path, [first, second], 80)
    (tmp_path / "0.4.npy").unlink()  # another noise ratio is trained
    check_data(tmp_path, [first, second], 80)


def test_data_of_another_size_is_refused_for_other_rows_too(
    file: Path, done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shutil.copytree(done, tmp_path / "results")
    shutil.rmtree(next((out / CELLS).glob("repair-*")))
    other = dataset.make(tmp_path / "other", train=12, dev=6, test=6)
    command = ["bench", "run", str(file), "--device", "cpu", "--out", str(out), "--data", str(other)]
    assert main([*command, "--only", "repair"]) == 2
    assert "80 pairs" in capsys.readouterr().err


def test_data_of_another_size_is_refused(suite: Suite, done: Path) -> None:
    record = read_record(cell_folder(done, suite.cells(1)[0]))
    assert record is not None
    assert record.data.pairs is not None
    check_data(done, suite.cells(1), record.data.pairs)
    with refused(ChangedError, done, "has 7"):
        check_data(done, suite.cells(1), 7)


def test_own_recipes_are_copied_to_the_results(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own"
    (own / "recipes").mkdir(parents=True)
    shutil.copy(find_packaged("recipe", "shapes/plain"), own / "recipes/mine.toml")
    head = 'title = "Own"\ndata = "shapes"\n[[part]]\nname = "a"\nkind = "retrieval"\n[part.rows]\n'
    (own / "suite.toml").write_text(head + 'x = "recipes/mine.toml"\n')
    suite = read_suite(own / "suite.toml")
    (name,) = (cell.name for cell in suite.cells(1))
    write_info(tmp_path / "results", str(own / "suite.toml"), suite, 1)
    shutil.rmtree(own)
    monkeypatch.chdir(file.parent)
    assert [cell.name for cell in read_results(tmp_path / "results").suite.cells(1)] == [name]
    assert name.startswith("mine-")


def test_recipes_of_other_folders_are_copied_too(tmp_path: Path) -> None:
    own, text = tmp_path / "own", find_packaged("recipe", "shapes/plain").read_text()
    own.mkdir()
    for path, size in ((tmp_path / "a.toml", 8), (own / "a.toml", 16), (tmp_path / "b.toml", 32)):
        path.write_text(text.replace("embed_size = 64", f"embed_size = {size}"))
    head = 'title = "Own"\ndata = "shapes"\n[[part]]\nname = "a"\nkind = "retrieval"\n[part.rows]\n'
    (own / "suite.toml").write_text(f'{head}x = "../a.toml"\ny = "a.toml"\nz = "{tmp_path / "b.toml"}"\n')
    suite = read_suite(own / "suite.toml")
    write_info(tmp_path / "results", str(own / "suite.toml"), suite, 1)
    shutil.rmtree(own)
    (tmp_path / "a.toml").unlink()
    (tmp_path / "b.toml").write_text(text)  # changed since
    assert [cell.config.embed_size for cell in read_results(tmp_path / "results").suite.cells(1)] == [8, 16, 32]


def test_a_full_disk_is_no_result(suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            raise DataError(f"best.safetensors: the file cannot be written ({error.strerror}).") from None

    cell = suite.cells(1)[0]
    monkeypatch.setattr(record_module, "train_splits", full)
    with pytest.raises(DataError, match="No space left"):
        run_cell(cell, tmp_path)
    assert not (tmp_path / RECORD).exists()


def test_a_long_error_is_shortened(suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise DataError(f"Not finite. Pairs: {', '.join(map(str, range(500)))}. Lower --lr.")

    monkeypatch.setattr(record_module, "train_splits", broken)
    error = run_cell(suite.cells(1)[0], tmp_path).error
    assert error is not None
    assert error.startswith("Not finite. Pairs: 0, 1")
    assert error.endswith("499. Lower --lr.")
    assert len(error) < 400


@pytest.mark.parametrize(
    "damage",
    [
        {"status": "other"},
        {"name": "another-cell"},
        {"test": {}},
        {"test": {"network A": {"rsum": 1.0}, "network B": {"rsum": 1.0}}},
        {"test": {"network": 5}},
        {"test": {"network": {"rsum": float("nan")}}},
        {"test": {"network": {"i2t_r1": 1.0}}},
        {"validation": [{"epoch": 0}]},
        {"validation": ["x"]},
        {"environment": {}},
    ],
)
def test_a_damaged_record_is_none(
    suite: Suite, done: Path, tmp_path: Path, damage: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"
    shutil.copytree(done, results, ignore=shutil.ignore_patterns(RUN))
    cell = suite.cells(1)[0]
    file = cell_folder(results, cell) / RECORD
    file.write_text(json.dumps({**json.loads(file.read_text()), **damage}))
    assert state(results, cell).status == "waiting"
    assert main(["bench", "report", str(results)]) == 0
    output = capsys.readouterr()
    assert output.out.startswith("1 of 2 trainings.")
    assert f"Ignored, because damaged or without a row in suite.toml: {cell.name}." in output.err


def test_a_training_resumes_where_its_data_is_now(suite: Suite, tmp_path: Path) -> None:
    """Begun by another machine, which has the data elsewhere."""
    cell = suite.cells(1)[0]
    settings = tmp_path / RUN / "config.toml"
    settings.parent.mkdir()
    settings.write_text(to_toml(complete(replace(cell.config, data="/mnt/other/shapes", device="auto"))))
    (settings.parent / "checkpoints").mkdir()
    (settings.parent / "checkpoints/step-000000001-0.pt").touch()  # damaged, but something was trained
    record = run_cell(cell, tmp_path)
    assert record.status == "done", record.error
    assert read_recipe(settings) == complete(cell.config)


def test_a_cell_that_cannot_begin_does_not_stop_the_others(suite: Suite, tmp_path: Path) -> None:
    first, second = suite.cells(1)
    (tmp_path / CELLS).mkdir()
    (tmp_path / CELLS / first.name).touch()  # a file where its folder should be
    console = Console(file=(output := io.StringIO()), width=500)
    states = run_cells([first, second], tmp_path, console=console)
    assert [one.status for one in states] == ["waiting", "done"]
    assert "1 of 1 processes ended before their work was done (exit code 1)" in output.getvalue()
    assert f"{first.name}: [Errno " in output.getvalue()


def test_more_seeds_are_remembered(file: Path, suite: Suite, tmp_path: Path) -> None:
    for seeds, known in ((2, 2), (1, 2), (3, 3)):
        write_info(tmp_path / "r", str(file), suite, seeds)
        assert read_results(tmp_path / "r").seeds == known


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0"], "--seeds: 0"),
        (["--jobs", "0"], "--jobs: 0"),
        (["--only", "nothing"], "--only: nothing"),
        (["--data", "nowhere"], "nowhere"),
        (["--noise-file", "a.npy"], "{ratio}"),
        (["--noise-file", "{ratio}.npy"], " 0.4.npy"),
        (["--noise-file", "{ratio}_{seed}_{.npy"], " 0.4_{seed}_{.npy"),
        (["--device", "abacus"], "abacus"),
    ],
)
def test_mistakes_become_sentences(
    file: Path, tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results"
    assert main(["bench", "run", str(file), "--out", str(out), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_data_that_no_training_takes_is_refused_before_any_work(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    towers, out = tmp_path / "towers.toml", tmp_path / "results"
    towers.write_text(file.read_text().replace("batch_size = 16", 'batch_size = 16, model = "two-tower"'))
    assert main(["bench", "run", str(towers), "--device", "cpu", "--out", str(out)]) == 2
    assert "two-tower" in capsys.readouterr().err
    assert not out.exists()


def test_published_records_can_be_read() -> None:
    folder = Path(__file__).parents[3] / "benchmarks/results/f8k"
    results = read_results(folder)
    assert not results.ignored
    records = results.records
    assert len(records) == len(list((folder / CELLS).iterdir())) == 45
    for cell in results.suite.cells(results.seeds):
        if cell.name in records:
            assert records[cell.name].digest == digest(cell.config)
            assert records[cell.name].validation
    repair = next(record for name, record in records.items() if name.startswith("repair-vse-noise-40-seed-0"))
    assert repair.method.replaced is not None
    assert [replaced.pairs for replaced in repair.method.replaced] == [11995, 11995]
    assert repair.validation[-1].selection_seconds > 0


def test_a_record_is_the_same_after_writing_and_reading(suite: Suite, done: Path, tmp_path: Path) -> None:
    cell = suite.cells(1)[1]
    record = read_record(cell_folder(done, cell))
    assert record is not None
    write_record(tmp_path / cell.name, record)
    assert read_record(tmp_path / cell.name) == record
    assert record.config["vocab"] is None
