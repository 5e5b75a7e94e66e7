"""Atomic checkpoints.

A checkpoint is written to a temporary file, flushed to disk and renamed; its name holds a part of its SHA-256. A
damaged file is skipped for the one before. Loading runs no code.
"""

from __future__ import annotations

import hashlib
import io
import re
import warnings
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter
from torch import Tensor

from mispair.errors import DamagedError
from mispair.methods.base import EpochPairs
from mispair.methods.epoch_metrics import MethodReport
from mispair.support.files import write_atomically
from mispair.support.memory import is_out_of_memory
from mispair.training.monitor import Health

FORMAT = 5
KEPT = 2
T = TypeVar("T")
NAME = re.compile(r"step-(\d{9})-([0-9a-f]{16})\.pt")


@dataclass
class Cursor:
    """Position of a run. The epoch awaits validation when `network` equals the number of networks."""

    epoch: int = 0
    network: int = 0  # the one in turn
    positions: list[int] = field(default_factory=list)  # batches of this epoch that each network has done
    step: int = 0  # batches done by all networks
    main_steps: list[int] = field(default_factory=list)  # batches of main epochs done by each network
    first_steps: list[int] = field(default_factory=list)  # and before this epoch

    @classmethod
    def start(cls, networks: int) -> Cursor:
        """Return the position before the first step."""
        return cls(positions=[0] * networks, main_steps=[0] * networks, first_steps=[0] * networks)

    @property
    def position(self) -> int:
        """Number of batches of this epoch done by the current network."""
        return self.positions[self.network]

    @property
    def begun(self) -> bool:
        """Whether this epoch has made a step."""
        return self.network > 0 or any(self.positions)

    def to_epoch(self, epoch: int) -> None:
        """Move to the start of an epoch."""
        self.epoch, self.network, self.positions = epoch, 0, [0] * len(self.positions)


@dataclass(frozen=True)
class Best:
    """The best epoch and its networks."""

    rsum: float = -1.0
    epoch: int = -1
    networks: tuple[int, ...] = ()  # which of the method's


@dataclass(frozen=True)
class Checkpoint:
    """The complete state of a run, except for the settings and the pairs."""

    cursor: Cursor
    networks: list[dict[str, Tensor]]
    optimizers: list[dict[str, Any]]
    method: dict[str, Any]  # `Method.state_dict`, of no meaning to anybody else
    epoch_pairs: list[EpochPairs]  # of this epoch, one a network
    report: MethodReport | None  # of this epoch
    best: Best
    health: list[Health]  # of each network
    random_state: Tensor
    cuda_random_state: Tensor | None
    logged_bytes: int  # length of metrics.jsonl
    fingerprint: str  # of the training pairs

    def _packed(self) -> dict[str, Any]:
        """Convert to tensors and plain values."""
        return {
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "format": FORMAT,
            "cursor": asdict(self.cursor),
            "best": asdict(self.best),
            "health": [asdict(health) for health in self.health],
            "epoch_pairs": [(torch.from_numpy(s.clean), torch.from_numpy(s.noisy), s.order) for s in self.epoch_pairs],
            "report": None if self.report is None else self.report.model_dump_json(exclude_unset=True),
        }

    @classmethod
    def _unpacked(cls, state: dict[str, Any]) -> Checkpoint:
        report = state["report"]
        return cls(**{
            **{field.name: state[field.name] for field in fields(cls)},
            "cursor": _typed(Cursor, state["cursor"]),
            "best": _typed(Best, state["best"]),
            "health": [_typed(Health, health) for health in state["health"]],
            "epoch_pairs": [EpochPairs(a.numpy(), b.numpy(), order) for a, b, order in state["epoch_pairs"]],
            "report": None if report is None else MethodReport.model_validate_json(report),
        })  # fmt: skip


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Save a checkpoint and remove all but the one before it.

    One of the same step is replaced: the last step of an epoch is saved again after the validation. A checkpoint of a
    later step must be damaged, otherwise this run would have resumed from it.
    """
    buffer = io.BytesIO()
    torch.save(checkpoint._packed(), buffer)
    content = buffer.getvalue()
    path = folder / f"step-{checkpoint.cursor.step:09d}-{_digest(content)}.pt"
    write_atomically(path, content)
    later = (other for other in find(folder) if other.name[:14] > path.name[:14])
    for old in (*later, *folder.glob(".step-*.tmp")):  # what a killed process was writing is of no use
        old.unlink()
    _keep(path)
    return path


def _keep(path: Path) -> None:
    """Delete other checkpoints of the same step, and all but the newest of those before it."""
    others = [other for other in find(path.parent) if other != path]
    before = [other for other in others if other.name[:14] < path.name[:14]]
    for old in (*(other for other in others if other.name[:14] == path.name[:14]), *before[KEPT - 1 :]):
        old.unlink()


def find(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, newest first."""
    found = (path for path in folder.glob("step-*.pt") if NAME.fullmatch(path.name) and path.is_file())
    return sorted(found, reverse=True)


def resume(folder: Path) -> Checkpoint | None:
    """Load the newest intact checkpoint, and delete files left behind by a killed `save`."""
    for path in find(folder):
        content = path.read_bytes()
        if path.stem.endswith(_digest(content)):
            state = _load(path, content)
            _keep(path)
            return state
        warnings.warn(f"{path.name} is damaged; going back to the checkpoint before it.", stacklevel=2)
    return None


def _load(path: Path, content: bytes) -> Checkpoint:
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises nearly anything for other content
        if is_out_of_memory(error):
            raise
        raise DamagedError(
            "not a checkpoint, or more than tensors and plain values; it was not loaded", where=path
        ) from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise DamagedError(
            "written by another version of mispair", where=path, advice="Give another `out`, or use that version."
        )
    try:
        return Checkpoint._unpacked(state)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise DamagedError(
            "not a checkpoint of this run", where=path, advice="Delete it, or give another `out`."
        ) from None


def _typed(kind: type[T], values: dict[str, Any]) -> T:
    """An object with these values; raise for unknown names and wrong types."""
    return TypeAdapter(kind).validate_python(vars(kind(**values)))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
