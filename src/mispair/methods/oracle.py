"""The upper bound: plain training on the pairs that are known to match, to compare other methods with."""

from __future__ import annotations

import numpy as np

from mispair.config import Config
from mispair.errors import ConfigError, DataError
from mispair.methods.base import EpochPairs
from mispair.methods.plain import Plain
from mispair.models import Network
from mispair.pairs.batches import PairLoader
from mispair.pairs.pairs import IntArray, Pairs


def matched_pairs(pairs: Pairs, method: str = "The oracle") -> IntArray:
    """Numbers of the pairs that are known to match, enough of them to train on.

    Raises:
        ConfigError: The truth is not known.
        DataError: They have fewer than two different left items.
    """
    if pairs.mismatched is None:
        raise ConfigError(f"{method} needs pairs whose truth is known; inject noise with --noise-ratio.")
    matched = np.flatnonzero(~pairs.mismatched)
    images = len(np.unique(pairs.left_groups[pairs.link[matched]]))
    if images < 2:
        raise DataError(
            f"{pairs.name}: {len(matched):,} of {len(pairs):,} pairs are matched, with {images} different left items; "
            "it trains on these only and needs at least 2; lower --noise-ratio."
        )
    return matched


class Oracle(Plain):
    """`Plain` without the mismatched pairs."""

    uses_truth = True

    def __init__(self, config: Config, nets: list[Network], loader: PairLoader) -> None:
        super().__init__(config, nets, loader)
        self._matched = EpochPairs(matched_pairs(loader.pairs))

    def begin_warmup(self) -> list[EpochPairs]:
        return [self._matched] * len(self.nets)

    def begin_epoch(self, epoch: int) -> list[EpochPairs]:  # noqa: ARG002 - the same pairs in every epoch
        return self.begin_warmup()
