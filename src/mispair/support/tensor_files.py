"""Files of tensors with protection against damage: safetensors with a SHA-256 of the content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch

from mispair.errors import DamagedError, NotFoundError
from mispair.support.files import regular, write_atomically

KEY = "mispair"  # the only one in the header: several would come in any order
_DIGEST = "sha256"


def save_tensors(path: str | Path, tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any] | None = None) -> None:
    """Write tensors without shared memory, and facts about them as JSON. Equal content gives equal bytes."""
    known = dict(about or {})
    known[_DIGEST] = _digest(tensors, known)
    write_atomically(path, safetensors.torch.save(dict(tensors), {KEY: json.dumps(known)}))


def load_tensors(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, Any] | None]:
    """Read the tensors of a file and the facts about them; None if mispair did not write it.

    Raises:
        NotFoundError: There is no such file.
        DamagedError: The file cannot be read, is corrupted or is something else.
    """
    try:
        regular(Path(path)).open("rb").close()  # safetensors says of a file that it may not read that it is not there
        with safetensors.safe_open(path, framework="pt") as opened:
            about = json.loads((opened.metadata() or {}).get(KEY, "null"))
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
    except FileNotFoundError:
        raise NotFoundError("no such file", where=path) from None
    except OSError as error:
        raise DamagedError(f"the file cannot be read ({error.strerror or error})", where=path) from None
    except (safetensors.SafetensorError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DamagedError(f"not a mispair tensor file, or corrupted ({reason})", where=path) from None
    if not isinstance(about, dict):
        return tensors, None
    if about.pop(_DIGEST, None) != _digest(tensors, about):
        advice = "Copy it again, or make it again"
        raise DamagedError("the file is damaged: its checksum is wrong", where=path, advice=advice)
    return tensors, about


def flattened(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Name the values of several parts, each with a prefix; leave out None."""
    named = {
        prefix + name: value if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value))
        for prefix, values in parts.items()
        for name, value in values.items()
        if value is not None
    }
    return {name: tensor.contiguous().cpu() for name, tensor in named.items()}


def part_of(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, Any]:
    """Return a part of `flattened` tensors as arrays and, without dimensions, as numbers."""
    arrays = {name.removeprefix(prefix): one.numpy() for name, one in tensors.items() if name.startswith(prefix)}
    return {name: array if array.ndim else array.item() for name, array in arrays.items()}


def _digest(tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        if tensor.numel():  # an empty one has no stride, so that it cannot be viewed as bytes
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
