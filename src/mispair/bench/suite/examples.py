"""Pairs of the training data, to look at: what REPAIR thought of them, and what it made of those that it replaced."""

from __future__ import annotations

from typing import Any

import numpy as np

from mispair.data.pairs import Pairs, Tokens
from mispair.methods.report import Examples

EACH = 3  # pairs of each kind


def examples(method: Examples, pairs: Pairs, seed: int) -> list[dict[str, Any]]:
    """Random pairs, not chosen by how well anything went: right ones, wrong ones, and half-replaced ones.

    Args:
        method: What REPAIR made of all pairs; nothing comes of methods without labels and new partners.
        pairs: What was trained on, noise and all.
        seed: Of the choice.

    Returns:
        For each: kind (`right`, `wrong`, `new text`, `new image`), text, image (its name), label y* (mean of both
        networks), and of the replaced ones `new_text` or `new_image`, whether the pair was `wrong`, and `true_image`.
    """
    wrong = pairs.mismatched
    labels, new_text, new_image = method.labels, method.new_right, method.new_left
    if not isinstance(pairs.right, Tokens) or not pairs.right.texts or wrong is None:
        return []
    if labels is None or new_text is None or new_image is None:
        return []
    rng, texts = np.random.default_rng(seed), pairs.right.texts
    truth = pairs.link if pairs.truth is None else pairs.truth

    def image(row: int) -> str:
        return pairs.left_ids[row] if pairs.left_ids else str(row)

    def plain(pair: int, kind: str) -> dict[str, Any]:
        return {"kind": kind, "text": texts[pair], "image": image(pairs.link[pair]), "label": float(labels[pair])}

    def replaced(pair: int, kind: str, half: dict[str, str]) -> dict[str, Any]:
        return {**plain(pair, kind), **half, "wrong": bool(wrong[pair]), "true_image": image(truth[pair])}

    def some(where: Any) -> list[int]:
        found = np.flatnonzero(where)
        return [int(pair) for pair in rng.permutation(found)[:EACH]]

    return [
        *(plain(pair, "right") for pair in some(~wrong)),
        *(plain(pair, "wrong") for pair in some(wrong)),
        *(replaced(pair, "new text", {"new_text": texts[new_text[pair]]}) for pair in some(new_text >= 0)),
        *(
            replaced(pair, "new image", {"new_image": image(pairs.link[new_image[pair]])})
            for pair in some(new_image >= 0)
        ),
    ]
