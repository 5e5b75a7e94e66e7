"""Upper bound for comparisons: plain training on the pairs known to match."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from mispair.errors import DataError, TooFewError
from mispair.methods.plain import Plain
from mispair.pairs.pairs import Pairs
from mispair.support.arrays import IntArray


def matched_pairs(pairs: Pairs) -> IntArray:
    """Return the pairs known to match; raise if they are too few to train on."""
    if pairs.mismatched is None:
        what = "it is not known which pairs match, and the training uses only these"
        raise DataError(what, where=pairs.name, advice="Inject noise with `noise_ratio`.")
    matched = np.flatnonzero(~pairs.mismatched)
    images = len(np.unique(pairs.left_groups[pairs.link[matched]]))
    if images < 2:
        what = f"{len(matched):,} of {len(pairs):,} pairs match, with {images} different left items"
        expected = "at least 2, as the training uses only these"
        raise TooFewError(what, where=pairs.name, expected=expected, advice="Lower `noise_ratio`.")
    return matched


class Oracle(Plain):
    """Plain training on the pairs known to match: the upper bound."""

    uses_truth = True

    @cached_property
    def unflagged(self) -> IntArray:
        return matched_pairs(self.loader.pairs)
