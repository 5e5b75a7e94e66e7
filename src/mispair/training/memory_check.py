"""Memory check before networks are built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import torch

from mispair.config import Config
from mispair.errors import ConflictError
from mispair.models import SideSpec, find, weight_bytes
from mispair.pairs.pairs import Pairs
from mispair.support import memory

TRAINED = 4  # weights, gradients and the two moments of Adam


def check_memory(configs: Sequence[Config], pairs: Pairs, device: torch.device) -> None:
    """Raise if the free memory cannot hold the networks in training; batches need more on top.

    On a GPU only the weights pass through the memory of the machine.
    """
    free, specs = memory.available_memory(), SideSpec.of_both(pairs)
    needed = sum(weight_bytes(config, *specs) for config in configs) * (1 if device.type == "cuda" else TRAINED)
    if free is not None and needed > free:
        config = max(configs, key=lambda one: weight_bytes(one, *specs))
        own = {name: value for kind in find(config.model).settings for name, value in asdict(config.of(kind)).items()}
        sizes = {"embed_size": config.embed_size, "word_size": config.word_size, **own}
        lower = [f"`{name}` ({value:,})" for name, value in sizes.items() if name.endswith("_size")]
        raise ConflictError(
            f"{'networks' if len(configs) > 1 else 'a network'} of {needed / 1e9:,.0f} GB",
            where="embed_size",
            expected=f"at most the free memory, {free / 1e9:,.0f} GB",
            advice=f"Lower {', '.join(lower[:-1])} or {lower[-1]}.",
        )
