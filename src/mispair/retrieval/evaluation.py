"""Retrieval metrics of networks, each alone and averaged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import ascii_uppercase

import numpy as np
import torch
from torch import Tensor

from mispair.errors import InvalidValueError
from mispair.functional.metrics import Retrieval, block_ranks, fold_retrieval, of_ranks, retrieval, row_blocks
from mispair.models import Network
from mispair.models.inference import average, encode_side, score
from mispair.pairs.batches import SideLoader
from mispair.pairs.pairs import Pairs, Side, select
from mispair.support.arrays import IntArray
from mispair.support.html import html_table
from mispair.support.terminal import COLUMNS


@dataclass(frozen=True)
class Evaluation:
    """Retrieval metrics of each network, and of their averaged similarities."""

    networks: list[Retrieval]
    averaged: Retrieval
    folds: Retrieval | None = None  # mean over slices of the images, with averaged networks

    def metrics(self, names: Sequence[str] = ()) -> dict[str, dict[str, float]]:
        """Return metrics by name: `network`, or `network A`, `network B` and `averaged`; and `folds`.

        Args:
            names: Other names of the networks.
        """
        letters = ascii_uppercase[: len(self.networks)]
        usual = ["network"] if len(letters) == 1 else [f"network {letter}" for letter in letters]
        rows = dict(zip(names or usual, self.networks, strict=True))
        if len(self.networks) > 1:
            rows["averaged"] = self.averaged
        if self.folds is not None:
            rows["folds"] = self.folds
        return {name: result.metrics() for name, result in rows.items()}

    def _repr_html_(self) -> str:
        return self.to_html()

    def to_html(self, title: str = "") -> str:
        """Return the metrics as an HTML table."""
        rows = [(name, *(f"{found[column]:.1f}" for column in COLUMNS)) for name, found in self.metrics().items()]
        return html_table(rows, ["", *COLUMNS], title)


def check_folds(pairs: Pairs, folds: int) -> None:
    """Raise if there are too few left items for this number of slices."""
    if folds != 1 and not (isinstance(folds, int) and 1 <= folds <= len(pairs.left)):
        expected = f"a number from 1 to {len(pairs.left):,}, the images of {pairs.name}"
        raise InvalidValueError(repr(folds), where="folds", expected=expected)


def evaluate(matrices: Sequence[Tensor], pairs: Pairs, folds: int = 1, mean: Tensor | None = None) -> Evaluation:
    """Rank all left items against all right items of `pairs`.

    Args:
        matrices: (l, r) of each network.
        pairs: Items and their links.
        folds: Average over this number of slices, too.
        mean: (l, r) of all networks together; by default the mean of the matrices.
    """
    S = torch.stack(list(matrices)).mean(dim=0) if mean is None else mean
    left, right = _groups(pairs, S.device)

    def part(rows: Tensor, columns: Tensor) -> Retrieval:
        return retrieval(S[rows][:, columns], left[rows], right[columns])

    sliced = None if folds == 1 else fold_retrieval(part, left, right, folds)
    return Evaluation([retrieval(each, left, right) for each in matrices], retrieval(S, left, right), sliced)


def evaluate_in_blocks(networks: Sequence[Network], pairs: Pairs, device: torch.device, folds: int = 1) -> Evaluation:
    """Evaluate matrices larger than memory: some rows at a time, each computed twice."""
    left, right = _groups(pairs, device)

    def part(rows: Tensor, columns: Tensor) -> Retrieval:
        side = select(pairs.right, columns.cpu().numpy())
        return _in_blocks(networks, pairs.left, rows.cpu().numpy(), side, left[rows], right[columns])[-1]

    found = _in_blocks(networks, pairs.left, np.arange(len(pairs.left)), pairs.right, left, right)
    sliced = None if folds == 1 else fold_retrieval(part, left, right, folds)
    return Evaluation(found[: len(networks)], found[-1], sliced)


def _in_blocks(
    networks: Sequence[Network], left: Side, rows: IntArray, right: Side, left_groups: Tensor, right_groups: Tensor
) -> list[Retrieval]:
    """Rank some left items by each network, and last by the average of several."""
    device = left_groups.device
    loader = SideLoader(right, device)
    encoded = [encode_side(network, loader, left=False) for network in networks]

    def blocks() -> Iterator[tuple[slice, list[Tensor]]]:
        for block in row_blocks(len(rows), len(right)):
            items = SideLoader(select(left, rows[block]), device)
            matrices = [
                score(network, encode_side(network, items, left=True), side)
                for network, side in zip(networks, encoded, strict=True)
            ]
            yield block, matrices if len(networks) == 1 else [*matrices, average(networks, matrices)]

    count = len(networks) + (len(networks) > 1)
    return [of_ranks(both) for both in block_ranks(blocks, count, left_groups, right_groups)]


def _groups(pairs: Pairs, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(pairs.left_groups).to(device), torch.from_numpy(pairs.right_groups).to(device)
