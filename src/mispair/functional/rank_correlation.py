"""Rank correlation against a bank of trusted pairs, and the soft labels made of it (Eq. 3-6 of the REPAIR paper).

If a pair matches, the pairs near its left item should also be near its right item. The
ranks of the distances to the bank say how true that is, without any common space.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24  # distances ranked at a time
CPU_ELEMENTS = 1 << 20  # and by a processor: what its caches hold takes half of the time
BOTTOM = 0.01  # share of the pairs that mu is the mean of (below Eq. 6)


def ranks(values: Tensor) -> Tensor:
    """Rank of each element in its row: how many are not greater (Eq. 4). Equal ones share the highest rank.

    Each row is sorted once; no element is compared with all others.

    >>> ranks(torch.tensor([[0.3, 0.1, 0.3, 0.9]]))
    tensor([[3., 1., 3., 4.]])
    """
    ordered, order = values.sort(dim=-1)
    size = values.shape[-1]
    last_of_equals = torch.ones_like(order, dtype=torch.bool)
    last_of_equals[..., :-1] = ordered[..., :-1] != ordered[..., 1:]
    position = torch.arange(1, size + 1, device=values.device)
    # Scanning backwards, the smallest end of a run seen so far is the end of the element's own run.
    shared = torch.where(last_of_equals, position, size).flip(-1).cummin(dim=-1).values.flip(-1)
    return torch.empty_like(values, dtype=torch.float32).scatter_(-1, order, shared.to(torch.float32))


def rank_correlation(left: Tensor, right: Tensor) -> Tensor:
    """Spearman's coefficient of each row of two sets of distances (Eq. 5), in [-1, 1]; 0 where a side says nothing.

    Args:
        left: (n, M) distances of the left items to the bank's left items.
        right: (n, M) the same for the right side.

    >>> rank_correlation(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[10.0, 30.0, 20.0]]))
    tensor([0.5000])
    """
    return (standard_ranks(left) * standard_ranks(right)).sum(dim=-1).clamp(-1, 1)


def standard_ranks(values: Tensor) -> Tensor:
    """Ranks of each row less their mean, as a vector of unit length; zero if they are all equal."""
    a = ranks(values) / values.shape[-1]  # so that float32 holds the sums
    a = a - a.mean(dim=-1, keepdim=True)
    length = a.square().sum(dim=-1, keepdim=True).sqrt()
    return torch.where(length > 0, a / length.clamp(min=torch.finfo(length.dtype).tiny), 0)


def bank_correlation(
    left: Tensor, right: Tensor, bank_left: Tensor, bank_right: Tensor, link: Tensor | None = None
) -> Tensor:
    """Rank correlation (n,) of each pair against a bank (Eq. 3-5), in chunks of bounded memory.

    Args:
        left: (n, D) left items of the pairs; or (m, D) with `link`.
        right: (n, E) right items.
        bank_left: (M, D) left items of the bank.
        bank_right: (M, E) right items.
        link: (n,) left item of each pair. Items that several pairs share are then ranked once only.
    """
    step = max(1, (CPU_ELEMENTS if right.device.type == "cpu" else CHUNK_ELEMENTS) // max(1, len(bank_left)))
    link = torch.arange(len(right), device=right.device) if link is None else link
    correlation = right.new_empty(len(right), dtype=torch.float32)
    for pairs in torch.split(link.argsort(), step):  # those that share an item come together
        items, which = torch.unique_consecutive(link[pairs], return_inverse=True)
        a = standard_ranks(distances(left[items], bank_left))[which]
        correlation[pairs] = (a * standard_ranks(distances(right[pairs], bank_right))).sum(dim=-1).clamp(-1, 1)
    return correlation


def distances(items: Tensor, bank: Tensor) -> Tensor:
    """Squared Euclidean distance (Eq. 3) of each item to each of the bank, (n, M), less a constant of the item.

    It has the same ranks as the distance itself, and only ranks matter. Both sides are centred first, because a common
    offset would leave few digits for the differences.
    """
    centre = bank.float().mean(dim=0)
    items, bank = items.float() - centre, bank.float() - centre
    with torch.autocast(items.device.type, enabled=False):  # in bf16 most distances would tie
        return bank.square().sum(dim=-1) - 2 * items @ bank.T


def label_bounds(correlation: Tensor, top_share: float) -> tuple[float, float]:
    """gamma, the mean of the largest `top_share` of the coefficients, and mu, the mean of the smallest 1 %."""
    ordered = correlation.sort().values
    top, bottom = (max(1, round(share * len(ordered))) for share in (top_share, BOTTOM))
    return float(ordered[-top:].mean()), float(ordered[:bottom].mean())


def soft_labels(correlation: Tensor, gamma: float, mu: float) -> Tensor:
    """Soft correspondence labels y* in [0, 1] (Eq. 6); a step at gamma where the bounds are equal.

    >>> soft_labels(torch.tensor([-0.5, 0.1, 0.4, 0.7, 0.9]), gamma=0.7, mu=0.1)
    tensor([0.0000, 0.0000, 0.5000, 1.0000, 1.0000])
    """
    low = max(0.0, mu)
    if gamma <= low:
        return (correlation > gamma).to(correlation.dtype) * (correlation > 0)
    return ((correlation - low) / (gamma - low)).clamp(0, 1)
