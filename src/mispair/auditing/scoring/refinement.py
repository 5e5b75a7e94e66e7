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

from mispair.auditing.scoring.common_space import CommonSpace
from mispair.data.pairs import MATCH_THRESHOLD
from mispair.functional.logistic import FloatArray

ENOUGH = 2000  # trusted pairs; below, refined spaces remember their pairs instead of learning
BATCH = 256
EPOCHS, ENOUGH_STEPS = 2, 30  # so many epochs, but no more steps than this, or than one epoch has
RATE = 0.03  # of Adam, times the spread of the directions' entries; it falls to 0
DECAYS = (0.9, 0.999)  # of Adam's running means
TEMPERATURE = 0.1  # of the similarities
SOFT = 0.8  # share of the targets that is spread over items alike
ALIKE = 0.1  # temperature of that likeness
ABSENT = 1e4  # taken from the similarity of items that do not take part


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
    rows = np.flatnonzero(trust >= MATCH_THRESHOLD)
    if len(rows) < ENOUGH:
        return spaces
    weight = torch.from_numpy(trust).to(x)
    other_fold = torch.from_numpy(fold[None, :] != np.arange(len(spaces))[:, None]).to(x)
    directions = [torch.stack([space.left for space in spaces]), torch.stack([space.right for space in spaces])]
    rates = [RATE * side.std(dim=(1, 2), keepdim=True) for side in directions]
    moments = [(torch.zeros_like(side), torch.zeros_like(side)) for side in directions]
    in_epoch = len(rows) // BATCH
    steps = min(EPOCHS * in_epoch, max(ENOUGH_STEPS, in_epoch))
    rng = np.random.default_rng(0)
    for step in range(steps):
        if step % in_epoch == 0:
            rows = rng.permutation(rows)
        start = step % in_epoch * BATCH
        here = torch.from_numpy(rows[start : start + BATCH]).to(x.device)
        gradients = contrastive_gradients(
            x[here], y[here], directions[0], directions[1], weight[here] * other_fold[:, here]
        )
        for side, gradient, rate, moment in zip(directions, gradients, rates, moments, strict=True):
            adam_step(side, gradient, moment, rate * (1 - step / steps), step + 1)
    pairs = zip(spaces, *directions, strict=True)
    return [replace(space, refined_left=left, refined_right=right) for space, left, right in pairs]


def adam_step(values: Tensor, gradient: Tensor, moments: tuple[Tensor, Tensor], rate: Tensor, step: int) -> None:
    """One step of Adam (Kingma and Ba, 2015), in place.

    That of torch imports its compiler first, which takes longer than an audit of a thousand pairs.

    Args:
        values: What is learned.
        gradient: Of the loss.
        moments: Running means of the gradient and of its square, from 0.
        rate: Of learning.
        step: Number of this step, from 1.
    """
    for moment, decay, value in zip(moments, DECAYS, (gradient, gradient.square()), strict=True):
        moment.lerp_(value, 1 - decay)
    mean, square = (moment / (1 - decay**step) for moment, decay in zip(moments, DECAYS, strict=True))
    values -= rate * mean / (square.sqrt() + 1e-8)


def contrastive_gradients(x: Tensor, y: Tensor, left: Tensor, right: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of InfoNCE of a batch with soft targets, both ways added, in several spaces at a time.

    With a, b the items of a batch in a space and of unit length, s = a b' / TEMPERATURE, and t_ij the targets, SOFT
    times how alike i and j are and 1 - SOFT more for i = j:

        loss = -1/B sum_i w_i sum_j t_ij (log softmax_j s_ij + log softmax_j s_ji)

    Args:
        x: (B, D) left items, of unit length.
        y: (B, E) their partners.
        left: (F, D, k) directions of each space.
        right: (F, E, k) directions.
        weight: (F, B) how much each pair counts; those that count nothing are not there for the others either.

    Returns:
        (F, D, k) and (F, E, k).
    """
    part = (weight > 0).to(x)
    target = (_alike(x, part) + _alike(y, part)) * (SOFT / 2)
    target.diagonal(dim1=1, dim2=2).add_(1 - SOFT)
    (a, long), (b, wide) = (_unit(items @ side) for items, side in ((x, left), (y, right)))
    similar = a @ b.transpose(1, 2) / TEMPERATURE
    absent = (part - 1)[:, None, :] * ABSENT
    # The targets of a row add up to 1, so that the derivative of each softmax is what it predicts less the target.
    rows = torch.softmax(similar + absent, dim=2).sub_(target)
    columns = torch.softmax(similar.transpose(1, 2) + absent, dim=2).sub_(target)
    share = weight[:, :, None] / (len(x) * TEMPERATURE)
    slope = share * rows + (share * columns).transpose(1, 2)
    return _turned(x, slope @ b, a, long), _turned(y, slope.transpose(1, 2) @ a, b, wide)


def _alike(items: Tensor, part: Tensor) -> Tensor:
    """(F, B, B) softmax of the likeness of items (B, D) over those that take part (F, B)."""
    like = ((items @ items.T - 1) / ALIKE).exp()
    return like * (part[:, None, :] / (part @ like)[:, :, None])


def _unit(items: Tensor) -> tuple[Tensor, Tensor]:
    """Items (F, B, k) of unit length, and their lengths (F, B, 1)."""
    length = torch.linalg.vector_norm(items, dim=2, keepdim=True).clamp(min=1e-12)
    return items / length, length


def _turned(x: Tensor, gradient: Tensor, unit: Tensor, length: Tensor) -> Tensor:
    """The gradient by the directions, of that by their items of unit length."""
    across = (gradient - (gradient * unit).sum(2, keepdim=True) * unit) / length
    return x.T @ across
