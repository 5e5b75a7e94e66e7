"""What networks reach on a set: retrieval by each one's similarities and by their average."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import ascii_uppercase

import numpy as np
import torch
from torch import Tensor

from mispair.data.batches import SideLoader
from mispair.data.pairs import IntArray, Pairs, select
from mispair.errors import ConfigError
from mispair.functional.metrics import Retrieval, block_ranks, fold_retrieval, of_ranks, retrieval, row_blocks
from mispair.models import Network
from mispair.models.inference import EncodedSide, average, encode_side, score


@dataclass(frozen=True)
class Evaluation:
    """What a set of networks reaches: each alone, and their averaged similarities."""

    networks: list[Retrieval]
    averaged: Retrieval
    folds: Retrieval | None = None  # mean over slices of the images, with averaged networks

    def metrics(self, names: Sequence[str] = ()) -> dict[str, dict[str, float]]:
        """By name: `network`, or `network A`, `network B` and `averaged`; `folds` if there are any.

        Args:
            names: What to call the networks instead.
        """
        letters = ascii_uppercase[: len(self.networks)]
        usual = ["network"] if len(letters) == 1 else [f"network {letter}" for letter in letters]
        rows = dict(zip(names or usual, self.networks, strict=True))
        if len(self.networks) > 1:
            rows["averaged"] = self.averaged
        if self.folds is not None:
            rows["folds"] = self.folds
        return {name: result.metrics() for name, result in rows.items()}


def check_folds(pairs: Pairs, folds: int) -> None:
    """Refuses a number of slices into which the left items cannot be cut."""
    if folds != 1 and not (isinstance(folds, int) and 1 <= folds <= len(pairs.left)):
        raise ConfigError(
            f"{pairs.name}: {len(pairs.left):,} images cannot be cut into {folds!r} folds; give a number from 1 to "
            f"{len(pairs.left):,}."
        )


def evaluate(matrices: Sequence[Tensor], pairs: Pairs, folds: int = 1, mean: Tensor | None = None) -> Evaluation:
    """Ranks all left items against all right items of `pairs`, by each network's matrix and by `mean`.

    Args:
        matrices: (l, r) of each network.
        pairs: The items and which of them belong together.
        folds: How many slices to average over as well.
        mean: (l, r) of all networks together; by default the mean of the matrices.
    """
    S = torch.stack(list(matrices)).mean(dim=0) if mean is None else mean
    groups = _groups(pairs, S.device)
    sliced = None if folds == 1 else fold_retrieval(lambda rows, columns: S[rows][:, columns], *groups, folds)
    return Evaluation([retrieval(each, *groups) for each in matrices], retrieval(S, *groups), sliced)


def evaluate_in_blocks(networks: Sequence[Network], pairs: Pairs, device: torch.device, folds: int = 1) -> Evaluation:
    """As `evaluate`, for similarities that would take too much memory: some rows at a time, each computed twice."""
    groups, right = _groups(pairs, device), SideLoader(pairs.right, device)
    encoded = [encode_side(network, right, left=False) for network in networks]

    def scores(rows: IntArray, rights: Sequence[EncodedSide]) -> list[Tensor]:
        left = SideLoader(select(pairs.left, rows), device)
        sides = [encode_side(network, left, left=True) for network in networks]
        return [score(network, *both) for network, *both in zip(networks, sides, rights, strict=True)]

    def blocks() -> Iterator[tuple[slice, list[Tensor]]]:
        for block in row_blocks(len(pairs.left), len(pairs.right)):
            matrices = scores(np.arange(block.start, block.stop), encoded)
            yield block, matrices if len(networks) == 1 else [*matrices, average(networks, matrices)]

    def part(rows: Tensor, columns: Tensor) -> Tensor:
        own = SideLoader(select(pairs.right, columns.cpu().numpy()), device)
        rights = [encode_side(network, own, left=False) for network in networks]
        return average(networks, scores(rows.cpu().numpy(), rights))

    count = len(networks) + (len(networks) > 1)
    found = [of_ranks(both) for both in block_ranks(blocks, count, *groups)]
    sliced = None if folds == 1 else fold_retrieval(part, *groups, folds)
    return Evaluation(found[: len(networks)], found[-1], sliced)


def _groups(pairs: Pairs, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(pairs.left_groups).to(device), torch.from_numpy(pairs.right_groups).to(device)
