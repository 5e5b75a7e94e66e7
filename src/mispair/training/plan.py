"""Plan of one epoch of one network: the pairs of each step, in order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mispair.methods.base import EpochPairs, StepPlan
from mispair.support.arrays import IntArray


def plan_epoch(
    pairs: EpochPairs, size: int, order: np.random.Generator, noisy_order: np.random.Generator, first: int | None
) -> list[StepPlan]:
    """Plan all steps of the epoch. A last batch of one pair is left out: it has no negatives.

    `first` is the number of the first main step, None while warming up. A step on noisy pairs alone does not count.
    """
    clean = order.permutation(pairs.clean)
    noisy = noisy_batches(pairs.noisy, size, noisy_order)
    plans: list[StepPlan] = []
    batches = (clean[start : start + size] for start in range(0, len(clean), size))
    for number, batch in enumerate(batch for batch in batches if len(batch) > 1):
        step = None if first is None else first + number
        beside = next(noisy)
        if beside is None or pairs.order == "together":
            plans.append(StepPlan(len(plans), step, batch, beside))
            continue
        both = (batch, False), (beside, True)
        for trained, on_noisy in both if pairs.order == "after" else both[::-1]:
            plans.append(StepPlan(len(plans), step, trained, on_noisy=on_noisy))
    return plans


def noisy_batches(pairs: IntArray, size: int, rng: np.random.Generator) -> Iterator[IntArray | None]:
    """Yield batches of these pairs endlessly, round after round, without repeats in a batch."""
    share = min(size, len(pairs))
    while share > 1:  # one pair alone has no negatives
        order = rng.permutation(pairs)
        for start in range(0, len(order) - share + 1, share):
            yield order[start : start + share]
    while True:
        yield None
