"""Near-duplicates of one side, among up to millions of rows, in bounded memory.

`sketch` makes 64 bits of a row: on which side of 64 random planes its centred vector lies. `find_near_duplicates`
compares rows that agree in three of the eight bytes of these codes, as near-duplicates nearly always do and other rows
hardly ever, and decides by the true cosine. With the threshold of 0.98, two rows of this cosine are compared with this
probability:

    cosine      1.000  0.999  0.995  0.990  0.985  0.980  0.950  0.900  0.500
    compared    1.000  1.000  0.997  0.983  0.958  0.922  0.623  0.244  0.000

Each row of a group is a near-duplicate of some other row of it, not of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, islice, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mispair.data.pairs import FloatArray, IntArray
from mispair.errors import ConfigError

Codes = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]
Gather = Callable[[IntArray], FloatArray]

BITS, BYTES, SHARED = 64, 8, 3  # of a code; how many of its bytes must be equal for a comparison
_SEED = 64
_SLACK = 1.75  # standard deviations by which a pair may differ in more bits than a cosine at the threshold does
_WINDOW = 64  # how many rows behind it in the same bucket a row is compared with, at most
_PATIENCE = 1  # true cosines a row and table: where most rows lie in dense clouds, all of them would take too long
_PART = 1 << 20  # rows at a time
_SKETCHED = 1 << 12  # rows sketched at a time
_GATHERED = 1 << 12  # rows or pairs of rows whose vectors are held at once
_PLACE = 39  # bits for a row's place beside three bytes of its code in one number


@dataclass(frozen=True)
class Groups:
    """Groups of rows, one after the other: there may be millions of them.

    Attributes:
        rows: The rows of the first group in ascending order, then those of the second, and so on.
        starts: Where each group begins in them, and at last their number.
    """

    rows: IntArray
    starts: IntArray

    @classmethod
    def none(cls) -> Groups:
        return cls(np.empty(0, dtype=np.int64), np.zeros(1, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __iter__(self) -> Iterator[IntArray]:
        return (self.rows[start:stop] for start, stop in pairwise(self.starts))

    def first(self, count: int) -> list[IntArray]:
        """The largest groups."""
        return list(islice(self, count))


def sketch(vectors: Tensor, mean: Tensor) -> Codes:
    """The codes of some vectors, the same in whatever company they come.

    Args:
        vectors: (n, D), on any device. A row that is not finite gets some code and is never a near-duplicate.
        mean: (D,) of all vectors: embeddings lie in a narrow cone, and around its axis they differ most.
    """
    if vectors.device.type == "mps":  # which has no double precision
        return sketch(vectors.cpu(), mean.cpu())
    # Whole numbers on both sides make the sums exact, so that a code does not depend on the order of adding, which
    # changes with the number of rows. 20 bits a unit vector and 15 bits a plane are enough for any width.
    planes = _planes(vectors.shape[1]).to(vectors.device)
    powers = 1 << torch.arange(BITS, device=vectors.device)
    codes = []
    for part in torch.split(vectors, _SKETCHED):
        centred = part.double() - mean.double()
        lengths = torch.linalg.vector_norm(centred, dim=1, keepdim=True)
        whole = torch.round(centred / torch.where(lengths == 0, 1, lengths) * 2**20)
        codes.append(torch.where(whole @ planes > 0, powers, 0).sum(1).cpu().numpy().view(np.uint64))
    return np.concatenate(codes)


@cache
def _planes(width: int) -> Tensor:
    """(D, 64) normals, in whole numbers."""
    return torch.from_numpy(np.rint(np.random.RandomState(_SEED).standard_normal((width, BITS)) * 2**12))


def find_near_duplicates(
    codes: Codes,
    gather: Gather,
    threshold: float = 0.98,
    *,
    mean: FloatArray | None = None,
    leave_out: Mask | None = None,
    device: torch.device | None = None,
) -> Groups:
    """Finds groups of rows that are nearly the same.

    Exact duplicates are always found. The work stays bounded with very many near-duplicates: in buckets beyond 64 rows
    not all are compared with all, and of each set of such rows with one code only a representative goes on.

    Args:
        codes: The codes of all rows (N,), from `sketch`.
        gather: Gives the vectors (n, D) of row numbers, which are ascending and at most 8,192 at a time.
        threshold: Cosine of the centred vectors from which two rows are near-duplicates.
        mean: What to take from the vectors first, the one of the sketch; nothing by default.
        leave_out: Rows that are never in a group (N,).
        device: Where the codes are sorted: on the CPU, unless it is a GPU of CUDA.

    Returns:
        Groups of at least two rows, the largest group first.

    Raises:
        ConfigError: The threshold is no such cosine.

    >>> vectors = np.eye(4, dtype=np.float32)[[0, 1, 0, 2, 1, 0]]
    >>> codes = sketch(torch.from_numpy(vectors), torch.zeros(4))
    >>> [group.tolist() for group in find_near_duplicates(codes, vectors.__getitem__)]
    [[0, 2, 5], [1, 4]]
    """
    if not 0.5 < threshold <= 1:
        raise ConfigError(
            f"The cosine from which rows are near-duplicates is {threshold}; expected more than 0.5 and at most 1."
        )
    rows = np.argsort(codes, kind="stable").astype(_number(len(codes)))
    if leave_out is not None:
        rows = rows[~leave_out[rows]]
    # From here on a row is known by its place in the order of the codes, and rows of one code by their content: the
    # result cannot depend on the order of the rows, and exact duplicates are neighbours.
    _sort_equal_codes(codes, rows, gather)
    ordered = codes[rows]
    search = _Search(ordered, rows, gather, threshold, mean)
    run: IntArray = np.cumsum(_starts(ordered), dtype=rows.dtype)
    run -= 1
    everything = np.arange(len(rows), dtype=rows.dtype)
    search.join_neighbours(run, everything, len(rows))
    long = (np.bincount(run, minlength=1) > _WINDOW)[run]
    entries = everything[~long | (search.sets.find(everything) == everything)]
    del run, long, everything
    tables = _Tables(ordered, entries, device if device is not None and device.type == "cuda" else torch.device("cpu"))
    for chosen in combinations(range(BYTES), SHARED):
        sooner = [byte for byte in range(chosen[-1]) if byte not in chosen]
        search.join_neighbours(*tables.by_bytes(chosen), len(entries), sooner)
    return _groups(search.sets, rows)


class _Search:
    """Compares neighbours in a sorted table and joins near-duplicates."""

    def __init__(self, codes: Codes, rows: IntArray, gather: Gather, threshold: float, mean: FloatArray | None) -> None:
        self.sets = DisjointSets(np.arange(len(rows), dtype=rows.dtype))
        self._codes, self._rows, self._gather, self._mean = codes, rows, gather, mean
        self._farthest = 2 * (1 - threshold)  # squared distance of unit vectors; two zero vectors are equal by it, too
        differ = math.acos(threshold) / math.pi
        self._most_bits = math.floor(BITS * differ + _SLACK * math.sqrt(BITS * differ * (1 - differ)))

    def join_neighbours(
        self, key: npt.NDArray[np.integer], places: IntArray, entries: int, sooner: Sequence[int] = ()
    ) -> None:
        """Joins near-duplicates among places with one key and not far from each other.

        Args:
            key: Bucket of each entry of the table, ascending.
            places: The entries; those that are alone in their bucket may be missing.
            entries: Their number with those.
            sooner: Bytes which, where they are equal as well, have brought the two together in another table already.
        """
        for start in range(0, len(places), _PART):
            at = np.arange(start, min(start + _PART, len(places)))
            patience = _PATIENCE * len(at) * entries // len(places)
            for shift in range(1, _WINDOW + 1):
                at = at[at + shift < len(places)]
                at = at[key[at] == key[at + shift]]  # the key ascends: what is apart stays apart
                if not len(at) or patience < 0:
                    break
                one, other = places[at], places[at + shift]
                differ = self._codes[one] ^ self._codes[other]
                near = _count_bits(differ) <= self._most_bits
                for byte in sooner:
                    near &= (differ & np.uint64(0xFF << 8 * byte)) != 0
                one, other = one[near], other[near]
                new = self.sets.find(one) != self.sets.find(other)
                one, other = one[new], other[new]
                patience -= len(one)
                close = self._are_near_duplicates(one, other)
                self.sets.join(one[close], other[close])

    def _are_near_duplicates(self, one: IntArray, other: IntArray) -> Mask:
        """Whether the true vectors are, pair by pair."""
        found = np.empty(len(one), dtype=np.bool_)
        for start in range(0, len(one), _GATHERED):
            part = slice(start, start + _GATHERED)
            both = np.concatenate([self._rows[one[part]], self._rows[other[part]]])
            needed, where = np.unique(both, return_inverse=True)
            units = _units(self._gather(needed), self._mean)
            half = len(both) // 2
            apart = units[where[:half]] - units[where[half:]]
            found[part] = np.square(apart, out=apart).sum(axis=1) <= self._farthest
        return found


class DisjointSets:
    """Union-find over whole arrays of links; the lowest member stands for a set."""

    def __init__(self, members: IntArray) -> None:
        self._above = members

    def find(self, members: IntArray) -> IntArray:
        """The lowest member of the set of each."""
        top = self._above[members]
        while True:
            higher = self._above[top]
            if np.array_equal(higher, top):
                break
            top = higher
        self._above[members] = top
        return top

    def join(self, one: IntArray, other: IntArray) -> None:
        """Makes one set of the sets of each link's two ends."""
        while len(one):
            one, other = self.find(one), self.find(other)
            apart = one != other
            one, other = one[apart], other[apart]
            low, high = np.minimum(one, other), np.maximum(one, other)
            self._above[high] = low  # of several links of one set the last one wins, and the next turn sees to the rest
            while True:  # a chain of n sets becomes flat in log n turns, as each link of it is in `high`
                above = self._above[high]
                higher = self._above[above]
                if np.array_equal(higher, above):
                    break
                self._above[high] = higher


