"""The measures of how well a pair fits, each by itself: the ingredients of the match score.

The space and the bank of trusted pairs by which a pair is measured were made without the fold of the pair.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from mispair.auditing.scoring.common_space import CommonSpace
from mispair.auditing.scoring.joint import normalised_cosine

BANK = 1024  # pairs that others are compared with
RIVALS, NEIGHBOURS = 0.01, 0.03  # shares of the bank: the best rivals of a pair, the neighbours of an item
FEW = 10  # but at least so many
RANKED = 512  # pairs of the bank in the spaces that items came in: 1,024 do not change the match score
PLACE_BITS = 9  # of a place among them
AT_ONCE = 512  # items whose rivals are searched at a time
GROUP = 8  # columns that are looked at together

MEANINGS = {
    "contrast": "How much closer the two items are to each other than to the best rival of either.",
    "evidence": "How much more likely the two items are as partners than as a random pair, in the learned space.",
    "similarity": "The cosine of the two items in the learned common space.",
    "neighbours": "Whether items like the left one have partners like the right one, and the other way round.",
    "rank": "Rank correlation of their distances to trusted pairs, in the original spaces.",
    "joint": "The cosine of the two items in the space that their encoders share.",
    "joint_contrast": "The cosine less what either item has with others.",
    "cosine": "The plain cosine in the space of a joint encoder.",
    "expected": "The cosine of either item with the partner predicted from other pairs.",
    "networks": "How much higher the networks of the run score the two items than the best rival of either.",
}
NATURAL = ("cosine", "expected")  # what random pairs do not show; see `joint`
WEAK = ("similarity", "neighbours", "rank")  # on all data sets that were tried; a few pairs say otherwise by accident


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
    near_left, near_right = left @ bank.left[:RANKED].T, right @ bank.right[:RANKED].T
    count = max(min(FEW, near_left.shape[1]), round(NEIGHBOURS * near_left.shape[1]))
    (nearest_left, ranks_left), (nearest_right, ranks_right) = (
        nearest_and_ranks(near, count) for near in (near_left, near_right)
    )
    agreement = _raised(near_right, rights, nearest_left[lefts]) + _raised(near_left, lefts, nearest_right[rights])
    columns = [
        learned(space, bank, left, right, lefts, rights),
        agreement,
        (ranks_left[lefts] * ranks_right[rights]).sum(1).clamp(-1, 1),
    ]
    if joint:
        columns.append((left[lefts] * right[rights]).sum(1))
        columns.append(normalised_cosine(left, right, bank.left, bank.right, lefts, rights))
    return torch.column_stack(columns)


def learned(space: CommonSpace, bank: Bank, left: Tensor, right: Tensor, lefts: Tensor, rights: Tensor) -> Tensor:
    """Measures in the learned space alone, (n, 3): contrast, evidence, similarity."""
    a, b = left @ space.left, right @ space.right
    known = evidence(space, a, b, lefts, rights)
    if space.refined_left is None:  # the same products again
        a, b = normalize(a, dim=1), normalize(b, dim=1)
    else:
        a, b = space.compared_left(left), space.compared_right(right)
    return with_contrast(a, b, lefts, rights, known, rivals(a, bank.space_right), rivals(b, bank.space_left))


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
    return torch.cat([largest(part @ others.T, count)[0].mean(1) for part in torch.split(items, AT_ONCE)])


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest scores of each row (n, m), in descending order, and their places, (n, count) each.

    `topk`, which takes two to four times as long on a CPU: only groups of columns are searched that have a large one.
    """
    size = scores.shape[1] // GROUP
    if scores.device.type != "cpu" or size <= 2 * count:
        found = scores.topk(count, dim=1)
        return found.values, found.indices
    groups = scores[:, : size * GROUP].view(len(scores), GROUP, size)  # group g has the columns g, g + size, ...
    chosen = np.argpartition(groups.amax(1).numpy(), size - count, axis=1)[:, size - count :]
    columns = (torch.from_numpy(chosen)[:, None] + size * torch.arange(GROUP)[:, None]).flatten(1)
    rest = torch.arange(size * GROUP, scores.shape[1]).expand(len(scores), -1)
    columns = torch.cat([columns, rest], dim=1)
    values, places = scores.gather(1, columns).topk(count, dim=1)
    return values, columns.gather(1, places)


def names(*, joint: bool, networks: bool = False) -> list[str]:
    """Names of the measures, in their order."""
    given = dict.fromkeys(("joint", "joint_contrast", *NATURAL), joint) | {"networks": networks}
    return [name for name in MEANINGS if given.get(name, True)]


def nearest_and_ranks(near: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Places of the nearest items of a bank (n, count), the nearest first, and standardised ranks of distances (n, M).

    The ranks of an item are a vector of unit length: `standard_ranks(-near)`, as the distance of unit vectors falls
    with their similarity `near` (n, M), but several times as fast: similarities are rounded to 22 bits and sorted with
    their places as one number. Equal ones are ranked by place, and zero if all are equal.
    """
    size = near.shape[1]
    if size < 2:
        return torch.zeros_like(near[:, :count], dtype=torch.long), torch.zeros_like(near)
    fine = ((1 - near.clamp(-0.9999999, 1)) * (1 << 21)).to(torch.int32)  # -1 would be 2^22, one bit too many
    keys = (fine << PLACE_BITS) | torch.arange(size, dtype=torch.int32, device=near.device)
    # numpy's sort uses the vector instructions of the processor, that of torch does not.
    ordered = torch.from_numpy(np.sort(keys.numpy(), axis=1)) if keys.device.type == "cpu" else keys.sort(dim=1).values
    ranks = torch.arange(size, dtype=near.dtype, device=near.device) - (size - 1) / 2
    ranks = ranks / torch.linalg.vector_norm(ranks)
    order = (ordered & ((1 << PLACE_BITS) - 1)).long()
    differ = (ordered[:, :1] >> PLACE_BITS) != (ordered[:, -1:] >> PLACE_BITS)
    return order[:, :count].clone(), torch.empty_like(near).scatter_(1, order, torch.where(differ, ranks, 0))


def _raised(scores: Tensor, items: Tensor, chosen: Tensor) -> Tensor:
    """Closeness of items to the partners of their partner's neighbours, in standard deviations, (n,).

    Pair i has the item `items[i]` with similarities `scores` (u, M) to those of the bank; `chosen` (n, c) are places of
    its partner's neighbours.
    """
    mean = scores.mean(1)
    # This is many times faster than `std`. Similarities of centred vectors have no large mean that would cancel.
    square = torch.linalg.vector_norm(scores, dim=1).square() / scores.shape[1]
    spread = (square - mean.square()).clamp(min=1e-12).sqrt()
    at = scores.reshape(-1)[items[:, None] * scores.shape[1] + chosen]
    raised: Tensor = (at.mean(1) - mean[items]) / spread[items]
    return raised
