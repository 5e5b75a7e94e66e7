"""Subjective logic on a score matrix: how much speaks for each match, and how sure one may be (DECL).

Each row is a query that chooses among the K items of the batch. Evidence e makes its opinion a Dirichlet distribution
with alpha = e + 1; no evidence at all is alpha = 1, the flat one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SATURATED = 1e-6  # from this to the ends of (0, 1) the score behind a sigmoid has a tanh of -1 or 1 in float32


def raw_scores(S: Tensor) -> Tensor:
    """The scores behind the sigmoids S, finite for all S in [0, 1].

    >>> raw_scores(torch.tensor([0.5, 0.8808]))
    tensor([0.0000, 2.0000])
    """
    return S.logit(eps=SATURATED)


def evidence(x: Tensor, tau: float = 0.1) -> Tensor:
    """Evidence `exp(tanh(x) / tau)` of raw scores x.

    >>> evidence(torch.tensor([-9.0, 0.0, 9.0]))
    tensor([4.5400e-05, 1.0000e+00, 2.2026e+04])
    """
    return (x.tanh() / tau).exp()


def uncertainty(e: Tensor) -> Tensor:
    """Uncertainty mass K / sum(alpha) of each row, between 0 and 1, (B,).

    >>> uncertainty(torch.tensor([[0.0, 0.0], [6.0, 0.0]]))
    tensor([1.0000, 0.2500])
    """
    return e.shape[1] / (e + 1).sum(dim=1)


def divergence(alpha: Tensor) -> Tensor:
    """KL(Dir(alpha) || Dir(1)) of each row, (B,): how far it is from knowing nothing.

    >>> divergence(torch.tensor([[1.0, 1.0, 1.0], [2.0, 1.0, 1.0]]))
    tensor([0.0000, 0.2653])
    """
    total = alpha.sum(dim=1, keepdim=True)
    volume = total.squeeze(1).lgamma() - alpha.lgamma().sum(dim=1) - math.lgamma(alpha.shape[1])
    return volume + ((alpha - 1) * (alpha.digamma() - total.digamma())).sum(dim=1)


def evidential_loss(e: Tensor, Y: Tensor, kl_weight: float = 0.1) -> Tensor:
    """Loss of each row (B,): expected squared error of its Dirichlet, and `kl_weight` for evidence of mismatches.

    Y is 1 where row and column of the evidence e (B, K) match; a row of zeros matches nothing.
    """
    alpha = e + 1
    total = alpha.sum(dim=1, keepdim=True)
    m = alpha / total
    error = (Y - m).square().sum(dim=1)
    variance = (m * (1 - m) / (total + 1)).sum(dim=1)
    return error + variance + kl_weight * divergence(e * (1 - Y) + 1)


def corresponds(e: Tensor) -> Tensor:
    """Whether a pair's own evidence is the largest of its row of M = e + e^T, (B,) true or false. A tie is not.

    The paper divides each row of M by its sum; that does not change which entry is the largest.

    >>> corresponds(torch.tensor([[3.0, 1.0], [4.0, 2.0]]))
    tensor([ True, False])
    """
    M = e + e.T
    others = M.clone().fill_diagonal_(-torch.inf)
    return M.diagonal() > others.amax(dim=1)
