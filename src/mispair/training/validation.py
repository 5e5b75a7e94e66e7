"""Validation during training: choose the best epoch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mispair.models import Network
from mispair.models.inference import average, similarities
from mispair.pairs.batches import SideLoader
from mispair.pairs.pairs import HELD_OUT, Pairs, unflagged, with_first_items
from mispair.retrieval.evaluation import Evaluation, evaluate
from mispair.training.checkpoint import Best


class Validation:
    """Evaluate networks on the validation pairs and keep the best result."""

    def __init__(self, dev: Pairs | None, device: torch.device) -> None:
        # Flagged pairs must not decide the best epoch, and validation must not take longer than training.
        self.dev = None if dev is None else with_first_items(unflagged(dev), HELD_OUT)
        self.device = device
        self.best = Best()
        self._loaders: tuple[SideLoader, SideLoader] | None = None
        self._scores: dict[int, Tensor] = {}  # by network, for those that do not train any more

    def evaluate(self, nets: Sequence[Network], kept: Sequence[int], trained: Sequence[int]) -> Evaluation:
        """Evaluate the kept networks together; `trained` lists those changed since the last time."""
        assert self.dev is not None
        if self._loaders is None:
            self._loaders = SideLoader(self.dev.left, self.device), SideLoader(self.dev.right, self.device)
        for number in kept:
            if number in trained or number not in self._scores:
                (self._scores[number],) = similarities([nets[number]], *self._loaders)
        matrices = [self._scores[number] for number in kept]
        return evaluate(matrices, self.dev, mean=average([nets[number] for number in kept], matrices))

    def is_best(self, result: Evaluation, epoch: int, kept: tuple[int, ...]) -> bool:
        """Keep a result if it is the best so far, or the first of other networks."""
        rsum = result.averaged.rsum
        if rsum > self.best.rsum or kept != self.best.networks:
            self.best = Best(rsum, epoch, kept)
            return True
        return False
