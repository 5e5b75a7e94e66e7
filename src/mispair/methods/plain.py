"""Plain training, the baseline: treat every pair as a match."""

from __future__ import annotations

from mispair.functional.losses import hard_loss
from mispair.methods.base import Method, StepInputs, StepResult, similarity


class Plain(Method):
    """Triplet loss on the hardest negatives of the batch; every pair is taken for a match."""

    distributed = True

    def loss(self, net: int, inputs: StepInputs) -> StepResult:
        S = similarity(self.nets[net], inputs.batch)
        return StepResult(hard_loss(S, self.config.margin, inputs.negatives, self.false_negatives(inputs.batch)), S)
