"""Checkpoints that are whole or absent.

A checkpoint is written to a temporary file, flushed to disk and renamed; the name holds a part of its SHA-256. A file
that does not have the content its name promises is passed over for the one before. Nothing read can run code.
"""

from __future__ import annotations

import hashlib
import io
import re
import warnings
from pathlib import Path
from typing import Any

import torch

from mispair.support.files import write_atomically

KEPT = 2
NAME = re.compile(r"step-(\d{9})-([0-9a-f]{16})\.pt")


def save(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Saves a state of tensors and plain values; older checkpoints than the one before are removed.

    A state of the same step is replaced: an epoch's last step is saved once more after its validation. One of a later
    step must be damaged, or this run would have gone on from it.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getvalue()
    path = folder / f"step-{step:09d}-{_digest(content)}.pt"
    write_atomically(path, content)
    not_before = [other for other in find(folder) if other.name[:14] >= path.name[:14] and other != path]
    for old in (*not_before, *folder.glob(".step-*.tmp")):  # what a killed process was writing is of no use
        old.unlink()
    for old in find(folder)[KEPT:]:
        old.unlink()
    return path


def find(folder: Path) -> list[Path]:
    """The checkpoints of a folder, newest first."""
    return sorted((path for path in folder.glob("step-*.pt") if NAME.fullmatch(path.name)), reverse=True)


def load_newest(folder: Path) -> dict[str, Any] | None:
    """State of the newest checkpoint that is whole; None where there is none."""
    for path in find(folder):
        content = path.read_bytes()
        match = NAME.fullmatch(path.name)
        if match and _digest(content) == match[2]:
            state: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            return state
        warnings.warn(f"{path.name} is damaged; going back to the checkpoint before it.", stacklevel=2)
    return None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
