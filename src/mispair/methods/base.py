"""What a training method is: how many networks it trains, on which pairs, and with which loss.

A method never loops over epochs and never touches files: the engine does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from mispair.config import Config
from mispair.data.loader import Batch, PairLoader, send
from mispair.data.pairs import IntArray
from mispair.losses import negatives_at, warmup_loss
from mispair.models import Network


@dataclass(frozen=True)
class Split:
    """Pairs that train one network in one epoch."""

    clean: IntArray  # an epoch goes once over these
    noisy: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # served beside them, over and over


@dataclass(frozen=True)
class Step:
    """What a training step hands to the engine."""

    loss: Tensor  # sum over the batch
    S: Tensor  # (B, B) similarities of the clean batch, watched for collapse
    report: dict[str, Tensor] = field(default_factory=dict)  # further scalars for the log


class Method(ABC):
    """Base of all methods. Adding one: see CONTRIBUTING.md.

    Attributes:
        networks: How many networks the method needs, 1 or 2. One-network methods may train two to average them.
        nets: The networks; set by the engine, as are the two that follow.
    """

    networks: int = 1

    def __init__(self, config: Config, nets: list[Network], loader: PairLoader) -> None:
        self.config, self.nets, self.loader = config, nets, loader

    def begin_warmup(self) -> list[Split]:
        """Chooses the pairs that warm up each network. By default all."""
        return [Split(np.arange(len(self.loader.pairs)))] * len(self.nets)

    def begin_epoch(self, epoch: int) -> list[Split]:  # noqa: ARG002 - a hook
        """Chooses the pairs that train each network in main epoch `epoch` (from 0). By default all, as clean ones."""
        return [Split(np.arange(len(self.loader.pairs)))] * len(self.nets)

    def figures(self) -> dict[str, Any]:
        """What the method found out in this main epoch, for the log: plain numbers and lists of them."""
        return {}

    def warmup_step(self, net: int, batch: Batch) -> Step:
        """Loss of network `net` on a batch of all pairs before the main epochs: mean over all negatives."""
        S = similarity(self.nets[net], batch)
        return Step(warmup_loss(S, self.config.margin, self.false_negatives(batch)), S)

    @abstractmethod
    def step(self, net: int, main_step: int, clean: Batch, noisy: Batch | None) -> Step:
        """Loss of network `net` in its step number `main_step` of the main epochs."""

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart beyond the networks: tensors and plain values only."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - most methods keep no state
        """Takes back what `state_dict` gave."""

    def negatives(self, main_step: int) -> int:
        """How many of the hardest negatives count in this step."""
        config = self.config
        start = min(config.negatives_start, config.batch_size - 1)
        return negatives_at(main_step, start, min(config.negatives_end, start), config.hardening_steps)

    def false_negatives(self, batch: Batch) -> Tensor | None:
        """(B, B): pairs that share their left item cannot be each other's negatives."""
        if not self.config.mask_false_negatives:
            return None
        rows = batch.left_rows
        return send(rows[:, None] == rows, batch.left.values.device)


def similarity(network: Network, batch: Batch) -> Tensor:
    """All left items of the batch against all its right items, (B, B)."""
    return network.similarity(network.encode_left(batch.left), network.encode_right(batch.right))
