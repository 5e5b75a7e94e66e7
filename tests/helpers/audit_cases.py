"""Pairs with known mistakes, in memory and as files, for the tests of whole audits."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mispair.support.arrays import IntArray

# A run in another process has as many threads as this one; see conftest.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Case:
    """Pairs of which some have exchanged their right items."""

    left: npt.NDArray[np.float32]  # (n, D)
    right: npt.NDArray[np.float32]  # (n, E)
    holder: IntArray  # (n,) row that has the right item of each left one; itself where the pair is right

    def __len__(self) -> int:
        return len(self.left)

    @property
    def mismatched(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self.holder != np.arange(len(self)))


def make_case(
    n: int = 300,
    share: float = 0.2,
    *,
    widths: tuple[int, int] = (16, 12),
    hidden: int = 6,
    noise: float = 0.1,
    seed: int = 0,
) -> Case:
    """A hidden vector a pair through two random maps, plus noise; a share of the pairs is wrong, two by two."""
    rng = np.random.default_rng(seed)
    common = rng.standard_normal((n, hidden))
    sides = [
        common @ rng.standard_normal((hidden, width)) + noise * rng.standard_normal((n, width)) for width in widths
    ]
    chosen = rng.permutation(n)[: 2 * int(share * n / 2)]
    holder = np.arange(n)
    holder[chosen] = chosen.reshape(-1, 2)[:, ::-1].reshape(-1)
    return Case(sides[0].astype(np.float32), sides[1][holder].astype(np.float32), holder)


def write_clip(
    folder: Path,
    left: npt.NDArray[Any],
    right: npt.NDArray[Any],
    metadata: Mapping[str, Sequence[Any]] | None = None,
    cuts: Sequence[int] = (),
) -> Path:
    """A clip-retrieval folder, cut into shards at these rows."""
    import pyarrow
    import pyarrow.parquet

    for name, side in (("img_emb", left), ("text_emb", right)):
        (folder / name).mkdir(parents=True)
        for number, part in enumerate(np.split(side, sorted(set(cuts)))):
            np.save(folder / name / f"{name}_{number}.npy", part)
    if metadata is not None:
        (folder / "metadata").mkdir()
        pyarrow.parquet.write_table(pyarrow.table(dict(metadata)), folder / "metadata" / "metadata_0.parquet")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a folder but locks."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