def _sort_equal_codes(codes: Codes, rows: IntArray, gather: Gather) -> None:
    """Sorts the rows of one code by a fingerprint of their vectors; in place."""
    ordered = codes[rows]
    starts = _starts(ordered)
    shared = np.flatnonzero(~(starts & np.append(starts[1:], True)))
    members = np.sort(rows[shared])  # read in their order on disk
    prints = np.empty(len(members), dtype=np.uint64)
    for start in range(0, len(members), _GATHERED):
        part = slice(start, start + _GATHERED)
        prints[part] = _fingerprints(gather(members[part]))
    rows[shared] = members[np.lexsort((prints, codes[members]))]


def _fingerprints(vectors: FloatArray) -> Codes:
    """A number that equal vectors share and others do not: a sum of the bits with random weights, modulo 2 ** 64."""
    bits = (np.ascontiguousarray(vectors, dtype=np.float32) + 0.0).view(np.uint32)  # makes -0 equal to 0
    weights = np.random.RandomState(_SEED).randint(2**64, size=bits.shape[1], dtype=np.uint64) | np.uint64(1)
    return np.asarray((bits * weights).sum(axis=1, dtype=np.uint64))


class _Tables:
    """The entries of a table sorted by some bytes of their codes."""

    def __init__(self, codes: Codes, entries: IntArray, device: torch.device) -> None:
        self._entries = torch.from_numpy(entries).to(device)
        self._codes = torch.from_numpy(codes[entries].view(np.int64)).to(device)

    def by_bytes(self, chosen: Sequence[int]) -> tuple[npt.NDArray[np.int32], IntArray]:
        """Key and place of each entry that shares its key with another one, sorted by both."""
        table = self._entries.to(torch.int64, copy=True)
        for start in range(0, len(table), _PART):
            here = slice(start, start + _PART)
            for number, byte in enumerate(chosen):
                table[here] |= ((self._codes[here] >> 8 * byte) & 0xFF) << (_PLACE + 8 * number)
        # One number an entry sorts several times faster than an argsort, and on a CPU numpy faster than torch.
        if table.device.type == "cpu":
            table.numpy().sort()
        else:
            table = table.sort().values
        shared = torch.zeros(len(table) + 1, dtype=torch.bool, device=table.device)
        for start in range(0, len(table) - 1, _PART):
            stop = min(start + _PART, len(table) - 1)
            shared[start + 1 : stop + 1] = (table[start:stop] ^ table[start + 1 : stop + 1]) < 2**_PLACE
        members = table[shared[:-1] | shared[1:]].cpu()
        key, places = members >> _PLACE, members & (2**_PLACE - 1)
        return key.to(torch.int32).numpy(), places.to(self._entries.dtype).numpy()


