"""Noisy pair half-replacing (NPR, Eq. 7-9 of the REPAIR paper): find a better partner for a side of a mismatched pair.

The nearest neighbours of the kept item in the memory bank are searched. Their partners are the candidates, and the one
that the network scores highest is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from mispair.compute.devices import send
from mispair.functional.rank_correlation import bank_correlation, distances
from mispair.methods.epoch_view import EpochView
from mispair.methods.memory_bank import Bank
from mispair.models import Encoded, Network
from mispair.models.inference import inference
from mispair.support.arrays import IntArray

PAIRS_AT_ONCE = 1 << 16  # candidate pairs chosen at a time
SCORED_AT_ONCE = 1 << 12  # and of these, texts of about the same length scored at a time
T = TypeVar("T")


@dataclass(frozen=True)
class Partners:
    """New partners for one side of some pairs."""

    ids: IntArray  # (n,) pair of the bank whose item is taken; -1 where there is none
    correlation: Tensor  # (n,) rank correlation of the new pair


def find_partners(view: EpochView, bank: Bank, pairs: IntArray, count: int, *, keep_left: bool) -> Partners:
    """Find a replacement in the bank for the right item of each pair, or the left one unless `keep_left`.

    The network of the view tries K = `count` candidates for each. The ranks of its team share the pairs.
    """
    device, groups = view.losses.device, view.loader.pairs.left_groups[view.loader.pairs.link]
    kept_bank, new_bank = _ordered(*bank.pooled(), keep_left)
    # The old partner must not come back: neither the pair's own text nor its image.
    old, _ = _ordered(np.arange(len(groups)), groups, keep_left)
    in_bank = send(torch.from_numpy(old[bank.ids]), device)

    def search(part: slice) -> tuple[np.ndarray, np.ndarray]:
        own = pairs[part]
        ids, correlations = [np.empty(0, dtype=np.int64)], [torch.empty(0, dtype=torch.float32, device=device)]
        for chunk in np.array_split(own, -(-len(own) * count // PAIRS_AT_ONCE)) if len(own) else ():
            kept = view.encoded(chunk, left=keep_left)
            barred = send(torch.from_numpy(old[chunk]), device)[:, None] == in_bank
            candidates = nearest(kept.pooled, kept_bank, count, barred)
            slots = best_partners(view.network, kept, bank, candidates, keep_left=keep_left)
            ids.append(np.where(slots < 0, -1, bank.ids[slots]))
            new = new_bank[send(torch.from_numpy(slots.clip(min=0)), device)]
            correlations.append(bank_correlation(*_ordered(kept.pooled, new, keep_left), *bank.pooled()))
        return np.concatenate(ids), torch.cat(correlations).cpu().numpy()

    ids, correlation = view.network.team.rows(search, len(pairs))
    return Partners(ids, torch.from_numpy(correlation).to(device))


def _ordered(first: T, second: T, keep_left: bool) -> tuple[T, T]:
    """Convert (left, right) to (kept, new), and back."""
    return (first, second) if keep_left else (second, first)


def nearest(kept: Tensor, bank: Tensor, count: int, barred: Tensor) -> IntArray:
    """Slots (n, K) of the nearest items (Eq. 7) on the host, nearest first; -1 where nothing is left to take.

    `kept` (n, D) and `bank` (M, D) are pooled vectors of one side; `barred` (n, M) marks forbidden slots.
    """
    apart = distances(kept, bank).masked_fill(barred, torch.inf)
    found = apart.topk(min(count, len(bank)), largest=False)
    return found.indices.masked_fill(found.values.isinf(), -1).cpu().numpy()


def best_partners(network: Network, kept: Encoded, bank: Bank, slots: IntArray, *, keep_left: bool) -> IntArray:
    """Choose the candidate with the highest score for each of n kept items (Eq. 9), from slots (n, K) to (n,).

    -1 stands for no candidate.
    """
    flat, again = slots.clip(min=0).reshape(-1), np.arange(len(slots)).repeat(slots.shape[1])
    _, new_items = _ordered(bank.left, bank.right, keep_left)
    kept_lengths = np.zeros(len(slots), dtype=np.int64) if kept.lengths is None else kept.lengths.numpy()
    _, words = _ordered(kept_lengths[again], new_items.lengths(flat), keep_left)
    order = words.argsort(kind="stable")  # among texts of one length nothing is padded
    S = torch.empty(len(flat), dtype=torch.float32, device=kept.pooled.device)
    with inference(network):
        for part in np.array_split(order, -(-len(order) // SCORED_AT_ONCE)):
            own = kept.take(torch.from_numpy(again[part]))
            left, right = _ordered(own, new_items.take(flat[part]), keep_left)
            S[send(torch.from_numpy(part), S.device)] = network.pair_similarity(left, right).to(S.dtype)
    scores = np.where(slots < 0, -np.inf, S.view(slots.shape).cpu().numpy())
    return np.take_along_axis(slots, scores.argmax(axis=1)[:, None], axis=1)[:, 0]
