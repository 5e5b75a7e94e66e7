"""The run folder."""

from __future__ import annotations

import errno
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mispair.config import Config
from mispair.errors import ChangedError, DamagedError, ExistsError, InUseError, WriteError
from mispair.functional.metrics import retrieval
from mispair.methods.epoch_metrics import Examples, MethodReport, ReplacedPairs
from mispair.training.checkpoint import Best
from mispair.training.events import Event, MethodEvent, StepEvent, ValidationEvent
from mispair.training.run_folder import (
    Run,
    RunResult,
    count_validations,
    read_environment,
    read_events,
    read_examples,
    read_result,
)
from refusals import refused


def steps(step: int, **values: Any) -> StepEvent:
    return StepEvent(epoch=0, step=step, network=1, loss=0.5, spread=0.1, grad_norm=2.0, **values)


VALIDATION = ValidationEvent.model_validate({
    "epoch": 3, "step": 40, "networks_rsum": [1.5, 2.5], "seconds": 1.25, "selection_seconds": 0.5,
    **retrieval(torch.eye(9), torch.arange(9), torch.arange(9)).metrics(),
})  # fmt: skip
METHOD = MethodEvent(
    epoch=3, step=40, clean_share=[0.5, 1 / 3], clean_precision=[None, 0.25], eta_share=0.1, eta_precision=None,
    labels_clean=[[1, 2], [3, 4]], replaced=[ReplacedPairs(pairs=3, new_left_fits=0.1), ReplacedPairs(pairs=0)],
    metrics={"temperature": 0.07},
)  # fmt: skip


def test_two_processes_cannot_share_a_folder(tmp_path: Path) -> None:
    with Run(tmp_path / "run", Config()), refused(InUseError, where=tmp_path / "run"):
        Run(tmp_path / "run", Config())
    Run(tmp_path / "run", Config()).close()


def test_a_run_that_fails_is_closed(tmp_path: Path) -> None:
    with pytest.raises(MemoryError), Run(tmp_path / "run", Config()):
        raise MemoryError
    Run(tmp_path / "run", Config()).close()


def test_a_folder_that_cannot_be_written_is_not_kept_from_the_next_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr("mispair.training.run_folder.write_atomically", full)
        with refused(WriteError, where=tmp_path / "run"):
            Run(tmp_path / "run", Config())
    Run(tmp_path / "run", Config()).close()


def test_settings_without_influence_may_change(tmp_path: Path) -> None:
    Run(tmp_path / "run", Config()).close()
    (tmp_path / "run/best.safetensors").touch()  # something was trained
    Run(tmp_path / "run", replace(Config(), checkpoint_seconds=1.0)).close()
    with refused(ChangedError, where=tmp_path / "run", names="epochs: 20 -> 21"):
        Run(tmp_path / "run", replace(Config(), epochs=21))


@pytest.mark.posix
def test_names_that_are_not_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(WriteError, tmp_path / "caf\udce9"):
        Run(tmp_path / "caf\udce9", Config())
    assert not any(tmp_path.iterdir())
    monkeypatch.setattr(sys, "argv", ["mispair", "train", "--recipe", "caf\udce9.toml"])
    with Run(tmp_path / "run", Config()) as run:
        run.write_environment(torch.device("cpu"))
    assert read_environment(tmp_path / "run").command == r"mispair train --recipe 'caf\udce9.toml'"


@pytest.mark.parametrize("program", ["/opt/x/bin/mispair", "/opt/x/mispair/__main__.py"])
def test_the_command_names_no_folder_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr("sys.argv", [program, "train", "--out", "a b"])
    with Run(tmp_path / "run", Config()) as run:
        run.write_environment(torch.device("cpu"))
    assert read_environment(run.path).command == "mispair train --out 'a b'"


def test_the_log_forgets_what_is_done_again(tmp_path: Path) -> None:
    with Run(tmp_path / "run", Config()) as run:
        run.log(steps(1))
        mark = run.logged_bytes
        run.log(steps(2))
    with Run(tmp_path / "run", Config()) as run:
        run.forget_after(mark)
        run.log(steps(3))
    assert [event.step for event in read_events(tmp_path / "run", StepEvent)] == [1, 3]


def test_a_lost_log_starts_anew(tmp_path: Path) -> None:
    Run(tmp_path / "run", Config()).close()
    with Run(tmp_path / "run", Config()) as run:
        run.forget_after(1000)
        run.log(steps(3))
    assert read_events(tmp_path / "run", StepEvent) == [steps(3)]


