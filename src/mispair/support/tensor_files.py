"""Files of tensors that know whether they are as they were written (safetensors with a SHA-256 of the content)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from mispair.errors import DataError
from mispair.support.files import write_atomically

_DIGEST = "sha256"


def save_tensors(path: str | Path, tensors: Mapping[str, torch.Tensor], about: Mapping[str, str] | None = None) -> None:
    """Writes tensors and texts about them to a file that is whole or absent.

    Args:
        path: The file.
        tensors: By name; no two may share memory.
        about: Texts by name.
    """
    texts = dict(about or {})
    texts[_DIGEST] = _digest(tensors, texts)
    write_atomically(path, safetensors.torch.save(dict(tensors), texts))


def load_tensors(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Reads what `save_tensors` has written, or any other safetensors file, which has no digest to check.

    Raises:
        DataError: The file cannot be read, is damaged or is something else.
    """
    try:
        Path(path).open("rb").close()  # safetensors says of a file that it may not read that it is not there
        with safetensors.safe_open(path, framework="pt") as opened:
            about = dict(opened.metadata() or {})
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
    except OSError as error:
        raise DataError(f"{path}: the file cannot be read ({error.strerror or error}).") from None
    except safetensors.SafetensorError as error:
        raise DataError(f"{path}: this is no file of tensors, or a damaged one ({str(error)[:200]}).") from None
    written = about.pop(_DIGEST, None)
    if written is not None and written != _digest(tensors, about):
        raise DataError(f"{path}: the file is damaged: it is not as it was written; copy it again, or make it again.")
    return tensors, about


def _digest(tensors: Mapping[str, torch.Tensor], about: Mapping[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
