"""Common spaces refined so that partners are told apart from other items.

Canonical correlation asks how much partners have in common; contrast and similarity ask whether an item is closer to
its partner than to others. So the directions are trained for a moment with the contrastive loss InfoNCE
(van den Oord et al., 2018). Its targets are soft: items that are alike on their own side are partly right as well, as
they are in the uni-modal soft labels of CUSA (Huang et al., 2024). Only pairs that likely match take part, and each
fold's space is refined without that fold.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import log_softmax, normalize

from mispair.auditing.scoring.common_space import CommonSpace
from mispair.compute.threads import parallel_map
from mispair.data.pairs import MATCH_THRESHOLD
from mispair.functional.logistic import FloatArray

ENOUGH = 2000  # trusted pairs; below, refined spaces remember their pairs instead of learning
BATCH = 256
EPOCHS, ENOUGH_STEPS = 2, 40  # so many epochs, but no more steps than this, or than one epoch has
RATE = 0.03  # of Adam, times the spread of the directions' entries; it falls to 0
TEMPERATURE = 0.1  # of the similarities
SOFT = 0.8  # share of the targets that is spread over items alike
ALIKE = 0.1  # temperature of that likeness


def refined(
    spaces: list[CommonSpace], x: Tensor, y: Tensor, fold: npt.NDArray[np.uint8], trust: FloatArray
) -> list[CommonSpace]:
    """The spaces with refined directions; as they are if there are too few trusted pairs.

    Args:
        spaces: The space of each fold, fitted without it.
        x: (n, D) left items, centred and of unit length.
        y: (n, E) right items.
        fold: (n,) fold of each pair.
        trust: (n,) probability that each pair matches.
    """
    if (trust >= MATCH_THRESHOLD).sum() < ENOUGH:
        return spaces
    weight = torch.from_numpy(trust).to(x)

    def refine(number: int) -> CommonSpace:
        rows = np.flatnonzero((fold != number) & (trust >= MATCH_THRESHOLD))
        return _refined(spaces[number], x, y, weight, rows, np.random.default_rng(number))

    return list(parallel_map(refine, range(len(spaces))))


def _refined(
    space: CommonSpace, x: Tensor, y: Tensor, weight: Tensor, rows: npt.NDArray[np.int64], rng: np.random.Generator
) -> CommonSpace:
    """One space, trained on some rows."""
    directions = [side.clone().requires_grad_() for side in (space.left, space.right)]
    rates = [RATE * float(side.std()) for side in (space.left, space.right)]
    optimizer = torch.optim.Adam([{"params": [side]} for side in directions])
    in_epoch = len(rows) // BATCH
    steps = min(EPOCHS * in_epoch, max(ENOUGH_STEPS, in_epoch))
    for step in range(steps):
        if step % in_epoch == 0:
            rows = rng.permutation(rows)
        start = step % in_epoch * BATCH
        here = torch.from_numpy(rows[start : start + BATCH]).to(x.device)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - step / steps)
        optimizer.zero_grad()
        loss = contrastive_loss(x[here], y[here], directions[0], directions[1], weight[here])
        torch.autograd.backward(loss)
        optimizer.step()
    return replace(space, refined_left=directions[0].detach(), refined_right=directions[1].detach())


def contrastive_loss(x: Tensor, y: Tensor, left: Tensor, right: Tensor, weight: Tensor) -> Tensor:
    """InfoNCE of a batch with soft targets, both ways added.

    Args:
        x: (B, D) left items, of unit length.
        y: (B, E) their partners.
        left: (D, k) directions.
        right: (E, k) directions.
        weight: (B,) how much each pair counts.
    """
    similar = normalize(x @ left, dim=1) @ normalize(y @ right, dim=1).T / TEMPERATURE
    alike = (torch.softmax(x @ x.T / ALIKE, dim=1) + torch.softmax(y @ y.T / ALIKE, dim=1)) / 2
    target = SOFT * alike
    target.diagonal().add_(1 - SOFT)
    both = log_softmax(similar, dim=1) + log_softmax(similar.T, dim=1)
    return -(weight * (target * both).sum(1)).mean()
