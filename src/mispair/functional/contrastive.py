"""Contrastive losses on a matrix of bounded scores t, and distillation from several networks.

Rows are left items (images), columns right items (captions), and the positives stand on the diagonal. `mask` is true
where row and column must not be taken for each other's negatives; the diagonal is always positive.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import softplus


def info_nce(t: Tensor, temperature: float, mask: Tensor | None = None) -> Tensor:
    """InfoNCE of each pair, as image and as text anchor together, (B,).

    >>> info_nce(torch.tensor([[0.5, 0.5], [0.5, 0.5]]), 0.05)
    tensor([1.3863, 1.3863])
    """
    z = t / temperature
    if mask is not None:
        z = z.masked_fill(mask & ~torch.eye(len(z), dtype=torch.bool, device=z.device), -torch.inf)
    return z.logsumexp(dim=1) + z.logsumexp(dim=0) - 2 * z.diagonal()


def sigmoid_losses(z: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """SigLIP's loss (Zhai et al., ICCV 2023) of logits z: of each pair as a positive, and of its row's negatives, (B,).

    >>> sigmoid_losses(torch.zeros(2, 2))
    (tensor([0.6931, 0.6931]), tensor([0.6931, 0.6931]))
    """
    ignored = torch.eye(len(z), dtype=torch.bool, device=z.device)
    if mask is not None:
        ignored = ignored | mask
    return softplus(-z.diagonal()), softplus(z).masked_fill(ignored, 0).sum(dim=1)


def match_probabilities(scores: Sequence[Tensor], temperature: float) -> tuple[Tensor, Tensor]:
    """Mean over networks of the probabilities of each image's captions (B, B), rows sum to 1; and of each caption's
    images (B, B), columns sum to 1."""
    rows = torch.stack([(t / temperature).softmax(dim=1) for t in scores]).mean(dim=0)
    columns = torch.stack([(t / temperature).softmax(dim=0) for t in scores]).mean(dim=0)
    return rows, columns


def distillation(t: Tensor, temperature: float, rows: Tensor, columns: Tensor) -> Tensor:
    """KL divergence of the teachers' `match_probabilities` from those of the scores t, both ways, (B,).

    >>> t = torch.tensor([[0.5, 0.1], [0.2, 0.3]])
    >>> distillation(t, 0.05, *match_probabilities([t], 0.05)).abs() < 1e-6
    tensor([True, True])
    """
    image = (rows.xlogy(rows) - rows * (t / temperature).log_softmax(dim=1)).sum(dim=1)
    text = (columns.xlogy(columns) - columns * (t / temperature).log_softmax(dim=0)).sum(dim=0)
    return image + text
