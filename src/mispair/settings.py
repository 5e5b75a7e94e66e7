"""Settings of our methods and models. They import no torch, to show help at once.

The class of a method or a model names its own in `settings`. An installed package keeps its settings beside its class.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from mispair.config import WIDEST, BelowOne, Count, Fraction, Name, Natural, NotNegative, Positive, Width, validated
from mispair.support.flags import OrNone


@validated
class VseSettings:
    """VSE-inf."""

    augment: bool = True
    """Drop regions and words at random while training (size augmentation)."""


@validated
class SgrafSettings:
    """SGR and SAF."""

    sim_size: Width = 256
    """Width of SGR's and SAF's similarity vectors."""
    graph_steps: Annotated[int, Field(ge=1, le=100)] = 3
    """Layers of SGR's graph reasoning."""
    score_hidden: Annotated[int, Field(ge=0, le=WIDEST)] = 0
    """Width of a hidden layer before SGR's and SAF's score; MSCN sets it to 64; 0 disables it."""


@validated
class ScanSettings:
    """SCAN."""

    attend: Literal["t2i", "i2t"] = "t2i"
    """t2i: words attend to regions; i2t: regions attend to words."""
    attend_sharpness: Positive = 9.0
    """lambda of the softmax of its attention; 9 for t2i, 4 for i2t."""
    aggregate: Literal["lse", "mean", "max", "sum"] = "lse"
    """Aggregation of the similarities of words (or regions)."""
    lse_sharpness: Positive = 6.0
    """lambda of its log-sum-exp; 6 for t2i, 5 (Flickr30K) or 20 (COCO) for i2t."""


@validated
class MendSettings:
    """Mend."""

    second_model: OrNone[Name] = None
    """Model of the second teacher; by default vse, and two-tower beside two-tower."""
    student_share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of the epochs, after those of the teachers, that train the student."""
    temperature: Positive = 0.05
    """Temperature of the softmax over the scores of a batch."""
    flagged_size: Natural = 32
    """Flagged pairs that go with each batch of trusted ones."""
    flagged_weight: NotNegative = 0.3
    """Weight of a flagged item with its soft partner."""
    trust: Literal["audit", "all", "truth"] = "audit"
    """Which pairs are trusted: those that the audit does not flag; all; or those known to match, as an upper bound."""


@validated
class CoTeachingSettings:
    """Co-teaching of two networks: NCR, BiCro, REPAIR."""

    clean_threshold: BelowOne = 0.5
    """p: pairs with a higher probability w of being clean are the clean part."""
    split_losses: Literal["smoothed", "joint", "single"] = "smoothed"
    """Mixture over losses smoothed over the epochs, or over both networks too; or one epoch's losses (the paper)."""
    split_memory: BelowOne = 0.5
    """Weight of the epochs before in the smoothed losses."""
    noisy_start: Fraction = 0.5
    """Share of the main epochs before the noisy part takes part."""
    margin_base: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 10.0
    """m: how steeply the margin grows with the label."""


@validated
class RepairSettings:
    """REPAIR."""

    labels: Literal["rank", "hard"] = "rank"
    """Labels of the clean part: by rank correlation (RC), or 1 for all (hard)."""
    label_when: Literal["epoch", "batch"] = "epoch"
    """epoch: the other network labels all pairs before the epoch; batch: each network its own batches (Algorithm 1)."""
    noisy: Literal["replace", "drop", "train"] = "replace"
    """The noisy part is half-replaced (NPR), dropped, or trained on with its labels, 0 if hard."""
    bank_size: Count = 4096
    """M: pairs in the memory bank of each network."""
    gamma_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """gamma is the mean of this share of the highest rank correlations; above gamma a label is 1 (paper: 0.1)."""
    eta: Fraction = 0.25
    """Noisy pairs are half-replaced if both networks' w is below it."""
    tau: NotNegative = 0.15
    """Weight of the noisy part in the loss, half-replaced or not."""
    neighbours: Count = 32
    """K: number of nearest bank items, the candidates for a half-replaced pair."""
    replace_by: Literal["peer", "own"] = "peer"
    """Which network's bank and similarity choose the new partners that train a network."""
    replace_side: Literal["both", "left", "right"] = "both"
    """Which side of a noisy pair is replaced; both: each pair makes two new ones."""


@validated
class DeclSettings:
    """DECL."""

    evidence_scale: Annotated[float, Field(ge=0.08, allow_inf_nan=False)] = 0.1
    """Temperature of the evidence; below 0.08 rounding would win."""
    hinge_weight: NotNegative = 0.8
    """lambda 1, weight of the dynamic hinge loss."""
    kl_weight: NotNegative = 0.1
    """lambda 2, weight of the divergence from no evidence."""
    hinge_decay: NotNegative = 0.025
    """eta, by how much the number of hard negatives falls each step."""
    hinge_least: Count = 5
    """mu, the least number of hard negatives."""


@validated
class BicroSettings:
    """BiCro."""

    warmup_share: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Share of each warm-up batch, the pairs with the smallest losses, that is trained on."""
    label_floor: Fraction = 0.5
    """Labels not above it become 0."""


@validated
class MscnSettings:
    """MSCN."""

    meta_lr: Positive = 1.7e-5
    """Learning rate of the meta network."""
    meta_share: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """Share of the training pairs, known to match, that make its meta set."""


_MODELS = VseSettings, SgrafSettings, ScanSettings
_METHODS = MendSettings, CoTeachingSettings, RepairSettings, DeclSettings, BicroSettings, MscnSettings
BUILT_IN: tuple[type[Any], ...] = *_MODELS, *_METHODS
