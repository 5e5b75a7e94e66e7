"""What networks reach on a set: retrieval by each one's similarities and by their average."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase

import torch
from torch import Tensor

from mispair.data.pairs import Pairs
from mispair.errors import ConfigError
from mispair.functional.metrics import Retrieval, fold_retrieval, retrieval


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


def evaluate(matrices: Sequence[Tensor], pairs: Pairs, folds: int = 1, average: Tensor | None = None) -> Evaluation:
    """Ranks all left items against all right items of `pairs`, by each network's matrix and by `average`.

    Args:
        matrices: (l, r) of each network.
        pairs: The items and which of them belong together.
        folds: How many slices to average over as well.
        average: (l, r) of all networks together; by default the mean.
    """
    groups = torch.from_numpy(pairs.left_groups), torch.from_numpy(pairs.right_groups)
    if average is None:
        average = torch.stack(list(matrices)).mean(dim=0)
    sliced = None if folds == 1 else fold_retrieval(average, *groups, folds)
    return Evaluation([retrieval(S, *groups) for S in matrices], retrieval(average, *groups), sliced)
