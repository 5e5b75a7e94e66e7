"""Reports of a method: metrics of an epoch, and its treatment of each pair.

Nothing here flows back into the training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel, ConfigDict

from mispair.functional.metrics import auroc
from mispair.support.arrays import FloatArray, IntArray, Mask

BINS = 20  # of the histograms of the labels


class ReplacedPairs(BaseModel):
    """Number of pairs with new partners, and the right fraction where the truth is known."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pairs: int
    new_right_fits: float | None = None
    new_left_fits: float | None = None


class MethodReport(BaseModel):
    """Metrics of a main epoch. Lists have one value per network; None means undefined.

    A method sets the fields that it knows, and puts numbers of its own into `metrics`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    clean_share: list[float] | None = None
    """Share of the pairs that are taken for clean."""
    clean_precision: list[float | None] | None = None
    """Share of these that match. Like all precisions, recalls and AUROCs only where the truth is known."""
    clean_recall: list[float | None] | None = None
    """Share of the matching pairs that are taken for clean."""
    spread: list[float] | None = None
    """Standard deviation of the similarities in a batch."""
    auroc_loss: list[float | None] | None = None
    """AUROC of matching against mismatched pairs, by the losses of this epoch."""
    auroc_w: list[float | None] | None = None
    """The same by the probability w of being clean."""
    auroc_rank: list[float | None] | None = None
    """The same by the rank correlation (REPAIR)."""
    auroc_similarity: list[float | None] | None = None
    """The same by the similarity (MSCN)."""
    auroc_known: list[float | None] | None = None
    """The same by the similarity, on the meta set (MSCN)."""
    labels_clean: list[list[int]] | None = None
    """Histogram of the labels of matching pairs, or of those taken for clean where the truth is not known."""
    labels_noisy: list[list[int]] | None = None
    """Histogram of the labels of the others."""
    gamma: list[float] | None = None
    """Rank correlation from which on a label is 1 (REPAIR)."""
    mu: list[float] | None = None
    """Rank correlation up to which a label is 0 (REPAIR)."""
    bank_pairs: list[int] | None = None
    bank_bytes: list[int] | None = None
    bank_age: list[float] | None = None
    """Mean number of steps since the pairs of the bank were trained on."""
    eta_share: float | None = None
    """Share of the pairs whose w is below eta for both networks (REPAIR)."""
    eta_precision: float | None = None
    eta_recall: float | None = None
    replaced: list[ReplacedPairs] | None = None
    """Half-replaced pairs (REPAIR)."""
    metrics: dict[str, float] = {}
    """Further numbers of a method."""

    @classmethod
    def of_networks(cls, rows: Sequence[Mapping[str, object]], **others: object) -> MethodReport:
        """Build a report from one mapping per network with equal names, and from shared fields."""
        return cls.model_validate({**{name: [row[name] for row in rows] for name in rows[0]}, **others})


@dataclass(frozen=True)
class Examples:
    """Treatment of some pairs in the last epoch, one row each. None if a method has no such value."""

    pairs: IntArray  # (n,) their numbers
    w: FloatArray | None = None  # (networks, n) probability of being clean
    labels: FloatArray | None = None  # (n,) mean over the networks
    new_left: IntArray | None = None  # (n,) pair whose left item takes the place of the own one; -1 for none
    new_right: IntArray | None = None  # (n,) the same for the right item


def selection(name: str, chosen: Mask, good: Mask | None) -> dict[str, float | None]:
    """Fraction of chosen pairs; precision and recall of choosing good pairs."""
    metrics: dict[str, float | None] = {f"{name}_share": float(chosen.mean())}
    if good is not None:
        both = int((chosen & good).sum())
        metrics[f"{name}_precision"] = both / int(chosen.sum()) if chosen.any() else None
        metrics[f"{name}_recall"] = both / int(good.sum()) if good.any() else None
    return metrics


def separation(scores: dict[str, FloatArray], matching: Mask | None) -> dict[str, float | None]:
    """AUROC of each score, high for matching pairs, against the truth."""
    return {} if matching is None else {f"auroc_{name}": auroc(score, matching) for name, score in scores.items()}


def label_histograms(labels: FloatArray, clean: Mask, matching: Mask | None) -> dict[str, list[int]]:
    """Count the labels of clean and noisy pairs in equal bins, by truth where it is known, else by the split."""
    kind = clean if matching is None else matching
    return {
        name: np.histogram(labels[which], bins=BINS, range=(0, 1))[0].tolist()
        for name, which in (("labels_clean", kind), ("labels_noisy", ~kind))
    }
