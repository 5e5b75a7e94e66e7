"""The interface of training methods: number of networks, choice of pairs, and loss.

A method never loops over epochs and never touches files: the trainer does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from mispair.compute.devices import send
from mispair.config import Config
from mispair.errors import ConflictError
from mispair.functional.losses import negatives_at, warmup_loss
from mispair.methods.epoch_metrics import Examples, MethodReport
from mispair.models import Network
from mispair.models.comparison import compare
from mispair.pairs.batches import Batch, PairLoader, random_batches
from mispair.support.arrays import IntArray, Mask

BATCHES = 100  # stream of random numbers


@dataclass(frozen=True)
class EpochPairs:
    """Training pairs of one network in one epoch: once over the clean ones, each batch with a noisy batch."""

    clean: IntArray
    noisy: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # round after round
    order: Literal["together", "after", "before"] = "together"  # in one step; or noisy ones in a step of their own


@dataclass(frozen=True)
class StepPlan:
    """The pairs of one step, by number."""

    position: int  # of the step in its epoch
    main_step: int | None  # number of the network's step in the main epochs; None while warming up
    pairs: IntArray  # clean ones; noisy ones with `on_noisy`
    noisy: IntArray | None = None  # in the same step
    on_noisy: bool = False  # whether this is a step on noisy pairs alone


@dataclass(frozen=True)
class StepInputs:
    """All inputs of a step's loss except the network, as tensors on the device."""

    batch: Batch  # the plan's `pairs`
    negatives: Tensor  # () how many of the hardest negatives count


@dataclass(frozen=True)
class StepResult:
    """Result of a training step."""

    loss: Tensor  # what the gradients are those of: a sum over the batch
    S: Tensor  # (B, B) similarities of the batch, monitored for collapse
    metrics: dict[str, Tensor] = field(default_factory=dict)  # further scalars for the log
    logged: Tensor | None = None  # the loss for the log, where it is no such sum; by default a pair's mean


@dataclass(frozen=True)
class Schedule:
    """Default schedule of a method."""

    batch_size: int | None = None  # by default what the data suggests
    longer: float = 1.0  # how many times the usual steps
    least_epochs: tuple[int, int] = (6, 6)  # for few pairs, for more
    warmup: float = 0.2  # share of the epochs