def test_events_come_back_as_they_were(tmp_path: Path) -> None:
    events: list[Event] = [steps(1), steps(2, metrics={"noisy_loss": 0.1}), VALIDATION, METHOD, steps(3)]
    with Run(tmp_path / "run", Config()) as run:
        for event in events:
            run.log(event)
    for kind in (StepEvent, ValidationEvent, MethodEvent):
        assert read_events(tmp_path / "run", kind) == [event for event in events if isinstance(event, kind)]
    assert count_validations(tmp_path / "run") == 1
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["steps", "steps", "validation", "method", "steps"]
    assert lines[3].keys() == METHOD.model_fields_set | {"event"}  # what a method does not know is left out


@pytest.mark.parametrize("line", ["no JSON", "{}", '{"event": "other"}', '{"event": "steps", "step": 1}', "[1]"])
def test_a_log_of_something_else_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(line)
    with refused(DamagedError, where=tmp_path / "metrics.jsonl"):
        read_events(tmp_path, StepEvent)


def test_a_folder_without_a_log_has_no_epochs(tmp_path: Path) -> None:
    assert count_validations(tmp_path) == 0
    assert read_result(tmp_path) is None
    assert read_examples(tmp_path) is None
    for read in (read_environment, lambda path: read_events(path, StepEvent)):
        with refused(DamagedError):
            read(tmp_path)


def test_a_result_comes_back(tmp_path: Path) -> None:
    report = MethodReport(clean_share=[0.5, 0.25], spread=[0.1, 0.2])
    result = RunResult(best=Best(300.5, 7), steps=99, fingerprint="abc", report=report)
    with Run(tmp_path / "run", Config()) as run:
        run.finish(result, None)
        assert run.result is None  # there is no model
        run.best.touch()
        assert run.result == read_result(run.path) == result
        assert read_examples(run.path) is None
        (run.path / "result.json").write_text('{"best": 3}')
        assert run.result is None


@pytest.mark.parametrize("whole", [True, False])
def test_examples_come_back(tmp_path: Path, whole: bool) -> None:
    pairs, w = np.arange(4), np.random.default_rng(0).random((2, 4)).astype(np.float32)
    others = {"labels": w[0], "new_left": np.array([3, -1, 0, -1]), "new_right": np.array([-1] * 4)} if whole else {}
    with Run(tmp_path / "run", Config()) as run:
        run.finish(RunResult(best=Best(), steps=1, fingerprint="abc"), Examples(pairs, w, **others))
    found = read_examples(tmp_path / "run")
    assert found is not None
    for name, value in {"pairs": pairs, "w": w, **others}.items():
        assert getattr(found, name).tolist() == value.tolist(), name
        assert getattr(found, name).dtype == value.dtype, name
    assert whole or (found.labels is None and found.new_left is None and found.new_right is None)
    (tmp_path / "run/pairs.parquet").write_bytes(b"damaged")
    with refused(DamagedError, where=tmp_path / "run/pairs.parquet"):
        read_examples(tmp_path / "run")


def test_what_a_killed_process_left_behind_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.config.toml.77.tmp").write_text("half")
    Run(tmp_path / "run", Config()).close()
    assert not (tmp_path / "run/.config.toml.77.tmp").exists()


FOREIGN = {
    "another program's": '[project]\nname = "thesis"\n',
    "no TOML": "epochs = = 3",
    "not UTF-8": b"\xff\xfe",
    "a recipe that somebody wrote": "epochs = 3\n",
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_somebody_elses_config_is_not_touched(tmp_path: Path, content: str | bytes) -> None:
    files = {"config.toml": content if isinstance(content, bytes) else content.encode(), "metrics.jsonl": b"mine"}
    for name, value in files.items():
        (tmp_path / name).write_bytes(value)
    with refused(ExistsError, where=tmp_path):
        Run(tmp_path, Config())
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files


def test_a_run_in_which_nothing_was_trained_takes_other_settings(tmp_path: Path) -> None:
    Run(tmp_path / "run", Config()).close()
    settings = tmp_path / "run/config.toml"
    settings.write_text("epochs = 3\n")  # known by the lock file, as when an older version wrote it
    Run(tmp_path / "run", Config(epochs=4)).close()
    (tmp_path / "run/.lock").unlink()  # hidden files get lost in copies; known by its text
    Run(tmp_path / "run", Config(epochs=5)).close()
    assert "epochs = 5\n" in settings.read_text()


def test_tensorboard_files_are_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with Run(tmp_path / "run", Config(tensorboard=True)) as run:
        run.log(steps(1))
    assert list((tmp_path / "run/tensorboard").iterdir())
