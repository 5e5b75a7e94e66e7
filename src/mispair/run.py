"""The run folder: everything about one training run, so that it can be resumed, read and repeated.

config.toml        the settings, usable as a recipe
environment.json   versions, device and command
metrics.jsonl      one line an event, as it happens
checkpoints/       state to resume from, the newest two
best.safetensors   the networks that were best on the validation pairs
result.json        written when the run has ended well
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mispair import __version__
from mispair.config import Config, difference, override, read_recipe, to_toml
from mispair.errors import ConfigError
from mispair.files import write_atomically

FREE = ("checkpoint_seconds", "tensorboard")  # settings that change nothing about the result


class Run:
    """An open run folder. Only one process at a time can have it open."""

    def __init__(self, path: Path, config: Config) -> None:
        self.path, self.config = path, config
        self.checkpoints, self.best = path / "checkpoints", path / "best.safetensors"
        settings = path / "config.toml"
        if settings.is_file():
            _refuse_other_config(path, read_recipe(settings), config)
        elif path.exists() and (not path.is_dir() or any(entry.name != ".lock" for entry in path.iterdir())):
            raise ConfigError(f"{path} exists and is not a run folder; give another --out, nothing was changed.")
        path.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(path)
        if not settings.is_file():
            write_atomically(settings, to_toml(config).encode())
        self._metrics = (path / "metrics.jsonl").open("ab")
        self._board = _tensorboard(path) if config.tensorboard else None

    @property
    def resume_command(self) -> str:
        path = shlex.quote(str(self.path))
        return f"mispair train --recipe {path}/config.toml --out {path}"

    def close(self) -> None:
        self._metrics.close()
        if self._board is not None:
            self._board.close()
        os.close(self._lock)

    def log(self, event: str, **figures: Any) -> None:
        """Appends a line to metrics.jsonl."""
        self._metrics.write(json.dumps({"event": event, **figures}).encode() + b"\n")
        self._metrics.flush()
        for name, value in figures.items():
            if self._board is not None and isinstance(value, float):
                self._board.add_scalar(f"{event}/{name}", value, figures.get("step"))

    @property
    def logged_bytes(self) -> int:
        return self._metrics.tell()

    def forget_after(self, logged_bytes: int) -> None:
        """Drops what was logged after a checkpoint: those steps are made again."""
        self._metrics.truncate(logged_bytes)
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
            "command": shlex.join(sys.argv),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        write_atomically(self.path / "environment.json", json.dumps(environment, indent=2).encode())

    @property
    def result(self) -> dict[str, Any] | None:
        """What a finished run reached; None while it has not ended."""
        file = self.path / "result.json"
        return dict(json.loads(file.read_text())) if file.is_file() else None

    def finish(self, result: dict[str, Any]) -> None:
        write_atomically(self.path / "result.json", json.dumps(result, indent=2).encode())


def _refuse_other_config(path: Path, old: Config, new: Config) -> None:
    same = {name: getattr(old, name) for name in FREE}
    changes = difference(old, override(new, same))
    if changes:
        raise ConfigError(f"{path} holds a run with other settings ({'; '.join(changes)}); give another --out.")


def _tensorboard(path: Path) -> Any:
    try:
        tensorboard = importlib.import_module("torch.utils.tensorboard")
    except ImportError:
        raise ConfigError("--tensorboard needs the extra: pip install 'mispair[tensorboard]'.") from None
    return tensorboard.SummaryWriter(path / "tensorboard")


def _lock(path: Path) -> int:
    handle = os.open(path / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise ConfigError(f"Another process is working in {path}; wait for it or give another --out.") from None
    return handle
