"""The run folder."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mispair.config import Config
from mispair.errors import ConfigError, DataError
from mispair.training.run_folder import Run


def test_two_processes_cannot_share_a_folder(tmp_path: Path) -> None:
    with Run(tmp_path / "run", Config()), pytest.raises(ConfigError, match="Another process"):
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
        with pytest.raises(DataError, match="cannot be written"):
            Run(tmp_path / "run", Config())
    Run(tmp_path / "run", Config()).close()


def test_settings_without_influence_may_change(tmp_path: Path) -> None:
    Run(tmp_path / "run", Config()).close()
    (tmp_path / "run/best.safetensors").touch()  # something was trained
    Run(tmp_path / "run", replace(Config(), checkpoint_seconds=1.0)).close()
    with pytest.raises(ConfigError, match="epochs: 20 -> 21"):
        Run(tmp_path / "run", replace(Config(), epochs=21))


@pytest.mark.parametrize("program", ["/opt/x/bin/mispair", "/opt/x/mispair/__main__.py"])
def test_the_command_names_no_folder_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr("sys.argv", [program, "train", "--out", "a b"])
    with Run(tmp_path / "run", Config()) as run:
        run.write_environment(torch.device("cpu"))
    assert json.loads((run.path / "environment.json").read_text())["command"] == "mispair train --out 'a b'"


def test_the_log_forgets_what_is_done_again(tmp_path: Path) -> None:
    with Run(tmp_path / "run", Config()) as run:
        run.log("steps", step=1)
        mark = run.logged_bytes
        run.log("steps", step=2)
    with Run(tmp_path / "run", Config()) as run:
        run.forget_after(mark)
        run.log("steps", step=3)
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 3]


def test_a_lost_log_starts_anew(tmp_path: Path) -> None:
    Run(tmp_path / "run", Config()).close()
    with Run(tmp_path / "run", Config()) as run:
        run.forget_after(1000)
        run.log("steps", step=3)
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text()) == {"event": "steps", "step": 3}


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
    with pytest.raises(ConfigError, match=r"exists and is not a run folder.* nothing was changed"):
        Run(tmp_path, Config())
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files


def test_a_run_in_which_nothing_was_trained_takes_other_settings(tmp_path: Path) -> None:
    Run(tmp_path / "run", Config()).close()
    settings = tmp_path / "run/config.toml"
    settings.write_text("epochs = 3\n")  # known by the lock beside it, as when an older version wrote it
    Run(tmp_path / "run", Config(epochs=4)).close()
    (tmp_path / "run/.lock").unlink()  # hidden files get lost in copies; known by its text
    Run(tmp_path / "run", Config(epochs=5)).close()
    assert "epochs = 5\n" in settings.read_text()


def test_tensorboard_files_are_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with Run(tmp_path / "run", Config(tensorboard=True)) as run:
        run.log("steps", step=1, loss=0.5)
    assert list((tmp_path / "run/tensorboard").iterdir())
