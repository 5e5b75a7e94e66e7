"""Batches: from device memory when the features fit there, else from the host with prefetch, in half precision."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from mispair.data.pairs import IntArray, Pairs, Side, Tokens
from mispair.errors import DataError

DEVICE_SHARE = 0.5  # of the free device memory, for the features; the rest is the training's
PREFETCH = 3  # batches made ahead when the features stay on the host
CHUNK = 1024  # rows moved at once when features go to the device
J = TypeVar("J")
R = TypeVar("R")


@dataclass(frozen=True)
class Items:
    """Some items of one side on the device: (B, n, D) regions, (B, n) token ids or (B, D) vectors.

    `lengths` says how many of the n are real. It stays on the host, because packing and choosing shapes by it must not
    wait for the device.
    """

    values: Tensor
    lengths: Tensor | None = None

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class Batch:
    """Pairs of a batch: item i of `left` belongs to item i of `right`, as far as the training knows."""

    left: Items
    right: Items
    pairs: Tensor  # (B,) numbers of the pairs in the data set
    left_rows: Tensor  # (B,) which left item each one uses: equal rows are never each other's negatives

    def __len__(self) -> int:
        return len(self.pairs)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """To the device without waiting for it."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


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

    def items(self, rows: IntArray) -> Items:
        """The items at `rows`, on the device."""
        if isinstance(self.side, Tokens):
            values, lengths = pad_tokens(self.side, rows)
            return Items(send(torch.from_numpy(values), self.device), torch.from_numpy(lengths))
        if self.resident is not None:
            values_on_device = self.resident[send(torch.from_numpy(rows), self.device)]
        else:
            values_on_device = send(torch.from_numpy(self._half(self.side.features[rows])), self.device)
        if self.side.kind == "vectors":
            return Items(values_on_device)
        return Items(values_on_device, torch.full((len(rows),), values_on_device.shape[1]))

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

    def batch(self, pairs: IntArray, augment: np.random.Generator | None = None) -> Batch:
        """The batch of these pairs; with `augment`, made smaller at random by it."""
        rows = self.pairs.link[pairs]
        left, right = self.left.items(rows), self.right.items(pairs)
        if augment is not None:
            left = Augmentation(augment, self.left.mask_id)(left)
            right = Augmentation(augment, self.right.mask_id)(right)
        return Batch(left, right, torch.from_numpy(pairs), torch.from_numpy(rows))

    @property
    def on_host(self) -> bool:
        return self.left.on_host or self.right.on_host


def pad_tokens(side: Tokens, rows: IntArray) -> tuple[IntArray, IntArray]:
    """Token ids (B, longest) padded with 0, and the lengths."""
    lengths = side.lengths[rows]
    inside = np.arange(lengths.max(initial=1)) < lengths[:, None]
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

    def __call__(self, items: Items) -> Items:
        if items.lengths is None:  # vectors have no elements to lose
            return items
        real = np.arange(items.values.shape[1]) < items.lengths.numpy()[:, None]
        if items.values.dim() == 2:
            items, dropped = self._touch_tokens(items, real)
        else:
            dropped = self.rng.random(real.shape) < self.rate
        kept = real & ~dropped
        kept[~kept.any(axis=1), 0] = True
        return _compact(items, kept)

    def _touch_tokens(self, items: Items, real: np.ndarray) -> tuple[Items, np.ndarray]:
        draw = self.rng.random(real.shape) / self.rate  # below 1: touched
        random_ids = self.rng.integers(0, self.mask_id, size=real.shape)
        device = items.values.device
        values = torch.where(send(torch.from_numpy(draw < 0.5), device), self.mask_id, items.values)
        is_random = send(torch.from_numpy((draw >= 0.5) & (draw < 0.6)), device)
        values = torch.where(is_random, send(torch.from_numpy(random_ids), device), values)
        return replace(items, values=values), (draw >= 0.6) & (draw < 1)


def _compact(items: Items, kept: np.ndarray) -> Items:
    """Moves the kept elements of each item to its front and cuts what no item needs."""
    lengths = kept.sum(axis=1)
    order = np.argsort(~kept, axis=1, kind="stable")[:, : lengths.max()]
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
