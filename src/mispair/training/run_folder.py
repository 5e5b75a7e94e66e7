"""The run folder: everything needed to resume, read and repeat a training run.

config.toml        the settings, usable as a recipe
environment.json   versions, device and command
metrics.jsonl      one line an event, as it happens
audited.parquet    with --audit: the match score of each pair and whether it is flagged; audited_dev.parquet and
                   audited_test.parquet likewise
features/, audit/  features and audit of a training from images and captions or from a review
made_from.json     inputs of these
checkpoints/       state to resume from, the newest two
best.safetensors   the networks that were best on the validation pairs
pairs.parquet      how the method treated each pair, for some methods
result.json        written when the run has ended well
"""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch
from filelock import FileLock
from pydantic import BaseModel, ConfigDict, ValidationError

from mispair import __version__
from mispair.config import BEST, Config, difference, to_toml
from mispair.errors import ChangedError, ConfigError, DamagedError, DataError, ExistsError, WriteError
from mispair.methods.epoch_metrics import Examples, MethodReport
from mispair.support.extras import missing_package
from mispair.support.files import LARGEST_TEXT, check_name, read_regular, regular, replacing, write_atomically
from mispair.support.owned_folder import LOCK, acquire
from mispair.training.checkpoint import Best
from mispair.training.events import Event, from_line, scalars, to_line
from mispair.training.settings import complete, read_recipe

AUDITED = ("audited.parquet", "audited_dev.parquet", "audited_test.parquet")  # training, validation and test pairs
MADE_FROM_FILES = ("features", "audit", "made_from.json")  # what a training from files or from a review makes first
LOG, RESULT, ENVIRONMENT, PAIRS = "metrics.jsonl", "result.json", "environment.json", "pairs.parquet"
_UNREADABLE = "missing, damaged or of another version of mispair"
EventT = TypeVar("EventT", bound=Event)
FREE = ("checkpoint_seconds", "tensorboard")  # settings that change nothing about the result


class RunResult(BaseModel):
    """The result of a finished run."""

    model_config = ConfigDict(frozen=True)

    best: Best
    steps: int
    fingerprint: str  # of the training and validation pairs
    report: MethodReport | None = None  # the method's, on the last epoch


class Environment(BaseModel):
    """The environment of a training."""

    model_config = ConfigDict(frozen=True)

    mispair: str
    python: str
    torch: str
    numpy: str
    platform: str
    device: str
    threads: int
    command: str
    started: str


