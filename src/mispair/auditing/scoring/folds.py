"""Choose rows to learn from, and the fold of each, by row numbers and groups alone.

So neither the cut of the files into shards nor the number of workers can change them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mispair.support.arrays import IntArray

FOLDS = 10
ONE_OUT = [(number,) for number in range(FOLDS)]  # folds that are left out of a fit, one after the other
PART = 1 << 18  # rows at a time
FOLD, SAMPLE, PARTNER, NEAR, SHARED, ORDER = range(6)  # independent streams of random numbers


def random_keys(numbers: IntArray, stream: int) -> npt.NDArray[np.uint64]:
    """A random 64-bit number for each of `numbers`, always the same (splitmix64)."""
    with np.errstate(over="ignore"):
        z = numbers.astype(np.uint64)  # changed in its place, as there may be millions
        z *= np.uint64(8)
        z += np.uint64(stream + 1)
        z *= np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            z ^= z >> np.uint64(shift)
            z *= np.uint64(factor)
        z ^= z >> np.uint64(31)
    return z


def fold_numbers(groups: IntArray) -> npt.NDArray[np.uint8]:
    """Fold of each row. Rows of one group share a fold, so no pair is scored by itself."""
    return (random_keys(groups, FOLD) % np.uint64(FOLDS)).astype(np.uint8)


def sample(rows: IntArray, most: int) -> IntArray:
    """A random sample of the rows, in ascending order."""
    if len(rows) <= most:
        return rows
    chosen = rows[:0]
    for start in range(0, len(rows), PART):  # the lowest keys so far; all keys at once would take much memory
        chosen = np.concatenate([chosen, rows[start : start + PART]])
        chosen = chosen[np.argsort(random_keys(chosen, SAMPLE))[:most]]
    return np.sort(chosen)


def in_random_order(places: IntArray, numbers: IntArray, stream: int = ORDER) -> IntArray:
    """Sort some places by random keys of their numbers: a place more or less leaves the others in their order."""
    return places[random_keys(numbers[places], stream).argsort(kind="stable")]


def shuffled(fold: npt.NDArray[np.uint8], *groups: IntArray, numbers: IntArray | None = None) -> IntArray:
    """For each place (n,) another one of its fold, as its partner in a shuffled pair; -1 if they share a group.

    `numbers` (n,) are the rows in these places and decide the order; by default the places do.
    """
    partner, numbers = np.full(len(fold), -1), np.arange(len(fold)) if numbers is None else numbers
    for number in range(FOLDS):
        places = in_random_order(np.flatnonzero(fold == number), numbers, PARTNER)
        partner[places] = np.roll(places, 1)
    return strangers(partner, *groups)


def strangers(partner: IntArray, *groups: IntArray) -> IntArray:
    """Replace partners (n,) by -1 if they share one of the groups (n,) of several kinds with their place."""
    for numbers in groups:
        partner = np.where(numbers[partner] == numbers, -1, partner)
    return partner
