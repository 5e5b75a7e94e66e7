"""The measures of how well a pair fits, each by itself: the ingredients of the match score.

The space and the bank of trusted pairs by which a pair is measured were made without the fold of the pair.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mispair.auditing.scoring.common_space import CommonSpace
from mispair.functional.rank_correlation import rank_correlation

BANK = 1024  # pairs that others are compared with
RIVALS, NEIGHBOURS = 0.01, 0.03  # shares of the bank: the best rivals of a pair, the neighbours of an item
FEW = 10  # but at least so many
RANKED = 512  # pairs of the bank that ranks are taken of

MEANINGS = {
    "contrast": "How much closer the two are to each other than to the best rivals of either.",
    "evidence": "How much more likely the two are as partners than as strangers, in the learned common space.",
    "similarity": "The cosine of the two in the learned common space.",
    "neighbours": "Whether items like the left one have partners like the right one, and the other way round.",
    "rank": "Rank correlation of their distances to trusted pairs, in the spaces they came in.",
    "joint": "The cosine of the two in the space that their encoders share.",
    "networks": "How much better the networks of the run score the two than the best rivals of either.",
}


@dataclass(frozen=True)
class Bank:
    """Trusted pairs in their own spaces and in the common space: rows of unit length."""

    left: Tensor  # (M, D)
    right: Tensor  # (M, E)
    space_left: Tensor  # (M, k)
    space_right: Tensor  # (M, k)


def make_bank(space: CommonSpace, left: Tensor, right: Tensor) -> Bank:
    """The bank of these pairs, (M, D) and (M, E), centred and of unit length."""
    return Bank(left, right, space.compared_left(left), space.compared_right(right))


def measure(space: CommonSpace, bank: Bank, left: Tensor, right: Tensor, *, joint: bool = False) -> Tensor:
    """All measures of n pairs, (n, m) in the order of `names`: higher is better.

    Args:
        space: Fitted without these pairs.
        bank: Other pairs.
        left: (n, D) centred, of unit length.
        right: (n, E) the same.
        joint: Whether the two sides come from encoders with a common space.
    """
    near_left, near_right = left @ bank.left.T, right @ bank.right.T
    columns = [
        learned(space, bank, left, right),
        _neighbour_agreement(near_left, near_right),
        # The distance of unit vectors falls with their similarity.
        rank_correlation(-near_left[:, :RANKED], -near_right[:, :RANKED]),
    ]
    if joint:
        columns.append((left * right).sum(1))
    return torch.column_stack(columns)


def learned(space: CommonSpace, bank: Bank, left: Tensor, right: Tensor) -> Tensor:
    """The measures that need only the learned space, (n, 3): contrast, evidence, similarity."""
    a, b = left @ space.left, right @ space.right
    evidence = (a * b).sum(1) - 0.5 * (space.correlation * (a.square() + b.square())).sum(1)
    a, b = space.compared_left(left), space.compared_right(right)
    similarity = (a * b).sum(1)
    contrast = 2 * similarity - rivals(a, bank.space_right) - rivals(b, bank.space_left)
    return torch.stack([contrast, evidence, similarity], dim=1)


def rivals(items: Tensor, others: Tensor) -> Tensor:
    """Mean similarity of each item to the most similar of the others, (n,)."""
    count = max(min(FEW, len(others)), round(RIVALS * len(others)))
    return (items @ others.T).topk(count, dim=1).values.mean(1)


def names(*, joint: bool, networks: bool = False) -> list[str]:
    """Names of the measures, in their order."""
    given = {"joint": joint, "networks": networks}
    return [name for name in MEANINGS if given.get(name, True)]


def _neighbour_agreement(left: Tensor, right: Tensor) -> Tensor:
    """How close each item is to the partners of its partner's neighbours, in standard deviations, both ways added.

    Args:
        left: (n, M) similarities of the left items to the bank's.
        right: (n, M) the same for the right items.
    """
    count = max(min(FEW, left.shape[1]), round(NEIGHBOURS * left.shape[1]))
    return _raised(right, left.topk(count, dim=1).indices) + _raised(left, right.topk(count, dim=1).indices)


def _raised(scores: Tensor, chosen: Tensor) -> Tensor:
    spread = scores.std(dim=1, correction=0).clamp(min=1e-12)
    return (scores.gather(1, chosen).mean(1) - scores.mean(1)) / spread