class Run:
    """An open run folder; only one process can open it at a time. Use it in a `with` or close it.

    Ranks other than the first write nothing: `writes` is false.
    """

    def __init__(self, path: Path, config: Config, *, writes: bool = True) -> None:
        self.path, self.config, self.writes = path, config, writes
        self.checkpoints, self.best = path / "checkpoints", path / BEST
        if not writes:
            return
        settings = path / "config.toml"
        self._tensorboard = _import_tensorboard() if config.tensorboard else None
        self._board: Any = None
        try:
            check_place(path)
            if settings.is_file() and _started(path):
                _refuse_other_config(path, complete(read_recipe(settings)), complete(config))
            path.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(path / LOCK)
            acquire(self._lock, path)
            with contextlib.ExitStack() as failing:
                failing.callback(self._lock.release)
                for left_behind in path.glob(".*.tmp"):  # by a process that was killed while it wrote
                    left_behind.unlink()
                if not (settings.is_file() and _started(path)):
                    write_atomically(settings, to_toml(config).encode())
                if (path / LOG).exists():
                    regular(path / LOG)
                self._metrics = (path / LOG).open("ab")
                failing.pop_all()
        except OSError as error:
            raise WriteError(
                f"the run folder cannot be written ({error.strerror})", where=path, advice="Give another `out`."
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if not self.writes:
            return
        with contextlib.suppress(OSError):  # a full disk was reported when it was met
            self._metrics.close()
        if self._board is not None:
            self._board.close()
        self._lock.release()

    def log(self, event: Event) -> None:
        """Append a line to metrics.jsonl."""
        if not self.writes:
            return
        try:
            self._metrics.write(to_line(event))
            self._metrics.flush()
        except OSError as error:
            raise WriteError(f"the log cannot be written ({error.strerror})", where=self.path) from None
        if self._tensorboard is not None:
            if self._board is None:  # made here, because steps that are made again must be taken out first
                self._board = self._tensorboard.SummaryWriter(self.path / "tensorboard", purge_step=event.step)
            for name, value in scalars(event).items():
                self._board.add_scalar(f"{event.event}/{name}", value, event.step)

    @property
    def logged_bytes(self) -> int:
        return self._metrics.tell()

    def forget_after(self, logged_bytes: int) -> None:
        """Drop log lines after a checkpoint, because those steps are repeated."""
        self._metrics.truncate(min(logged_bytes, self._metrics.seek(0, os.SEEK_END)))
        self._metrics.seek(0, os.SEEK_END)

    def write_environment(self, device: torch.device) -> None:
        environment = Environment(
            mispair=__version__,
            python=platform.python_version(),
            torch=torch.__version__,
            numpy=np.__version__,
            platform=platform.platform(),
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            threads=torch.get_num_threads(),
            command=_command(),
            started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        )
        write_atomically(self.path / ENVIRONMENT, environment.model_dump_json(indent=2).encode())

    @property
    def result(self) -> RunResult | None:
        """The result of the run; None until it ends."""
        return read_result(self.path) if self.best.is_file() else None

    def finish(self, result: RunResult, examples: Examples | None) -> None:
        if examples is not None:
            _write_examples(self.path / PAIRS, examples)
        write_atomically(self.path / RESULT, result.model_dump_json(indent=2, exclude_unset=True).encode())


def read_events(folder: Path, kind: type[EventT]) -> list[EventT]:
    """Read all events of one kind from a run folder, in order."""
    try:
        events = [from_line(line) for line in read_regular(folder / LOG, LARGEST_TEXT).splitlines()]
    except (OSError, ValidationError):
        raise DamagedError(_UNREADABLE, where=folder / LOG) from None
    return [event for event in events if isinstance(event, kind)]


def count_validations(folder: Path) -> int:
    """Count the finished epochs of a run folder; cheap enough for polling."""
    try:
        return read_regular(folder / LOG, LARGEST_TEXT).count(b'{"event": "validation"')
    except OSError:
        return 0


def read_result(folder: Path) -> RunResult | None:
    """Read the result of a run; None until it ends."""
    try:
        return RunResult.model_validate_json(read_regular(folder / RESULT))
    except (OSError, ValidationError):
        return None


def read_environment(folder: Path) -> Environment:
    try:
        return Environment.model_validate_json(read_regular(folder / ENVIRONMENT))
    except (OSError, ValidationError):
        raise DamagedError(_UNREADABLE, where=folder / ENVIRONMENT) from None


def read_examples(folder: Path) -> Examples | None:
    """Read how the method treated each training pair of a finished run; None if there is no such file."""
    import pyarrow as pa  # here, because it takes half a second and most trainings need it only in the end
    import pyarrow.parquet as pq

    path = folder / PAIRS
    if not path.exists():
        return None
    try:
        table = pq.read_table(regular(path))
        columns = {name: table[name].fill_null(-1).to_numpy() for name in table.column_names}
        w = [column for name, column in columns.items() if name.startswith("w_")]
        others = (columns.get(name) for name in ("label", "new_left", "new_right"))
        return Examples(columns["pair"], np.stack(w) if w else None, *others)
    except (OSError, UnicodeError, pa.ArrowException, KeyError):
        raise DamagedError(_UNREADABLE, where=path) from None


def _write_examples(path: Path, examples: Examples) -> None:
    """Write `pair`, `w_A`, `w_B`, `label`, `new_left` and `new_right`, as far as the method has them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, Any] = {"pair": examples.pairs}
    columns |= {f"w_{'ABC'[net]}": w for net, w in enumerate(() if examples.w is None else examples.w)}
    columns["label"] = examples.labels
    for name, new in (("new_left", examples.new_left), ("new_right", examples.new_right)):
        columns[name] = None if new is None else pa.array(new, mask=new < 0)
    with replacing(path) as file:
        pq.write_table(pa.table({name: column for name, column in columns.items() if column is not None}), file)


def check_place(path: Path) -> None:
    """Raise if the folder holds something other than a run; nothing is written."""
    check_name(path)
    is_run = (path / "config.toml").is_file() and _started(path)
    try:
        if path.exists() and not is_run and not _is_free(path):
            raise ExistsError("exists and is not a run folder", where=path, advice="Give another `out`.")
    except OSError as error:
        raise DataError(
            f"the run folder cannot be read ({error.strerror})", where=path, advice="Give another `out`."
        ) from None


def _started(path: Path) -> bool:
    """Whether anything was trained here; until then another config is harmless."""
    return (path / BEST).exists() or any((path / "checkpoints").glob("step-*.pt"))


def _is_free(path: Path) -> bool:
    """Whether a folder without a training holds nothing but files of mispair."""
    if (path / "config.toml").is_file():
        return (path / ".lock").exists() or _is_ours(path / "config.toml")
    ours = (*AUDITED, *MADE_FROM_FILES)
    return path.is_dir() and all(entry.name[0] == "." or entry.name in ours for entry in path.iterdir())


def _is_ours(settings: Path) -> bool:
    """Whether a run wrote this file; other programs have a config.toml, too."""
    try:
        return settings.read_text(encoding="utf-8") == to_toml(read_recipe(settings))
    except (ConfigError, UnicodeDecodeError):
        return False


def own_features(run: Path, data: str) -> str | None:
    """Return the features made by a run itself, even after its folder was moved; None for other runs."""
    made = run / MADE_FROM_FILES[0]
    return str(made.resolve()) if Path(data).name == made.name and made.is_dir() else None


def _refuse_other_config(path: Path, old: Config, new: Config) -> None:
    if new.data == own_features(path, old.data):
        old = replace(old, data=new.data)
    same = {name: getattr(old, name) for name in FREE}
    changes = difference(old, replace(new, **same))
    if changes:
        found = f"a run with other settings ({'; '.join(changes)})"
        raise ChangedError(found, where=path, advice="Give another `out`.")


def _import_tensorboard() -> Any:
    try:
        return importlib.import_module("torch.utils.tensorboard")
    except ImportError:
        raise missing_package("tensorboard", "tensorboard") from None


def _command() -> str:
    """Return the command line, without the folder of the program."""
    program = Path(sys.argv[0]).name
    command = shlex.join(["mispair" if program == "__main__.py" else program, *sys.argv[1:]])
    return command.encode("utf-8", "backslashreplace").decode()  # names of files may be no text
