"""Vectors of a common space to try an audit of joint encoders on, where no CLIP is at hand.

python docs/results/joint_space.py FOLDER LEARNED OUT learns linear maps with InfoNCE from the last LEARNED pairs of a
folder of embeddings, and writes the vectors of the first 10,000 others as OUT/left.npy and OUT/right.npy.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

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
        (cross_entropy(logits, own) + cross_entropy(logits.T, own)).backward()
        optimizer.step()
    return [one.detach() for one in maps]


def main() -> None:
    if len(sys.argv) != 4:
        sys.exit("Usage: python docs/results/joint_space.py FOLDER LEARNED OUT")
    source, learned, out = open_source(Path(sys.argv[1])), int(sys.argv[2]), Path(sys.argv[3])
    sides = [torch.from_numpy(np.asarray(side)) for side in source.gather(np.arange(len(source)))]
    sides = [(side - side.mean(0)) / side.std() for side in sides]
    maps = learn([side[-learned:] for side in sides])
    out.mkdir(parents=True, exist_ok=True)
    for name, side, own in zip(("left", "right"), sides, maps, strict=True):
        np.save(out / f"{name}.npy", normalize(side[:-learned][:MOST] @ own, dim=1).numpy())


if __name__ == "__main__":
    main()
