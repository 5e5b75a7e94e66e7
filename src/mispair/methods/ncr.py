"""NCR: learning with noisy correspondence (Huang et al., NeurIPS 2021).

Two networks split the pairs for each other by a mixture over their losses. The label of a clean pair combines the
other network's probability w of being clean with the own prediction. The label of a noisy pair is the mean of both
predictions. Labels set the margins. From half time on a step on noisy pairs follows every step on clean pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mispair.compute.devices import send, uncached
from mispair.functional.losses import adaptive_prediction, hard_loss
from mispair.methods.base import StepInputs, StepPlan, StepResult, similarity
from mispair.methods.coteaching import CoTeaching
from mispair.models.inference import inference
from mispair.pairs.batches import Batch


@dataclass(frozen=True)
class NCRInputs(StepInputs):
    """A clean or noisy batch with the inputs of its labels."""

    unaugmented: Batch = field(kw_only=True)  # the same pairs without augmentation, for the predictions
    w: Tensor | None = field(kw_only=True)  # (B,) by the other network; None in a step on noisy pairs


class NCR(CoTeaching):
    """Learning with noisy correspondence: two networks split and label the pairs for each other (NeurIPS 2021)."""

    order = "after"

    def inputs(self, net: int, plan: StepPlan, augment: np.random.Generator | None) -> StepInputs:
        if plan.main_step is None:
            return super().inputs(net, plan, augment)
        batch, unaugmented = self.augmented(plan.pairs, augment, self.loader.pad_shapes(plan.pairs))
        w = None if plan.on_noisy else send(torch.from_numpy(self.w[1 - net, plan.pairs]), batch.pairs.device)
        return NCRInputs(batch, self.negatives(plan.main_step), unaugmented=unaugmented, w=w)

    def loss(self, net: int, inputs: NCRInputs) -> StepResult:
        labels = self.labels(net, inputs)
        S = similarity(self.nets[net], inputs.batch)
        loss = hard_loss(S, self.margin(labels), inputs.negatives, self.false_negatives(inputs.batch))
        return StepResult(loss, S, {"label": labels.mean()})

    def labels(self, net: int, inputs: NCRInputs) -> Tensor:
        """(B,) label y of each pair."""
        own = self._prediction(net, inputs.unaugmented)
        if inputs.w is None:
            return (own + self._prediction(1 - net, inputs.unaugmented)) / 2
        return inputs.w + (1 - inputs.w) * own

    def _prediction(self, net: int, batch: Batch) -> Tensor:
        """(B,) labels predicted by a network."""
        # Older torch keeps the weights converted here, which have no gradients, for the step that is to train them.
        with inference(self.nets[net]), uncached(batch.pairs.device):
            S = similarity(self.nets[net], batch)
            return adaptive_prediction(S, self.config.margin, self.false_negatives(batch))
