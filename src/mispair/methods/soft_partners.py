"""Soft partners: new partners for the items of flagged pairs, from similar trusted pairs.

Both items of a mismatched pair are still good. The images of similar trusted captions suit a flagged caption better
than its own image, and likewise for images. Similarity is measured within one modality, in the space of the canonical
correlation of the trusted pairs, so no mismatch can spoil it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mispair.functional.canonical_correlation import canonical_directions
from mispair.pairs.layouts.arrays import item_vectors
from mispair.pairs.pairs import Pairs
from mispair.support.arrays import FloatArray, IntArray, Mask

NEIGHBOURS = 5  # trusted pairs that lend their item
TEMPERATURE = 0.05  # of the softmax over them
ACROSS = 0.5  # weight of the similarity to the lent item itself, beside that to its partner
TEXT_WIDTH = 512
LENDERS = 1 << 16  # trusted pairs that are compared, a random part of more: else it would take the square of the pairs
CHUNK = 512  # flagged items compared at a time
BLOCK = 1 << 16  # items moved to the common space at a time


@dataclass(frozen=True)
class SoftPartners:
    """R items of flagged pairs, with K possible lenders of a partner each. All are numbers of pairs."""

    own: IntArray  # (R,) flagged pair of the item
    keeps_right: Mask  # (R,) whether its right item is kept and gets another left item; else the left one is kept
    lenders: IntArray  # (R, K) pairs to lend their other item
    odds: FloatArray  # (R, K) probability of each of them

    def __len__(self) -> int:
        return len(self.own)

    def draw(self, count: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
        """Draw n <= `count` new pairs of distinct items: the pairs of their left and of their right items."""
        chosen, lender = self.draw_lenders(count, rng)
        own, keeps_right = self.own[chosen], self.keeps_right[chosen]
        return np.where(keeps_right, lender, own), np.where(keeps_right, own, lender)

    def draw_lenders(self, count: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
        """Draw n <= `count` distinct items, as places in `own`, and the lending pair of each."""
        chosen = rng.choice(len(self), min(count, len(self)), replace=False)
        passed = self.odds[chosen].cumsum(axis=1) < rng.random(len(chosen))[:, None]
        place = np.minimum(passed.sum(axis=1), self.odds.shape[1] - 1)
        return chosen, self.lenders[chosen, place]


def find_soft_partners(pairs: Pairs, trusted: Mask, device: torch.device) -> SoftPartners:
    """Find partners for all flagged right items, and for left items without a trusted pair.

    At least one pair must be `trusted` (N,).
    """
    good, flagged = np.flatnonzero(trusted), np.flatnonzero(~trusted)
    lending = np.sort(np.random.default_rng(0).permutation(good)[:LENDERS]) if len(good) > LENDERS else good
    left, right = _common_space(pairs, lending)
    left, right = left.to(device)[torch.from_numpy(pairs.link).to(device)], right.to(device)
    _, first = np.unique(pairs.link[flagged], return_index=True)
    alone = flagged[np.sort(first)]
    alone = alone[~np.isin(pairs.link[alone], pairs.link[good])]
    captions, images = _lenders(right, left, flagged, lending), _lenders(left, right, alone, lending)
    return SoftPartners(
        np.concatenate([flagged, alone]),
        np.repeat([True, False], [len(flagged), len(alone)]),
        np.concatenate([captions[0], images[0]]),
        np.concatenate([captions[1], images[1]]),
    )


def _common_space(pairs: Pairs, good: IntArray) -> tuple[Tensor, Tensor]:
    """Unit vectors of all left and all right items, along the canonical directions of these trusted pairs."""
    items = [item_vectors(side, TEXT_WIDTH) for side in (pairs.left, pairs.right)]
    x, y = (side[rows].astype(np.float64) for side, rows in zip(items, (pairs.link[good], good), strict=True))
    means = x.mean(axis=0), y.mean(axis=0)
    directions = canonical_directions(x - means[0], y - means[1])
    left, right = (_moved(*side) for side in zip(items, means, directions, strict=True))
    return left, right


def _moved(items: npt.NDArray[np.floating], mean: FloatArray, directions: FloatArray) -> Tensor:
    """(N, k) unit vectors of items (N, D), less the mean, along these directions (D, k)."""
    blocks = (items[start : start + BLOCK].astype(np.float64) for start in range(0, len(items), BLOCK))
    moved = [((block - mean) @ directions).astype(np.float32) for block in blocks]
    return torch.nn.functional.normalize(torch.from_numpy(np.concatenate(moved)))


def _lenders(own_side: Tensor, other_side: Tensor, own: IntArray, good: IntArray) -> tuple[IntArray, FloatArray]:
    """Find the most similar pairs of `good` for the kept items of pairs `own` (R,): lenders and odds, (R, K).

    `own_side` (N, k) has the kept items, `other_side` (N, k) the others.
    """
    count = min(NEIGHBOURS, len(good))
    lenders, odds = np.empty((len(own), count), dtype=np.int64), np.empty((len(own), count))
    places = torch.from_numpy(good).to(own_side.device)
    lent = own_side[places] + ACROSS * other_side[places]
    for start in range(0, len(own), CHUNK):
        part = slice(start, start + CHUNK)
        likeness = own_side[torch.from_numpy(own[part]).to(own_side.device)] @ lent.T
        best = likeness.topk(count, dim=1)
        lenders[part] = good[best.indices.cpu().numpy()]
        odds[part] = (best.values.double() / TEMPERATURE).softmax(dim=1).cpu().numpy()
    return lenders, odds
