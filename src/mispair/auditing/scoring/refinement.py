"""Refine common spaces to tell partners from other items.

Canonical correlation asks how much partners have in common; contrast asks whether an item is closer to its partner than
to others. So the directions are trained for a moment with the contrastive loss InfoNCE (van den Oord et al., 2018).
Only pairs that likely match take part, and each fold's space is refined without that fold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import normalize

from mispair.auditing.scoring.common_space import CommonSpace
from mispair.auditing.scoring.folds import FOLDS, in_random_order
from mispair.compute.threads import parallel_map
from mispair.functional.logistic import FloatArray
from mispair.pairs.pairs import MATCH_THRESHOLD
from mispair.support.arrays import IntArray
from mispair.support.progress import tracked

ENOUGH = 2000  # trusted pairs; below, refined spaces remember their pairs instead of learning
BATCH = 256
AT_ONCE = 2  # spaces that a core refines at a time, a divisor of FOLDS
EPOCHS, ENOUGH_STEPS = 2, 30  # so many epochs, but no more steps than this, or than one epoch has
RATE = 0.03  # of Adam, times the spread of the directions' entries; it falls to 0
DECAYS = (0.9, 0.999)  # of Adam's running means
TEMPERATURE = 0.1  # of the similarities
MOST_ROWS = 1 << 40  # of a data set


def refined(
    spaces: list[CommonSpace],
    x: Tensor,
    y: Tensor,
    fold: npt.NDArray[np.uint8],
    trust: FloatArray,
    numbers: IntArray,
) -> list[CommonSpace]:
    """Refine the directions of spaces; unchanged if there are too few trusted pairs.

    Each space was fitted without a fold of the pairs (n, D) and (n, E), and is refined without it. `numbers` (n,) are
    the rows of the pairs.
    """
    rows = np.flatnonzero(trust >= MATCH_THRESHOLD)
    if len(rows) < ENOUGH:
        return spaces
    batches = [torch.from_numpy(batch).to(x.device) for batch in _batches(rows, numbers)]
    weight = torch.from_numpy(trust * (fold != np.arange(FOLDS)[:, None])).to(x)
    at_once = FOLDS if x.device.type == "cuda" else AT_ONCE
    parts = [slice(start, start + at_once) for start in range(0, len(spaces), at_once)]
    found = parallel_map(lambda part: _refined(spaces[part], weight[part], x, y, batches), parts)
    return [space for _ in tracked(parts) for space in next(found)]


def _refined(
    spaces: list[CommonSpace], weight: Tensor, x: Tensor, y: Tensor, batches: Sequence[Tensor]
) -> list[CommonSpace]:
    """Refine F spaces, each by itself; `weight` (F, n) is how much each pair counts in each."""
    sides = [torch.stack([space.left for space in spaces]), torch.stack([space.right for space in spaces])]
    rates = [RATE * side.std(dim=(1, 2), keepdim=True) for side in sides]
    moments = [(torch.zeros_like(side), torch.zeros_like(side)) for side in sides]
    for step, rows in enumerate(batches):
        with torch.enable_grad():
            left, right = (side.requires_grad_() for side in sides)
            gradients = torch.autograd.grad(contrastive_loss(x[rows], y[rows], left, right, weight[:, rows]), sides)
        sides = [side.detach() for side in sides]
        for side, gradient, rate, moment in zip(sides, gradients, rates, moments, strict=True):
            adam_step(side, gradient, moment, rate * (1 - step / len(batches)), step + 1)
    return [replace(space, refined_left=a, refined_right=b) for space, a, b in zip(spaces, *sides, strict=True)]


def _batches(rows: IntArray, numbers: IntArray) -> list[IntArray]:
    """Rows of each step, in the order of random keys of their numbers (n,)."""
    in_epoch = len(rows) // BATCH
    steps = min(EPOCHS * in_epoch, max(ENOUGH_STEPS, in_epoch))
    batches: list[IntArray] = []
    for epoch in range(math.ceil(steps / in_epoch)):
        rows = in_random_order(rows, numbers + epoch * MOST_ROWS)
        batches += np.split(rows[: in_epoch * BATCH], in_epoch)
    return batches[:steps]


def adam_step(values: Tensor, gradient: Tensor, moments: tuple[Tensor, Tensor], rate: Tensor, step: int) -> None:
    """Take one step of Adam (Kingma and Ba, 2015) in place, with running moments from 0 and steps from 1.

    That of torch imports its compiler first, which takes longer than an audit of a thousand pairs.
    """
    mean, square = moments
    mean.lerp_(gradient, 1 - DECAYS[0])
    square.mul_(DECAYS[1]).addcmul_(gradient, gradient, value=1 - DECAYS[1])
    spread = (square / (1 - DECAYS[1] ** step)).sqrt_().add_(1e-8)
    values.addcmul_(mean / spread, rate, value=-1 / (1 - DECAYS[0] ** step))


def contrastive_loss(x: Tensor, y: Tensor, left: Tensor, right: Tensor, weight: Tensor) -> Tensor:
    """Mean InfoNCE of pairs (B, D) and (B, E) in spaces (F, D, k) and (F, E, k), weighted by (F, B).

    Pairs with weight 0 are not there for the others either.
    """
    there = (weight > 0).to(weight)[:, :, None]
    a, b = normalize(x @ left, dim=2), normalize(y @ right, dim=2)
    logits = a @ b.mT / TEMPERATURE
    each = logits.exp()  # bounded, as the similarities are
    others = ((each @ there).log() + (each.mT @ there).log())[:, :, 0]
    return (weight * (others - 2 * logits.diagonal(dim1=1, dim2=2))).sum() / len(x)
