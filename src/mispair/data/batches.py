"""Batches: from device memory when the features fit there, else from the host with prefetch, in half precision."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from mispair.compute.devices import send
from mispair.data.pairs import IntArray, Pairs, Side, Tokens
from mispair.errors import DataError

DEVICE_SHARE = 0.5  # of the free device memory, for the features; the rest is the training's
PREFETCH = 3  # batches made ahead when the features stay on the host
CHUNK = 1024  # rows moved at once when features go to the device
WIDTHS, TOTALS = 8, 256  # steps of the sizes of `PadShape`
J = TypeVar("J")
R = TypeVar("R")


@dataclass(frozen=True)
class Items:
    """Some items of one side on the device: (B, n, D) regions, (B, n) token ids or (B, D) vectors.

    Attributes:
        values: The items.
        lengths: (B,) how many of the n are real; None if all are. It stays on the host, because choosing shapes by it
            must not wait for the device. Where the shapes are chosen already, by `capacity`, it is on the device.
        capacity: For how many real elements of all items together there is room.
    """

    values: Tensor
    lengths: Tensor | None = None
    capacity: int | None = None

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class Batch:
    """Pairs of a batch: item i of `left` belongs to item i of `right`, as far as the training knows."""

    left: Items
    right: Items
    pairs: Tensor  # (B,) numbers of the pairs in the data set, on the device as all the rest
    left_rows: Tensor  # (B,) which left item each one uses
    left_groups: Tensor  # (B,) its group: pairs of one group are never each other's negatives

    def __len__(self) -> int:
        return len(self.pairs)


class PadShape(NamedTuple):
    """Sizes of arrays for texts of any lengths up to these. In coarse steps, so that the same few sizes come again."""

    width: int  # of the longest text
    total: int  # of all texts together


PadShapes = tuple[PadShape | None, PadShape | None]  # of the left and of the right side


class SideLoader:
    """Serves the items of one side."""

    def __init__(self, side: Side, device: torch.device, share: float = DEVICE_SHARE) -> None:
        self.side, self.device = side, device
        self.resident: Tensor | None = None
        if device.type == "cuda" and not isinstance(side, Tokens):
            free, _ = torch.cuda.mem_get_info(device)
            if side.features.size * 2 <= free * share:
                self.resident = self._move_in(side.features)

    @property
    def on_host(self) -> bool:
        """Whether features have to travel for every batch."""
        return self.device.type == "cuda" and self.resident is None and not isinstance(self.side, Tokens)

    @property
    def mask_id(self) -> int:
        """Number of the augmentation's <mask>: one behind the words."""
        return len(self.side.vocabulary) if isinstance(self.side, Tokens) else 0

    def pad_shape(self, *batches: IntArray) -> PadShape | None:
        """Room for any one of these batches of texts; None where nothing would be gained by it."""
        if self.device.type != "cuda" or not isinstance(self.side, Tokens):
            return None
        lengths = [self.side.lengths[rows] for rows in batches]
        longest, most = (max(int(size(part)) for part in lengths) for size in (np.max, np.sum))
        return PadShape(round_up(longest, WIDTHS), round_up(most, TOTALS))

    def items(self, rows: IntArray, pad: PadShape | None = None, augment: np.random.Generator | None = None) -> Items:
        """The items at `rows`, on the device; with `augment`, made smaller at random by it."""
        if isinstance(self.side, Tokens):
            values, lengths = pad_tokens(self.side, rows, None if pad is None else pad.width)
            items = Items(torch.from_numpy(values), torch.from_numpy(lengths))
        else:
            items = Items(self._features(rows))
        if augment is not None:
            items = Augmentation(augment, self.mask_id, cut=self.device.type != "cuda")(items)
        return self._placed(items, pad)

    def _placed(self, items: Items, pad: PadShape | None) -> Items:
        """On the device; the lengths as well, if the shapes do not follow from them."""
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
        return send(torch.from_numpy(self._half(self.side.features[rows])), self.device)  # type: ignore[union-attr]

    def _half(self, features: np.ndarray) -> np.ndarray:
        """Half precision where a GPU computes; on a CPU half precision only costs time."""
        if self.device.type == "cpu":
            return features.astype(np.float32, copy=False)
        with np.errstate(over="ignore"):
            half = features.astype(np.float16)
        if not np.isfinite(half).all():
            raise DataError("Some features are too large for half precision (above 65,504); scale them down first.")
        return half

    def _move_in(self, features: np.ndarray) -> Tensor:
        store = torch.empty(features.shape, dtype=torch.float16, device=self.device)
        for start in range(0, len(features), CHUNK):
            store[start : start + CHUNK] = send(
                torch.from_numpy(self._half(features[start : start + CHUNK])), self.device
            )
        return store


