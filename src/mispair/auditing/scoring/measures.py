"""The measures of how well a pair fits, each by itself: the ingredients of the match score.

The space and the bank of trusted pairs by which a pair is measured were made without the fold of the pair.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mispair.auditing.scoring.common_space import CommonSpace
from mispair.auditing.scoring.joint import normalised_cosine

BANK = 1024  # pairs that others are compared with
RIVALS, FEW = 0.01, 10  # share of the bank that is the best rivals of a pair; at least so many
AT_ONCE = 512  # items whose rivals are searched at a time
GROUP = 8  # columns that are looked at together

MEANINGS = {
    "contrast": "How much closer the two items are to each other than to the best rival of either.",
    "evidence": "How much more likely the two items are as partners than as a random pair, in the learned space.",
    "joint": "The cosine of the two items in the space that their encoders share.",
    "joint_contrast": "The cosine less what either item has with others.",
    "cosine": "The plain cosine in the space of a joint encoder.",
    "expected": "The cosine of either item with the partner predicted from other pairs.",
    "networks": "How much higher the networks of the run score the two items than the best rival of either.",
}
NATURAL = ("cosine", "expected")  # what random pairs do not show; see `joint`


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


def measure(
    space: CommonSpace, bank: Bank, left: Tensor, right: Tensor, lefts: Tensor, rights: Tensor, *, joint: bool
) -> Tensor:
    """All measures of n pairs, (n, m) in the order of `names`: higher is better.

    Pair i has the left item `lefts[i]` of (u, D) and the right item `rights[i]` of (v, E), centred and of unit length.
    The space and the bank were made without these pairs.
    """
    known = evidence(space, left @ space.left, right @ space.right, lefts, rights)
    a, b = space.compared_left(left), space.compared_right(right)
    found = with_contrast(a, b, lefts, rights, known, rivals(a, bank.space_right), rivals(b, bank.space_left))[:, :2]
    if not joint:
        return found
    cosine = (left[lefts] * right[rights]).sum(1)
    contrast = normalised_cosine(left, right, bank.left, bank.right, lefts, rights)
    return torch.column_stack([found, cosine, contrast])


def evidence(space: CommonSpace, a: Tensor, b: Tensor, lefts: Tensor, rights: Tensor) -> Tensor:
    """Log density ratio of partners and random pairs, (n,), of items in the space, (u, k) and (v, k)."""
    own_left, own_right = ((space.correlation * side.square()).sum(1) for side in (a, b))
    return (a[lefts] * b[rights]).sum(1) - 0.5 * (own_left[lefts] + own_right[rights])


def with_contrast(
    a: Tensor, b: Tensor, lefts: Tensor, rights: Tensor, evidence: Tensor, left_rivals: Tensor, right_rivals: Tensor
) -> Tensor:
    """Contrast, evidence and similarity of pairs (n, 3), given the similarity of each item to its best rivals."""
    similarity = (a[lefts] * b[rights]).sum(1)
    contrast = 2 * similarity - left_rivals[lefts] - right_rivals[rights]
    return torch.stack([contrast, evidence, similarity], dim=1)


def rivals(items: Tensor, others: Tensor) -> Tensor:
    """Mean similarity of each item to the most similar of the others, (n,)."""
    count = max(min(FEW, len(others)), round(RIVALS * len(others)))
    return torch.cat([mean_of_largest(part @ others.T, count) for part in torch.split(items, AT_ONCE)])


def mean_of_largest(scores: Tensor, count: int) -> Tensor:
    """(n,) mean of the largest scores of each row (n, m)."""
    if scores.device.type != "cpu":
        return scores.topk(count, dim=1).values.mean(1)
    found = scores.gather(1, columns_with_largest(scores, count)).numpy()
    found.partition(found.shape[1] - count, axis=1)  # on a CPU faster than `topk`
    return torch.from_numpy(found[:, found.shape[1] - count :].mean(axis=1))


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest scores of each row (n, m), in descending order, and their places, (n, count) each."""
    if scores.device.type != "cpu":
        found = scores.topk(count, dim=1)
        return found.values, found.indices
    columns = columns_with_largest(scores, count)
    values, places = scores.gather(1, columns).topk(count, dim=1)
    return values, columns.gather(1, places)


def columns_with_largest(scores: Tensor, count: int) -> Tensor:
    """(n, k) columns of the largest scores of each row (n, m) on a CPU, in groups of which one score is large.

    The scores of these columns are sorted two to four times as fast as those of all.
    """
    size = scores.shape[1] // GROUP
    if size <= 2 * count:
        return torch.arange(scores.shape[1]).expand(len(scores), -1)
    groups = scores[:, : size * GROUP].view(len(scores), GROUP, size)  # group g has the columns g, g + size, ...
    chosen = np.argpartition(groups.amax(1).numpy(), size - count, axis=1)[:, size - count :]
    columns = (torch.from_numpy(chosen)[:, None] + size * torch.arange(GROUP)[:, None]).flatten(1)
    rest = torch.arange(size * GROUP, scores.shape[1]).expand(len(scores), -1)
    return torch.cat([columns, rest], dim=1)


def names(*, joint: bool, networks: bool = False) -> list[str]:
    """Names of the measures, in their order."""
    given = dict.fromkeys(("joint", "joint_contrast", *NATURAL), joint) | {"networks": networks}
    return [name for name in MEANINGS if given.get(name, True)]