def _number(size: int) -> type[np.signedinteger[Any]]:
    """Numbers for so many rows, as small as they may be: there are several for each of millions."""
    return np.int32 if size < 2**31 else np.int64


def _groups(sets: DisjointSets, rows: IntArray) -> Groups:
    """The sets of at least two places, as groups of their rows."""
    top = sets.find(np.arange(len(rows), dtype=rows.dtype))
    size = np.bincount(top, minlength=1).astype(rows.dtype)[top]
    members = np.flatnonzero(size > 1)
    if not len(members):
        return Groups.none()
    own, top, size = rows[members], top[members], size[members]
    first = np.full(len(rows), np.iinfo(rows.dtype).max, dtype=rows.dtype)
    np.minimum.at(first, top, own)  # the lowest row of each set
    order = np.lexsort((own, first[top], -size))
    return Groups(own[order], np.append(np.flatnonzero(_starts(top[order])), len(own)))


def _units(vectors: FloatArray, mean: FloatArray | None) -> npt.NDArray[np.float32]:
    """Centred vectors of length one; a vector equal to the mean stays zero."""
    with np.errstate(invalid="ignore", over="ignore"):
        centred = np.array(vectors, dtype=np.float32, order="C")
        if mean is not None:
            centred -= mean
        lengths = np.sqrt(np.square(centred).sum(axis=1, keepdims=True))
        centred /= np.where(lengths == 0, 1, lengths)
    return centred


def _count_bits(numbers: Codes) -> Codes:
    """How many bits of each number are set: sums of pairs of bits, of fours, of bytes, then of all bytes.

    numpy has a function for this only since 2.0.
    """
    pairs, fours, bytes_ = (np.uint64(mask) for mask in (0x5555555555555555, 0x3333333333333333, 0x0F0F0F0F0F0F0F0F))
    counts = numbers - ((numbers >> np.uint64(1)) & pairs)
    counts = (counts & fours) + ((counts >> np.uint64(2)) & fours)
    counts = (counts + (counts >> np.uint64(4))) & bytes_
    return np.asarray((counts * np.uint64(0x0101010101010101)) >> np.uint64(56))


def _starts(values: npt.NDArray[np.generic]) -> Mask:
    """Where a value differs from the one before it."""
    starts = np.ones(len(values), dtype=np.bool_)
    starts[1:] = values[1:] != values[:-1]
    return starts
