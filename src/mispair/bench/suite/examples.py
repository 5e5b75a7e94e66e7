"""Pairs of the training data, to look at: what REPAIR thought of them, and what it made of those that it replaced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mispair.data.pairs import Pairs, Tokens
from mispair.methods.repair import KEEP_LEFT, KEEP_RIGHT

EACH = 3  # pairs of each kind


def examples(method: Mapping[str, Any], pairs: Pairs, seed: int) -> list[dict[str, Any]]:
    """Random pairs, not chosen by how well anything went: right ones, wrong ones, and half-replaced ones.

    Args:
        method: State of REPAIR at the end of a training; nothing comes of other methods.
        pairs: What was trained on, noise and all.
        seed: Of the choice.

    Returns:
        For each: kind (`right`, `wrong`, `new text`, `new image`), text, image (its name), label y* (mean of both
        networks), and of the replaced ones `new_text` or `new_image`, whether the pair was `wrong`, and `true_image`.
    """
    wrong = pairs.mismatched
    if not isinstance(pairs.right, Tokens) or not pairs.right.texts or "partners" not in method or wrong is None:
        return []
    labels = method["labels"].float().mean(0).cpu().numpy()
    partners = method["partners"].numpy().max(axis=0)  # (side, pair), of one network or the other
    rng, texts = np.random.default_rng(seed), pairs.right.texts
    truth = pairs.link if pairs.truth is None else pairs.truth

    def image(row: int) -> str:
        return pairs.left_ids[row] if pairs.left_ids else str(row)

    def plain(pair: int, kind: str) -> dict[str, Any]:
        return {"kind": kind, "text": texts[pair], "image": image(pairs.link[pair]), "label": float(labels[pair])}

    def replaced(pair: int, kind: str, side: int) -> dict[str, Any]:
        new = int(partners[side, pair])
        half = {"new_text": texts[new]} if side == KEEP_LEFT else {"new_image": image(pairs.link[new])}
        true = {"wrong": bool(wrong[pair]), "true_image": image(truth[pair])}
        return {**plain(pair, kind), **half, **true}

    def some(where: Any) -> list[int]:
        found = np.flatnonzero(where)
        return [int(pair) for pair in rng.permutation(found)[:EACH]]

    return [
        *(plain(pair, "right") for pair in some(~wrong)),
        *(plain(pair, "wrong") for pair in some(wrong)),
        *(replaced(pair, "new text", KEEP_LEFT) for pair in some(partners[KEEP_LEFT] >= 0)),
        *(replaced(pair, "new image", KEEP_RIGHT) for pair in some(partners[KEEP_RIGHT] >= 0)),
    ]
