"""Find near-duplicates of one side, among up to millions of rows, in bounded memory.

`sketch` makes a code of 64 bits: the sides of 64 random planes on which the centred vector lies.
`find_near_duplicates` compares rows with three equal bytes of their codes, and decides by the true cosine. Nearly all
near-duplicates agree in three bytes, and hardly any other rows. With the threshold of 0.98, two rows of a cosine are
compared with this probability:

    cosine      1.000  0.999  0.995  0.990  0.985  0.980  0.950  0.900  0.500
    compared    1.000  1.000  0.997  0.983  0.958  0.922  0.623  0.244  0.000

Each row of a group is a near-duplicate of some other row of the group, not of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, islice, pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mispair.errors import ConfigError
from mispair.support.arrays import FloatArray, IntArray, Mask

Codes = npt.NDArray[np.uint64]
Gather = Callable[[IntArray], FloatArray]

BITS, BYTES, SHARED = 64, 8, 3  # of a code; equal bytes for a comparison
SEEN = 0.75  # least mean cosine of hashes and vectors of near-duplicate images
_SEED = 64
_SLACK = 1.75  # standard deviations of the number of different bits, above that of a cosine at the threshold
_WINDOW = 64  # rows of a bucket to compare a row with, at most
_COMPARED = {"cpu": 1 << 15, "cuda": 1 << 24}  # pairs of neighbours at a time, at least one a row
_PATIENCE = 1  # true cosines a row and table: dense clouds of rows would take too long
_PART = 1 << 20  # rows at a time
_SKETCHED, _SKETCHED_ON_GPU = 1 << 12, 1 << 15  # rows sketched at a time
_GATHERED = 1 << 12  # rows or pairs of rows with vectors in memory
_KEY = 8 * SHARED  # bits of a table's key
_PLACE = 33  # bits for a row's place beside its key and the number of its table in one number


@dataclass(frozen=True)
class Groups:
    """Up to millions of groups of rows.

    Attributes:
        rows: Rows of the first group in ascending order, then those of the second, and so on.
        starts: First place of each group in `rows`, and the number of rows.
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
        """Return the largest groups."""
        return list(islice(self, count))


def sketch(vectors: Tensor, mean: Tensor, number: int = 0) -> Codes:
    """Make a code of each vector, independent of the other vectors.

    Args:
        vectors: (n, D), on any device. Rows with infinite numbers are never near-duplicates.
        mean: (D,) of all vectors: embeddings lie in a narrow cone and differ most around its axis.
        number: Choice of the planes.
    """
    if vectors.device.type == "mps":  # without double precision
        return sketch(vectors.cpu(), mean.cpu(), number)
    # Sums of whole numbers are exact as long as they stay below 2 ** 24, so codes do not depend on the order of adding,
    # which changes with the number of rows. A GPU may round the factors of float32 products (TF32).
    exact = torch.float64 if vectors.is_cuda else torch.float32
    planes = _planes(vectors.shape[1], number).to(vectors.device, exact)
    size = 2.0 ** (23 - math.ceil(math.log2(torch.linalg.vector_norm(planes, dim=0).max())))
    codes = []
    for part in torch.split(vectors, _SKETCHED_ON_GPU if vectors.is_cuda else _SKETCHED):
        centred = (part - mean).contiguous()  # lengths depend on the order of adding
        lengths = torch.linalg.vector_norm(centred, dim=1, keepdim=True)
        whole = (centred * (size / torch.where(lengths == 0, 1, lengths))).round_()
        signs = (whole.to(exact) @ planes > 0).cpu().numpy()
        codes.append(np.packbits(signs, axis=1, bitorder="little").view(np.uint64)[:, 0])
    return np.concatenate(codes)


@cache
def _planes(width: int, number: int) -> Tensor:
    """Draw normals (D, 64), in whole numbers."""
    return torch.from_numpy(np.rint(np.random.RandomState(_SEED + number).standard_normal((width, BITS)) * 4))