class PairLoader:
    """Serves batches of pairs. Which pairs, in which order, is the caller's business: nothing here needs saving."""

    def __init__(self, pairs: Pairs, device: torch.device, share: float = DEVICE_SHARE) -> None:
        self.pairs = pairs
        self.left = SideLoader(pairs.left, device, share / 2)
        self.right = SideLoader(pairs.right, device, share / 2)

    def pad_shapes(self, *batches: IntArray) -> PadShapes:
        """Room for the left and for the right items of any one of these batches of pairs."""
        return self.left.pad_shape(*(self.pairs.link[pairs] for pairs in batches)), self.right.pad_shape(*batches)

    def batch(
        self, pairs: IntArray, augment: np.random.Generator | None = None, pad_shapes: PadShapes = (None, None)
    ) -> Batch:
        """The batch of these pairs; with `augment`, made smaller at random by it."""
        rows = self.pairs.link[pairs]
        left, right = self.left.items(rows, pad_shapes[0], augment), self.right.items(pairs, pad_shapes[1], augment)
        numbers = pairs, rows, rows if self.pairs.groups is None else self.pairs.groups[rows]
        return Batch(left, right, *(send(torch.from_numpy(array), self.left.device) for array in numbers))

    @property
    def on_host(self) -> bool:
        return self.left.on_host or self.right.on_host


def round_up(size: int, step: int) -> int:
    """
    >>> round_up(17, 8), round_up(16, 8)
    (24, 16)
    """
    return step * -(-size // step)


def pad_tokens(side: Tokens, rows: IntArray, width: int | None = None) -> tuple[IntArray, IntArray]:
    """Token ids (B, width) padded with 0, by default as wide as the longest, and the lengths."""
    lengths = side.lengths[rows]
    inside = np.arange(width or lengths.max(initial=1)) < lengths[:, None]
    values = np.zeros(inside.shape, dtype=np.int64)
    starts = np.repeat(side.offsets[:-1][rows] - np.cumsum(lengths) + lengths, lengths)
    values[inside] = side.ids[starts + np.arange(lengths.sum())]
    return values, lengths


@dataclass(frozen=True)
class Augmentation:
    """VSE-inf's size augmentation: sets and texts lose some of their elements at random.

    A region is dropped with probability `rate`. A token is touched with that probability: then half become `mask_id`,
    a tenth a random word and the rest is dropped. At least one element stays.
    """

    rng: np.random.Generator
    mask_id: int
    rate: float = 0.2
    cut: bool = True  # what no item needs any more

    def __call__(self, items: Items) -> Items:
        texts = items.values.dim() == 2
        if texts and items.lengths is None:  # these are vectors, which have no elements to lose
            return items
        real = np.ones(items.values.shape[:2], dtype=bool)
        if items.lengths is not None:
            real &= np.arange(real.shape[1]) < items.lengths.numpy()[:, None]
        if texts:
            items, dropped = self._touch_tokens(items, real)
        else:
            dropped = self.rng.random(real.shape) < self.rate
        kept = real & ~dropped
        kept[~kept.any(axis=1), 0] = True
        return _compact(items, kept, kept.sum(axis=1).max() if self.cut else kept.shape[1])

    def _touch_tokens(self, items: Items, real: np.ndarray) -> tuple[Items, np.ndarray]:
        draw = self.rng.random(real.shape) / self.rate  # below 1: touched
        random_ids = self.rng.integers(0, self.mask_id, size=real.shape)
        device = items.values.device
        values = torch.where(send(torch.from_numpy(draw < 0.5), device), self.mask_id, items.values)
        is_random = send(torch.from_numpy((draw >= 0.5) & (draw < 0.6)), device)
        values = torch.where(is_random, send(torch.from_numpy(random_ids), device), values)
        return replace(items, values=values), (draw >= 0.6) & (draw < 1)


def _compact(items: Items, kept: np.ndarray, width: int) -> Items:
    """Moves the kept elements of each item to its front; what lies behind them becomes 0, as far as `width`."""
    lengths = kept.sum(axis=1)
    order = np.argsort(~kept, axis=1, kind="stable")[:, :width]
    inside = np.arange(order.shape[1]) < lengths[:, None]
    index = send(torch.from_numpy(order), items.values.device)
    shape = (*index.shape, *(1,) * (items.values.dim() - 2))
    values = torch.take_along_dim(items.values, index.view(shape), dim=1)
    values = values * send(torch.from_numpy(inside), values.device).view(shape)
    return Items(values, torch.from_numpy(lengths))


def prefetch(jobs: Sequence[J], make: Callable[[J], R], depth: int = PREFETCH) -> Iterator[R]:
    """`map(make, jobs)` with `depth` results made ahead in a thread; an error surfaces where its batch would have."""
    results: queue.Queue[R | BaseException | None] = queue.Queue(maxsize=depth)
    stop = threading.Event()

    def offer(result: R | BaseException | None) -> bool:
        while not stop.is_set():
            try:
                results.put(result, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for job in jobs:
                if not offer(make(job)):
                    return
            offer(None)
        except BaseException as error:
            offer(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while (result := results.get()) is not None:
            if isinstance(result, BaseException):
                raise result
            yield result
    finally:
        stop.set()
        thread.join()


def random_batches(count: int, size: int, rng: np.random.Generator) -> list[IntArray]:
    """Random batches of nearly equal size: in a small last one the losses would be others than in the rest."""
    parts = min(round(count / size), count // 2)  # a pair alone in its batch has no negatives
    return np.array_split(rng.permutation(count), max(1, parts))
