"""Files of tensors that know whether they are as they were written (safetensors with a SHA-256 of the content)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from mispair.errors import DataError
from mispair.support.files import regular, write_atomically

KEY = "mispair"  # the only one in the header: several would come in any order
_DIGEST = "sha256"


def save_tensors(path: str | Path, tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any] | None = None) -> None:
    """Writes tensors and what is known about them to a file that is whole or absent. The same content, the same bytes.

    Args:
        path: The file.
        tensors: By name; no two may share memory.
        about: Anything that JSON can hold.
    """
    known = dict(about or {})
    known[_DIGEST] = _digest(tensors, known)
    write_atomically(path, safetensors.torch.save(dict(tensors), {KEY: json.dumps(known)}))


def load_tensors(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, Any] | None]:
    """Reads what `save_tensors` has written.

    Returns:
        The tensors, and what is known about them: None for a safetensors file of somebody else.

    Raises:
        DataError: The file cannot be read, is damaged or is something else.
    """
    try:
        regular(Path(path)).open("rb").close()  # safetensors says of a file that it may not read that it is not there
        with safetensors.safe_open(path, framework="pt") as opened:
            about = json.loads((opened.metadata() or {}).get(KEY, "null"))
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
    except OSError as error:
        raise DataError(f"{path}: the file cannot be read ({error.strerror or error}).") from None
    except (safetensors.SafetensorError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{path}: this is no file of tensors by mispair, or a damaged one ({reason}).") from None
    if not isinstance(about, dict):
        return tensors, None
    written = about.pop(_DIGEST, None)  # earlier versions did not write it
    if written is not None and written != _digest(tensors, about):
        raise DataError(f"{path}: the file is damaged: it is not as it was written; copy it again, or make it again.")
    return tensors, about


def _digest(tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
