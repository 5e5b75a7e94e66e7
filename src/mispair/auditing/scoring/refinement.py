"""Refine common spaces to tell partners from other items.

Canonical correlation asks how much partners have in common; contrast and similarity ask whether an item is closer to
its partner than to others. So the directions are trained for a moment with the contrastive loss InfoNCE
(van den Oord et al., 2018). Its targets are soft: similar items of one side are partly right as well, as in the
uni-modal soft labels of CUSA (Huang et al., 2024). Only pairs that likely match take part, and each
fold's space is refined without that fold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mispair.auditing.scoring.common_space import CommonSpace
from mispair.auditing.scoring.folds import FOLDS, ONE_OUT, in_random_order
from mispair.compute.threads import parallel_each, parallel_map
from mispair.functional.logistic import FloatArray
from mispair.pairs.pairs import MATCH_THRESHOLD
from mispair.support.arrays import IntArray
from mispair.support.progress import tracked

ENOUGH = 2000  # trusted pairs; below, refined spaces remember their pairs instead of learning
BATCH = 256
PREPARED = 8  # batches held at a time
AT_ONCE = 2  # spaces that a core refines at a time, a divisor of FOLDS
EPOCHS, ENOUGH_STEPS = 2, 30  # so many epochs, but no more steps than this, or than one epoch has
RATE = 0.03  # of Adam, times the spread of the directions' entries; it falls to 0
DECAYS = (0.9, 0.999)  # of Adam's running means
TEMPERATURE = 0.1  # of the similarities
SOFT = 0.8  # share of the targets that is spread over items alike
ALIKE = 0.1  # temperature of that likeness
MOST_ROWS = 1 << 40  # of a data set
LEAST = 1e-30  # sum of a softmax of which no item takes part


def refined(
    spaces: list[CommonSpace],
    x: Tensor,
    y: Tensor,
    fold: npt.NDArray[np.uint8],
    trust: FloatArray,
    numbers: IntArray,
    without: Sequence[Sequence[int]] = ONE_OUT,
) -> list[CommonSpace]:
    """Refine the directions of spaces; unchanged if there are too few trusted pairs.

    Each space was fitted `without` some folds of the pairs (n, D) and (n, E), and is refined without them. Every
    `FOLDS` spaces in a row have equally many directions. `numbers` (n,) are the rows of the pairs.
    """
    rows = np.flatnonzero(trust >= MATCH_THRESHOLD)
    if len(rows) < ENOUGH:
        return spaces
    batches = _batches(rows, numbers)
    weight = torch.from_numpy(trust * ~np.stack([np.isin(fold, out) for out in without])).to(x)
    at_once = FOLDS if x.device.type == "cuda" else AT_ONCE
    parts = [slice(start, start + at_once) for start in range(0, len(spaces), at_once)]
    learners = [Learner(spaces[part], weight[part], len(batches)) for part in parts]

    def prepared(batch: IntArray) -> Batch:
        here = torch.from_numpy(batch).to(x.device)
        return Batch.of(here, x[here], y[here])

    for start in tracked(range(0, len(batches), PREPARED)):
        some = list(parallel_map(prepared, batches[start : start + PREPARED]))
        parallel_each(partial(Learner.learn, batches=some), learners)
    return [space for learner in learners for space in learner.spaces()]


def _batches(rows: IntArray, numbers: IntArray) -> list[IntArray]:
    """Rows of each step, in the order of random keys of their numbers (n,)."""
    in_epoch = len(rows) // BATCH
    steps = min(EPOCHS * in_epoch, max(ENOUGH_STEPS, in_epoch))
    batches: list[IntArray] = []
    for epoch in range(math.ceil(steps / in_epoch)):
        rows = in_random_order(rows, numbers + epoch * MOST_ROWS)
        batches += np.split(rows[: in_epoch * BATCH], in_epoch)
    return batches[:steps]


@dataclass(frozen=True)
class Batch:
    """Pairs of a step."""

    rows: Tensor  # (B,)
    x: Tensor  # (B, D) left items, of unit length
    y: Tensor  # (B, E) their partners
    alike: tuple[Tensor, Tensor]  # (B, B) how alike left items are, and how right items are: 1 for equal ones

    @classmethod
    def of(cls, rows: Tensor, x: Tensor, y: Tensor) -> Batch:
        return cls(rows, x, y, (_alike(x), _alike(y)))


def _alike(items: Tensor) -> Tensor:
    return ((items @ items.T - 1) / ALIKE).exp_()


class Learner:
    """Refines some of the spaces, each for itself."""

    def __init__(self, spaces: list[CommonSpace], weight: Tensor, steps: int) -> None:
        """Take F spaces, and how much each of n pairs counts in each, (F, n)."""
        self._spaces, self._weight, self._steps, self._done = spaces, weight, steps, 0
        self._left = torch.stack([space.left for space in spaces])
        self._right = torch.stack([space.right for space in spaces])
        both = self._left, self._right
        self._rates = [RATE * side.std(dim=(1, 2), keepdim=True) for side in both]
        self._moments = [(torch.zeros_like(side), torch.zeros_like(side)) for side in both]

    def learn(self, batches: Sequence[Batch]) -> None:
        """A step with each batch."""
        for batch in batches:
            gradients = contrastive_gradients(batch, self._left, self._right, self._weight[:, batch.rows])
            left = 1 - self._done / self._steps
            self._done += 1
            each = zip((self._left, self._right), gradients, self._rates, self._moments, strict=True)
            for side, gradient, rate, moment in each:
                adam_step(side, gradient, moment, rate * left, self._done)

    def spaces(self) -> list[CommonSpace]:
        """The spaces with refined directions."""
        each = zip(self._spaces, self._left, self._right, strict=True)
        return [replace(space, refined_left=left, refined_right=right) for space, left, right in each]


def adam_step(values: Tensor, gradient: Tensor, moments: tuple[Tensor, Tensor], rate: Tensor, step: int) -> None:
    """Take one step of Adam (Kingma and Ba, 2015) in place, with running moments from 0 and steps from 1.

    That of torch imports its compiler first, which takes longer than an audit of a thousand pairs.
    """
    for moment, decay, value in zip(moments, DECAYS, (gradient, gradient.square()), strict=True):
        moment.lerp_(value, 1 - decay)
    mean, square = (moment / (1 - decay**step) for moment, decay in zip(moments, DECAYS, strict=True))
    values -= rate * mean / (square.sqrt() + 1e-8)


def contrastive_gradients(batch: Batch, left: Tensor, right: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients (F, D, k) and (F, E, k) of InfoNCE of a batch with soft targets, both ways added, in F spaces.

    With a, b the items of a batch in a space and of unit length, s = a b' / TEMPERATURE, and t_ij the targets, SOFT
    times how alike i and j are and 1 - SOFT more for i = j:

        loss = -1/B sum_i w_i sum_j t_ij (log softmax_j s_ij + log softmax_j s_ji)

    The weights w are (F, B); pairs with weight 0 are not there for the others either.
    """
    x, y = batch.x, batch.y
    part = (weight > 0).to(x)[:, :, None]
    share = weight[:, :, None] / (len(x) * TEMPERATURE)
    (a, long), (b, wide) = (_unit(items @ side) for items, side in ((x, left), (y, right)))
    # The targets of a row add up to 1, so that the derivative of each softmax is what it predicts less the target.
    # Cosines over the temperature are no more than 10: their exponentials need no shift.
    slope = torch.bmm(a / TEMPERATURE, b.transpose(1, 2)).exp_()
    forth, back = (share / (like @ part).clamp(min=LEAST) for like in (slope, slope.transpose(1, 2)))
    slope *= forth + back.transpose(1, 2)
    for like in batch.alike:
        own = share * (SOFT / 2) / (like @ part).clamp(min=LEAST)
        slope.addcmul_(like, own + own.transpose(1, 2), value=-1)
    slope.diagonal(dim1=1, dim2=2).sub_((1 - SOFT) * 2 * share[:, :, 0])
    to_left, to_right = part * (slope @ (part * b)), part * (slope.transpose(1, 2) @ (part * a))
    return _turned(x, to_left, a, long), _turned(y, to_right, b, wide)


def _unit(items: Tensor) -> tuple[Tensor, Tensor]:
    """Items (F, B, k) of unit length, and their lengths (F, B, 1)."""
    length = torch.linalg.vector_norm(items, dim=2, keepdim=True).clamp(min=1e-12)
    return items / length, length


def _turned(x: Tensor, gradient: Tensor, unit: Tensor, length: Tensor) -> Tensor:
    """The gradient by the directions, from the gradient by the items of unit length."""
    across = (gradient - (gradient * unit).sum(2, keepdim=True) * unit) / length
    return x.T @ across
