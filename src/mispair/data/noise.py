"""Wrong pairs on purpose: the two noise protocols of the field, and the index files in which they are shared.

Caption level (NCR, BiCro, MSCN): the images of a share of the captions are shuffled, so an image keeps some right
captions. Image level (DECL): a share of the images is permuted, and all captions of an image move together, which is
harder. Results of the two cannot be compared.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Literal

import numpy as np

from mispair.data.arrays import open_array
from mispair.data.pairs import IntArray, Pairs
from mispair.errors import DataError
from mispair.files import replacing

_PLAUSIBLE = 0.02  # shuffling leaves a few pairs right by chance; more than this is another file


def caption_noise(link: IntArray, ratio: float, seed: int) -> IntArray:
    """Shuffle the left rows of a share of the pairs among themselves, as NCR does.

    The calls to the legacy generator and their order are NCR's: the result equals its own after `numpy.random.seed`.

    Args:
        link: Left row of each pair.
        ratio: Share of the pairs to select; a few of them keep a right partner by chance.
        seed: Seed of numpy's legacy generator.

    >>> caption_noise(np.arange(10) // 5, 0.4, seed=0)
    array([0, 0, 1, 0, 0, 1, 1, 1, 1, 0])
    """
    _check_ratio(ratio)
    if not 0 <= seed < 2**32:
        raise DataError(f"The noise seed is {seed}; expected a whole number from 0 to 4,294,967,295.")
    random = np.random.RandomState(seed)
    order = np.arange(len(link))
    random.shuffle(order)
    selected = order[: int(ratio * len(link))]
    noisy = np.array(link, dtype=np.int64)
    moved = noisy[selected]
    random.shuffle(moved)
    noisy[selected] = moved
    return noisy


def image_noise(n_left: int, ratio: float, seed: int) -> IntArray:
    """Permute a share of the left rows among themselves, as DECL does.

    Returns:
        For each left row (n_left,) the row that takes its place.

    >>> image_noise(6, 0.5, seed=0)
    array([0, 2, 5, 3, 4, 1])
    """
    return caption_noise(np.arange(n_left), ratio, seed)


def mismatch(link: IntArray, truth: IntArray) -> float:
    """Share of the pairs whose left row is not the true one.

    >>> mismatch(np.array([0, 1, 1, 0]), np.array([0, 0, 1, 1]))
    0.5
    """
    return float(np.mean(link != truth))


def save_noise(path: str | Path, index: IntArray) -> None:
    """Write a noise index as the int64 .npy that the peers' code reads, whole or not at all."""
    with replacing(path) as file:
        np.save(file, np.asarray(index, dtype=np.int64), allow_pickle=False)


def load_noise(path: str | Path, link: IntArray, n_left: int) -> IntArray:
    """Read a noise index of either level.

    Args:
        path: An .npy of whole numbers: one left row a pair (caption level), or one left row a left row (image level).
        link: Left row of each pair without noise.
        n_left: Number of left rows.

    Returns:
        Left row of each pair with the noise of the file.

    Raises:
        DataError: The file fits neither level, or points outside the left rows.
    """
    index = np.array(open_array(path, ndim=1, kind="integer"), dtype=np.int64)
    if len(index) not in (len(link), n_left):
        raise DataError(
            f"{path}: the noise index has {len(index):,} entries; expected {len(link):,} (one a pair) or {n_left:,} "
            "(one an image). Use the file made for exactly this training set."
        )
    if index.min() < 0 or index.max() >= n_left:
        raise DataError(
            f"{path}: the noise index points to image rows {index.min():,} to {index.max():,}, "
            f"but the training set has rows 0 to {n_left - 1:,}; use the file made for this training set."
        )
    return index if len(index) == len(link) else index[link]


def add_noise(
    pairs: Pairs,
    *,
    ratio: float,
    seed: int,
    kind: Literal["caption", "image"] = "caption",
    file: str | Path | None = None,
) -> Pairs:
    """Join a share of the pairs wrongly; the right link stays known as the truth.

    Args:
        pairs: The training pairs.
        ratio: Share of the captions (or images) to shuffle, 0 to 1.
        seed: Seed of the shuffle.
        kind: Which protocol.
        file: A noise index: read where it exists (whatever `kind` and `seed` say), else made and written for next time.

    Raises:
        DataError: The ratio, the kind or the file is wrong.
    """
    _check_ratio(ratio)
    if kind not in ("caption", "image"):
        raise DataError(f"The kind of noise is {kind!r}; expected 'caption' or 'image'.")
    if file is not None and Path(file).exists():
        link = load_noise(file, pairs.link, len(pairs.left))
        found = mismatch(link, pairs.link)
        if ratio and abs(found - ratio) > _PLAUSIBLE:
            warnings.warn(
                f"{file}: {found:.1%} of the pairs are mismatched by this noise index, but a ratio of {ratio:.1%} "
                "was asked for; the file is used as it is.",
                stacklevel=2,
            )
        return pairs.with_link(link)
    if file is not None and not ratio:
        raise DataError(f"{file}: no such noise index, and with a noise ratio of 0 there is none to make.")
    index = (
        caption_noise(pairs.link, ratio, seed) if kind == "caption" else image_noise(len(pairs.left), ratio, seed)
    )  # fmt: skip
    if file is not None:
        save_noise(file, index)
    return pairs.with_link(index if kind == "caption" else index[pairs.link])


def _check_ratio(ratio: float) -> None:
    if not 0 <= ratio <= 1:
        raise DataError(f"The noise ratio is {ratio}; expected a share from 0 to 1, such as 0.4 for 40 %.")
