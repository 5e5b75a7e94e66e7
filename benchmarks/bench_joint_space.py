"""Make vectors of a common space, to audit joint encoders without CLIP: `make bench-joint-space ARGS=...`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from tyro.conf import Positional

from common import run
from mispair.pairs.layouts.opening import open_source

WIDTH, STEPS, BATCH, RATE = 64, 800, 512, 2e-3
MOST = 10_000


def learn(sides: list[Tensor]) -> list[Tensor]:
    """Maps (D, WIDTH) and (E, WIDTH) into a common space."""
    generator = torch.Generator().manual_seed(0)
    maps = [(0.05 * torch.randn(side.shape[1], WIDTH, generator=generator)).requires_grad_() for side in sides]
    scale = torch.tensor(2.66, requires_grad=True)  # the logarithm of 1 / 0.07
    optimizer = torch.optim.Adam([*maps, scale], lr=RATE)
    for _ in range(STEPS):
        rows = torch.randint(len(sides[0]), (BATCH,), generator=generator)
        x, y = (normalize(side[rows] @ own, dim=1) for side, own in zip(sides, maps, strict=True))
        logits, own = x @ y.T * scale.exp(), torch.arange(BATCH)
        optimizer.zero_grad()
        (cross_entropy(logits, own) + cross_entropy(logits.T, own)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return [one.detach() for one in maps]


def main(data: Positional[Path], learned: Positional[int], out: Positional[Path]) -> None:
    """Learn linear maps with InfoNCE, and write OUT/left.npy and OUT/right.npy.

    Args:
        data: Folder of embeddings.
        learned: Pairs to learn from, the last ones; the first 10,000 others are written.
        out: Folder of the vectors.
    """
    source = open_source(data)
    sides = [torch.from_numpy(np.asarray(side)) for side in source.gather(np.arange(len(source)))]
    sides = [(side - side.mean(0)) / side.std() for side in sides]
    maps = learn([side[-learned:] for side in sides])
    out.mkdir(parents=True, exist_ok=True)
    for name, side, own in zip(("left", "right"), sides, maps, strict=True):
        np.save(out / f"{name}.npy", normalize(side[:-learned][:MOST] @ own, dim=1).numpy())


if __name__ == "__main__":
    sys.exit(run(main))
