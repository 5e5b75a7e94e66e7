"""DECL: Deep Evidential Learning with Noisy Correspondence for Cross-Modal Retrieval (Qin et al., ACM MM 2022).

A batch is a classification with as many classes as pairs, and the scores are evidence for the classes. Before every
main epoch a pair counts as clean if there is more evidence for it than for any other pair of a random batch. Clean
pairs train as matches; noisy ones as samples of no class, and as negatives of the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mispair.compute.cuda_graphs import CudaGraphStep
from mispair.compute.devices import send, uncached
from mispair.config import Config
from mispair.functional.evidence import corresponds, evidence, evidential_loss, raw_scores, uncertainty
from mispair.functional.losses import hard_loss
from mispair.methods.base import EpochPairs, Method, StepInputs, StepPlan, StepResult, similarity
from mispair.methods.epoch_metrics import MethodReport, selection
from mispair.models import Network
from mispair.models.inference import inference
from mispair.pairs.batches import Batch, PairLoader
from mispair.settings import DeclSettings
from mispair.support.arrays import IntArray


@dataclass(frozen=True)
class DeclInputs(StepInputs):
    """A batch of pairs with the mask of clean ones."""

    is_clean: Tensor = field(kw_only=True)  # (B,) true or false


class Decl(Method):
    """Cross-modal evidential learning with the robust dynamic hinge loss (Qin et al., ACM MM 2022)."""

    settings = (DeclSettings,)
    ignores = ("negatives_start", "negatives_end", "hardening_steps")
    distributed = True

    def __init__(self, config: Config, nets: list[Network], loader: PairLoader) -> None:
        super().__init__(config, nets, loader)
        self.device = loader.left.device
        self.clean = torch.ones(len(nets), len(loader.pairs), dtype=torch.bool, device=self.device)  # by each network
        self.warmups = 0  # warm-up epochs begun

    @property
    def own(self) -> DeclSettings:
        return self.config.of(DeclSettings)

    # ------------------------------------------------------------------ before an epoch

    def begin_warmup(self) -> list[EpochPairs]:
        self.warmups += 1
        return super().begin_warmup()

    def begin_epoch(self, epoch: int) -> list[EpochPairs]:
        batches = self.random_batches(epoch)
        self.clean = torch.stack([self._filtered(net, batches) for net in self.nets])
        return super().begin_epoch(epoch)

    def _filtered(self, net: Network, batches: list[IntArray]) -> Tensor:
        """(N,) true for clean pairs, by the network, each among the pairs of its batch."""
        clean = torch.zeros(len(self.loader.pairs), dtype=torch.bool, device=self.device)

        def compute(batch: Batch) -> None:
            with uncached(self.device):
                clean[batch.pairs] = corresponds(self._evidence(self._raw(net, similarity(net, batch)), batch))

        with inference(net), CudaGraphStep(compute, on=net.team.alone and self.device.type == "cuda") as step:
            for chosen in batches:
                step(self.loader.batch(chosen, pad_shapes=self.loader.pad_shapes(chosen)))
        return clean

    # ------------------------------------------------------------------ a step

    def inputs(self, net: int, plan: StepPlan, augment: np.random.Generator | None) -> DeclInputs:
        batch = self.loader.batch(plan.pairs, augment, self.loader.pad_shapes(plan.pairs))
        return DeclInputs(batch, self.negatives(self._step(plan)), is_clean=self.clean[net, batch.pairs])

    def _step(self, plan: StepPlan) -> int:
        """Return the step number of the network, warm-up included. All epochs have the same number of steps.

        As in `plan_epoch`, one pair alone makes no step.
        """
        count, size = len(self.unflagged), self.config.batch_size
        epoch = count // size + (count % size > 1)
        if plan.main_step is None:
            return (self.warmups - 1) * epoch + plan.position
        return self.config.warmup_epochs * epoch + plan.main_step

    def negatives(self, step: int) -> Tensor:
        """n of RDH: falls by eta a step, from all negatives of the batch to mu."""
        config = self.config
        count = max(int(config.batch_size - self.own.hinge_decay * step), self.own.hinge_least)
        return send(torch.tensor(count), self.device)

    def warmup_loss(self, net: int, inputs: DeclInputs) -> StepResult:  # type: ignore[override]
        """Compute the main loss; all pairs count as clean during warm-up."""
        return self.loss(net, inputs)

    def loss(self, net: int, inputs: DeclInputs) -> StepResult:
        config, batch, is_clean = self.config, inputs.batch, inputs.is_clean
        S = similarity(self.nets[net], batch)
        x = self._raw(self.nets[net], S)
        e, Y = self._evidence(x, batch), torch.diag(is_clean.float())
        rows = [evidential_loss(side, Y, self.own.kl_weight) for side in (e, e.T)]  # of images and captions
        # A noisy pair is no anchor, but stays a negative of the others: with this margin it costs nothing.
        margin = x.new_full((len(x),), config.margin).masked_fill(~is_clean, -torch.inf)
        hinge = hard_loss(x.tanh(), margin, inputs.negatives, self.false_negatives(batch))
        unsure = (uncertainty(e) + uncertainty(e.T)).mean() / 2
        loss = (rows[0] + rows[1]).mean() + self.own.hinge_weight * hinge  # a mean and a sum
        return StepResult(loss, S, {"uncertainty": unsure}, logged=loss)

    @staticmethod
    def _raw(net: Network, S: Tensor) -> Tensor:
        return raw_scores(S) if net.squashed else S

    def _evidence(self, x: Tensor, batch: Batch) -> Tensor:
        """(B, B) evidence, 0 for false negatives."""
        e, same = evidence(x, self.own.evidence_scale), self.false_negatives(batch)
        if same is None:
            return e
        return e.masked_fill(same & ~torch.eye(len(e), dtype=torch.bool, device=e.device), 0)

    # ------------------------------------------------------------------ state and report

    def state_dict(self) -> dict[str, Any]:
        return {"clean": self.clean, "warmups": self.warmups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.clean, self.warmups = state["clean"].to(self.device), state["warmups"]

    def report(self) -> MethodReport:
        """Report the quality of each network's filter."""
        rows = self.clean.cpu().numpy()
        return MethodReport.of_networks([selection("clean", row, self.matching) for row in rows])
