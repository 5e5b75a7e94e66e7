"""Batches of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch.distributed as dist
from torch.utils.data import Sampler

from mispair.errors import InvalidValueError, TooFewError
from mispair.methods.soft_partners import SoftPartners
from mispair.support.arrays import IntArray


class RobustSampler(Sampler[list[int]]):
    """Batches of pair numbers, for `DataLoader(batch_sampler=...)`; made by `Robust.sampler`.

    The order depends on the seed and on `Robust.epoch` alone. All batches have the same size; other pairs are left over
    in each epoch. With several processes each gets its part of every batch.
    """

    drop_last = True  # what accelerate asks of a batch sampler, as it does of `batch_size`

    def __init__(
        self,
        order: Callable[[int], tuple[int, IntArray]],
        count: int,
        batch_size: int,
        rank: int | None = None,
        world: int | None = None,
    ) -> None:
        """A sampler of `count` pairs an epoch; the other arguments are those of `Robust.sampler`.

        Called with the pairs a batch, of all processes, `order` returns the first batch and the pairs of the epoch.
        """
        if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer) or batch_size < 2:
            expected = "a whole number from 2 on: a pair needs negatives"
            raise InvalidValueError(repr(batch_size), where="batch_size", expected=expected)
        several = dist.is_available() and dist.is_initialized()
        self.rank = (dist.get_rank() if several else 0) if rank is None else rank
        self.world = (dist.get_world_size() if several else 1) if world is None else world
        if not 0 <= self.rank < self.world:
            expected = f"0 to {self.world - 1}, because `world` is {self.world}"
            raise InvalidValueError(str(self.rank), where="rank", expected=expected)
        self.order, self.count = order, count
        self.batch_size = min(int(batch_size), count // self.world)
        if self.batch_size < 2:
            raise TooFewError(f"{count:,} pairs", expected=f"two for each of {self.world} processes")

    def __len__(self) -> int:
        return self.count // (self.batch_size * self.world)

    def __iter__(self) -> Iterator[list[int]]:
        """Batches of the present epoch; after `Robust.load_state_dict` the remaining ones."""
        size = self.batch_size * self.world
        first, pairs = self.order(size)
        for number in range(first, len(self)):
            start = number * size + self.rank * self.batch_size
            yield pairs[start : start + self.batch_size].tolist()


def epoch_order(trusted: IntArray, partners: SoftPartners | None, extra: int, rng: np.random.Generator) -> IntArray:
    """The pairs of an epoch: each trusted pair once, and `extra` flagged ones.

    A flagged pair follows the pair that lends it a partner, so that both are in one batch unless it ends between them.
    A lender that is flagged itself takes a place as well.
    """
    order = rng.permutation(trusted)
    if partners is None or not extra:
        return order
    places, lender = partners.draw_lenders(extra, rng)
    own = partners.own[places]
    by_number = order.argsort()
    key = by_number[np.searchsorted(order, lender, sorter=by_number).clip(max=len(order) - 1)]
    is_trusted = order[key] == lender
    key = np.where(is_trusted, key, rng.integers(len(order), size=len(lender)))
    comes = np.stack([~is_trusted, np.ones(len(own), dtype=bool)], axis=1)
    more, keys = (np.stack(two, axis=1)[comes][:extra] for two in ((lender, own), (key, key)))
    place = np.concatenate([np.arange(len(order)), keys])
    return np.asarray(np.concatenate([order, more])[place.argsort(kind="stable")])
