"""Whether networks fit into memory, asked before any is made: the system ends a process that takes too much."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mispair.config import Config
from mispair.errors import ConfigError
from mispair.models import SideSpec, weight_bytes
from mispair.support import memory

TRAINED = 4  # weights, gradients and the two moments of Adam


def check_memory(configs: Sequence[Config], specs: tuple[SideSpec, SideSpec], device: torch.device) -> None:
    """Refuses networks that cannot be trained with the memory that is free; what batches need comes on top.

    Args:
        configs: Of each network.
        specs: Of the two sides.
        device: Where they train. On a GPU only their weights pass through the memory of the machine.

    Raises:
        ConfigError: They do not fit.
    """
    free = memory.available_memory()
    needed = sum(weight_bytes(config, *specs) for config in configs) * (1 if device.type == "cuda" else TRAINED)
    if free is not None and needed > free:
        config = max(configs, key=lambda one: weight_bytes(one, *specs))
        raise ConfigError(
            f"The {'networks take' if len(configs) > 1 else 'network takes'} {needed / 1e9:,.0f} GB, and "
            f"{free / 1e9:,.0f} GB of memory are free; lower embed_size ({config.embed_size:,}), word_size "
            f"({config.word_size:,}) or sim_size ({config.sgraf.sim_size:,})."
        )
