"""What a researcher wants to see of a split and its labels, every epoch; where the truth is known, held against it.

Nothing here flows back into the training.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mispair.functional.metrics import auroc

BINS = 20  # of the histograms of the labels
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[Any]


def selection(name: str, chosen: BoolArray, good: BoolArray | None) -> dict[str, float | None]:
    """Share of the chosen pairs; how many of them are good (precision), and of the good ones chosen (recall)."""
    figures: dict[str, float | None] = {f"{name}_share": float(chosen.mean())}
    if good is not None:
        both = int((chosen & good).sum())
        figures[f"{name}_precision"] = both / int(chosen.sum()) if chosen.any() else None
        figures[f"{name}_recall"] = both / int(good.sum()) if good.any() else None
    return figures


def separation(scores: dict[str, FloatArray], right: BoolArray | None) -> dict[str, float | None]:
    """AUROC of each score, high for right pairs, against the truth."""
    return {} if right is None else {f"auroc_{name}": auroc(score, right) for name, score in scores.items()}


def label_histograms(labels: FloatArray, clean: BoolArray, right: BoolArray | None) -> dict[str, list[int]]:
    """Labels of the clean and the noisy pairs, by truth where it is known, else by the split: counts in equal bins."""
    kind = clean if right is None else right
    return {
        name: np.histogram(labels[which], bins=BINS, range=(0, 1))[0].tolist()
        for name, which in (("labels_clean", kind), ("labels_noisy", ~kind))
    }


def by_network(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """From one dictionary a network to one list a figure."""
    return {name: [row[name] for row in rows] for name in rows[0]}
