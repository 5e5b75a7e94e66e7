"""Find items in several pairs, before anything is learned.

A mismatched pair that occurs twice would be scored by what was learned from its copy. So near-duplicates of either side
are found first. Pairs with the same two items count once, pairs that
share one item are in one fold, and an item whose partners have nothing in common (a placeholder image, a boilerplate
caption) is left out of the learning.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import betaincinv

from mispair.auditing.scoring.folds import FOLDS, SHARED, random_keys, sample
from mispair.auditing.scoring.judge import inliers, mean_of
from mispair.auditing.scoring.near_duplicates import (
    Codes,
    DisjointSets,
    Groups,
    find_near_duplicate_images,
    find_near_duplicates,
    joined_groups,
    sketch,
)
from mispair.auditing.scoring.scan import READABLE, block_size, faults
from mispair.compute.threads import one_thread_each, parallel_map
from mispair.pairs.source import Source
from mispair.support.arrays import FloatArray, IntArray, Mask
from mispair.support.files import replacing
from mispair.support.progress import stage_part, tracked

NEAR = 0.98  # cosine of near-duplicates, where vectors have many directions
BY_ACCIDENT = 0.01  # near-duplicates that a row may have by accident; with few directions they must be nearer
SAMPLED = 2048  # rows by which the mean and the number of directions of a side are estimated
MOST_OF_ALL = 1 / (2 * FOLDS)  # share of the pairs that one group may have, so that folds stay possible
MANY = 8  # partners from which on an item may be a placeholder; captions of one image are five to seven
LOOKED_AT, RANDOM = 64, 256  # partners of an item that are compared with each other, and with so many random ones
COMPARED = 1 << 17  # partners that are looked at in all, those of the most shared items first
# Probability of two partners of an item being more similar than one of them and a random one: 0.5 if unrelated. On
# MS-COCO with k partners: images of random captions 0.50 with a standard deviation of 0.45 / k, images whose
# captions name a dog 0.63, a train 0.87; captions of dogs 0.90.
ALIKE, ALIKE_BY_ACCIDENT = 0.52, 0.55
MOST_UNLIKE = 0.5  # share of the pairs that may be of such items, without those of the most shared one
ONE_ITEM = 0.95  # mean cosine of near-duplicates with their mean, below which they are a chain of different items


@dataclass(frozen=True)
class SharedItems:
    """Rows with common items."""

    left: IntArray  # (N,) first row with (nearly) the same left item as each row, or of its given group
    right: IntArray  # (N,) first row with the same right item
    first: IntArray  # (N,) first row with the same two items: of these only one is learned from
    # (N,) first row of the rows that are in one fold; a count of groups would change with each near-duplicate before it
    groups: IntArray
    # (2, N) for rows whose left (right) item has many partners with nothing in common: how many, else 0
    unlike: npt.NDArray[np.int32]
    # groups of rows whose left items, and whose right items, are nearly the same
    near_duplicates: tuple[Groups, Groups]
    split: int  # rows of groups that were too large for a fold, and were split

    @cached_property
    def partners(self) -> npt.NDArray[np.int32]:
        """(N,) number of the unlike partners of the more shared item of each row, 0 for nearly all."""
        return np.asarray(self.unlike.max(axis=0))

    @cached_property
    def is_first(self) -> Mask:
        """(N,) whether no row before has the same two items."""
        return np.asarray(self.first == np.arange(len(self.first)))

    @classmethod
    def apart(cls, rows: int) -> SharedItems:
        """Rows without common items."""
        own, unlike = np.arange(rows), np.zeros((2, rows), dtype=np.int32)
        return cls(own, own, own, own, unlike, (Groups.none(), Groups.none()), 0)

    def save(self, path: Path) -> None:
        """Writes everything to an .npz file."""
        groups = {f"{name}_{side}": value for side, found in enumerate(self.near_duplicates)
                  for name, value in vars(found).items()}  # fmt: skip
        plain = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        with replacing(path) as file:
            np.savez(file, allow_pickle=False, split=np.array(self.split), **plain, **groups)

    @classmethod
    def load(cls, path: Path, rows: int) -> SharedItems | None:
        """Back from `save`; None if it is not there or not whole."""
        names = ("left", "right", "first", "groups", "unlike")
        try:
            with np.load(path, allow_pickle=False) as saved:
                arrays = {name: saved[name] for name in names}
                groups = [Groups(saved[f"rows_{side}"], saved[f"starts_{side}"]) for side in range(2)]
                split = int(saved["split"])
        except Exception:  # a damaged archive raises almost anything
            return None
        if any(arrays[name].shape[-1] != rows for name in names):
            return None
        return cls(**arrays, near_duplicates=(groups[0], groups[1]), split=split)


def find_shared_items(source: Source, *, workers: int, device: torch.device) -> SharedItems:
    """Find near-duplicates on both sides in one pass over all rows, and derive the shared items."""
    rows = sample(np.delete(np.arange(len(source)), source.known_rows), SAMPLED)
    sides = source.gather(rows)
    good = faults(torch.from_numpy(sides[0]), torch.from_numpy(sides[1])) == READABLE
    if not good.any():
        return combined((Groups.none(), Groups.none()), source, np.ones(len(source), dtype=bool), [])
    some = [SomeVectors.of(side[good]) for side in sides]
    with stage_part(0.5):
        codes, unreadable = _sketches(source, some, workers, device)

    def search(side: int) -> Groups:
        return _near_duplicates(source, side, codes[side], unreadable, some[side], device)

    left, right = parallel_map(search, range(2), min(2, workers))
    return combined((left, right), source, unreadable, some)


@dataclass(frozen=True)
class SomeVectors:
    """Random vectors of one side."""

    mean: FloatArray  # (D,) without outliers
    units: FloatArray  # (n, D) centred, of unit length

    @classmethod
    def of(cls, vectors: npt.NDArray[np.float32]) -> SomeVectors:
        mean = mean_of(inliers(torch.from_numpy(vectors))).numpy().astype(np.float64)
        return cls(mean, _units(vectors, mean))


def _sketches(source: Source, some: list[SomeVectors], workers: int, device: torch.device) -> tuple[Codes, Mask]:
    """(2, N) codes of both sides, and the unreadable rows."""
    codes, unreadable = np.zeros((2, len(source)), dtype=np.uint64), np.ones(len(source), dtype=bool)
    there = [torch.from_numpy(side.mean.astype(np.float32)).to(device) for side in some]

    def block(start: int) -> tuple[Mask, list[Codes]]:
        sides = source.tensors(slice(start, min(start + size, len(source))), device)
        good = faults(*sides) == READABLE
        vectors = sides if good.all() else (side.nan_to_num(0.0, 0.0, 0.0) for side in sides)
        return good, [sketch(side, mean) for side, mean in zip(vectors, there, strict=True)]

    size = block_size(device)
    starts = range(0, len(source), size)
    for start, (good, found) in zip(tracked(starts), parallel_map(block, starts, workers), strict=True):
        here = slice(start, start + len(good))
        unreadable[here] = ~good
        codes[0, here], codes[1, here] = found
    unreadable[list(source.known)] = True
    return codes, unreadable


def _near_duplicates(
    source: Source, side: int, codes: Codes, unreadable: Mask, some: SomeVectors, device: torch.device
) -> Groups:
    """Groups of near-duplicates on one side, with one row for each given group of left items."""
    vectors, groups = (source.left, source.right)[side], source.groups
    leave_out = unreadable.copy()
    if side == 0 and groups is not None:
        leave_out[:] = True
        leave_out[_first_readable(groups, unreadable)] = False
    threshold = near_enough(some.units, len(codes))
    found = find_near_duplicates(codes, vectors.gather, threshold, mean=some.mean, leave_out=leave_out, device=device)
    if side or source.hashes is None:
        return found
    seen = find_near_duplicate_images(source.hashes, vectors.gather, mean=some.mean, leave_out=leave_out, device=device)
    return joined_groups([found, seen], len(source))


def _first_readable(groups: IntArray, unreadable: Mask) -> IntArray:
    """The first readable row of each group."""
    readable = np.flatnonzero(~unreadable)
    return readable[np.unique(groups[readable], return_index=True)[1]]


def near_enough(units: FloatArray, rows: int) -> float:
    """Smallest cosine of near-duplicates among `rows` vectors: hardly reached by accident, at least 0.98.

    The mean squared cosine of random vectors is one over the number of directions that they use; `units` (n, D) are
    some of them, centred and of unit length. The share of a sphere of that dimension within an angle of a point is a
    regularised incomplete beta function.
    """
    units = np.asarray(units, dtype=np.float32)
    cosines = units @ units.T
    equal = ~(cosines < 1 - 1e-6)  # which say nothing about how near different ones are
    np.fill_diagonal(equal, True)
    cosines[equal] = 0
    different = equal.size - np.count_nonzero(equal)
    squares = float(np.square(cosines, out=cosines).sum(dtype=np.float64))
    directions = 1 / max(squares / different, 1e-9) if different else 1.0
    if directions < 1.5:
        return 1.0
    squared_sine = float(betaincinv((directions - 1) / 2, 0.5, min(1.0, 2 * BY_ACCIDENT / rows)))
    return float(np.clip(np.sqrt(max(0.0, 1 - squared_sine)), NEAR, 1))


def combined(
    near_duplicates: tuple[Groups, Groups], source: Source, unreadable: Mask, some: list[SomeVectors], others: int = 0
) -> SharedItems:
    """Derive the shared items from the near-duplicates of either side; unreadable rows share nothing.

    `some` are random vectors of either side, and `others` counts pairs outside the source that share no item.
    """
    rows, groups = len(source), source.groups
    left, right = (_items(found, rows) for found in near_duplicates)
    if groups is not None:  # near-duplicates were searched among the first readable rows of the groups
        stands_for = np.arange(int(groups.max()) + 1) + rows  # groups without such a row
        chosen = _first_readable(groups, unreadable)
        stands_for[groups[chosen]] = left[chosen]
        left = _lowest(stands_for[groups])
    first = _first_pairs(left, right)
    distinct = np.flatnonzero((first == np.arange(rows)) & ~unreadable)
    unlike = np.zeros((2, rows), dtype=np.int32)
    for side, own in enumerate((left, right) if some else ()):
        unlike[side] = _unlike_partners(source, side, own, distinct, some, others)
    # Placeholders are not learned from, so they need not be in the fold of others that share them.
    links = [np.where(unlike[side] > 0, np.arange(rows), own) for side, own in enumerate((left, right))]
    apart = np.arange(rows) if groups is None else np.where(unlike[0] > 0, rows + np.arange(rows), groups)
    joined, split = _joined(links, distinct, _lowest(apart))
    return SharedItems(left, right, first, joined[first], unlike, near_duplicates, split)


def _items(found: Groups, rows: int) -> IntArray:
    """(N,) the first row of the group of each row; itself without a group."""
    items = np.arange(rows)
    items[found.rows] = np.repeat(found.rows[found.starts[:-1]], np.diff(found.starts))
    return items


def _lowest(labels: IntArray) -> IntArray:
    """(N,) the first row with the same label as each row."""
    _, first, label = np.unique(labels, return_index=True, return_inverse=True)
    return np.asarray(first[label])


def _first_pairs(left: IntArray, right: IntArray) -> IntArray:
    """(N,) the first row with the same left and the same right item as each row."""
    rows = np.arange(len(left))
    several = np.flatnonzero(_is_shared(left) & _is_shared(right))
    first = rows.copy()
    first[several] = several[_lowest(left[several] * len(left) + right[several])]
    return first


def _is_shared(items: IntArray) -> Mask:
    return np.asarray(np.bincount(items, minlength=len(items))[items] > 1)


def _joined(links: list[IntArray], distinct: IntArray, given: IntArray) -> tuple[IntArray, int]:
    """First row of the connected rows of each row (N,), and the number of rows in split groups.

    Whatever is connected becomes one group, by the first row with the same item on either side (`links`). Where that
    has more pairs than a fold can have, its items are joined one by one, the least shared first, as long as no group
    becomes too large. `given` (N,) is the first row of each group that must not be split.
    """
    rows = np.arange(len(given))
    sets = DisjointSets(rows.copy())
    for items in links:
        shared = np.flatnonzero(items != rows)
        sets.join(shared, items[shared])
    joined = sets.find(rows)
    most = max(1, int(MOST_OF_ALL * len(distinct)))
    large = (np.bincount(joined[distinct], minlength=len(rows)) > most)[joined]
    if not large.any():
        return joined, 0
    inside = distinct[large[distinct]]
    joined[large] = rows[large]
    joined[inside] = inside[_joined_while_small([items[inside] for items in links], _lowest(given[inside]), most)]
    return joined, int(large.sum())


def _joined_while_small(items: list[IntArray], given: IntArray, most: int) -> IntArray:
    """The first of n rows in the group of each, (n,): rows of one item are joined while no group outgrows `most`."""
    tops, sizes = given.tolist(), np.bincount(given, minlength=len(given)).tolist()
    sides = np.concatenate([items[0], items[0].max() + 1 + items[1]])
    order = np.argsort(sides, kind="stable")
    starts = np.flatnonzero(np.diff(sides[order], prepend=-1))
    counts = np.diff(starts, append=len(order))
    usable = np.flatnonzero((counts > 1) & (counts <= most))

    def top(row: int) -> int:
        while tops[row] != row:
            tops[row] = row = tops[tops[row]]
        return row

    for which in usable[np.argsort(counts[usable], kind="stable")].tolist():
        members = order[starts[which] : starts[which] + counts[which]] % len(given)
        found = {top(row) for row in members.tolist()}
        size = sum(sizes[row] for row in found)
        if len(found) > 1 and size <= most:
            lowest = min(found)
            sizes[lowest] = size
            for row in found:
                tops[row] = lowest
    return np.array([top(row) for row in range(len(given))], dtype=np.int64)


def _unlike_partners(
    source: Source, side: int, own: IntArray, distinct: IntArray, some: list[SomeVectors], others: int
) -> npt.NDArray[np.int32]:
    """(N,) number of partners of each row's item on one side if these have nothing in common, else 0."""
    partners = np.bincount(own[distinct], minlength=len(own))
    items = np.flatnonzero(partners >= MANY)
    items = items[np.argsort(-partners[items], kind="stable")]
    items = items[np.cumsum(np.minimum(partners[items], LOOKED_AT)) <= COMPARED]
    members = distinct[np.isin(own[distinct], items)]
    members = members[np.lexsort((random_keys(members, SHARED), own[members]))]
    starts = np.searchsorted(own[members], items)
    sides = source.left, source.right
    strangers = some[1 - side].units[:RANDOM]
    unlike = np.zeros(len(own), dtype=np.int32)
    for item, start in zip(items.tolist(), starts.tolist(), strict=True):
        rows = members[start : start + min(int(partners[item]), LOOKED_AT)]
        one, other = (_units(sides[which].gather(rows), some[which].mean) for which in (side, 1 - side))
        if likeness(other, strangers) < ALIKE + ALIKE_BY_ACCIDENT / len(rows) and _are_one_item(one):
            unlike[item] = partners[item]
    # Where most pairs would be of such items, these vectors do not show what the partners have in common. But one item
    # alone may be in any number of pairs.
    most = int(unlike.max(initial=0))
    few = unlike.sum() - most <= MOST_UNLIKE * (len(distinct) + others - most)
    return unlike[own] if few else np.zeros_like(unlike)


def likeness(units: FloatArray, strangers: FloatArray) -> float:
    """Probability of two of these vectors being more similar than one of them and a random vector: 0.5 for random
    vectors."""
    those, others = torch.from_numpy(units), torch.from_numpy(strangers)
    with one_thread_each():  # several threads would wait for each other longer than so small a product takes
        within, outside = (those @ those.T).numpy(), np.sort((those @ others.T).numpy(), axis=1)
    several = ~np.eye(len(units), dtype=bool)
    below = [
        (np.searchsorted(random, row, "left") + np.searchsorted(random, row, "right")) / (2 * len(random))
        for row, random in zip(within, outside, strict=True)
    ]
    return float(np.stack(below)[several].mean())


def _are_one_item(units: FloatArray) -> bool:
    """Whether near-duplicates are near their mean, not a chain of neighbours."""
    centre = units.mean(0)
    length = float(np.linalg.norm(centre))
    return not units.any() or length >= ONE_ITEM


def _units(vectors: FloatArray, mean: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Centred vectors of unit length; a vector equal to the mean stays zero."""
    centred = vectors.astype(np.float64) - mean
    lengths = np.linalg.norm(centred, axis=1, keepdims=True)
    return np.asarray(centred / np.where(lengths == 0, 1, lengths))
