"""NCR: learning with noisy correspondence (Huang et al., NeurIPS 2021).

Two networks split the pairs for each other by a mixture over their losses. The label of a clean pair is the other
network's probability w that it is clean, topped up with what the network that is being trained predicts by itself. The
label of a noisy pair is the mean of both networks' predictions. Labels set the margins. From half time on every step
on clean pairs is followed by one on noisy pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from mispair.compute.devices import send, uncached
from mispair.data.batches import Batch
from mispair.functional.losses import adaptive_prediction, hard_loss, soft_margin
from mispair.methods.base import Split, StepInputs, StepPlan, StepResult, similarity
from mispair.methods.coteaching import CoTeaching
from mispair.methods.epoch_view import EpochView
from mispair.methods.report import BoolArray
from mispair.models.inference import inference


@dataclass(frozen=True)
class NCRInputs(StepInputs):
    """A batch, clean or noisy, and what its labels are made of."""

    seen: Batch = field(kw_only=True)  # the same pairs without augmentation, for the predictions
    w: Tensor | None = field(kw_only=True)  # (B,) by the other network; None in a step on noisy pairs


class NCR(CoTeaching):
    """NCR as its paper says; with `as_published` the margins that the authors' code gives to wrong pairs."""

    def divide(self, epoch: int, views: list[EpochView], clean: BoolArray) -> list[Split]:
        return [replace(part, order="after") for part in super().divide(epoch, views, clean)]

    def inputs(self, net: int, plan: StepPlan, augment: np.random.Generator | None) -> StepInputs:
        if plan.main_step is None:
            return super().inputs(net, plan, augment)
        pad_shapes = self.loader.pad_shapes(plan.pairs)
        batch = self.loader.batch(plan.pairs, augment, pad_shapes)
        seen = batch if augment is None else self.loader.batch(plan.pairs, None, pad_shapes)
        w = None if plan.on_noisy else send(torch.from_numpy(self.w[1 - net, plan.pairs]), batch.pairs.device)
        return NCRInputs(batch, self.negatives(plan.main_step), seen=seen, w=w)

    def loss(self, net: int, inputs: NCRInputs) -> StepResult:
        labels = self._labels(net, inputs)
        S = similarity(self.nets[net], inputs.batch)
        margin = soft_margin(labels, self.config.margin, self.config.coteaching.margin_base)
        loss = hard_loss(S, margin, inputs.negatives, self.false_negatives(inputs.batch))
        return StepResult(loss, S, {"label": labels.mean()})

    def _labels(self, net: int, inputs: NCRInputs) -> Tensor:
        """(B,) y of each pair; as published (B, B), for each image with each caption."""
        own, w, published = self._prediction(net, inputs.seen), inputs.w, self.config.as_published
        if w is None:
            labels = (own + self._prediction(1 - net, inputs.seen)) / 2
            return labels[:, None].expand(-1, len(labels)) if published else labels
        if published:
            w = w[:, None]  # that w is a column there and p is not makes a matrix: w of the image, p of the caption
        return w + (1 - w) * own

    def _prediction(self, net: int, batch: Batch) -> Tensor:
        """(B,) what a network takes the labels for."""
        # Older torch keeps the weights converted here, which have no gradients, for the step that is to train them.
        with inference(self.nets[net]), uncached(batch.pairs.device):
            S = similarity(self.nets[net], batch)
            return adaptive_prediction(S, self.config.margin, self.false_negatives(batch))
