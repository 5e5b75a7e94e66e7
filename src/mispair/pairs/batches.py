"""Batches of pairs: features live on the device if they fit, else on the host with prefetching."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from mispair.compute.devices import send
from mispair.errors import DataError
from mispair.pairs.pairs import Pairs, Side, Tokens
from mispair.support.arrays import IntArray

DEVICE_SHARE = 0.5  # of the free device memory, for features; the rest is left to the training
PREFETCH = 3  # batches made ahead when the features stay on the host
CHUNK = 1024  # rows moved at once when features go to the device
WIDTHS, TOTALS = 8, 256  # multiples to which the sizes of `PadShape` are rounded up
J = TypeVar("J")
R = TypeVar("R")


@dataclass(frozen=True)
class Items:
    """Some items of one side on the device: (B, n, D) regions, (B, n) token ids or (B, D) vectors."""

    values: Tensor
    # (B,) number of real elements per item; None if all n are real. On the host, as choosing shapes must not wait for
    # the device, unless `capacity` fixes the shapes.
    lengths: Tensor | None = None
    capacity: int | None = None  # most real elements of all items together

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class Batch:
    """A batch of pairs: item i of `left` is linked to item i of `right`."""

    left: Items
    right: Items
    pairs: Tensor  # (B,) indices of the pairs in the data set, on the device
    left_rows: Tensor  # (B,) row of each left item
    left_groups: Tensor  # (B,) its group: pairs of one group are never each other's negatives

    def __len__(self) -> int:
        return len(self.pairs)


class PadShape(NamedTuple):
    """Padded size of a batch of texts, rounded up so as to have few different sizes."""

    width: int  # of the longest text
    total: int  # of all texts together


PadShapes = tuple[PadShape | None, PadShape | None]  # of the left and of the right side


class SideLoader:
    """Loads items of one side onto the device."""

    def __init__(self, side: Side, device: torch.device, share: float = DEVICE_SHARE) -> None:
        self.side, self.device = side, device
        self.resident: Tensor | None = None
        if device.type == "cuda" and not isinstance(side, Tokens):
            free, _ = torch.cuda.mem_get_info(device)
            if side.features.size * np.dtype(self._kind(side.features)).itemsize <= free * share:
                self.resident = self._move_in(side.features)

    @property
    def on_host(self) -> bool:
        """Whether features are copied to the device for every batch."""
        return self.device.type == "cuda" and self.resident is None and not isinstance(self.side, Tokens)

    @property
    def mask_id(self) -> int:
        """Token id of the augmentation's <mask>: the first one after the vocabulary."""
        return len(self.side.vocabulary) if isinstance(self.side, Tokens) else 0

    def pad_shape(self, *batches: IntArray) -> PadShape | None:
        """A shape for all of these batches of texts; None on a CPU and for features."""
        if self.device.type != "cuda" or not isinstance(self.side, Tokens):
            return None
        lengths = [self.side.lengths[rows] for rows in batches]
        longest, most = (max(int(size(part)) for part in lengths) for size in (np.max, np.sum))
        return PadShape(round_up(longest, WIDTHS), round_up(most, TOTALS))

    def items(self, rows: IntArray, pad: PadShape | None = None, augment: np.random.Generator | None = None) -> Items:
        """The items at `rows` on the device, augmented with the generator `augment` if given."""
        if isinstance(self.side, Tokens):
            values, lengths = pad_tokens(self.side, rows, None if pad is None else pad.width)
            items = Items(torch.from_numpy(values), torch.from_numpy(lengths))
        else:
            items = Items(self._features(rows))
        if augment is not None:
            items = Augmentation(augment, self.mask_id, cut=self.device.type != "cuda")(items)
        return self._placed(items, pad)

    def _placed(self, items: Items, pad: PadShape | None) -> Items:
        """Moves items to the device; the lengths as well if the shapes do not depend on them."""
        if self.device.type != "cuda":
            return items
        values, lengths = items.values, items.lengths
        total = values[..., 0].numel() if values.dim() == 3 else None if pad is None else pad.total
        if lengths is not None and total is not None:
            lengths = send(lengths, self.device)
        return Items(values if values.is_cuda else send(values, self.device), lengths, total)

    def _features(self, rows: IntArray) -> Tensor:
        if self.resident is not None:
            return self.resident[send(torch.from_numpy(rows), self.device)]
        return send(torch.from_numpy(self._converted(self.side.features[rows])), self.device)  # type: ignore[union-attr]

    def _kind(self, features: np.ndarray) -> type[np.floating]:
        """Half precision on a GPU; float32 on a CPU, where half precision is slower, and for vectors in float32.

        Their numbers may have any offset, such as years, beside which half precision would lose all differences.
        """
        wide = features.ndim == 2 and features.dtype != np.float16
        return np.float32 if wide or self.device.type == "cpu" else np.float16

    def _converted(self, features: np.ndarray) -> np.ndarray:
        if self._kind(features) is np.float32:
            return features.astype(np.float32, copy=False)
        with np.errstate(over="ignore"):
            half = features.astype(np.float16)
        if not np.isfinite(half).all():
            raise DataError("Some features are too large for half precision (above 65,504); scale them down first.")
        return half

    def _move_in(self, features: np.ndarray) -> Tensor:
        half = self._kind(features) is np.float16
        store = torch.empty(features.shape, dtype=torch.float16 if half else torch.float32, device=self.device)
        for start in range(0, len(features), CHUNK):
            part = self._converted(features[start : start + CHUNK])
            store[start : start + CHUNK] = send(torch.from_numpy(part), self.device)
        return store


