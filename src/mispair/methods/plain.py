"""Plain training: every pair is taken for right. What noise does to this is the reason for all the other methods."""

from __future__ import annotations

from mispair.data.loader import Batch
from mispair.losses import hard_loss
from mispair.methods.base import Method, Step, similarity


class Plain(Method):
    """Triplet loss on the hardest negatives of the batch, hardened gradually."""

    def step(self, net: int, main_step: int, clean: Batch, noisy: Batch | None) -> Step:  # noqa: ARG002
        S = similarity(self.nets[net], clean)
        return Step(hard_loss(S, self.config.margin, self.negatives(main_step), self.false_negatives(clean)), S)
