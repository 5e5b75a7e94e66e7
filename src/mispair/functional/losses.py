"""The triplet family on a similarity matrix S: rows are left items (images), columns right items (captions).

The positives stand on the diagonal. A margin may be one number or one a pair; a pair's margin then counts where the
pair is the anchor: row i for the image anchor, column i for the text anchor (Eq. 1 of the REPAIR paper). Code that was
published with other papers gives each image with each caption a margin of its own, in both directions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def triplet_costs(S: Tensor, margin: float | Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Hinge costs of every negative, 0 on the diagonal and where `mask` is true.

    Args:
        S: (B, B) similarities.
        margin: One number; (B,) one a pair; or (B, B) the same for both costs.
        mask: (B, B), true where row and column must not be taken for each other's negatives.

    Returns:
        `image_cost[i, j] = [m_i + S_ij - S_ii]+` (image i against caption j) and
        `text_cost[i, j] = [m_j + S_ij - S_jj]+` (caption j against image i), (B, B) each.
    """
    positive = S.diagonal()
    row = margin[:, None] if isinstance(margin, Tensor) and margin.dim() == 1 else margin
    ignored = torch.eye(len(S), dtype=torch.bool, device=S.device)
    if mask is not None:
        ignored = ignored | mask
    image_cost = (row + S - positive[:, None]).clamp(min=0).masked_fill(ignored, 0)
    text_cost = (margin + S - positive).clamp(min=0).masked_fill(ignored, 0)
    return image_cost, text_cost


def sample_losses(S: Tensor, margin: float | Tensor, mask: Tensor | None = None) -> Tensor:
    """Loss of each pair by the mean over all negatives, (B,). The mean divides by B, the zero diagonal counts (NCR).

    So does the 0 of every masked negative: a pair with many false negatives in its batch has a smaller loss.

    >>> sample_losses(torch.tensor([[0.5, 0.4], [0.1, 0.5]]), 0.2)
    tensor([0.0500, 0.0500])
    """
    image_cost, text_cost = triplet_costs(S, margin, mask)
    return image_cost.mean(dim=1) + text_cost.mean(dim=0)


def warmup_loss(S: Tensor, margin: float | Tensor, mask: Tensor | None = None) -> Tensor:
    """Warm-up loss: sum over the batch of `sample_losses`."""
    return sample_losses(S, margin, mask).sum()


def hard_loss(S: Tensor, margin: float | Tensor, negatives: int | Tensor = 1, mask: Tensor | None = None) -> Tensor:
    """Sum over the batch of each anchor's mean over its hardest `negatives`; 1 is the hardest-negative triplet loss.

    >>> hard_loss(torch.tensor([[0.5, 0.4], [0.1, 0.5]]), 0.2)
    tensor(0.2000)
    """
    image_cost, text_cost = triplet_costs(S, margin, mask)
    hardest = torch.cat([image_cost, text_cost.T]).sort(dim=1, descending=True).values
    most = max(1, len(S) - 1)
    n = negatives.clamp(max=most) if isinstance(negatives, Tensor) else min(negatives, most)
    return (hardest.sum(dim=0) * (torch.arange(len(S), device=S.device) < n)).sum() / n


def hard_losses(S: Tensor, margin: float | Tensor, negatives: int = 1, mask: Tensor | None = None) -> Tensor:
    """Terms of `hard_loss`: of each pair as image and as text anchor together, (B,).

    >>> hard_losses(torch.tensor([[0.5, 0.4], [0.1, 0.5]]), 0.2)
    tensor([0.1000, 0.1000])
    """
    image_cost, text_cost = triplet_costs(S, margin, mask)
    hardest = torch.stack([image_cost, text_cost.T]).topk(min(negatives, max(1, len(S) - 1)), dim=2).values
    return hardest.mean(dim=2).sum(dim=0)


def negatives_at(step: int, start: int, end: int, steps: int) -> int:
    """Number of hardest negatives at `step`: from `start` to `end` in `steps`, by equal factors.

    >>> [negatives_at(step, 48, 4, 300) for step in (0, 100, 200, 300, 1000)]
    [48, 21, 9, 4, 4]
    """
    if step >= steps:
        return end
    return round(start * math.pow(end / start, step / steps))


def soft_margin(labels: Tensor, margin: float = 0.2, base: float = 10.0) -> Tensor:
    """Margin of a pair with correspondence label y (Eq. 2): `margin * (base^y - 1) / (base - 1)`.

    >>> soft_margin(torch.tensor([0.0, 0.5, 1.0]))
    tensor([0.0000, 0.0481, 0.2000])
    """
    return margin * torch.expm1(labels * math.log(base)) / (base - 1)


def meta_margin(scores: Tensor, margin: float = 0.2) -> Tensor:
    """MSCN's margin of a pair with similarity p in [0, 1]: `margin * p^2 / (p^2 + (1 - p)^2)`.

    >>> meta_margin(torch.tensor([0.0, 0.25, 0.5, 1.0]))
    tensor([0.0000, 0.0200, 0.1000, 0.2000])
    """
    return margin * scores.square() / (scores.square() + (1 - scores).square())


def pair_quality(S: Tensor, margin: float = 0.2, mask: Tensor | None = None) -> Tensor:
    """Score of each pair in its batch: the margin less half its loss, (B,) in [0, margin] (NCR, BiCro)."""
    return (margin - sample_losses(S, margin, mask) / 2).clamp(0, margin)


def best_count(pairs: int) -> int:
    """Number of the best pairs of a batch: a tenth and one more (NCR, BiCro)."""
    return pairs // 10 + 1


def adaptive_prediction(S: Tensor, margin: float = 0.2, mask: Tensor | None = None) -> Tensor:
    """NCR's prediction of each pair's label from its loss in the batch: 1 for the best tenth, (B,) in [0, 1]."""
    quality = pair_quality(S, margin, mask)
    best = quality.topk(best_count(len(S))).values.mean()
    return (quality / best.clamp(min=torch.finfo(S.dtype).tiny)).clamp(0, 1)
