"""Matching networks by name: those of mispair, and those of installed packages (entry points `mispair.models`)."""

from __future__ import annotations

import torch

from mispair.config import Config
from mispair.models.base import CosineNetwork, Encoded, Network, SideSpec
from mispair.models.scan import SCAN
from mispair.models.sgraf import SAF, SGR
from mispair.models.two_tower import TwoTower
from mispair.models.vse import VSE
from mispair.support.registry import Registry

FOR_SETS, FOR_VECTORS = "vse", "two-tower"  # the usual models
MODELS: dict[str, type[Network]] = {FOR_SETS: VSE, "sgr": SGR, "saf": SAF, "scan": SCAN, FOR_VECTORS: TwoTower}
REGISTRY: Registry[Network] = Registry("model", Network, MODELS)  # type: ignore[type-abstract]
find, find_all = REGISTRY.find, REGISTRY.all


def list_models() -> dict[str, str]:
    """The models for `mispair.fit`, with one line each.

    >>> list_models()["two-tower"]
    'A linear map and a small residual MLP over the vectors of each side; the similarity is the cosine.'
    """
    return REGISTRY.titles()


def build(config: Config, left: SideSpec, right: SideSpec, seed: int) -> Network:
    """A new network; the same seed gives the same weights on every device."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would touch the GPU's generators as well
        return find(config.model)(left, right, config)


def weight_bytes(config: Config, left: SideSpec, right: SideSpec) -> int:
    """Bytes of the weights of a network, without taking any memory."""
    with torch.device("meta"):
        network = find(config.model)(left, right, config)
    return sum(weights.nbytes for weights in network.state_dict().values())


__all__ = [
    "FOR_SETS",
    "FOR_VECTORS",
    "MODELS",
    "SAF",
    "SCAN",
    "SGR",
    "VSE",
    "CosineNetwork",
    "Encoded",
    "Network",
    "SideSpec",
    "build",
    "find",
    "find_all",
    "list_models",
    "weight_bytes",
]
