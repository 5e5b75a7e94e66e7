"""Writing a two-tower model as ONNX files, which run without torch and without mispair."""

from __future__ import annotations

import importlib
import io
import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from mispair.data.batches import Items
from mispair.errors import ConfigError
from mispair.models import Network, SideSpec
from mispair.models.two_tower import TwoTower
from mispair.support.files import write_atomically

FILES = ("left.onnx", "right.onnx")


class _Side(nn.Module):
    """The towers of one side of all networks, as `Matcher.encode` joins them."""

    def __init__(self, towers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.towers = nn.ModuleList(towers)

    def forward(self, items: Tensor) -> Tensor:
        joined: Tensor = torch.cat([tower(Items(items)).pooled for tower in self.towers], dim=1)
        return joined / math.sqrt(len(self.towers))


def export_onnx(networks: Sequence[Network], specs: tuple[SideSpec, SideSpec], out: Path) -> list[Path]:
    """Writes `left.onnx` and `right.onnx`: vectors (N, D) in, `items`; unit vectors (N, E) out, `vectors`.

    Raises:
        ConfigError: The model is not two-tower, or onnx is missing.
    """
    if not all(isinstance(network, TwoTower) for network in networks):
        raise ConfigError("Only two-tower models can be written as ONNX; others take regions and texts, not vectors.")
    try:
        importlib.import_module("onnx")
    except ImportError:
        raise ConfigError("Writing ONNX needs onnx; install it: pip install 'mispair[onnx]'.") from None
    out.mkdir(parents=True, exist_ok=True)
    sides = [network.left for network in networks], [network.right for network in networks]
    written = []
    for name, towers, spec in zip(FILES, sides, specs, strict=True):
        file, example = io.BytesIO(), torch.zeros(2, spec.size, device=next(towers[0].parameters()).device)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # the exporter without onnxscript is an older one, and says so
            torch.onnx.export(
                _Side(towers).eval(),
                (example,),
                file,  # type: ignore[arg-type]
                dynamo=False,
                input_names=["items"],
                output_names=["vectors"],
                dynamic_axes={"items": {0: "N"}, "vectors": {0: "N"}},
            )
        write_atomically(out / name, file.getvalue())
        written.append(out / name)
    return written
