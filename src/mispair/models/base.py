"""The interface of matching networks, and their common parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mispair.compute.devices import EPSILON, full_precision, send
from mispair.compute.distributed import ALONE, Team
from mispair.functional.evidence import raw_scores
from mispair.models.layers import BatchNorm, Dropout
from mispair.pairs.batches import Items
from mispair.pairs.pairs import Kind, Pairs, Side, Tokens


@dataclass(frozen=True)
class SideSpec:
    """Kind and sizes of a side."""

    kind: Kind
    size: int  # width of the features, or number of words
    count: int = 0  # regions an item; 0 for texts and vectors

    @classmethod
    def of(cls, side: Side) -> SideSpec:
        if isinstance(side, Tokens):
            return cls("tokens", len(side.vocabulary))
        count = side.features.shape[1] if side.kind == "regions" else 0
        return cls(side.kind, side.features.shape[-1], count)

    @classmethod
    def of_both(cls, pairs: Pairs) -> tuple[SideSpec, SideSpec]:
        return cls.of(pairs.left), cls.of(pairs.right)

    def __str__(self) -> str:
        if self.kind == "tokens":
            return f"texts of {self.size:,} words"
        return (
            f"{self.count} regions of width {self.size}" if self.kind == "regions" else f"vectors of width {self.size}"
        )


@dataclass(frozen=True)
class Encoded:
    """Encoded items of one side."""

    local: Tensor | None  # (B, n, D) a vector for each region or word, zero where padded; None for one vector an item
    lengths: Tensor | None  # (B,) number of real ones; None if all are
    pooled: Tensor  # (B, D) one vector of unit length an item
    capacity: int | None = None  # as in `Items`, as are the lengths

    def __len__(self) -> int:
        return len(self.pooled)

    def take(self, rows: Tensor) -> Encoded:
        """The items at `rows` (on the host, as the lengths must be), in that order, padded to the longest of them."""
        there = send(rows, self.pooled.device)
        lengths = None if self.lengths is None else self.lengths[rows]
        width = None if lengths is None or not len(lengths) else int(lengths.max())
        return Encoded(None if self.local is None else self.local[:, :width][there], lengths, self.pooled[there])

    def parts(self) -> tuple[Tensor, Tensor | None]:
        """`local` and `lengths`; raise if the model has none."""
        if self.local is None:
            raise TypeError("This model needs a vector for each region or word, but the items have one vector only.")
        return self.local, self.lengths


class Network(nn.Module, ABC):
    """A matching network: encodes items of either side and scores how well they match (higher is better)."""

    settings: tuple[type, ...] = ()  # classes of the settings that are its own
    ignores: tuple[str, ...] = ()  # settings of a run that have no effect on it
    title = ""  # its name in tables, where it is not that of the class
    takes_vectors = False  # whether it takes one vector an item, instead of regions and words
    fixed_regions = False  # whether it has weights for each region, and takes no other number of regions

    left: nn.Module  # encoder of the left side: Items to Encoded
    right: nn.Module
    augments = False  # whether training batches go through the size augmentation
    squashed = False  # whether similarities are sigmoids of raw scores
    team = ALONE  # the processes that share the work on its batches

    def share(self, team: Team) -> None:
        """Lets the ranks of a team share the work."""
        self.team = team
        for layer in self.modules():
            if isinstance(layer, BatchNorm | Dropout):
                layer.team = team

    def encode_left(self, items: Items) -> Encoded:
        encoded: Encoded = self.left(items)
        return encoded

    def encode_right(self, items: Items) -> Encoded:
        encoded: Encoded = self.right(items)
        return encoded

    def bounded(self, S: Tensor) -> Tensor:
        """Similarities as scores between -1 and 1, the same for all networks: tanh of the raw scores."""
        return (raw_scores(S) if self.squashed else S).tanh()

    @abstractmethod
    def similarity(self, left: Encoded, right: Encoded) -> Tensor:
        """Every left item against every right item, (l, r) in float32."""

    @abstractmethod
    def pair_similarity(self, left: Encoded, right: Encoded) -> Tensor:
        """Item i against item i, (n,) in float32."""


class CosineNetwork(Network):
    """Similarity is the dot product of the pooled unit vectors."""

    def similarity(self, left: Encoded, right: Encoded) -> Tensor:
        with full_precision(left.pooled):
            return left.pooled.float() @ right.pooled.float().T

    def pair_similarity(self, left: Encoded, right: Encoded) -> Tensor:
        return (left.pooled.float() * right.pooled.float()).sum(dim=-1)


def l2norm(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    """x / (|x| + 1e-8) along `dim`, in `dtype`, by default the one of x: a zero vector stays zero."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    return (wide / safe_norm(wide.square().sum(dim=dim, keepdim=True))).to(dtype or x.dtype)


def safe_norm(square: Tensor) -> Tensor:
    """sqrt(square) + 1e-8 to divide by; about 1 where the square is 0, where the root's slope would be infinite."""
    return torch.where(square > 0, square, 1).sqrt() + EPSILON


def xavier_linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer as all peers start it: Xavier-uniform weights, no bias at first."""
    layer = nn.Linear(inputs, outputs)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