def find_near_duplicates(
    codes: Codes,
    gather: Gather,
    threshold: float = 0.98,
    *,
    mean: FloatArray | None = None,
    leave_out: Mask | None = None,
    device: torch.device | None = None,
) -> Groups:
    """Find groups of nearly equal rows, and always exact duplicates.

    The work stays bounded: in buckets beyond 64 rows not all are compared with all, and equal codes there continue with
    one representative.

    Args:
        codes: Codes of all rows (N,), from `sketch`.
        gather: Reads the vectors (n, D) of at most 8,192 ascending rows.
        threshold: Least cosine of the centred vectors of near-duplicates.
        mean: Mean of the sketch, to centre the vectors; zero by default.
        leave_out: Rows outside all groups (N,).
        device: Compares the codes if it is a GPU of CUDA; else the CPU does.

    Returns:
        Groups of at least two rows, the largest group first.

    Raises:
        ConfigError: The threshold is not in (0.5, 1].

    >>> vectors = np.eye(4, dtype=np.float32)[[0, 1, 0, 2, 1, 0]]
    >>> codes = sketch(torch.from_numpy(vectors), torch.zeros(4))
    >>> [group.tolist() for group in find_near_duplicates(codes, vectors.__getitem__)]
    [[0, 2, 5], [1, 4]]
    """
    if not 0.5 < threshold <= 1:
        raise ConfigError(f"The cosine of near-duplicates is {threshold}; expected more than 0.5 and at most 1.")
    device = device if device is not None and device.type == "cuda" else torch.device("cpu")
    rows = _order(codes, device).astype("i4" if len(codes) < 2**31 else "i8")  # half the memory of many arrays
    if leave_out is not None:
        rows = rows[~leave_out[rows]]
    # From here on rows are places in the order of codes and content, so the result does not depend on the order of the
    # rows, and exact duplicates are neighbours.
    _sort_equal_codes(codes, rows, gather)
    ordered = codes[rows]
    there = torch.from_numpy(ordered.view(np.int64)).to(device)
    search = _Search(there, rows, gather, threshold, mean)
    run: IntArray = np.cumsum(_starts(ordered), dtype=rows.dtype)
    run -= 1
    everything = np.arange(len(rows), dtype=rows.dtype)
    search.join_neighbours(torch.from_numpy(run).to(device), torch.from_numpy(everything).to(device), len(rows))
    long = (np.bincount(run, minlength=1) > _WINDOW)[run]
    entries = torch.from_numpy(everything[~long | (search.sets.find(everything) == everything)]).to(device)
    del run, long, everything, ordered
    there = there[entries]
    tables = list(combinations(range(BYTES), SHARED))
    # Of few rows, the tables are made together: each step takes longer than its work.
    together = max(1, min(_PART, _COMPARED[device.type]) // max(1, len(entries)))
    for start in range(0, len(tables), together):
        some = tables[start : start + together]
        sooner = torch.tensor([_sooner(chosen) for chosen in some], device=device)
        search.join_neighbours(*_sorted_by_bytes(entries, there, some), len(entries), sooner)
    return groups_of(search.sets, rows)


def find_near_duplicate_images(
    hashes: Codes, gather: Gather, *, mean: FloatArray, leave_out: Mask, device: torch.device | None = None
) -> Groups:
    """Find groups of images with similar hashes and similar vectors.

    The mean of two cosines of near-duplicates is at least 0.75: that of their hashes as 128 signs, 1 - d / 64 with d
    different bits, and that of their centred vectors. `find_near_duplicates` compares images by the bytes of either
    half of the hash: always if d is at most 11, as a half with at most 5 different bits has 3 equal bytes.

    Args:
        hashes: Hashes of all rows (N, 2); zero means none.
        gather: As in `find_near_duplicates`.
        mean: Mean of the vectors (D,).
        leave_out: Rows outside all groups (N,).
        device: Device for the comparison of the hashes.
    """

    def signs_and_vectors(rows: IntArray) -> FloatArray:
        bits = np.unpackbits(hashes[rows].view(np.uint8), axis=1)
        return np.hstack([(bits * np.float32(2) - 1) / math.sqrt(bits.shape[1]), _units(gather(rows), mean)])

    leave_out = leave_out | ~hashes.any(axis=1)
    halves = (np.ascontiguousarray(half) for half in hashes.T)
    return joined_groups(
        [find_near_duplicates(half, signs_and_vectors, SEEN, leave_out=leave_out, device=device) for half in halves],
        len(hashes),
    )


def joined_groups(several: Sequence[Groups], rows: int) -> Groups:
    """Join groups of `rows` rows that share a row.

    >>> first, second = Groups(np.array([0, 3]), np.array([0, 2])), Groups(np.array([1, 2, 3, 4]), np.array([0, 2, 4]))
    >>> [group.tolist() for group in joined_groups([first, second], 5)]
    [[0, 3, 4], [1, 2]]
    """
    sets = DisjointSets(np.arange(rows))
    for groups in several:
        sets.join(np.repeat(groups.rows[groups.starts[:-1]], np.diff(groups.starts)), groups.rows.astype(np.int64))
    return groups_of(sets, np.arange(rows))


class _Search:
    """Compare neighbours in a sorted table and join near-duplicates."""

    def __init__(
        self, codes: Tensor, rows: IntArray, gather: Gather, threshold: float, mean: FloatArray | None
    ) -> None:
        self.sets = DisjointSets(np.arange(len(rows), dtype=rows.dtype))
        self._codes, self._rows, self._gather, self._mean = codes, rows, gather, mean
        self._farthest = 2 * (1 - threshold)  # squared distance of unit vectors; two zero vectors are equal by it, too
        differ = math.acos(threshold) / math.pi
        self._most_bits = math.floor(BITS * differ + _SLACK * math.sqrt(BITS * differ * (1 - differ)))

    def join_neighbours(self, key: Tensor, places: Tensor, entries: int, sooner: Tensor | None = None) -> None:
        """Join near-duplicates among near places with one key.

        Args:
            key: Bucket of each entry of the tables, ascending, with the number of the table above 24 bits.
            places: The entries, with or without those alone in their bucket.
            entries: Number of all entries of a table.
            sooner: Of each table, `_sooner`: pairs with one of these bytes equal are skipped.
        """
        nobody = key.new_full((_WINDOW,), -1)  # so that every entry has neighbours
        key, codes = torch.cat([key, nobody]), torch.cat([self._codes.index_select(0, places), nobody.to(self._codes)])
        for start in range(0, len(places), _PART):
            at = torch.arange(start, min(start + _PART, len(places)), device=places.device)
            if sooner is not None and len(sooner) > 1:
                found = np.concatenate([*self._neighbours(key, codes, places, at, sooner)], axis=1)
                for table in np.unique(found[3]):
                    own = found[:, found[3] == table]
                    self._join_new(own[:2], own[2], _PATIENCE * entries)
                continue
            patience = _PATIENCE * len(at) * entries // len(places)
            for found in self._neighbours(key, codes, places, at, sooner):
                patience -= self._join_new(found[:2], found[2], patience)
                if patience < 0:
                    break

    def _neighbours(
        self, key: Tensor, codes: Tensor, places: Tensor, at: Tensor, sooner: Tensor | None
    ) -> Iterator[IntArray]:
        """Yield the near places (4, n) with one key and similar codes: two places, their distance and their table."""
        behind = 1  # places
        while behind <= _WINDOW and len(at):
            until = min(behind + max(1, _COMPARED[at.device.type] // len(at)), _WINDOW + 1)
            shifts = torch.arange(behind, until, device=places.device)[:, None]
            behind = until
            one, other = at.expand(len(shifts), -1).reshape(-1), (at + shifts).view(-1)
            same = key.index_select(0, one) == key.index_select(0, other)
            together = torch.nonzero(same)[:, 0]
            one, other = one.index_select(0, together), other.index_select(0, together)
            at = at[same[-len(at) :]]  # the key ascends: what is apart stays apart
            table = key.index_select(0, one) >> _KEY
            skipped = None if sooner is None else sooner[table]
            few = self._alike(codes.index_select(0, one) ^ codes.index_select(0, other), skipped)
            one, other = one[few], other[few]
            yield torch.stack([places[one], places[other], other - one, table[few]]).cpu().numpy()

    def _join_new(self, places: IntArray, shift: IntArray, patience: int) -> int:
        """Join near-duplicates among pairs of places (2, n) by their `shift` (n,) until patience runs out.

        Returns:
            Number of compared pairs.
        """
        looked_at = 0
        for one, other in np.split(places, np.flatnonzero(np.diff(shift)) + 1, axis=1):
            if looked_at > patience:
                break
            new = self.sets.find(one) != self.sets.find(other)
            one, other = one[new], other[new]
            looked_at += len(one)
            close = self._are_near_duplicates(one, other)
            self.sets.join(one[close], other[close])
        return looked_at

    def _alike(self, differ: Tensor, sooner: Tensor | None) -> Tensor:
        """Find pairs of codes with few different bits (n,) and with differences in each of some bytes."""
        few = torch.nonzero(_count_bits(differ) <= self._most_bits)[:, 0]
        if sooner is None:
            return few
        differ = differ.index_select(0, few)
        low = 0x7F7F7F7F7F7F7F7F
        equal = ~(((differ & low) + low) | differ | low)  # the highest bit of each equal byte
        return few[equal & sooner.index_select(0, few) == 0]

    def _are_near_duplicates(self, one: IntArray, other: IntArray) -> Mask:
        """Compare the true vectors, pair by pair."""
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
    """Union-find over whole arrays of links; a set is named by its lowest member."""

    def __init__(self, members: IntArray) -> None:
        self._above = members

    def find(self, members: IntArray) -> IntArray:
        """Return the lowest member of the set of each."""
        top = self._above[members]
        while True:
            higher = self._above[top]
            if np.array_equal(higher, top):
                break
            top = higher
        self._above[members] = top
        return top

    def join(self, one: IntArray, other: IntArray) -> None:
        """Join the sets of the two ends of each link."""
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
    """Sort the rows of one code by a fingerprint of their vectors, in place."""
    ordered = codes[rows]
    starts = _starts(ordered)
    shared = np.flatnonzero(~(starts & np.append(starts[1:], True)))
    members = np.sort(rows[shared])  # read in their order on disk
    prints = np.empty(len(members), dtype=np.uint64)
    for start in range(0, len(members), _GATHERED):
        part = slice(start, start + _GATHERED)
        prints[part] = fingerprints(gather(members[part]))
    rows[shared] = members[np.lexsort((prints, codes[members]))]


def fingerprints(vectors: FloatArray) -> Codes:
    """Hash each vector: the sum of its bits with random weights, modulo 2 ** 64."""
    bits = (np.ascontiguousarray(vectors, dtype=np.float32) + 0.0).view(np.uint32)  # makes -0 equal to 0
    weights = np.random.RandomState(_SEED).randint(2**64, size=bits.shape[1], dtype=np.uint64) | np.uint64(1)
    return np.asarray((bits * weights).sum(axis=1, dtype=np.uint64))


def _sooner(chosen: Sequence[int]) -> int:
    """Return the highest bits of the bytes by which earlier tables have compared pairs that agree in `chosen`, too."""
    return sum(0x80 << 8 * byte for byte in range(chosen[-1]) if byte not in chosen)


def _sorted_by_bytes(entries: Tensor, codes: Tensor, tables: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return key and place of all entries with a shared key, sorted by both, of several tables one after another.

    The key is the number of the table and some bytes of the code.
    """
    several = torch.empty(len(tables), len(entries), dtype=torch.int64, device=entries.device)
    for number, chosen in enumerate(tables):
        for start in range(0, len(entries), _PART):
            here = slice(start, start + _PART)
            own = several[number, here]
            own.copy_(entries[here]).bitwise_or_(number << (_PLACE + _KEY))
            for place, byte in enumerate(chosen):
                own |= ((codes[here] >> 8 * byte) & 0xFF) << (_PLACE + 8 * place)
    table = several.view(-1)
    # One number an entry sorts several times faster than an argsort, and on a CPU numpy faster than torch.
    if table.is_cuda:
        table = table.sort().values
    else:
        table.numpy().sort()
    shared = torch.zeros(len(table) + 1, dtype=torch.bool, device=table.device)
    for start in range(0, len(table) - 1, _PART):
        stop = min(start + _PART, len(table) - 1)
        shared[start + 1 : stop + 1] = (table[start:stop] ^ table[start + 1 : stop + 1]) < 2**_PLACE
    members = table[shared[:-1] | shared[1:]]
    key, places = members >> _PLACE, members & (2**_PLACE - 1)
    return key.to(torch.int32), places.to(entries.dtype)


def _order(codes: Codes, device: torch.device) -> IntArray:
    """Sort the rows by their codes, stably."""
    if device.type == "cpu":
        return np.argsort(codes, kind="stable")
    signed = torch.from_numpy((codes ^ np.uint64(1 << 63)).view(np.int64)).to(device)
    order: IntArray = torch.sort(signed, stable=True).indices.cpu().numpy()
    return order


def groups_of(sets: DisjointSets, rows: IntArray) -> Groups:
    """Return the sets of at least two places as groups of their rows."""
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
    """Centre vectors and scale them to length one; a vector equal to the mean stays zero."""
    with np.errstate(invalid="ignore", over="ignore"):
        centred = np.array(vectors, dtype=np.float32, order="C")
        if mean is not None:
            centred -= mean
        lengths = np.sqrt(np.square(centred).sum(axis=1, keepdims=True))
        centred /= np.where(lengths == 0, 1, lengths)
    return centred


def _count_bits(numbers: Tensor) -> Tensor:
    """Count the bits of each number: sums of pairs of bits, of fours, of bytes, then of all bytes."""
    counts = numbers - (numbers >> 1).bitwise_and_(0x5555555555555555)
    counts = (counts >> 2).bitwise_and_(0x3333333333333333) + counts.bitwise_and_(0x3333333333333333)
    counts += counts >> 4
    return counts.bitwise_and_(0x0F0F0F0F0F0F0F0F).mul_(0x0101010101010101) >> 56


def _starts(values: npt.NDArray[np.generic]) -> Mask:
    """Mark values different from the one before."""
    starts = np.ones(len(values), dtype=np.bool_)
    starts[1:] = values[1:] != values[:-1]
    return starts
