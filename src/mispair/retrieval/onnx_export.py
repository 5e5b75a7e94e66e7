"""Export models with one vector an item as ONNX files, which run without torch and mispair."""

from __future__ import annotations

import importlib
import io
import json
import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from mispair.errors import WriteError
from mispair.models import SideSpec
from mispair.models.base import CosineNetwork, l2norm
from mispair.models.encoders import WordRecurrence
from mispair.models.vse import PooledRegions, PooledWords
from mispair.pairs.batches import Items
from mispair.pairs.vocabulary import MOST_WORDS, Vocabulary
from mispair.support.extras import missing_package
from mispair.support.files import write_atomically

FILES = ("left.onnx", "right.onnx")
WORDS = "words.json"
LONGEST = MOST_WORDS + 2  # with the start and end words


class _Regions(nn.Module):
    """`PooledRegions` in ONNX operations; all items have `count` regions, so the weights are constants."""

    weights: Tensor

    def __init__(self, encoder: PooledRegions, count: int) -> None:
        super().__init__()
        self.fc, self.mlp = encoder.fc, encoder.mlp
        self.register_buffer("weights", encoder.pool.weights(None, count))

    def forward(self, items: Tensor) -> Tensor:
        regions = items.flatten(0, -2)
        mapped = (self.fc(regions) + self.mlp(regions)).unflatten(0, (-1, self.weights.shape[1]))
        ordered = mapped.sort(dim=1, descending=True).values
        return l2norm((self.weights[:, None] @ ordered).squeeze(1))


class _Words(nn.Module):
    """`PooledWords` in ONNX operations; the weights of all lengths are constants."""

    weights: Tensor

    def __init__(self, encoder: PooledWords) -> None:
        super().__init__()
        self.words = encoder.words
        lengths = torch.arange(1, LONGEST + 1, device=encoder.pool.score.weight.device)
        self.register_buffer("weights", encoder.pool.weights(lengths, LONGEST))  # (LONGEST, LONGEST), by length

    def forward(self, items: Tensor, lengths: Tensor) -> Tensor:
        position, ends = torch.arange(items.shape[1], device=items.device), lengths[:, None]
        real = (position < ends)[..., None]
        order = torch.where(position < ends, ends - 1 - position, position)
        hidden = _recurrence(self.words, items, order).masked_fill(~real, -torch.inf)
        ordered = hidden.sort(dim=1, descending=True).values.masked_fill(~real, 0)
        weights = self.weights[lengths - 1, : items.shape[1]]
        return l2norm((weights[:, None] @ ordered).squeeze(1))


def _recurrence(words: WordRecurrence, items: Tensor, order: Tensor) -> Tensor:
    """Average both directions (N, n, H); the second one reads the texts reversed."""
    x = words.embed(items)
    ahead: Tensor = words.rnn.ahead(x)[0]
    back: Tensor = words.rnn.back(_ordered(x, order))[0]
    return (ahead + _ordered(back, order)) / 2


def _ordered(x: Tensor, order: Tensor) -> Tensor:
    return x.gather(1, order[..., None].expand(-1, -1, x.shape[2]))


class _Vectors(nn.Module):
    """An encoder of vectors."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, items: Tensor) -> Tensor:
        pooled: Tensor = self.encoder(Items(items)).pooled
        return pooled


class _Side(nn.Module):
    """One side of all networks, as `Matcher.encode` joins them."""

    def __init__(self, encoders: Sequence[nn.Module], spec: SideSpec) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(_exportable(encoder, spec) for encoder in encoders)

    def forward(self, *inputs: Tensor) -> Tensor:
        joined = torch.cat([encoder(*inputs) for encoder in self.encoders], dim=1)
        return joined / math.sqrt(len(self.encoders))


def _exportable(encoder: nn.Module, spec: SideSpec) -> nn.Module:
    if isinstance(encoder, PooledWords):
        return _Words(encoder)
    if isinstance(encoder, PooledRegions):
        return _Regions(encoder, max(spec.count, 1))  # a vector is a set of one
    return _Vectors(encoder)


def export_onnx(
    networks: Sequence[CosineNetwork], specs: tuple[SideSpec, SideSpec], vocabulary: Vocabulary | None, out: Path
) -> list[Path]:
    """Write `left.onnx` and `right.onnx`, and `words.json` for texts; see `Matcher.to_onnx`.

    Raises:
        MissingPackageError: onnx is missing.
        WriteError: The folder cannot be written.
    """
    try:
        importlib.import_module("onnx")
    except ImportError:
        raise missing_package("onnx", "onnx") from None
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteError(f"the folder cannot be made ({error.strerror})", where=out) from None
    sides = [network.left for network in networks], [network.right for network in networks]
    contents = {out / name: _exported(encoders, spec) for name, encoders, spec in zip(FILES, sides, specs, strict=True)}
    if vocabulary is not None:
        contents[out / WORDS] = json.dumps(vocabulary.words, ensure_ascii=False, indent=0).encode()
    for path, content in contents.items():
        write_atomically(path, content)
    return list(contents)


def _exported(encoders: Sequence[nn.Module], spec: SideSpec) -> bytes:
    device = next(encoders[0].parameters()).device
    example: tuple[Tensor, ...]
    if spec.kind == "tokens":
        example = torch.ones(2, 3, dtype=torch.int64, device=device), torch.tensor([3, 2], device=device)
        inputs = {"items": {0: "N", 1: "n"}, "lengths": {0: "N"}}
    else:
        shape = (2, spec.count, spec.size) if spec.count else (2, spec.size)
        example, inputs = (torch.zeros(shape, device=device),), {"items": {0: "N"}}
    file = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # without onnxscript, torch warns about its older exporter
        torch.onnx.export(
            _Side(encoders, spec).eval(),
            example,
            file,  # type: ignore[arg-type]
            dynamo=False,
            input_names=list(inputs),
            output_names=["vectors"],
            dynamic_axes={**inputs, "vectors": {0: "N"}},
        )
    return file.getvalue()
