"""BiCro: labels by bidirectional cross-modal similarity consistency (Yang et al., CVPR 2023).

Two networks split the pairs for each other by a mixture of Beta distributions over their losses, and label them for
each other: the image of a pair should be as close to the image of an anchor, a surely clean pair, as its text to the
anchor's text. Labels set the margins. From half time on every step on clean pairs follows one on noisy pairs. The
warm-up trains only on the pairs with the smallest losses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mispair.compute.devices import full_precision
from mispair.config import Config
from mispair.functional.beta_mixture import fit_betas
from mispair.functional.gaussian_mixture import FloatArray, min_max
from mispair.functional.losses import best_count, hard_loss, pair_quality, sample_losses
from mispair.methods.base import EpochPairs, StepInputs, StepPlan, StepResult, similarity
from mispair.methods.coteaching import CoTeaching
from mispair.methods.epoch_view import EpochView
from mispair.models import Encoded, Network
from mispair.models.inference import inference
from mispair.pairs.batches import Batch, PairLoader
from mispair.settings import BicroSettings, CoTeachingSettings
from mispair.support.arrays import IntArray, Mask

ANCHORS = 102  # stream of random numbers


@dataclass(frozen=True)
class BiCroInputs(StepInputs):
    """A clean or noisy batch with the inputs of its labels."""

    unaugmented: Batch = field(kw_only=True)  # the same pairs without augmentation
    clean: Batch | None = field(kw_only=True)  # in a step on noisy pairs: clean ones, for their anchors


class BiCro(CoTeaching):
    """Labels by bidirectional cross-modal similarity consistency (Yang et al., CVPR 2023)."""

    settings = (CoTeachingSettings, BicroSettings)
    order = "before"

    def __init__(self, config: Config, nets: list[Network], loader: PairLoader) -> None:
        super().__init__(config, nets, loader)
        self.clean: list[IntArray] = [np.empty(0, dtype=np.int64)] * 2  # training pairs of each network in this epoch

    # ------------------------------------------------------------------ which pairs

    def warmup_loss(self, net: int, inputs: StepInputs) -> StepResult:
        """Sum over the pairs with the smallest losses."""
        S = similarity(self.nets[net], inputs.batch)
        losses = sample_losses(S, self.config.margin, self.false_negatives(inputs.batch))
        count = max(1, int(self.config.of(BicroSettings).warmup_share * len(S) + 1e-9))
        return StepResult(losses.topk(count, largest=False).values.sum(), S)

    def clean_probabilities(self, losses: FloatArray) -> FloatArray:
        rows = losses if self.coteaching.split_losses == "single" else self.smoothed(losses)
        return np.stack([clean_probability(row) for row in rows]).astype(np.float32)

    def divide(self, epoch: int, views: list[EpochView], clean: Mask) -> list[EpochPairs]:
        splits = super().divide(epoch, views, clean)
        self.clean = [part.clean for part in splits]
        return splits

    # ------------------------------------------------------------------ a step

    def inputs(self, net: int, plan: StepPlan, augment: np.random.Generator | None) -> StepInputs:
        if plan.main_step is None:
            return super().inputs(net, plan, augment)
        anchors = self._anchor_pairs(net, plan.main_step) if plan.on_noisy else plan.pairs
        pad_shapes = self.loader.pad_shapes(plan.pairs, anchors)
        batch, unaugmented = self.augmented(plan.pairs, augment, pad_shapes)
        clean = self.loader.batch(anchors, None, pad_shapes) if plan.on_noisy else None
        return BiCroInputs(batch, self.negatives(plan.main_step), unaugmented=unaugmented, clean=clean)

    def pairs_used(self, net: int, plan: StepPlan) -> IntArray:
        pairs = super().pairs_used(net, plan)
        if plan.main_step is None or not plan.on_noisy:
            return pairs
        return np.concatenate([pairs, self._anchor_pairs(net, plan.main_step)])

    def _anchor_pairs(self, net: int, main_step: int) -> IntArray:
        """Choose clean pairs as candidates for anchors of a noisy batch, by step number."""
        clean = self.clean[net]
        rng = self.rng(ANCHORS, net, main_step)
        return rng.choice(clean, min(self.config.batch_size, len(clean)), replace=False)

    def loss(self, net: int, inputs: BiCroInputs) -> StepResult:
        labels = self._labels(self.nets[1 - net], inputs)
        S = similarity(self.nets[net], inputs.batch)
        loss = hard_loss(S, self.margin(labels), inputs.negatives, self.false_negatives(inputs.batch))
        return StepResult(loss, S, {"label": labels.mean()})

    def _labels(self, teacher: Network, inputs: BiCroInputs) -> Tensor:
        """(B,) label y of each pair, by the other network."""
        clean = inputs.unaugmented if inputs.clean is None else inputs.clean
        with inference(teacher):
            left, right = teacher.encode_left(clean.left), teacher.encode_right(clean.right)
            S = teacher.similarity(left, right)
            order = pair_quality(S, self.config.margin, self.false_negatives(clean)).argsort(stable=True)
            anchors = order[len(S) - best_count(len(S)) :]
            if inputs.clean is None:
                values = self._floored(0.5 + consistency(left, right, left, right, anchors) / 2)
                return values.index_fill(0, anchors, 1.0)
            noisy = teacher.encode_left(inputs.unaugmented.left), teacher.encode_right(inputs.unaugmented.right)
            return self._floored(consistency(*noisy, left, right, anchors))

    def _floored(self, values: Tensor) -> Tensor:
        return torch.where(values > self.config.of(BicroSettings).label_floor, values, 0.0).clamp(0, 1)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "clean": [torch.from_numpy(pairs) for pairs in self.clean]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.clean = [pairs.numpy() for pairs in state["clean"]]


def consistency(left: Encoded, right: Encoded, known_left: Encoded, known_right: Encoded, anchors: Tensor) -> Tensor:
    """Compare the relation of image and text of n pairs to the closest anchors of known pairs: (n,), at most 1."""
    with full_precision(left.pooled):
        # Means over regions and words; that they have unit length here makes no difference to a cosine.
        to_left = left.pooled.float() @ known_left.pooled[anchors].float().T
        to_right = right.pooled.float() @ known_right.pooled[anchors].float().T
    return (_ratio(to_left, to_right) + _ratio(to_right, to_left)) / 2


def _ratio(near: Tensor, far: Tensor) -> Tensor:
    """(n,) ratio of the cosines with the closest anchor by `near` (n, A) and by `far`, or its inverse if below 1."""
    closest, where = near.max(dim=1)
    there = far.gather(1, where[:, None]).squeeze(1)
    ratio = closest / torch.where(there == 0, torch.inf, there)
    return torch.where(ratio < 1, ratio, there / closest)


def clean_probability(losses: FloatArray) -> FloatArray:
    """Probability w of being clean: the posterior of the Beta mixture's lower component over min-max losses.

    Losses that are all equal, or too few, say nothing: then every pair is called clean, with a warning.
    """
    scaled = min_max(losses)
    if scaled is None:
        return np.ones(len(losses))
    mixture = fit_betas(scaled)
    return mixture.posterior(scaled, int(mixture.means.argmin()))