class PairLoader:
    """Loads batches of pairs. The caller chooses pairs and order, so there is no state to save."""

    def __init__(self, pairs: Pairs, device: torch.device, share: float = DEVICE_SHARE) -> None:
        self.pairs = pairs
        self.left = SideLoader(pairs.left, device, share / 2)
        self.right = SideLoader(pairs.right, device, share / 2)

    def pad_shapes(self, *batches: IntArray) -> PadShapes:
        """Shapes for the left and the right items of all of these batches of pairs."""
        return self.left.pad_shape(*(self.pairs.link[pairs] for pairs in batches)), self.right.pad_shape(*batches)

    def batch(
        self, pairs: IntArray, augment: np.random.Generator | None = None, pad_shapes: PadShapes = (None, None)
    ) -> Batch:
        """The batch of these pairs, augmented with the generator `augment` if given."""
        return self.crossed_batch(pairs, pairs, augment, pad_shapes)

    def crossed_batch(
        self,
        lefts: IntArray,
        rights: IntArray,
        augment: np.random.Generator | None = None,
        pad_shapes: PadShapes = (None, None),
    ) -> Batch:
        """A batch of the left items of some pairs with the right items of others; `Batch.pairs` are the latter."""
        rows = self.pairs.link[lefts]
        left, right = self.left.items(rows, pad_shapes[0], augment), self.right.items(rights, pad_shapes[1], augment)
        numbers = rights, rows, rows if self.pairs.groups is None else self.pairs.groups[rows]
        return Batch(left, right, *(send(torch.from_numpy(array), self.left.device) for array in numbers))

    @property
    def on_host(self) -> bool:
        return self.left.on_host or self.right.on_host


