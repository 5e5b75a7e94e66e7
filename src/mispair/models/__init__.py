"""Matching networks. `build` makes one from a config and the specs of the two sides."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mispair.config import Config
from mispair.models.base import CosineNetwork, Encoded, Network, SideSpec
from mispair.models.scan import SCAN
from mispair.models.sgraf import SAF, SGR
from mispair.models.two_tower import TwoTower
from mispair.models.vse import VSE

MODELS: dict[str, Callable[[SideSpec, SideSpec, Config], Network]] = {
    "vse": VSE,
    "sgr": SGR,
    "saf": SAF,
    "scan": SCAN,
    "two-tower": TwoTower,
}


def build(config: Config, left: SideSpec, right: SideSpec, seed: int) -> Network:
    """A new network; the same seed gives the same weights on every device."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would touch the GPU's generators as well
        return MODELS[config.model](left, right, config)


def weight_bytes(config: Config, left: SideSpec, right: SideSpec) -> int:
    """Bytes of the weights of a network, without taking any memory."""
    with torch.device("meta"):
        network = MODELS[config.model](left, right, config)
    return sum(weights.nbytes for weights in network.state_dict().values())


__all__ = [
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
    "weight_bytes",
]
