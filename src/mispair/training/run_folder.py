"""The run folder: everything about one training run, so that it can be resumed, read and repeated.

config.toml        the settings, usable as a recipe
environment.json   versions, device and command
metrics.jsonl      one line an event, as it happens
match_score.npy    with --audit: what the audit said of each pair
checkpoints/       state to resume from, the newest two
best.safetensors   the networks that were best on the validation pairs
result.json        written when the run has ended well
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from mispair import __version__
from mispair.config import Config, difference, override, read_recipe, to_toml
from mispair.errors import ConfigError, DataError
from mispair.support.files import write_atomically

FREE = ("checkpoint_seconds", "tensorboard")  # settings that change nothing about the result


class Run:
    """An open run folder, to be closed or used in a `with`. Only one process at a time can have it open."""

    def __init__(self, path: Path, config: Config) -> None:
        self.path, self.config = path, config
        self.checkpoints, self.best = path / "checkpoints", path / "best.safetensors"
        settings = path / "config.toml"
        self._tensorboard = _import_tensorboard() if config.tensorboard else None
        self._board: Any = None
        try:
            if settings.is_file() and self._started:
                _refuse_other_config(path, read_recipe(settings), config)
            elif path.exists() and not _is_free(path):
                raise ConfigError(f"{path} exists and is not a run folder; give another --out, nothing was changed.")
            path.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(path)
            with contextlib.ExitStack() as failing:
                failing.callback(os.close, self._lock)
                for left_behind in path.glob(".*.tmp"):  # by a process that was killed while it wrote
                    left_behind.unlink()
                if not (settings.is_file() and self._started):
                    write_atomically(settings, to_toml(config).encode())
                self._metrics = (path / "metrics.jsonl").open("ab")
                failing.pop_all()
        except OSError as error:
            raise DataError(
                f"{path}: the run folder cannot be written ({error.strerror}); give another --out."
            ) from None

    @property
    def _started(self) -> bool:
        """Whether anything was trained here; before that, another config does no harm."""
        return self.best.exists() or any(self.checkpoints.glob("step-*.pt"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk was reported when it was met
            self._metrics.close()
        if self._board is not None:
            self._board.close()
        os.close(self._lock)

    def log(self, event: str, **figures: Any) -> None:
        """Appends a line to metrics.jsonl."""
        try:
            self._metrics.write(json.dumps({"event": event, **figures}).encode() + b"\n")
            self._metrics.flush()
        except OSError as error:
            raise DataError(f"{self.path}: the log cannot be written ({error.strerror}).") from None
        if self._tensorboard is not None:
            step = figures.get("step")
            if self._board is None:  # made here, because steps that are made again must be taken out first
                self._board = self._tensorboard.SummaryWriter(self.path / "tensorboard", purge_step=step)
            for name, value in figures.items():
                if isinstance(value, float):
                    self._board.add_scalar(f"{event}/{name}", value, step)

    @property
    def logged_bytes(self) -> int:
        return self._metrics.tell()

    def forget_after(self, logged_bytes: int) -> None:
        """Drops what was logged after a checkpoint: those steps are made again."""
        self._metrics.truncate(min(logged_bytes, self._metrics.seek(0, os.SEEK_END)))
        self._metrics.seek(0, os.SEEK_END)

    def write_environment(self, device: torch.device) -> None:
        environment = {
            "mispair": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "platform": platform.platform(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "threads": torch.get_num_threads(),
            "command": _command(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        write_atomically(self.path / "environment.json", json.dumps(environment, indent=2).encode())

    @property
    def result(self) -> dict[str, Any] | None:
        """What a finished run reached; None while it has not ended."""
        try:
            return dict(json.loads((self.path / "result.json").read_text())) if self.best.is_file() else None
        except (OSError, ValueError):
            return None

    def finish(self, result: dict[str, Any]) -> None:
        write_atomically(self.path / "result.json", json.dumps(result, indent=2).encode())


def _is_free(path: Path) -> bool:
    """Whether nothing of somebody else's is in this folder, in which nothing was trained yet."""
    if (path / "config.toml").is_file():
        return (path / ".lock").exists() or _is_ours(path / "config.toml")
    return path.is_dir() and all(entry.name[0] == "." for entry in path.iterdir())


def _is_ours(settings: Path) -> bool:
    """Whether a run wrote this file: people call other files config.toml, too."""
    try:
        return settings.read_text(encoding="utf-8") == to_toml(read_recipe(settings))
    except (ConfigError, UnicodeDecodeError):
        return False


def _refuse_other_config(path: Path, old: Config, new: Config) -> None:
    same = {name: getattr(old, name) for name in FREE}
    changes = difference(old, override(new, same))
    if changes:
        raise ConfigError(f"{path} holds a run with other settings ({'; '.join(changes)}); give another --out.")


def _import_tensorboard() -> Any:
    try:
        return importlib.import_module("torch.utils.tensorboard")
    except ImportError:
        raise ConfigError("--tensorboard needs the extra: pip install -c constraints.txt '.[tensorboard]'.") from None


def _lock(path: Path) -> int:
    handle = os.open(path / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise ConfigError(f"Another process is working in {path}; wait for it or give another --out.") from None
    return handle


def _command() -> str:
    """How the program was called; its own name without the folder that it is installed in."""
    program = Path(sys.argv[0]).name
    return shlex.join(["mispair" if program == "__main__.py" else program, *sys.argv[1:]])