def round_up(size: int, step: int) -> int:
    """The next multiple of `step`.

    >>> round_up(17, 8), round_up(16, 8)
    (24, 16)
    """
    return step * -(-size // step)


def pad_tokens(side: Tokens, rows: IntArray, width: int | None = None) -> tuple[IntArray, IntArray]:
    """Token ids (B, width) padded with 0, by default to the longest text, and the lengths (B,)."""
    lengths = side.lengths[rows]
    inside = np.arange(width or lengths.max(initial=1)) < lengths[:, None]
    values = np.zeros(inside.shape, dtype=np.int64)
    starts = np.repeat(side.offsets[:-1][rows] - np.cumsum(lengths) + lengths, lengths)
    values[inside] = side.ids[starts + np.arange(lengths.sum())]
    return values, lengths


@dataclass(frozen=True)
class Augmentation:
    """VSE-inf's size augmentation: drop elements of sets and texts at random.

    A region is dropped with probability `rate`. A token is selected with that probability: half of the selected ones
    become `mask_id`, a tenth a random word, and the rest is dropped. At least one element stays.
    """

    rng: np.random.Generator
    mask_id: int
    rate: float = 0.2
    cut: bool = True  # whether to trim padding that no item needs

    def __call__(self, items: Items) -> Items:
        texts = items.values.dim() == 2
        if texts and items.lengths is None:  # vectors have no elements to drop
            return items
        real = np.ones(items.values.shape[:2], dtype=bool)
        if items.lengths is not None:
            real &= np.arange(real.shape[1]) < items.lengths.numpy()[:, None]
        if texts:
            items, dropped = self._change_tokens(items, real)
        else:
            dropped = self.rng.random(real.shape) < self.rate
        kept = real & ~dropped
        kept[~kept.any(axis=1), 0] = True
        return _compact(items, kept, kept.sum(axis=1).max() if self.cut else kept.shape[1])

    def _change_tokens(self, items: Items, real: np.ndarray) -> tuple[Items, np.ndarray]:
        draw = self.rng.random(real.shape) / self.rate  # below 1: selected
        random_ids = self.rng.integers(0, self.mask_id, size=real.shape)
        device = items.values.device
        values = torch.where(send(torch.from_numpy(draw < 0.5), device), self.mask_id, items.values)
        is_random = send(torch.from_numpy((draw >= 0.5) & (draw < 0.6)), device)
        values = torch.where(is_random, send(torch.from_numpy(random_ids), device), values)
        return replace(items, values=values), (draw >= 0.6) & (draw < 1)


def _compact(items: Items, kept: np.ndarray, width: int) -> Items:
    """Moves the kept elements of each item to its front and pads with 0 up to `width`."""
    lengths = kept.sum(axis=1)
    order = np.argsort(~kept, axis=1, kind="stable")[:, :width]
    inside = np.arange(order.shape[1]) < lengths[:, None]
    index = send(torch.from_numpy(order), items.values.device)
    shape = (*index.shape, *(1,) * (items.values.dim() - 2))
    values = torch.take_along_dim(items.values, index.view(shape), dim=1)
    values = values * send(torch.from_numpy(inside), values.device).view(shape)
    return Items(values, torch.from_numpy(lengths))


def corrupt(items: Items, rate: float, unknown: int) -> Items:
    """Replaces each word by the id `unknown`, or each region by another one of its item, with probability `rate`.

    Sizes do not change, so networks with weights for each region can use it too. Vectors stay unchanged.
    """
    values, lengths = items.values, items.lengths
    if values.dim() == 3:
        count = values.shape[1]
        chosen = torch.rand(values.shape[:2], device=values.device) < rate
        own = torch.arange(count, device=values.device).expand(values.shape[:2])
        others = torch.randint(count, values.shape[:2], device=values.device)
        index = torch.where(chosen, others, own)
        return replace(items, values=torch.take_along_dim(values, index[..., None], dim=1))
    if lengths is None:
        return items
    # The first words of a vocabulary are marks such as the end of a text.
    chosen = (torch.rand(values.shape, device=values.device) < rate) & (values > unknown)
    return replace(items, values=values.masked_fill(chosen, unknown))


def prefetch(jobs: Sequence[J], make: Callable[[J], R], depth: int = PREFETCH) -> Iterator[R]:
    """`map(make, jobs)` with up to `depth` results computed ahead in a thread; errors are raised in their turn."""
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(1) as pool:
        try:
            for job in jobs:
                waiting.append(pool.submit(make, job))
                if len(waiting) > depth:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for result in waiting:
                result.cancel()


def random_batches(count: int, size: int, rng: np.random.Generator) -> list[IntArray]:
    """Random batches of nearly equal size, because losses of a small last batch would not be comparable."""
    parts = min(round(count / size), count // 2)  # a batch of one pair has no negatives
    return np.array_split(rng.permutation(count), max(1, parts))
