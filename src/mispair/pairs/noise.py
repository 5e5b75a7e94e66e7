"""Synthetic noise: pairs mismatched on purpose, and index files of noise.

Two protocols of the field. Caption level (NCR, BiCro, MSCN): the images of a share of the captions are shuffled, so an
image keeps some of its captions. Image level (DECL): a share of the images is permuted, and all captions of an image
move together, which is harder. Results of the two cannot be compared.

Two more to test audits. Near: pairs exchange images with pairs of a similar image, so that a mismatched pair is hard
to tell from a matched one. Group: whole groups of similar images exchange their captions, so that the neighbours of a
mismatched pair agree with it.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import numpy as np
import numpy.typing as npt

from mispair.config import Config, NoiseKind
from mispair.errors import ConflictError, InvalidValueError, NotFoundError, ShapeError
from mispair.pairs.layouts.arrays import item_vectors
from mispair.pairs.npy import check_finite, open_array, write_array
from mispair.pairs.pairs import Pairs, Regions, Tokens, Vectors
from mispair.support.arrays import FloatArray, IntArray

NEIGHBOURS = 10  # nearest left items that `near` exchanges with
GROUP_ITEMS = 20  # left items per group in `group`, about

_COUPLES = 5  # least number of pairs of groups, so that a ratio is met to 20 % even in a tiny set
_TOLERANCE = 0.02  # of the ratio: shuffling leaves a few pairs matched by chance
_COMPARED = 1 << 15  # left items that are compared with each other, so that time does not grow with their square
_BLOCK = 1 << 22  # similarities held at once
_OWN_FILE = "Use the file made for exactly this training set."
_ITERATIONS = 50  # of the power iteration: the order along the direction need not be exact


def caption_noise(link: IntArray, noise_ratio: float, seed: int) -> IntArray:
    """Shuffle the left rows of a share of the pairs among themselves, as NCR does; a few keep theirs by chance.

    The calls to the legacy generator and their order are NCR's: the result equals its own after `numpy.random.seed`.

    >>> caption_noise(np.arange(10) // 5, 0.4, seed=0)
    array([0, 0, 1, 0, 0, 1, 1, 1, 1, 0])
    """
    random = _generator(noise_ratio, seed)
    order = np.arange(len(link))
    random.shuffle(order)
    selected = order[: int(noise_ratio * len(link))]
    noisy = np.array(link, dtype=np.int64)
    moved = noisy[selected]
    random.shuffle(moved)
    noisy[selected] = moved
    return noisy


def image_noise(n_left: int, noise_ratio: float, seed: int, *, groups: IntArray | None = None) -> IntArray:
    """Permute a share of the left rows among themselves, as DECL does: (n_left,) the row in the place of each row.

    All rows of one group, which are one image, get rows of one other image.

    >>> image_noise(6, 0.5, seed=0)
    array([0, 2, 5, 3, 4, 1])
    >>> image_noise(6, 1.0, seed=0, groups=np.array([0, 0, 1, 1, 2, 2]))
    array([2, 3, 4, 5, 0, 1])
    """
    if groups is None:
        return caption_noise(np.arange(n_left), noise_ratio, seed)
    _, image = np.unique(groups, return_inverse=True)
    by_image = np.argsort(image, kind="stable")
    sizes = np.bincount(image)
    starts = np.cumsum(sizes) - sizes
    place = np.empty(n_left, dtype=np.int64)  # of each row among those of its image
    place[by_image] = np.arange(n_left) - np.repeat(starts, sizes)
    other = image_noise(len(sizes), noise_ratio, seed)[image]
    return np.asarray(by_image[starts[other] + place % sizes[other]])


def near_noise(
    link: IntArray, features: FloatArray, noise_ratio: float, seed: int, *, groups: IntArray | None = None
) -> IntArray:
    """Exchange the left rows of pairs with left items among each other's nearest neighbours.

    Near is a high cosine of the centred features, mean-pooled where they are regions. A pair is exchanged at most once.
    Copies of one item (of one group, or with equal features) count as one, as exchanging them makes no mismatch. The
    ratio is met to within one exchange; the highest ratios are not reached, where too few pairs have a partner left.

    >>> near_noise(np.arange(4), np.array([[9.0, 1], [9, 2], [-9, 1], [-9, 2]]), 0.5, seed=0)
    array([2, 1, 0, 3])
    """
    random = _generator(noise_ratio, seed)
    noisy = np.array(link, dtype=np.int64)
    wanted = int(noise_ratio * len(link)) // 2
    if not wanted:
        return noisy
    vectors = _pool(features)
    item, first = _distinct(vectors, groups)
    near = nearest(vectors[first], NEIGHBOURS)
    both = (near[near] == np.arange(len(near))[:, None, None]).any(axis=2)
    friends = [row[keep].tolist() for row, keep in zip(near, both, strict=True)]
    item_of = item[noisy].tolist()
    order = random.permutation(len(link)).tolist()
    free: list[dict[int, None]] = [{} for _ in first]
    for pair in order:
        free[item_of[pair]][pair] = None
    for pair in order:
        own = free[item_of[pair]]
        choices = [other for other in friends[item_of[pair]] if free[other]] if pair in own else []
        if not choices:
            continue
        del own[pair]
        partner, _ = free[choices[random.randint(len(choices))]].popitem()
        noisy[[pair, partner]] = noisy[[partner, pair]]
        wanted -= 1
        if not wanted:
            break
    return noisy


def group_noise(link: IntArray, groups: IntArray, noise_ratio: float, seed: int) -> IntArray:
    """Exchange the right items of whole groups of left items, one by one.

    Groups with about the same number of pairs are coupled; surplus pairs of the larger one stay. The ratio is met to
    within one exchange of two groups.

    >>> group_noise(np.arange(8) // 2, np.array([0, 0, 1, 1]), 1.0, seed=0)
    array([2, 2, 3, 3, 0, 0, 1, 1])
    """
    random = _generator(noise_ratio, seed)
    noisy = np.array(link, dtype=np.int64)
    by_item = np.argsort(noisy, kind="stable")
    group_of = np.asarray(groups)[noisy[by_item]]
    by_group = np.argsort(group_of, kind="stable")
    starts = np.flatnonzero(np.diff(group_of[by_group], prepend=group_of[by_group][:1] - 1))
    members = np.split(by_item[by_group], starts[1:])
    shuffled = [members[number] for number in random.permutation(len(starts))]
    largest_first = sorted(shuffled, key=len, reverse=True)
    couples = list(zip(largest_first[::2], largest_first[1::2], strict=False))  # the smallest may stay alone
    missing = noise_ratio * len(link)
    for number in random.permutation(len(couples)):
        one, other = couples[number]
        size = min(len(one), len(other))
        if size <= missing:  # nearer to the ratio with these 2 * size pairs than without them
            one, other = one[:size], other[:size]
            noisy[one], noisy[other] = noisy[other], noisy[one]
            missing -= 2 * size
    return noisy


def neighbour_groups(features: FloatArray, *, groups: IntArray | None = None) -> IntArray:
    """Groups of similar left items (N,): about 20 neighbours along the first principal direction.

    Their number is even, so that each has a partner; groups of small sets are smaller, so that a ratio can be met.
    Copies of one item stay together, by `groups` or equal features.

    >>> neighbour_groups(np.arange(200.0)[:, None])[[0, 19, 20, 39, 40, 199]]
    array([9, 9, 8, 8, 7, 0])
    """
    vectors = _pool(features)
    item, first = _distinct(vectors, groups)
    order = np.argsort(_first_direction(vectors[first]), kind="stable")
    sizes = np.bincount(item, minlength=len(first))[order]
    before = np.empty(len(first), dtype=np.int64)  # left items in front of this one
    before[order] = np.cumsum(sizes) - sizes
    most = max(1, len(first) // 2)  # couples of groups
    count = 2 * min(most, max(_COUPLES, round(len(item) / GROUP_ITEMS / 2)))
    return np.asarray(before * count // max(len(item), 1))[item]


def nearest(vectors: FloatArray, k: int) -> IntArray:
    """The k other rows of highest cosine to each row after centring, in no order: at most (N, N - 1) row numbers.

    More than 32,768 rows are halved across their first principal direction, and so on; each is compared with those of
    its part.

    >>> nearest(np.array([[1.0, 0], [2, 1], [-1, 0], [-2, 1]], np.float32), 1)[:, 0]
    array([1, 0, 3, 2])
    """
    unit = _centred(vectors)
    lengths = np.linalg.norm(unit, axis=1, keepdims=True)
    unit /= np.where(lengths, lengths, 1)
    found = np.empty((len(unit), min(k, len(unit) - 1)), dtype=np.int64)
    for part in _halves(unit, np.arange(len(unit))):
        found[part] = part[_nearest(unit[part], found.shape[1])]
    return found


def _nearest(unit: npt.NDArray[np.float32], k: int) -> IntArray:
    """The k other rows of highest cosine to each unit vector, by comparing all."""
    n = len(unit)
    found = np.empty((n, k), dtype=np.int64)
    step = max(1, _BLOCK // n)
    for start in range(0, n, step) if k else ():
        cosines = unit[start : start + step] @ unit.T
        rows = np.arange(len(cosines))
        cosines[rows, start + rows] = -np.inf
        found[start : start + step] = np.argpartition(cosines, n - k, axis=1)[:, n - k :]
    return found


def _halves(unit: npt.NDArray[np.float32], rows: IntArray) -> Iterator[IntArray]:
    """Cut rows into parts of similar ones, small enough to be compared."""
    if len(rows) <= _COMPARED:
        yield rows
        return
    order = rows[np.argsort(_first_direction(unit[rows]), kind="stable")]
    for half in np.array_split(order, 2):
        yield from _halves(unit, np.sort(half))


def mismatch(link: IntArray, truth: IntArray, groups: IntArray | None = None) -> float:
    """Share of the pairs with a left row other than the true one and outside its group.

    >>> mismatch(np.array([0, 1, 1, 0]), np.array([0, 0, 1, 1]))
    0.5
    >>> mismatch(np.array([0, 1, 1, 0]), np.array([0, 0, 1, 1]), groups=np.array([7, 7]))
    0.0
    """
    return float(np.mean(link != truth if groups is None else groups[link] != groups[truth]))


def save_noise(path: str | Path, index: IntArray) -> None:
    """Write a noise index as int64 .npy, readable by the peers' code, whole or not at all."""
    write_array(Path(path), np.asarray(index, dtype=np.int64))


def load_noise(path: str | Path, link: IntArray, n_left: int, *, by_row: bool = False) -> IntArray:
    """Read a noise index as the left row of each pair: one left row a pair (caption level) or a left row (image level).

    With `by_row` the numbers may be pairs, as in files for vectors, where several rows have one image.
    """
    mapped = open_array(path, ndim=1, kind="integer")
    if len(mapped) not in (len(link), n_left):
        raise ShapeError(
            f"the noise index has {len(mapped):,} entries",
            where=path,
            expected=f"{len(link):,} (one a pair) or {n_left:,} (one an image)",
            advice=_OWN_FILE,
        )
    index = np.array(mapped, dtype=np.int64)
    if by_row and len(index) == len(link) and index.min() >= 0 and n_left <= index.max() < len(link):
        index = link[index]
    if index.min() < 0 or index.max() >= n_left:
        what = f"the noise index points to image rows {index.min():,} to {index.max():,}"
        raise ShapeError(what, where=path, expected=f"rows 0 to {n_left - 1:,}", advice=_OWN_FILE)
    return index if len(index) == len(link) else index[link]


def noise_index(pairs: Pairs, *, noise_ratio: float, seed: int, kind: NoiseKind = "caption") -> IntArray:
    """Make the noise index of a data set for `save_noise`: a left row a pair, or for `image` a left row a left row."""
    _check(noise_ratio, kind, seed)
    if kind == "caption":
        return caption_noise(pairs.link, noise_ratio, seed)
    if kind == "image":
        return image_noise(len(pairs.left), noise_ratio, seed, groups=pairs.groups)
    if isinstance(pairs.left, Tokens):
        what = f"{kind!r} needs features on the left side, which holds texts in {pairs.name}"
        raise ConflictError(what, where="kind", advice="Use 'caption' or 'image'.")
    features = pairs.left.features
    if kind == "near":
        index = near_noise(pairs.link, features, noise_ratio, seed, groups=pairs.groups)
    else:
        index = group_noise(pairs.link, neighbour_groups(features, groups=pairs.groups), noise_ratio, seed)
    reached = mismatch(index, pairs.link, pairs.groups)
    if abs(reached - noise_ratio) > _TOLERANCE:
        warnings.warn(
            f"{pairs.name}: noise of kind {kind!r} mismatches {reached:.1%} of the pairs instead of {noise_ratio:.1%}: "
            + ("the other pairs have no near partner left." if kind == "near" else "only whole groups are exchanged."),
            stacklevel=2,
        )
    return index


def add_noise(
    pairs: Pairs,
    *,
    noise_ratio: float,
    seed: int,
    kind: NoiseKind = "caption",
    file: str | Path | None = None,
) -> Pairs:
    """Mismatch a share of the pairs; the present link becomes the truth.

    Args:
        pairs: The training pairs.
        noise_ratio: Share of the captions (or images) to move, 0 to 1.
        seed: Seed of the random choice.
        kind: caption: shuffled (NCR); image: shuffled with all captions of an image (DECL); near: exchanged between
            similar images; group: exchanged between whole groups of images.
        file: Read a noise index if the file exists (`kind` and `seed` are then ignored), else make and write it.

    Raises:
        InvalidValueError: The ratio, the seed or the kind is invalid.
        DataError: The file cannot be read, or does not fit.
    """
    if not isinstance(pairs, Pairs):
        raise InvalidValueError(type(pairs).__name__, where="pairs", expected="Pairs, as mispair.load gives them")
    _check(noise_ratio, kind)
    if file is not None and Path(file).exists():
        link = load_noise(file, pairs.link, len(pairs.left), by_row=isinstance(pairs.left, Vectors))
        found = mismatch(link, pairs.link, pairs.groups)
        if noise_ratio and abs(found - noise_ratio) > _TOLERANCE:
            warnings.warn(
                f"{file}: {found:.1%} of the pairs are mismatched by this noise index, but the noise ratio is "
                f"{noise_ratio:.1%}; the file is used as it is.",
                stacklevel=2,
            )
        return pairs.with_link(link)
    if file is not None and not noise_ratio:
        raise NotFoundError("no such noise index, and `noise_ratio` is 0, so there is none to make", where=file)
    index = noise_index(pairs, noise_ratio=noise_ratio, seed=seed, kind=kind)
    if file is not None:
        save_noise(file, index)
    return pairs.with_link(index[pairs.link] if kind == "image" else index)


def with_noise(config: Config, train: Pairs) -> Pairs:
    """The training pairs with the noise of the config."""
    if not config.noise_ratio and config.noise_file is None:
        return train
    seed = config.seed if config.noise_seed is None else config.noise_seed
    return add_noise(train, noise_ratio=config.noise_ratio, seed=seed, kind=config.noise_kind, file=config.noise_file)


def _check(noise_ratio: float, kind: str = "caption", seed: int = 0) -> None:
    if not (isinstance(noise_ratio, float | int | np.floating) and 0 <= noise_ratio <= 1):
        expected = "a share from 0 to 1, such as 0.4 for 40 %"
        raise InvalidValueError(repr(noise_ratio), where="noise_ratio", expected=expected)
    if kind not in get_args(NoiseKind):
        raise InvalidValueError(repr(kind), where="kind", expected="'caption', 'image', 'near' or 'group'")
    if not (isinstance(seed, int | np.integer) and 0 <= seed < 2**32):
        raise InvalidValueError(repr(seed), where="seed", expected="a whole number from 0 to 4,294,967,295")


def _generator(noise_ratio: float, seed: int) -> np.random.RandomState:
    _check(noise_ratio, seed=seed)
    return np.random.RandomState(seed)


def _pool(features: FloatArray) -> npt.NDArray[np.float32]:
    """One vector per item (N, D): the mean of its regions if it has any."""
    pooled = item_vectors(Regions(features) if features.ndim == 3 else Vectors(features)).astype(np.float32, copy=False)
    check_finite(pooled, "The left features")
    return pooled


def _distinct(vectors: npt.NDArray[np.float32], groups: IntArray | None) -> tuple[IntArray, IntArray]:
    """Number of each item when copies count as one, (N,), and the row of the first copy of each number."""
    given = np.arange(len(vectors)) if groups is None else groups
    _, first, group_of = np.unique(given, return_index=True, return_inverse=True)
    digests: dict[bytes, int] = {}
    number = np.array(
        [digests.setdefault(hashlib.blake2b(vectors[row].data, digest_size=16).digest(), row) for row in first],
        dtype=np.int64,
    )
    rows, numbers = np.unique(number, return_inverse=True)
    return numbers[group_of], rows


def _centred(vectors: FloatArray) -> npt.NDArray[np.float32]:
    return np.asarray(vectors - vectors.mean(axis=0, dtype=np.float64), dtype=np.float32)


def _first_direction(vectors: FloatArray) -> FloatArray:
    """Coordinate of each row along the first principal direction, by power iteration from the farthest row."""
    centred = _centred(vectors)
    direction = centred[np.linalg.norm(centred, axis=1).argmax()]
    for _ in range(_ITERATIONS):
        turned = (centred @ direction) @ centred
        length = np.linalg.norm(turned)
        if not length:  # all rows are equal
            break
        direction = turned / length
    return np.asarray(centred @ direction)