class Method(ABC):
    """Base class of all methods. Adding one: see CONTRIBUTING.md.

    Attributes:
        networks: Number of networks of the method. One-network methods may train more to average them.
        audits: Whether the pairs are audited first even where the settings do not ask for it.
        repeatable: Whether a GPU may record a step and repeat it with other inputs: if `loss` does the same operations
            at every step, touches nothing but its inputs and the network, and reads nothing back from the device.
        uses_truth: Whether the method trains by the truth of the pairs. A run then refuses to go on with another one.
        settings: Classes of the settings that are its own, each made by `mispair.config.validated`.
        ignores: Names of other settings that have no effect on it.
        schedule: Its usual schedule.
        alike: Whether tables average its networks, because they are of one kind; else the first one counts.
        distributed: Whether several processes may train it. `loss` must then compute gradients by `similarity` and
            `compare` only, so that the ranks share the work.
        nets: The networks, which the trainer builds.
    """

    networks: int = 1
    audits: bool = False
    repeatable: bool = True
    uses_truth: bool = False
    settings: tuple[type, ...] = ()
    ignores: tuple[str, ...] = ()
    schedule = Schedule()
    alike: bool = True
    distributed: bool = False

    def __init__(self, config: Config, nets: list[Network], loader: PairLoader) -> None:
        self.config, self.nets, self.loader = config, nets, loader

    @classmethod  # noqa: B027 - a hook
    def check(cls, config: Config) -> None:
        """Raise if the method cannot train with these settings, before any work; by default accept all."""

    @classmethod
    def network_configs(cls, config: Config) -> list[Config]:
        """Return the settings of each network; by default those of the run."""
        config = cls.adapted(config)
        count = config.networks or cls.networks
        if cls.networks > 1 and count != cls.networks:
            expected = f"{cls.networks}, which `method={config.method}` trains together"
            raise ConflictError(str(count), where="networks", expected=expected)
        return [config] * count

    def trained_networks(self, epoch: int) -> Sequence[int]:  # noqa: ARG002 - a hook
        """Return the networks trained in this epoch (from 0, warm-up included); by default all."""
        return range(len(self.nets))

    def kept_networks(self, epoch: int) -> list[int]:  # noqa: ARG002 - a hook
        """Return the networks of the model after this epoch, to validate and keep; by default all."""
        return list(range(len(self.nets)))

    def learning_rate(self, net: int, epoch: float) -> float:  # noqa: ARG002 - a hook
        """Return the learning rate of network `net`; epoch 2.25 is a quarter into the third one."""
        return self.config.lr * self.config.decay(int(epoch) - self.config.warmup_epochs)

    def begin_warmup(self) -> list[EpochPairs]:
        """Choose the warm-up pairs of each network; by default all unflagged ones."""
        return [EpochPairs(self.unflagged)] * len(self.nets)

    def begin_epoch(self, epoch: int) -> list[EpochPairs]:  # noqa: ARG002 - a hook
        """Choose the pairs of each network in main epoch `epoch` (from 0).

        By default all unflagged pairs, as clean ones.
        """
        return [EpochPairs(self.unflagged)] * len(self.nets)

    @property
    def unflagged(self) -> IntArray:
        """The pairs not flagged by an audit; all pairs without an audit or with fewer than two left."""
        pairs = self.loader.pairs
        kept = np.arange(0) if pairs.flagged is None else np.flatnonzero(~pairs.flagged)
        return kept if len(kept) > 1 else np.arange(len(pairs))

    @property
    def matching(self) -> Mask | None:
        """(N,) true for matching pairs; None if the truth is unknown."""
        mismatched = self.loader.pairs.mismatched
        return None if mismatched is None else ~mismatched

    def report(self) -> MethodReport | None:
        """Return metrics of the current main epoch for the log; none by default."""
        return None

    def examples(self, pairs: IntArray) -> Examples | None:  # noqa: ARG002 - a hook
        """Return how the method treated these pairs in its last epoch; nothing by default."""
        return None

    def inputs(self, net: int, plan: StepPlan, augment: np.random.Generator | None) -> StepInputs:  # noqa: ARG002 - a hook
        """Load the inputs of a step's loss. Must not use the networks, as it may run ahead of the steps."""
        batch = self.loader.batch(plan.pairs, augment, self.loader.pad_shapes(plan.pairs))
        return StepInputs(batch, self.negatives(plan.main_step or 0))

    def pairs_used(self, net: int, plan: StepPlan) -> IntArray:  # noqa: ARG002 - a hook
        """Return all pairs with an item in this step, to name them if the loss is not finite."""
        return plan.pairs if plan.noisy is None else np.concatenate([plan.pairs, plan.noisy])

    def warmup_loss(self, net: int, inputs: StepInputs) -> StepResult:
        """Compute the warm-up loss of network `net` on a batch: mean over all negatives."""
        S = similarity(self.nets[net], inputs.batch)
        return StepResult(warmup_loss(S, self.config.margin, self.false_negatives(inputs.batch)), S)

    @classmethod
    def variant(cls, config: Config) -> type[Method]:  # noqa: ARG003 - a hook
        """Return the class for these settings: this one or a subclass."""
        return cls

    @classmethod
    def adapted(cls, config: Config) -> Config:
        """Return the settings for building the networks."""
        return config

    @classmethod
    def noisy_from(cls, config: Config) -> int | None:  # noqa: ARG003 - a hook
        """Return the first main epoch (from 0) with noisy pairs; None by default."""
        return None

    @abstractmethod
    def loss(self, net: int, inputs: Any) -> StepResult:
        """Compute the loss of network `net` in a main step, on the result of `inputs`."""

    def after_step(self, net: int, plan: StepPlan) -> None:  # noqa: B027 - a hook that most methods do not need
        """Hook after network `net` has taken its main step `plan`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to keep across a restart beyond the networks: tensors and plain values only."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - most methods keep no state
        """Restore the state returned by `state_dict`."""

    def negatives(self, main_step: int) -> Tensor:
        """Number of hardest negatives in this step, on the device."""
        config = self.config
        start = min(config.negatives_start, config.batch_size - 1)
        count = negatives_at(main_step, start, min(config.negatives_end, start), config.hardening_steps)
        return send(torch.tensor(count), self.loader.left.device)

    def random_batches(self, epoch: int) -> list[IntArray]:
        """Divide all pairs into random batches, to compute losses before main epoch `epoch`."""
        return random_batches(len(self.loader.pairs), self.config.batch_size, self.rng(BATCHES, epoch))

    def rng(self, *stream: int) -> np.random.Generator:
        """Return a generator seeded by the seed and these numbers alone, so it survives a restart."""
        return np.random.default_rng([self.config.seed, *stream])

    def false_negatives(self, batch: Batch) -> Tensor | None:
        """(B, B) true for pairs with a common left item or group: they are not each other's negatives."""
        if not self.config.mask_false_negatives:
            return None
        return batch.left_groups[:, None] == batch.left_groups


def similarity(network: Network, batch: Batch) -> Tensor:
    """Compare all left items of the batch with all right items, (B, B)."""
    return compare(network, batch.left, batch.right)
