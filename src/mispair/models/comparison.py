"""Similarities of a batch, computed together by the ranks of a team.

Each rank encodes its part of the items of both sides, and gets the encoded right items of the others. It compares its
left items with all right items and gets the other rows of the matrix. Gradients flow back the same way.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Literal

from torch import Tensor

from mispair.models.base import CosineNetwork, Encoded, Network
from mispair.models.inference import inference
from mispair.pairs.batches import Items


def compare(
    network: Network, left: Items, right: Items, without_gradient: Literal["left", "right"] | None = None
) -> Tensor:
    """Every left item of a batch against every right item, (l, r), the same on all ranks.

    The side `without_gradient` is encoded in evaluation mode.
    """
    with inference(network) if without_gradient == "left" else nullcontext():
        encoded_left = encode_part(network, left, "left")
    with inference(network) if without_gradient == "right" else nullcontext():
        encoded_right = encode_part(network, right, "right")
    return compare_parts(network, encoded_left, encoded_right, left, right)


def encode_part(network: Network, items: Items, side: Literal["left", "right"]) -> Encoded:
    """This rank's part of the items, encoded."""
    encode = network.encode_left if side == "left" else network.encode_right
    if not network.team.splits(len(items)):
        return encode(items)
    with network.team.on_part(len(items)) as part:
        lengths = None if items.lengths is None else items.lengths[part]
        return encode(replace(items, values=items.values[part], lengths=lengths))


def compare_parts(network: Network, left: Encoded, right: Encoded, lefts: Items, rights: Items) -> Tensor:
    """(l, r) from the encoded parts of `lefts` and `rights` on each rank."""
    team = network.team
    if team.alone:
        return network.similarity(left, right)
    if team.splits(len(rights)):
        right = _whole(network, right, rights)
    if not team.splits(len(lefts)):
        return team.replicated(network.similarity(left, right))
    with team.on_part(len(lefts)):
        rows = network.similarity(left, right)
    return team.gather_alike(rows, len(lefts))


def gather_pooled(network: Network, part: Encoded, items: Items) -> Tensor:
    """(n, D) pooled vectors of all items, from the parts of the ranks."""
    team = network.team
    return team.gather_alike(part.pooled, len(items)) if team.splits(len(items)) else part.pooled


def _whole(network: Network, part: Encoded, items: Items) -> Encoded:
    """All items from the parts of the ranks; without pooled vectors where the network does not compare these."""
    team, count = network.team, len(items)
    if isinstance(network, CosineNetwork) or part.local is None:
        return Encoded(None, None, team.gather(part.pooled, count))
    local = team.gather(part.local, count)
    lengths = None if part.lengths is None else items.lengths
    return Encoded(local, lengths, local.new_empty(count, 0), items.capacity)
